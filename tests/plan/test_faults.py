"""Public faults of weight sync and resharding, as small inputs that a plan and one process are enough for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from reshard_cli.errors import DocumentError, ReshardError, WeightsError
from reshard_cli.plan.build import IN_FLIGHT, build_plan
from reshard_cli.plan.schedule import count_messages, rank_schedule, transfers
from reshard_cli.refit.prepare import Jobs, read_jobs
from reshard_cli.transport.message import Message, chunks
from tests.support import POISON, make_jobs, model_document, refit_in_process, write_yaml


def job(axes, place=None, rules=None, domain=None, **more):
    """Return a job's document: one rule for everything, or these rules."""
    ranks = math.prod(axes.values())
    rules = rules or [{"match": "*", "place": place or {}}]
    return {"ranks": ranks, "domain": domain or ranks, "meshes": {"m": axes}, "tensors": rules, **more}


ONE = job({"a": 1})


def plan_of(jobs: Jobs, staging=1 << 20, mode="reshard", **more):
    return build_plan(
        jobs.source, jobs.destination, jobs.topology(None, False), mode, staging=staging, **more
    )


def lists(result, name="w"):
    return [storages[name].tolist() if name in storages else [] for storages in result.storages]


# strided shards

STRIDED = {"tp": "shard(0)", "dp": "shard(0)"}
NAIVE = {"dp": "shard(0)", "tp": "shard(0)"}


