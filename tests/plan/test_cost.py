"""Predicted seconds: the formula of the model's description, worked out by hand; better hardware is never slower."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import limit_seconds, predict, traffic_of
from reshard_cli.spec.hardware_profile import Hardware, hardware_names, read_hardware
from tests.support import make_jobs, model_document

MEGABYTE = 1 << 20
RATES = {
    "nic": 50e9, "nic_achieved": 40e9, "nvlink": 300e9, "memory": 2e12,
    "launch": 20e-6, "message": 1e-6, "tensor": 100e-6,
}  # fmt: skip


def hardware(**more):
    return Hardware(name="test", **{**RATES, **more})


def jobs_of(folder, tensors, sources=2, destinations=2, domain=2):
    model = model_document(
        {f"mlp.{i}.up_proj.weight" if i % 2 else f"w{i}": one for i, one in enumerate(tensors)}
    )
    source = {"ranks": sources, "domain": domain, "meshes": {"m": {"r": sources}},
              "tensors": [{"match": "*", "place": {"r": "shard(0)"}}]}  # fmt: skip
    destination = {"ranks": destinations, "domain": domain, "tensors": [{"match": "*"}]}
    return make_jobs(folder, model, source, destination)


def priced(jobs, mode, machine, staging=512 << 20):
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), mode, staging=staging)
    return plan, predict(plan, traffic_of(plan), machine, mode)


def test_fragments_take_as_long_as_the_busiest_resource_and_a_round_of_the_others(tmp_path):
    size = 2 * MEGABYTE
    jobs = jobs_of(tmp_path, [((size // 4,), "float32")])
    plan, prediction = priced(jobs, "reshard", hardware())
    # each of two ranks sends its half, takes a half, and passes that on to its neighbour
    half = size / 2
    parts = {
        "NIC, sending": half / 40e9,
        "NIC, receiving": half / 40e9,
        "NVLink, sending": half / 300e9,
        "NVLink, receiving": half / 300e9,
        "packing": 2 * 3 * half / 2e12,  # the destination's: taken, given on, taken from the neighbour
    }
    assert plan.num_rounds == 1
    for name, seconds in parts.items():
        assert prediction.parts[name] == pytest.approx(seconds, rel=0.02)
    # a destination rank takes a stripe of each sender's shard, passes on both in one, and takes its neighbour's
    assert prediction.parts["launches"] == pytest.approx(2 * 20e-6 + 4 * 1e-6)
    # one round: each link's two directions at the same time, everything else in turn
    once = [prediction.parts[name] for name in ("NIC, sending", "NVLink, sending", "packing", "launches")]
    assert prediction.seconds == pytest.approx(sum(once))
    assert prediction.bottleneck.startswith("launches, ")  # of so little


def test_more_rounds_leave_less_to_fill_and_cost_more_launches(tmp_path):
    jobs = jobs_of(tmp_path, [((16 * MEGABYTE,), "float32")])
    plan, prediction = priced(jobs, "reshard", hardware(), staging=4 * MEGABYTE)
    assert plan.num_rounds > 10
    parts = prediction.parts
    others = parts["NVLink, receiving"] + parts["packing"] + parts["NIC, sending"]
    assert max(parts, key=parts.__getitem__) == "launches"
    assert parts["NIC, sending"] == pytest.approx(parts["NIC, receiving"])
    assert prediction.seconds == pytest.approx(max(prediction.parts.values()) + others / plan.num_rounds)
    assert prediction.parts["launches"] >= plan.num_rounds * 2 * 20e-6


def test_gather_and_broadcast_goes_step_by_step(tmp_path):
    shapes = [((MEGABYTE,), "float32")] * 6
    jobs = jobs_of(tmp_path, shapes, sources=4, destinations=6)
    _, prediction = priced(jobs, "broadcast", hardware())
    size = 6 * 4 * MEGABYTE
    # two source domains hold a half each; three destination domains of two NICs take it all
    assert prediction.parts == {
        "gather": pytest.approx(size / 2 / (2 * 40e9)),
        "broadcast": pytest.approx(size / (2 * 40e9)),
        "tensors one by one": pytest.approx(6 * 100e-6),
    }
    assert prediction.seconds == pytest.approx(sum(prediction.parts.values()))
    assert prediction.bottleneck == "tensors one by one"


def test_the_published_policy_pays_both(tmp_path):
    jobs = jobs_of(tmp_path, [((MEGABYTE,), "float32")] * 6)
    _, prediction = priced(jobs, "hybrid-ffn", hardware())
    assert prediction.parts["tensors one by one"] == pytest.approx(3 * 100e-6)
    half = 3 * 4 * MEGABYTE
    assert prediction.parts["NIC, sending"] == pytest.approx(half / 2 / 40e9, rel=1e-3)
    assert prediction.parts["broadcast"] == pytest.approx(half / (2 * 40e9))
    _, fragments = priced(jobs, "hybrid", hardware())
    assert prediction.seconds > fragments.seconds


def test_the_bottleneck_names_the_rank_that_has_it(tmp_path):
    tensors = {"a": ((3 * MEGABYTE,), "float32"), "b": ((MEGABYTE,), "float32")}
    source = {"ranks": 2, "domain": 1, "pieces": [
        {"tensor": "a", "rank": 1, "box": [[0, 3 * MEGABYTE]]}, {"tensor": "b", "rank": 0, "box": [[0, MEGABYTE]]},
    ]}  # fmt: skip
    destination = {"ranks": 3, "domain": 1, "meshes": {"m": {"r": 3}},
                   "tensors": [{"match": "*", "place": {"r": "shard(0)"}}]}  # fmt: skip
    jobs = make_jobs(tmp_path, model_document(tensors), source, destination)
    _, prediction = priced(jobs, "reshard", hardware())
    assert prediction.bottleneck == "NIC, sending, rank 1"


def test_nothing_to_move_takes_no_time(tmp_path):
    jobs = jobs_of(tmp_path, [((4,), "float32")], sources=1, destinations=1)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, True), "reshard", staging=1 << 20)
    prediction = predict(plan, traffic_of(plan), hardware(), "reshard")
    assert (prediction.seconds, prediction.bottleneck) == (0.0, "nothing to move")


def test_the_limit_counts_a_byte_once_however_many_domains_want_it(tmp_path):
    size = 64 * MEGABYTE
    jobs = jobs_of(tmp_path, [((size // 4,), "float32")], sources=4, destinations=8, domain=2)
    plan, _ = priced(jobs, "reshard", hardware())
    # every domain's two NICs take the whole; the source's four need to send it only once
    assert limit_seconds(plan, hardware()) == pytest.approx(size / 2 / 50e9, rel=1e-3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(RATES)), st.floats(1, 100), st.sampled_from(["broadcast", "hybrid-ffn", "hybrid"])
)
def test_better_hardware_is_never_slower(tmp_path_factory, name, factor, mode):
    jobs = jobs_of(tmp_path_factory.mktemp("jobs"), [((MEGABYTE,), "float32")] * 4)
    better = RATES[name] / factor if name in ("launch", "message", "tensor") else RATES[name] * factor
    _, before = priced(jobs, mode, hardware())
    _, after = priced(jobs, mode, hardware(**{name: better}))
    assert after.seconds <= before.seconds * (1 + 1e-9)


def test_shipped_profiles_are_what_is_known_of_the_machines():
    h100, gb200 = (read_hardware(name, 8) for name in ("dgx-h100", "gb200-nvl72"))
    assert set(hardware_names()) == {"dgx-h100", "gb200-nvl72"}
    assert h100.nic == gb200.nic == 400e9 / 8
    assert h100.nvlink == pytest.approx(20.6e9 * 18, rel=0.001)
    assert gb200.nvlink == pytest.approx(40.1e9 * 18, rel=0.001)
    assert read_hardware(None, 8) == h100
    assert read_hardware(None, 64) == gb200
