"""Who sends and who takes: replicas share the work as well as any division could, on lined-up rails."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_cli.plan.balance import RankSets, best_maximum, share_out
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.report.plan_report import plan_report
from reshard_cli.spec.hardware_profile import read_hardware
from tests.support import make_jobs, model_document

QUICKSTART = Path(__file__).parent.parent.parent / "layouts" / "quickstart"


def sets_of(groups):
    members = [rank for ranks, _ in groups for rank in ranks]
    offsets = np.concatenate([[0], np.cumsum([len(ranks) for ranks, _ in groups])])
    return RankSets(np.array(members), offsets), np.array([amount for _, amount in groups])


@st.composite
def holder_groups(draw):
    num_ranks = draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    groups = draw(
        st.dictionaries(
            ranks, st.integers(0, 1000).map(lambda kilobytes: 1000 * kilobytes), min_size=1, max_size=8
        )
    )
    return num_ranks, list(groups.items())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(holder_groups())
def test_the_busiest_rank_has_the_least_possible_by_trying_every_set_of_ranks(case):
    num_ranks, groups = case
    sets, amounts = sets_of(groups)
    shares = share_out(sets, amounts, num_ranks)
    loads = np.bincount(sets.members, shares, minlength=num_ranks)
    for index, (_, amount) in enumerate(groups):
        assert shares[sets.offsets[index] : sets.offsets[index + 1]].sum() == pytest.approx(amount, abs=1)
    best = max(
        sum(amount for ranks, amount in groups if set(ranks) <= set(chosen)) / size
        for size in range(1, num_ranks + 1)
        for chosen in itertools.combinations(range(num_ranks), size)
    )
    assert loads.max() <= best * 1.01 + 1
    bound = best_maximum(sets, amounts, shares, num_ranks)
    assert bound <= best + 1e-6
    assert bound >= best * 0.99 - 1e-6


def balance(jobs, staging=512 << 20):
    topology = jobs.topology(None, False)
    plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=staging)
    traffic = traffic_of(plan)
    return (
        plan,
        traffic,
        traffic.send_network.max() / plan.streams.best_send,
        traffic.receive_network.max() / plan.streams.best_receive,
    )


def test_the_quickstart_is_balanced():
    jobs = read_jobs(QUICKSTART / "train.yaml", QUICKSTART / "infer.yaml")
    _, _, send, receive = balance(jobs)
    assert send <= 1.05
    assert receive <= 1.05


@pytest.mark.parametrize("seed", range(40))
def test_tensors_ten_times_the_ranks_are_balanced_whatever_the_layouts(seed, tmp_path):
    random = Random(seed)
    source_ranks, destination_ranks = random.choice([2, 4, 6]), random.choice([2, 3, 4, 8])
    number = 10 * (source_ranks + destination_ranks)
    shapes = [(random.randint(100, 800), random.randint(64, 512)) for _ in range(4)] + [(4096,)]
    tensors = {f"kind{i % 5}.t{i}.w": (shapes[i % 5], "float32") for i in range(number)}

    def job(ranks):
        axis = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        axes = {"a": ranks // axis, "b": axis}
        rules = [
            {
                "match": f"kind{kind}.*",
                "place": {
                    name: f"shard({random.randrange(1 if kind == 4 else 2)})"
                    for name in random.sample(["a", "b"], random.randint(0, 2))
                },
            }
            for kind in range(5)
        ]
        return {"ranks": ranks, "domain": random.randint(1, ranks), "meshes": {"m": axes}, "tensors": rules}

    jobs = make_jobs(tmp_path, model_document(tensors), job(source_ranks), job(destination_ranks))
    _, _, send, receive = balance(jobs)
    assert send <= 1.05
    assert receive <= 1.05


def megatron_like(tp, dp, domain=8):
    return {
        "ranks": tp * dp,
        "domain": min(domain, tp * dp),
        "meshes": {"m": {"dp": dp, "tp": tp}},
        "tensors": [{"match": "norm.*", "place": {}}, {"match": "*", "place": {"tp": "shard(0)"}}],
    }


@pytest.mark.parametrize(
    ("source", "destination"), [((4, 4), (8, 16)), ((1, 4), (4, 1)), ((1, 8), (8, 1))],
    ids=["TP4 DP4 to TP8 DP16", "TP1 DP4 to TP4 DP1", "DP8 to TP8"],
)  # fmt: skip
def test_every_source_replica_sends_its_share(source, destination, tmp_path):
    tensors = {f"layer.{i}.w": ((512, 256), "bfloat16") for i in range(24)}
    jobs = make_jobs(tmp_path, model_document(tensors), megatron_like(*source), megatron_like(*destination))
    plan, traffic, send, receive = balance(jobs)
    sent = traffic.send_network[plan.topology.source]
    assert sent.min() > 0.95 * sent.max()
    assert send <= 1.02
    assert receive <= 1.02


def test_rows_that_no_number_of_replicas_divides_are_striped_all_the_same(tmp_path):
    whole = {"ranks": 8, "domain": 8, "meshes": {"m": {"dp": 8}}, "tensors": [{"match": "*"}]}
    jobs = make_jobs(tmp_path, model_document({"head.w": ((129_281, 64), "bfloat16")}), whole, whole)
    plan, traffic, send, receive = balance(jobs)
    taken = traffic.receive_network[plan.topology.destination]
    assert taken.sum() == 129_281 * 64 * 2
    assert len(set(taken.tolist())) > 1
    assert send <= 1.001
    assert receive <= 1.001


def test_equal_replicas_send_along_their_own_rail(tmp_path):
    whole = {"ranks": 4, "domain": 4, "meshes": {"m": {"dp": 4}}, "tensors": [{"match": "*"}]}
    two = {**whole, "ranks": 8, "meshes": {"m": {"dp": 8}}}
    tensors = {f"t{i}.w": ((256, 256), "float32") for i in range(16)}
    plan, _, _, _ = balance(make_jobs(tmp_path, model_document(tensors), whole, two))
    rails = plan.topology.rails()
    assert np.array_equal(rails[plan.streams.sender], rails[plan.streams.carrier])


def test_uneven_stages_are_nobodys_fault(tmp_path):
    tensors = {f"layers.{i}.w": ((256, 256), "float32") for i in range(5)}
    source = {
        "ranks": 2, "domain": 1, "meshes": {"m": {"pp": 2}}, "pipeline": {"layers": [4, 1]},
        "tensors": [{"match": "*", "place": {"pp": "stage"}}],
    }  # fmt: skip
    destination = {"ranks": 1, "domain": 1, "tensors": [{"match": "*"}]}
    _, traffic, send, _ = balance(make_jobs(tmp_path, model_document(tensors), source, destination))
    assert traffic.send_network[0] == 4 * traffic.send_network[1]
    assert send == pytest.approx(1.0)


def test_the_report_states_bytes_by_rank_that_add_up():
    jobs = read_jobs(QUICKSTART / "train.yaml", QUICKSTART / "infer.yaml")
    for mode in ("reshard", "broadcast", "hybrid-ffn", "hybrid"):
        report = plan_report(
            jobs, jobs.topology(None, False), mode, read_hardware("dgx-h100", 8), staging=1 << 24
        )[0]
        ranks, traffic = report["per_rank"], report["traffic"]
        assert sum(ranks["send_network"]) == sum(ranks["receive_network"]) == traffic["network_bytes"]
        assert sum(ranks["send_domain"]) == sum(ranks["receive_domain"]) == traffic["domain_bytes"]
        assert traffic["network_bytes"] >= traffic["network_lower_bound"]
        assert {one["mode"]: one["network_bytes"] for one in report["compare"]}[mode] == traffic[
            "network_bytes"
        ]