def test_strided_shards_are_read_in_the_order_in_which_the_axes_cut(tmp_path):
    value = torch.arange(8)
    model = model_document({"w": ((8,), "int64")})
    jobs = make_jobs(tmp_path, model, ONE, job({"dp": 2, "tp": 2}, STRIDED))
    assert lists(refit_in_process(jobs, {"w": value})) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    jobs = make_jobs(tmp_path, model, job({"dp": 2, "tp": 2}, STRIDED), ONE)
    assert lists(refit_in_process(jobs, {"w": value}, from_storages=True)) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_the_naive_order_has_equal_sizes_and_other_values_and_another_digest(tmp_path):
    value = torch.arange(8)
    model = model_document({"w": ((8,), "int64")})
    digests = []
    for place, expected in (
        (STRIDED, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (NAIVE, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ):
        result = refit_in_process(
            make_jobs(tmp_path, model, ONE, job({"dp": 2, "tp": 2}, place)), {"w": value}
        )
        assert lists(result) == expected
        digests.append(result.plan.digest)
    assert digests[0] != digests[1]


# uneven and empty shards, sizes


@pytest.mark.parametrize(
    ("shape", "source", "destination", "dim"),
    [
        ((10, 3), job({"a": 4}, {"a": "shard(0)"}), job({"a": 3}, {"a": "shard(1)"}), 1),
        ((6,), job({"a": 4}, {"a": "shard(0)"}), job({"a": 5}, {"a": "shard(0)"}), 0),
        (
            (2,),
            job({"a": 2, "b": 4}, {"a": "shard(0)", "b": "shard(0)"}),
            job({"a": 3}, {"a": "shard(0)"}),
            0,
        ),
        ((0, 4), job({"a": 2}, {"a": "shard(0)"}), job({"a": 2}, {"a": "shard(1)"}), 1),
    ],
    ids=["3,3,3,1 to columns", "2,2,2,0 to five", "six of eight empty", "no rows at all"],
)
def test_uneven_and_empty_shards_come_out_as_chunks_of_the_whole(tmp_path, shape, source, destination, dim):
    value = torch.arange(math.prod(shape)).view(shape)
    jobs = make_jobs(tmp_path, model_document({"w": (shape, "int64")}), source, destination)
    result = refit_in_process(jobs, {"w": value}, from_storages=True)
    ranks = len(result.storages)
    chunks = list(torch.chunk(value, ranks, dim))
    chunks += [value.narrow(dim, 0, 0)] * (ranks - len(chunks))
    for storages, chunk in zip(result.storages, chunks, strict=True):
        assert torch.equal(storages["w"], chunk)  # an empty one is there, and empty
    assert result.plan.network_bytes == 8 * value.numel()


def test_six_of_eight_ranks_that_hold_nothing_send_nothing(tmp_path):
    source = job({"a": 2, "b": 4}, {"a": "shard(0)", "b": "shard(0)"})
    jobs = make_jobs(tmp_path, model_document({"w": ((2,), "int64")}), source, ONE)
    assert sorted(set(plan_of(jobs).streams.sender.tolist())) == [0, 4]


def test_the_size_is_the_declared_one_and_never_one_shard_times_the_ranks(tmp_path):
    value = torch.arange(20).view(10, 2)
    jobs = make_jobs(
        tmp_path, model_document({"w": ((10, 2), "int64")}), job({"a": 4}, {"a": "shard(0)"}), ONE
    )
    result = refit_in_process(jobs, {"w": value}, from_storages=True)
    assert torch.equal(result.storages[0]["w"], value)  # 3 rows times 4 ranks would be 12
    assert result.plan.network_bytes == 160


@pytest.mark.parametrize("rows", [[3, 3, 3], [3, 3, 3, 0]])
def test_shards_that_do_not_add_up_are_refused_with_the_tensor_and_the_box(tmp_path, rows):
    pieces = [
        {"tensor": "w", "rank": rank, "box": [[3 * rank, 3 * rank + count], [0, 2]]}
        for rank, count in enumerate(rows)
    ]
    source = {"ranks": 4, "domain": 4, "pieces": pieces}
    jobs = make_jobs(tmp_path, model_document({"w": ((10, 2), "int64")}), source, ONE)
    with pytest.raises(WeightsError, match=r"'w'.* 18 of the 20 elements .*do not add up to \[10, 2\]"):
        plan_of(jobs)


def test_a_shard_that_reaches_past_the_tensor_is_refused(tmp_path):
    pieces = [{"tensor": "w", "rank": 0, "box": [[0, 12], [0, 2]]}]
    with pytest.raises(DocumentError, match="dim 0 stops at 12, the tensor at 10"):
        make_jobs(tmp_path, model_document({"w": ((10, 2), "int64")}), {"ranks": 1, "pieces": pieces}, ONE)


# gate and up


@pytest.mark.parametrize("ranks", [2, 1])
def test_gate_and_up_go_by_segment_and_never_by_rank(tmp_path, ranks):
    storage = [{"tensor": "gate_up", "concat": ["{gate,up}"], "dim": 0}]
    source = job({"tp": 4}, {"tp": "shard(0)"}, storage=storage)
    destination = job({"tp": ranks}, {"tp": "shard(0)"}, storage=storage)
    model = model_document({"gate": ((8,), "int64"), "up": ((8,), "int64")})
    values = {"gate": torch.arange(8), "up": torch.arange(8, 16)}
    result = refit_in_process(make_jobs(tmp_path, model, source, destination), values, from_storages=True)
    expected = {
        1: [list(range(16))],
        2: [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    }[ranks]
    assert lists(result, "gate_up") == expected


# layers


@pytest.mark.parametrize("layers", [[3, 3], [4, 3]], ids=["6 as 3,3", "7 as 4,3"])
def test_layer_names_local_to_a_stage_are_found_by_their_global_layer(tmp_path, layers):
    number = sum(layers)
    local = job(
        {"pp": 2}, {"pp": "stage"}, pipeline={"layers": layers},
        storage=[{"tensor": "block.{local_layer}.w", "concat": ["layers.{layer}.w"]}],
    )  # fmt: skip
    tensors = {f"layers.{i}.w": torch.full((2,), i) for i in range(number)}
    model = model_document(dict.fromkeys(tensors, ((2,), "int64")))
    result = refit_in_process(make_jobs(tmp_path, model, local, ONE), tensors, from_storages=True)
    assert result.storages[0].keys() == tensors.keys()
    assert [result.storages[0][name][0].item() for name in tensors] == list(range(number))
    back = refit_in_process(make_jobs(tmp_path, model, ONE, local), tensors)
    first = 0
    for storages, count in zip(back.storages, layers, strict=True):
        assert [storages[f"block.{i}.w"][0].item() for i in range(count)] == list(range(first, first + count))
        assert len(storages) == count
        first += count


def test_two_owners_of_one_local_name_are_refused(tmp_path):
    storage = [{"tensor": "block.{local_layer}.w", "concat": ["layers.{layer}.w"]}]
    # the stages know their layers, but the rule forgets to let the axis pick: every rank holds all six
    source = job({"pp": 2}, {}, pipeline={"layers": [3, 3]}, storage=storage)
    model = model_document({f"layers.{i}.w": ((2,), "int64") for i in range(6)})
    with pytest.raises(
        DocumentError, match=r"'layers.0.w' and 'layers.3.w' would both be 'block.0.w' on rank 0"
    ):
        make_jobs(tmp_path, model, source, ONE)


# dtypes and staging


@pytest.mark.parametrize("staging", [1 << 10, 64 << 10, 1 << 40], ids=["1 KB", "64 KB", "unbounded"])
@pytest.mark.parametrize("from_storages", [False, True])
@pytest.mark.parametrize("mode", ["reshard", "broadcast"])
def test_a_bucket_of_mixed_dtypes_keeps_every_bit(tmp_path, staging, from_storages, mode):
    kinds = {
        "a": ((3,), "bfloat16"), "b": ((2,), "float32"), "c": ((1,), "uint8"), "d": ((5,), "bfloat16"),
        "e": ((3,), "bool"), "f": ((3,), "float64"), "g": ((7,), "float8_e4m3fn"), "h": ((10, 1024), "uint8"),
    }  # fmt: skip
    values = {}
    for name, (shape, dtype) in kinds.items():
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        bits = torch.arange(size) % (2 if dtype == "bool" else 251)
        values[name] = bits.to(torch.uint8).view(getattr(torch, dtype)).view(shape)
    jobs = make_jobs(tmp_path, model_document(kinds), job({"a": 2}), job({"a": 2}))
    result = refit_in_process(jobs, values, staging=staging, from_storages=from_storages, mode=mode)
    assert result.peak_staging_bytes <= staging
    for storages in result.storages:
        for name, value in values.items():
            assert storages[name].dtype == value.dtype
            assert torch.equal(storages[name].view(torch.uint8), value.view(torch.uint8))


def test_a_tensor_of_10_kb_passes_a_staging_of_1_kb_in_rounds(tmp_path):
    # bytes that lie apart in the source, so that none goes straight from its place
    value = torch.arange(10 * 1024).to(torch.uint8).view(1024, 10)
    jobs = make_jobs(
        tmp_path, model_document({"w": ((1024, 10), "uint8")}), ONE, job({"a": 2}, {"a": "shard(1)"})
    )
    result = refit_in_process(jobs, {"w": value}, staging=1 << 10)
    assert result.plan.num_rounds >= 10
    assert 0 < result.peak_staging_bytes <= 1 << 10
    assert torch.equal(torch.cat([one["w"] for one in result.storages], 1), value)


# replication, scalars


def test_equal_values_are_not_taken_for_replicas(tmp_path):
    jobs = make_jobs(
        tmp_path, model_document({"w": ((8,), "float32")}), job({"a": 4}, {"a": "shard(0)"}), ONE
    )
    result = refit_in_process(jobs, {"w": torch.ones(8)}, from_storages=True)
    assert result.storages[0]["w"].tolist() == [1.0] * 8
    assert sorted(result.plan.streams.sender.tolist()) == [0, 1, 2, 3]
    assert result.plan.streams.num_bytes.tolist() == [8] * 4


@pytest.mark.parametrize("place", ["expert", "expert(round_robin)"])
def test_scalars_and_one_scalar_per_expert_arrive(tmp_path, place):
    kinds = {"s": ((), "float32"), "one": ((1,), "bfloat16"), "flag": ((), "bool")}
    kinds |= {f"layers.0.experts.{e}.scale": ((), "float32") for e in range(5)}
    rules = [{"match": "*.scale", "place": {"ep": place}}, {"match": "*"}]
    jobs = make_jobs(
        tmp_path, model_document(kinds), job({"ep": 2}, rules=rules), job({"ep": 3}, rules=rules)
    )
    values = {
        "s": torch.tensor(3.5), "one": torch.tensor([2.0]).bfloat16(), "flag": torch.tensor(True),
        "layers.0.experts.{expert}.scale": torch.arange(5.0) + 10,
    }  # fmt: skip
    result = refit_in_process(jobs, values, from_storages=True)
    scales = {}
    for storages in result.storages:
        assert storages["s"].shape == ()
        assert storages["s"].item() == 3.5
        assert storages["one"].tolist() == [2.0]
        assert storages["flag"].item() is True
        scales |= {name: one.item() for name, one in storages.items() if name.endswith("scale")}
    assert scales == {f"layers.0.experts.{e}.scale": 10.0 + e for e in range(5)}


# names and cover


def two_models(folder: Path, source: list[str], destination: list[str], **more) -> Jobs:
    """Read two jobs with models of their own; `more` goes into the source's document."""
    paths = []
    for side, names in (("source", source), ("destination", destination)):
        model = model_document(dict.fromkeys(names, ((2,), "float32")))
        write_yaml(folder / f"{side}-model.yaml", model)
        document = {"name": side, "model": f"{side}-model.yaml", **ONE, **(more if side == "source" else {})}
        paths.append(write_yaml(folder / f"{side}.yaml", document))
    return read_jobs(*paths)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "_orig_mod.layers.0.w",
        "layers.0._fsdp_wrapped_module.w",
        "layers.0._checkpoint_wrapped_module.w",
        "module.layers.0.w",
        "module._orig_mod._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w",
    ],
)
def test_wrappers_in_names_are_taken_off_on_either_side(tmp_path, name, side):
    names = [[name], ["layers.0.w"]]
    plan = plan_of(two_models(tmp_path, names[side], names[1 - side]))
    assert [pair.name for pair in plan.pairs] == ["layers.0.w"]


def test_a_prefix_on_one_side_is_refused_with_both_lists_until_a_rule_renames_it(tmp_path):
    names = ["language_model.a.w", "language_model.b.w", "c.w"]
    with pytest.raises(WeightsError) as caught:
        plan_of(two_models(tmp_path, names, ["a.w", "b.w", "c.w"]))
    message = str(caught.value)
    assert "lacks 2 tensor(s): a.w, b.w" in message
    assert "no place for 2 tensor(s): language_model.a.w, language_model.b.w" in message
    renamed = two_models(tmp_path, names, ["a.w", "b.w", "c.w"], rename={"language_model.*": "*"})
    assert [pair.name for pair in plan_of(renamed).pairs] == ["a.w", "b.w", "c.w"]


def test_a_destination_tensor_without_an_origin_fails_even_where_extra_ones_are_allowed(tmp_path):
    names = [f"t{i}.w" for i in range(5)]
    jobs = two_models(tmp_path, names[:4], names)
    for allow_extra in (False, True):
        with pytest.raises(WeightsError, match=r"the source lacks 1 tensor\(s\): t4\.w"):
            plan_of(jobs, allow_extra=allow_extra)


def test_a_source_tensor_too_many_fails_unless_allowed_and_then_is_listed(tmp_path):
    names = [f"t{i}.w" for i in range(5)]
    jobs = two_models(tmp_path, names, names[:4])
    with pytest.raises(WeightsError, match=r"no place for 1 tensor\(s\): t4\.w .*--allow-extra"):
        plan_of(jobs)
    plan = plan_of(jobs, allow_extra=True)
    assert plan.extra == ["t4.w"]
    assert plan.network_bytes == 4 * 8


def test_shapes_that_differ_are_refused_with_both_shapes(tmp_path):
    write_yaml(tmp_path / "one.yaml", model_document({"w": ((4, 6), "float32")}))
    write_yaml(tmp_path / "other.yaml", model_document({"w": ((6, 4), "float32")}))
    a = write_yaml(tmp_path / "a.yaml", {"name": "a", "model": "one.yaml", **ONE})
    b = write_yaml(tmp_path / "b.yaml", {"name": "b", "model": "other.yaml", **ONE})
    with pytest.raises(WeightsError, match=r"'w': the source has shape \[4, 6\], the destination \[6, 4\]"):
        plan_of(read_jobs(a, b))


# keys that a document may carry are obeyed or refused, never passed over


def refit_or_refusal(tmp_path, kinds, destination, values):
    """Return the destination's storages, or None where the documents are refused."""
    try:
        return refit_in_process(make_jobs(tmp_path, model_document(kinds), ONE, destination), values).storages
    except ReshardError:
        return None


def test_the_storage_name_of_an_explicit_piece_is_obeyed_or_refused(tmp_path):
    pieces = [{"tensor": "w", "rank": 0, "box": [[0, 4]], "storage": "other"}]
    found = refit_or_refusal(
        tmp_path, {"w": ((4,), "int64")}, {"ranks": 1, "pieces": pieces}, {"w": torch.arange(4)}
    )
    assert found is None or found[0].keys() == {"other"}


def test_padding_of_one_dim_and_blocks_of_another_are_both_obeyed_or_refused(tmp_path):
    rules = [{"match": "w", "place": {"tp": "shard(1)"}, "blocks": {"0": [2, 2]}, "pad": {"1": 4}}]
    value = torch.arange(12).view(4, 3)
    found = refit_or_refusal(tmp_path, {"w": ((4, 3), "int64")}, job({"tp": 2}, rules=rules), {"w": value})
    padded = torch.cat([value, torch.zeros(4, 1, dtype=torch.int64)], 1)
    expected = [padded[:, :2].tolist(), padded[:, 2:].tolist()]
    assert found is None or [one["w"].tolist() for one in found] == expected


def test_padding_of_interleaved_operands_is_obeyed_or_refused(tmp_path):
    # padded alike, as any other storage is: each operand is filled up before the groups are laid
    rules = [{"match": "*", "place": {"tp": "shard(0)"}, "pad": {"0": 8}}]
    storage = [{"tensor": "qk", "concat": ["{q,k}"], "interleave": 2}]
    kinds = {"q": ((4,), "int64"), "k": ((2,), "int64")}
    values = {"q": torch.arange(4), "k": torch.arange(10, 12)}
    found = refit_or_refusal(tmp_path, kinds, job({"tp": 2}, rules=rules, storage=storage), values)
    assert found is None or sum(one["qk"].numel() for one in found) % 8 == 0


def test_padding_kept_for_one_operand_and_zeroed_for_another_is_obeyed_or_refused(tmp_path):
    rules = [{"match": "a", "pad": {"0": 4}, "padding": "keep"}, {"match": "b", "pad": {"0": 4}}]
    storage = [{"tensor": "ab", "concat": ["{a,b}"]}]
    kinds = {"a": ((3,), "uint8"), "b": ((3,), "uint8")}
    values = {name: torch.arange(3, dtype=torch.uint8) for name in kinds}
    found = refit_or_refusal(tmp_path, kinds, job({"tp": 1}, rules=rules, storage=storage), values)
    assert found is None or found[0]["ab"].tolist() == [0, 1, 2, POISON, 0, 1, 2, 0]


def test_experts_whose_shard_is_all_padding_are_there_and_zero_as_any_tensor(tmp_path):
    rules = [{"match": "*", "place": {"tp": "shard(0)"}, "pad": {"0": 8}}]
    destination = job({"tp": 4}, rules=rules)
    kinds = {"w": ((2,), "int64")} | {f"layers.0.experts.{e}.w": ((2,), "int64") for e in range(2)}
    values = {"w": torch.arange(2), "layers.0.experts.{expert}.w": torch.arange(4).view(2, 2)}
    jobs = make_jobs(tmp_path, model_document(kinds), ONE, destination)
    for storages in refit_in_process(jobs, values).storages[1:]:
        assert {name: one.tolist() for name, one in storages.items()} == {name: [0, 0] for name in kinds}


def test_an_experts_own_piece_is_stored_as_it_is(tmp_path):
    names = [f"layers.0.experts.{e}.w" for e in range(2)]
    pieces = [
        {"tensor": names[0], "rank": 0, "box": [[0, 2]]},
        {"tensor": names[1], "rank": 0, "box": [[2, 4]]},
    ]
    values = {"layers.0.experts.{expert}.w": torch.arange(8).view(2, 4)}
    jobs = make_jobs(
        tmp_path, model_document(dict.fromkeys(names, ((4,), "int64"))), ONE, {"ranks": 1, "pieces": pieces}
    )
    found = refit_in_process(jobs, values).storages[0]
    assert {name: one.tolist() for name, one in found.items()} == {names[0]: [0, 1], names[1]: [6, 7]}


# what a plan says without any data


def test_sides_with_two_stagings_have_two_digests_even_where_one_round_is_enough(tmp_path):
    jobs = make_jobs(tmp_path, model_document({"w": ((64, 64), "float32")}), ONE, ONE)
    plans = [plan_of(jobs, staging=size) for size in (1 << 20, 2 << 20, 1 << 20)]
    assert plans[0].num_rounds == plans[1].num_rounds == 1
    assert plans[0].digest == plans[2].digest != plans[1].digest


@pytest.mark.parametrize("domain", [1, 2, 4])
def test_a_tensor_of_16_gib_is_planned_with_2_to_30_bytes_per_pair_in_countable_messages(tmp_path, domain):
    jobs = make_jobs(
        tmp_path,
        model_document({"w": ((131072, 131072), "uint8")}),
        job({"a": 4}, {"a": "shard(0)"}, domain=domain),
        job({"a": 4}, {"a": "shard(1)"}, domain=domain),
    )
    plan = plan_of(jobs, staging=1 << 40)
    assert plan.network_bytes == 17_179_869_184
    pairs: dict[tuple[int, int], int] = {}
    for rank in range(8):
        for blocks in rank_schedule(plan, rank).rounds:
            assert not transfers(blocks, rank, phase=1)  # nobody wants what a neighbour wants
            for one in transfers(blocks, rank, phase=0):
                assert 0 < one.num_bytes < 2**31
                if one.origin == rank:
                    ends = (one.origin, one.target)
                    pairs[ends] = pairs.get(ends, 0) + one.num_bytes
    assert pairs == {(source, target): 2**30 for source in range(4) for target in range(4, 8)}


def test_a_fragment_longer_than_2_to_31_bytes_goes_in_several_messages(tmp_path):
    jobs = make_jobs(tmp_path, model_document({"w": ((65536, 65537), "bfloat16")}), ONE, ONE)
    plan = plan_of(jobs, staging=1 << 40)
    planned = [one for blocks in rank_schedule(plan, 0).rounds for one in transfers(blocks, 0, phase=0)]
    # no memory behind these: only their sizes count
    whole = [Message(1, torch.empty(one.num_bytes, dtype=torch.uint8, device="meta")) for one in planned]
    sizes = [one.data.numel() for one in chunks(whole)]
    assert sum(sizes) == 2 * 65536 * 65537
    assert max(sizes) < 2**31
    assert count_messages(plan) == len(sizes)


def test_20000_small_tensors_go_in_messages_per_pair_and_round_and_not_per_tensor(tmp_path):
    model = {"name": "m", "dtype": "float32", "ranges": {"layer": 20_000}, "tensors": {"t.{layer}.w": [256]}}
    side = job({"a": 2}, {"a": "shard(0)"})
    jobs = make_jobs(tmp_path, model, side, side)
    for staging in (512 << 20, 2 << 20):
        plan = plan_of(jobs, staging=staging)
        assert len(plan.pairs) == 20_000
        assert plan.network_bytes == 20_000 * 1024
        assert count_messages(plan) <= 2 * plan.num_rounds  # two pairs hold all of it
        assert plan.num_rounds <= max(16, IN_FLIGHT * 20_000 * 1024 / staging + 1)
        for blocks in rank_schedule(plan, 0).rounds:
            assert len(transfers(blocks, 0, phase=0)) == 1
