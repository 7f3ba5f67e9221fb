"""Public faults of this job as small inputs: those that a plan and one process are enough for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from reshard_cli.errors import DocumentError, WeightsError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.plan.schedule import MAX_MESSAGE, count_messages, rank_schedule, transfers
from reshard_cli.refit.prepare import read_jobs
from tests.support import make_jobs, model_document, refit_in_process, write_yaml

WHOLE = {"ranks": 1, "domain": 1, "tensors": [{"match": "*"}]}


def job(axes, rules, **more):
    ranks = 1
    for size in axes.values():
        ranks *= size
    return {"ranks": ranks, "domain": ranks, "meshes": {"m": axes}, "tensors": rules, **more}


def everywhere(axes, place, **more):
    return job(axes, [{"match": "*", "place": place}], **more)


def test_strided_shards_come_together_in_order(tmp_path):
    value = torch.arange(8.0)
    model = model_document({"w": ((8,), "float32")})
    strided = everywhere({"dp": 2, "tp": 2}, {"tp": "shard(0)", "dp": "shard(0)"})
    jobs = make_jobs(tmp_path, model, strided, WHOLE)
    result = refit_in_process(jobs, {"w": value}, from_storages=True)
    assert result.storages[0]["w"].tolist() == list(range(8))
    naive = everywhere({"dp": 2, "tp": 2}, {"dp": "shard(0)", "tp": "shard(0)"})
    back = refit_in_process(make_jobs(tmp_path, model, WHOLE, strided), {"w": value})
    shards = [storage["w"].tolist() for storage in back.storages]
    assert shards == [[0, 1], [4, 5], [2, 3], [6, 7]]
    other = refit_in_process(make_jobs(tmp_path, model, WHOLE, naive), {"w": value})
    assert [storage["w"].tolist() for storage in other.storages] != shards


@pytest.mark.parametrize(
    ("shape", "source", "destination"),
    [
        ((10, 3), everywhere({"a": 4}, {"a": "shard(0)"}), everywhere({"a": 3}, {"a": "shard(1)"})),
        ((6,), everywhere({"a": 4}, {"a": "shard(0)"}), everywhere({"a": 5}, {"a": "shard(0)"})),
        ((2,), everywhere({"a": 2, "b": 4}, {"a": "shard(0)", "b": "shard(0)"}), WHOLE),
    ],
    ids=["10x3 over 4 to 3", "6 over 4 to 5", "2 over 2x4"],
)
def test_uneven_and_empty_shards_are_equal_and_an_empty_rank_is_not_missing(
    shape, source, destination, tmp_path
):
    value = torch.randn(shape)
    jobs = make_jobs(tmp_path, model_document({"w": (shape, "float32")}), source, destination)
    result = refit_in_process(jobs, {"w": value}, from_storages=True)
    size = len(result.storages)
    dim = 1 if size == 3 else 0
    chunks = list(torch.chunk(value, size, dim))
    for rank, storage in enumerate(result.storages):
        expected = chunks[rank] if rank < len(chunks) else value[:0]
        assert torch.equal(storage["w"], expected)


def test_shards_that_do_not_add_up_are_refused(tmp_path):
    pieces = [
        {"tensor": "w", "rank": rank, "box": [[3 * rank, min(3 * rank + 3, 9)], [0, 2]]} for rank in range(3)
    ]
    source = {"ranks": 4, "domain": 4, "pieces": pieces}
    jobs = make_jobs(tmp_path, model_document({"w": ((10, 2), "float32")}), source, WHOLE)
    with pytest.raises(WeightsError, match=r"'w'.*hold 18 of the 20 elements.*do not add up to \[10, 2\]"):
        build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)


@pytest.mark.parametrize("ranks", [2, 1])
def test_gate_and_up_are_put_together_by_segment_not_by_rank(ranks, tmp_path):
    gate, up = torch.arange(8.0).view(8, 1), torch.arange(8.0, 16.0).view(8, 1)
    storage = [{"tensor": "gate_up", "concat": ["{gate,up}"], "dim": 0}]
    source = everywhere({"tp": 4}, {"tp": "shard(0)"}, storage=storage)
    destination = everywhere({"tp": ranks}, {"tp": "shard(0)"}, storage=storage)
    model = model_document({"gate": ((8, 1), "float32"), "up": ((8, 1), "float32")})
    result = refit_in_process(
        make_jobs(tmp_path, model, source, destination), {"gate": gate, "up": up}, from_storages=True
    )
    for rank, storages in enumerate(result.storages):
        expected = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
        assert torch.equal(storages["gate_up"], expected)


@pytest.mark.parametrize("layers", [[3, 3], [4, 3]], ids=["six as 3,3", "seven as 4,3"])
def test_layer_names_that_are_local_to_a_stage_find_their_global_layer(layers, tmp_path):
    number = sum(layers)
    tensors = {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(number)}
    source = everywhere(
        {"pp": 2}, {"pp": "stage"}, pipeline={"layers": layers},
        storage=[{"tensor": "block.{local_layer}.w", "concat": ["layers.{layer}.w"]}],
    )  # fmt: skip
    model = model_document(dict.fromkeys(tensors, ((2,), "float32")))
    jobs = make_jobs(tmp_path, model, source, WHOLE)
    result = refit_in_process(jobs, tensors, from_storages=True)
    assert [result.storages[0][f"layers.{i}.w"][0].item() for i in range(number)] == list(range(number))


def test_two_owners_of_one_storage_name_are_refused(tmp_path):
    model = model_document({f"layers.{i}.w": ((2,), "float32") for i in range(6)})
    source = everywhere({"pp": 2}, {}, storage=[{"tensor": "block.w", "concat": ["layers.{layer}.w"]}])
    with pytest.raises(
        DocumentError, match=r"'layers.0.w' and 'layers.1.w' would both be 'block.w' on rank 0"
    ):
        make_jobs(tmp_path, model, source, WHOLE)


@pytest.mark.parametrize("staging", [1 << 10, 64 << 10, 1 << 40], ids=["1 KB", "64 KB", "unbounded"])
def test_mixed_dtypes_in_one_message_keep_their_alignment_whatever_the_staging(staging, tmp_path):
    dtypes = {"a": ((3,), "bfloat16"), "b": ((2,), "float32"), "c": ((1,), "uint8"), "d": ((5,), "bfloat16")}
    dtypes["e"] = ((10, 256), "float32")  # 10 KB
    dtypes["f"] = ((7,), "float64")
    values = {
        name: torch.randint(0, 200, shape).to(getattr(torch, dtype))
        for name, (shape, dtype) in dtypes.items()
    }
    jobs = make_jobs(tmp_path, model_document(dtypes), WHOLE, everywhere({"a": 2}, {}))
    result = refit_in_process(jobs, values, staging=staging)
    assert result.peak_staging_bytes <= staging
    for storages in result.storages:
        assert all(torch.equal(storages[name], value) for name, value in values.items())


def test_replicas_are_never_guessed_from_values(tmp_path):
    model = model_document({"w": ((8,), "float32")})
    jobs = make_jobs(tmp_path, model, everywhere({"a": 4}, {"a": "shard(0)"}), WHOLE)
    result = refit_in_process(jobs, {"w": torch.ones(8)}, from_storages=True)
    assert torch.equal(result.storages[0]["w"], torch.ones(8))
    assert sorted(result.plan.streams.sender.tolist()) == [0, 1, 2, 3]


def test_scalars_are_moved_like_any_tensor(tmp_path):
    shapes = {"s": ((), "float32"), "one": ((1,), "bfloat16")}
    shapes |= {f"layers.0.experts.{e}.scale": ((), "float32") for e in range(4)}
    model = model_document(shapes)
    source = job({"ep": 2}, [{"match": "*.scale", "place": {"ep": "expert"}}, {"match": "*"}])
    jobs = make_jobs(tmp_path, model, source, WHOLE)
    values = {"s": torch.tensor(3.5), "one": torch.tensor([2.0]).bfloat16()}
    values["layers.0.experts.{expert}.scale"] = torch.arange(4.0)
    storages = refit_in_process(jobs, values, from_storages=True).storages[0]
    assert storages["s"].item() == 3.5
    assert storages["one"].item() == 2.0
    assert [storages[f"layers.0.experts.{e}.scale"].item() for e in range(4)] == [0, 1, 2, 3]


def two_models(folder: Path, source: list[str], destination: list[str], **more):
    """Return paths of a source and a destination document with models of their own."""
    paths = []
    for side, names in (("source", source), ("destination", destination)):
        write_yaml(folder / f"{side}-model.yaml", model_document(dict.fromkeys(names, ((2,), "float32"))))
        document = {
            "name": side,
            "model": f"{side}-model.yaml",
            **WHOLE,
            **(more if side == "source" else {}),
        }
        paths.append(write_yaml(folder / f"{side}.yaml", document))
    return paths


def plan_of(jobs, allow_extra=False):
    topology = jobs.topology(None, False)
    return build_plan(
        jobs.source, jobs.destination, topology, "reshard", staging=1 << 20, allow_extra=allow_extra
    )


@pytest.mark.parametrize(
    "name", ["_orig_mod.a.w", "a._fsdp_wrapped_module.w", "module.a._checkpoint_wrapped_module.w"]
)
def test_wrappers_names_are_normalised_on_either_side(name, tmp_path):
    assert len(plan_of(read_jobs(*two_models(tmp_path, [name], ["a.w"]))).pairs) == 1
    assert len(plan_of(read_jobs(*two_models(tmp_path, ["a.w"], [name]))).pairs) == 1


def test_a_prefix_on_one_side_needs_a_rename_rule_and_else_both_lists_are_shown(tmp_path):
    paths = two_models(tmp_path, ["language_model.a.w", "b.w"], ["a.w", "b.w"])
    with pytest.raises(WeightsError) as caught:
        plan_of(read_jobs(*paths))
    assert "the source lacks 1 tensor(s): a.w" in str(caught.value)
    assert "the destination has no place for 1 tensor(s): language_model.a.w" in str(caught.value)
    paths = two_models(
        tmp_path, ["language_model.a.w", "b.w"], ["a.w", "b.w"], rename={"language_model.*": "*"}
    )
    assert len(plan_of(read_jobs(*paths)).pairs) == 2


def test_a_tie_that_only_the_destination_declares_is_told(tmp_path):
    source, destination = two_models(tmp_path, ["a.w", "b.w"], ["a.w", "b.w"])
    tied = yaml.safe_load(destination.read_text()) | {"alias": {"b.w": "a.w"}}
    write_yaml(destination, tied)
    with pytest.raises(WeightsError, match=r"b\.w: tied \(alias\) in the destination's document alone"):
        plan_of(read_jobs(source, destination))
    write_yaml(source, yaml.safe_load(source.read_text()) | {"alias": {"b.w": "a.w"}})
    untied = {key: value for key, value in tied.items() if key != "alias"}
    with pytest.raises(WeightsError, match=r"b\.w: tied \(alias\) in the source's document alone"):
        plan_of(read_jobs(source, write_yaml(tmp_path / "untied.yaml", untied)))
    assert len(plan_of(read_jobs(source, destination)).pairs) == 1


def test_a_destination_tensor_without_an_origin_fails_and_one_too_many_only_unless_allowed(tmp_path):
    names = [f"t{i}.w" for i in range(5)]
    with pytest.raises(WeightsError, match=r"the source lacks 1 tensor\(s\): t4.w"):
        plan_of(read_jobs(*two_models(tmp_path, names[:4], names)))
    jobs = read_jobs(*two_models(tmp_path, names, names[:4]))
    with pytest.raises(WeightsError, match=r"no place for 1 tensor\(s\): t4.w .*--allow-extra"):
        plan_of(jobs)
    assert plan_of(jobs, allow_extra=True).extra == ["t4.w"]


def test_two_stagings_make_two_digests(tmp_path):
    model = model_document({"w": ((1024, 1024), "float32")})
    jobs = make_jobs(tmp_path, model, WHOLE, WHOLE)
    topology = jobs.topology(None, False)
    digests = {
        build_plan(jobs.source, jobs.destination, topology, "reshard", staging=size).digest
        for size in (1 << 20, 2 << 20)
    }
    assert len(digests) == 2


def test_a_tensor_of_16_gib_is_planned_in_messages_that_transports_can_count(tmp_path):
    side = {**everywhere({"a": 4}, {"a": "shard(0)"}), "domain": 1}
    other = {**everywhere({"a": 4}, {"a": "shard(1)"}), "domain": 1}
    jobs = make_jobs(tmp_path, model_document({"w": ((131072, 131072), "uint8")}), side, other)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 40)
    assert plan.network_bytes == 17_179_869_184
    pairs = {}
    for rank in range(8):
        for blocks in rank_schedule(plan, rank).rounds:
            for transfer in transfers(blocks, rank, phase=0):
                assert transfer.num_bytes <= MAX_MESSAGE < 2**31
                if transfer.origin == rank:
                    key = (transfer.origin, transfer.target)
                    pairs[key] = pairs.get(key, 0) + transfer.num_bytes
    assert set(pairs.values()) == {2**30}
    assert len(pairs) == 16
    assert traffic_of(plan).send_network[:4].tolist() == [2**32] * 4


def test_many_small_tensors_travel_as_messages_per_pair_and_round(tmp_path):
    tensors = {f"t{i}.w": ((256,), "float32") for i in range(20_000)}
    two = everywhere({"a": 2}, {"a": "shard(0)"})
    jobs = make_jobs(tmp_path, model_document(tensors), two, everywhere({"a": 2}, {}))
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=4 << 20)
    pairs_on_the_network, pairs_in_the_domain = 4, 2
    blocks = plan.num_rounds * (pairs_on_the_network + 2 * pairs_in_the_domain)
    assert plan.num_rounds > 1
    assert count_messages(plan) <= blocks


def test_a_dtype_that_differs_is_refused_unless_the_destination_asks_for_a_cast(tmp_path):
    source = model_document({"w": ((4, 4), "float32")})
    destination = model_document({"w": ((4, 4), "bfloat16")})
    write_yaml(tmp_path / "one.yaml", source)
    write_yaml(tmp_path / "other.yaml", destination)
    a = write_yaml(tmp_path / "a.yaml", {"name": "a", "model": "one.yaml", **WHOLE})
    b = write_yaml(tmp_path / "b.yaml", {"name": "b", "model": "other.yaml", **WHOLE})
    with pytest.raises(WeightsError, match="'w': the source has float32, the destination bfloat16"):
        plan_of(read_jobs(a, b))
    value = torch.randn(4, 4)
    for dtype in ("bfloat16", "float64", "float16", "float8_e4m3fn"):
        jobs = make_jobs(tmp_path, source, WHOLE, {**WHOLE, "dtype": dtype})
        result = refit_in_process(jobs, {"w": value})
        expected = value.to(getattr(torch, dtype))
        assert torch.equal(result.storages[0]["w"].view(torch.uint8), expected.view(torch.uint8))
        # cast at the sender where that makes fewer bytes
        assert result.plan.network_bytes == 16 * min(4, expected.element_size())
