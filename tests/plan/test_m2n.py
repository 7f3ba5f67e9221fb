"""Which tensors NCCL M2N can carry, why it declines the others, and that a plan leaves it what it takes."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.spec.dtypes import ITEM_SIZE
from tests.benchmarks.published import ROWS
from tests.m2n_fake import DTYPES
from tests.plan.test_random_pairs import draw_topology, jobs_of
from tests.random_layouts import draw_pair, held_elements
from tests.support import make_jobs, model_document

WHOLE = (2, {"dp": 2}, {})


def plan_of(
    folder, shape, source, destination, *, dtype="bfloat16", mode="reshard", colocated=False, staging=1 << 24
):
    """Return the plan for one tensor; a job is (ranks, mesh, place, more of its rule)."""
    documents = []
    for ranks, mesh, place, *more in (source, destination):
        rule = {"match": "*", "place": place, **(more[0] if more else {})}
        documents.append({"ranks": ranks, "domain": 1, "meshes": {"m": mesh}, "tensors": [rule]})
    jobs = make_jobs(folder, model_document({"w": (shape, dtype)}), *documents)
    topology = jobs.topology(None, colocated)
    return build_plan(jobs.source, jobs.destination, topology, mode, staging=staging, m2n=True)


def carried(plan):
    (one,) = plan.m2n.carried
    assert plan.routes == ["m2n"]
    assert not plan.m2n.declined
    return one


def test_replicas_outside_and_inside_the_cut_are_meshes_of_two_axes(tmp_path):
    source = (4, {"dp": 2, "tp": 2}, {"tp": "shard(0)"})
    destination = (6, {"tp": 2, "dp": 3}, {"tp": "shard(1)"})
    one = carried(plan_of(tmp_path, [8, 6], source, destination))
    sides = [(side.start, side.mesh, side.axis, side.dim) for side in (one.source, one.destination)]
    assert sides == [(0, (2, 2), 1, 0), (4, (2, 3), 0, 1)]
    assert one.source.local_shape(one.shape) == (4, 6)
    assert one.destination.box(8, one.shape) == ((0, 3), (8, 6))
    assert one.destination.box(3, one.shape) is None
    assert one.shard_bytes == 2 * 4 * 6


def test_a_whole_tensor_has_one_shard_as_m2n_wants_one_cut_axis(tmp_path):
    one = carried(plan_of(tmp_path, [8], (2, {"tp": 2}, {"tp": "shard(0)"}), (3, {"dp": 3}, {})))
    assert (one.source.mesh, one.source.shards, one.source.copies) == ((1, 2), 2, 1)
    assert (one.destination.mesh, one.destination.axis, one.destination.shards) == ((3, 1), 1, 1)
    assert [one.destination.box(rank, one.shape) for rank in (2, 4)] == [((0,), (8,))] * 2


@pytest.mark.parametrize(
    ("shape", "source", "more", "told"),
    [
        ([7], (4, {"tp": 4}, {"tp": "shard(0)"}), {}, "source: its cut is uneven"),
        ([8], (2, {"tp": 2}, {"tp": "shard(0)"}, {"pad": {0: 3}}), {}, "source: its cut is uneven"),
        (
            [8, 8],
            (4, {"a": 2, "b": 2}, {"a": "shard(0)", "b": "shard(1)"}),
            {},
            "source: several dims are cut",
        ),
        (
            [8],
            (8, {"a": 2, "b": 2, "c": 2}, {"b": "shard(0)"}),
            {},
            "source: its ranks are no mesh of two axes",
        ),
        ([2, 2, 2, 2], WHOLE, {}, "it has 4 dims, not 1 to 3"),
        ([], WHOLE, {}, "it has 0 dims, not 1 to 3"),
        ([4], WHOLE, {"dtype": "int16"}, "its dtype is int16"),
        ([4], WHOLE, {"mode": "broadcast"}, "its route is broadcast"),
        ([4], WHOLE, {"colocated": True}, "the jobs share ranks"),
        (
            [34],
            (17, {"tp": 17}, {"tp": "shard(0)"}),
            {},
            "more than 16 source shards meet in a destination shard",
        ),
        ([1024], WHOLE, {"staging": 4000}, "a shard is larger than half of --staging, or than 2 GiB"),
        (
            [1 << 30, 2],
            WHOLE,
            {"staging": 1 << 40},
            "a shard is larger than half of --staging, or than 2 GiB",
        ),
    ],
)
def test_what_is_beyond_the_limits_is_declined_with_the_reason(tmp_path, shape, source, more, told):
    plan = plan_of(tmp_path, shape, source, WHOLE, **more)
    assert not plan.m2n.carried
    ((reason, lost),) = plan.m2n.declined.items()
    assert reason == told
    dtype = more.get("dtype", "bfloat16")
    assert (lost.tensors, lost.num_bytes) == (1, math.prod(shape) * ITEM_SIZE[dtype])
    assert plan.routes == ["broadcast" if more.get("mode") else "reshard"]


def test_fan_in_and_fan_out_are_taken_up_to_their_limits(tmp_path):
    assert carried(plan_of(tmp_path, [32], (16, {"tp": 16}, {"tp": "shard(0)"}), WHOLE))
    assert carried(plan_of(tmp_path, [64], WHOLE, (64, {"tp": 64}, {"tp": "shard(0)"})))
    lost = plan_of(tmp_path, [65], WHOLE, (65, {"tp": 65}, {"tp": "shard(0)"})).m2n.declined
    assert list(lost) == ["a source shard goes to more than 64 destination shards"]
    four, many = ((n, {"tp": n}, {"tp": "shard(0)"}) for n in (4, 128))
    assert carried(plan_of(tmp_path, [128], four, many))


def test_tied_and_quantised_tensors_are_declined(tmp_path):
    model = model_document({"a": ([8], "float32"), "b": ([8], "float32")})
    job = {"ranks": 1, "domain": 1, "tensors": [{"match": "*"}]}
    cut = {"match": "b", "place": {"m": "shard(0)"}}
    tied = {"ranks": 2, "domain": 1, "meshes": {"m": {"m": 2}}, "tensors": [cut, {"match": "*"}]}
    jobs = make_jobs(tmp_path, model, {**job, "alias": {"b": "a"}}, {**tied, "alias": {"b": "a"}})
    topology = jobs.topology(None, False)
    plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=1 << 20, m2n=True)
    assert list(plan.m2n.declined) == ["destination: it is tied to another tensor"]
    casts = [{"match": "*", "cast": "blockwise(float8_e4m3fn, 128)"}]
    jobs = make_jobs(
        tmp_path, model_document({"a.weight": ([256, 256], "bfloat16")}), job, {**job, "casts": casts}
    )
    topology = jobs.topology(None, False)
    plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=1 << 20, m2n=True)
    assert list(plan.m2n.declined) == ["it is cast in blocks"]


def mesh_by_trying(held, shape):
    """Return whether these elements by rank are what some mesh of two axes and one even cut says, trying them all."""
    having = [rank for rank, own in enumerate(held) if own]
    if not having or having != list(range(having[0], having[-1] + 1)):
        return None
    count, found = len(having), None
    for shards in (n for n in range(1, count + 1) if count % n == 0):
        for dim, outside in itertools.product(range(len(shape)), (False, True)):
            if shape[dim] % shards:
                continue
            rows, step = shape[dim] // shards, math.prod(shape[dim + 1 :])
            of = [
                {i for i in range(math.prod(shape)) if i // step % shape[dim] // rows == s}
                for s in range(shards)
            ]
            order = [n % shards if outside else n // (count // shards) for n in range(count)]
            if all(held[rank] == of[shard] for rank, shard in zip(having, order, strict=True)):
                found = shards
    return found


def test_of_random_layouts_it_declines_exactly_what_no_even_mesh_of_two_axes_describes():
    taken = declined = 0
    for seed in range(300):
        random = Random(seed)
        pair = draw_pair(random)
        jobs = jobs_of(pair)
        plan = build_plan(
            jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20, m2n=True
        )
        for tensor, route in zip(plan.pairs, plan.routes, strict=True):
            if 0 in tensor.shape or len(tensor.source_geometries + tensor.destination_geometries) > 2:
                assert route == "reshard"
                continue
            fits = 1 <= len(tensor.shape) <= 3 and tensor.wire_dtype in DTYPES
            for job in (pair.source, pair.destination) if fits else ():
                fits = (
                    fits and mesh_by_trying(held_elements(pair, job, tensor.name), tensor.shape) is not None
                )
            assert (route == "m2n") == fits, (seed, tensor.name)
            taken, declined = taken + fits, declined + (not fits)
    assert taken > 150
    assert declined > 150


def test_what_m2n_carries_has_no_part_in_the_rest_and_the_digest_tells_the_choice():
    some = 0
    for seed in range(60):
        random = Random(seed)
        jobs = jobs_of(draw_pair(random))
        topology = draw_topology(random, jobs)

        def build(m2n, jobs=jobs, topology=topology):
            return build_plan(jobs.source, jobs.destination, topology, "reshard", staging=1 << 20, m2n=m2n)

        plain, again, plan, twice = build(False), build(False), build(True), build(True)
        assert plain.digest == again.digest
        assert plan.digest == twice.digest
        taken = {index for one in plan.m2n.carried for index in one.tensors}
        assert taken == {index for index, route in enumerate(plan.routes) if route == "m2n"}
        assert not taken.intersection(*[set(one.tensors.tolist()) for one in plan.entries.classes] or [set()])
        assert (plain.digest == plan.digest) == (not taken)
        assert traffic_of(plan).network_bytes <= traffic_of(plain).network_bytes
        assert plan.staging == (1 << 20) - plan.m2n.buffer_bytes
        some += bool(taken)
    assert some > 20


def test_a_staging_too_small_for_the_rest_is_told_how_much_is_enough_beside_m2n(tmp_path):
    job = {"ranks": 2, "domain": 1, "tensors": [{"match": "*"}]}
    model = model_document({"w": ([16], "uint8"), "v": ([2, 2, 2, 200], "float64")})
    jobs = make_jobs(tmp_path, model, job, job)

    def build(staging):
        topology = jobs.topology(None, False)
        return build_plan(jobs.source, jobs.destination, topology, "reshard", staging=staging, m2n=True)

    with pytest.raises(DocumentError, match=r"--staging: 40 bytes .* give at least") as told:
        build(40)
    enough = float(str(told.value).split("at least ")[1].split()[0])
    assert build(math.ceil(enough * 2**20)).m2n.buffer_bytes == 16


def test_the_published_rows_are_chosen_class_by_class():
    shares = {}
    for name in ("deepseek-v3-h100", "qwen3-235b-h100", "nemotron-ultra-gb200"):
        jobs = read_jobs(ROWS / name / "train.yaml", ROWS / name / "infer.yaml")
        topology = jobs.topology(None, False)
        plain = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=4 << 30)
        plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=4 << 30, m2n=True)
        total = sum(math.prod(one.shape) * ITEM_SIZE[one.wire_dtype] for one in plain.pairs)
        carried, lost = plan.m2n.totals(plan.pairs), plan.m2n.declined.values()
        assert carried["bytes"] + sum(one.num_bytes for one in lost) == total
        assert carried["tensors"] + sum(one.tensors for one in lost) == sum(
            one.num_names for one in plan.pairs
        )
        assert len(plan.m2n.carried) < 300
        shares[name] = round(100 * carried["bytes"] / total, 1)
    assert shares == {"deepseek-v3-h100": 100.0, "qwen3-235b-h100": 99.3, "nemotron-ultra-gb200": 3.5}
