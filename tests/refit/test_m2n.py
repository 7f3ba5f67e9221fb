"""What NCCL M2N carries arrives exactly: its calls are done by a stand-in that knows nothing but their arguments."""

from __future__ import annotations

import json
import math
import sys
import threading
from random import Random

import pytest
import torch

from reshard_cli.errors import DocumentError, PeerLostError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.refit.endpoints import Destination
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.in_process import run_in_process
from reshard_cli.refit.m2n import carry
from reshard_cli.transport.exchange import open_m2n
from reshard_cli.transport.m2n import M2n, m2n_fault
from tests import m2n_fake
from tests.plan.test_m2n import plan_of
from tests.plan.test_random_pairs import all_right, draw_topology, jobs_of
from tests.random_layouts import RandomPair, draw_pair, draw_values
from tests.support import model_document, run_cli, run_module, storages_of, write_yaml

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Have the stand-in as `nccl.m2n` for one test."""
    for name in ("nccl", "nccl.m2n"):
        monkeypatch.setitem(sys.modules, name, None)
    m2n_fake.install()


def draw_even_pair(random: Random) -> RandomPair:
    """Return a pair whose tensors M2N can often carry: even cuts, replicas, experts apart or stacked, fused rows."""
    named, logical = {}, {}
    for index in range(random.randint(1, 4)):
        shape = [random.choice([4, 8, 12]) for _ in range(random.randint(1, 3))]
        dtype = random.choice(sorted(m2n_fake.DTYPES))
        named[f"t{index}.w"], logical[f"t{index}.w"] = (shape, dtype), (tuple(shape), dtype)
    for part in ("gate", "up"):
        for expert in range(4):
            named[f"layers.0.experts.{expert}.{part}.w"] = ([4, 8], "bfloat16")
        logical[f"layers.0.experts.{{expert}}.{part}.w"] = ((4, 4, 8), "bfloat16")
    for part, rows in (("q", 8), ("k", 4), ("v", 4)):
        named[f"layers.1.{part}.w"] = ([rows, 3], "float32")
        logical[f"layers.1.{part}.w"] = ((rows, 3), "float32")
    jobs = []
    for _ in range(2):
        axes = dict(random.sample([("dp", random.choice([1, 2])), ("tp", random.choice([1, 2, 4]))], 2))
        rules = [
            {
                "match": name,
                "place": {"tp": f"shard({random.randrange(len(shape))})"} if random.random() < 0.8 else {},
            }
            for name, (shape, _) in named.items()
            if name.startswith("t")
        ]
        how = random.choice(["expert", "shard(0)", "shard(1)", "replicate"])
        rules.append({"match": "layers.{layer}.experts.*", "place": {"tp": how}})
        rules.append({"match": "layers.{layer}.{q,k,v}.w", "place": {"tp": "shard(0)"}})
        storage = [{"tensor": "layers.{layer}.qkv", "concat": ["layers.{layer}.{q,k,v}.w"], "dim": 0}]
        if random.random() < 0.5:
            storage[0]["interleave"] = 4
        operands = ["layers.{layer}.experts.{expert}.{gate,up}.w"]
        if random.random() < 0.7:
            stacked = {"tensor": "w13", "stack": "expert", "concat": operands, "dim": random.choice([1, 2])}
            apart = {"tensor": "w13.{expert}", "concat": operands, "dim": 0}
            storage.append(random.choice([stacked, apart]))
        ranks = axes["dp"] * axes["tp"]
        jobs.append(
            {"ranks": ranks, "domain": random.randint(1, ranks), "meshes": {"m": axes}, "tensors": rules,
             "storage": storage}
        )  # fmt: skip
    return RandomPair(model_document(named), jobs[0], jobs[1], logical)


def run_ranks(body, size):
    """Run body(rank) in a thread a rank; raise the first failure."""
    failed = []

    def guarded(rank):
        try:
            body(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=60)
    if failed:
        raise failed[0]


def refit(random: Random, pair: RandomPair, *, staging=1 << 20, versions=1, tamper=lambda plan: None):
    """Refit a pair with M2N; return (plan, whether M2N's and the rounds' tensors are right, buffer bytes by call)."""
    jobs = jobs_of(pair)
    topology = jobs.topology(None, False)
    plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=staging, m2n=True)
    tamper(plan)
    source, destination = topology.source.tolist(), topology.destination.tolist()
    world = m2n_fake.ThreadWorld(topology.num_ranks)
    held, filled = {}, {}
    right, buffers = True, []
    for version in range(versions):
        values = draw_values(random, pair)
        for rank in source:
            held[rank] = storages_of(jobs, source.index(rank), values)
        for rank in destination if not version else ():
            filled[rank] = Destination.create(plan, destination.index(rank), None, 1, CPU)
            for storage in filled[rank].storages:
                if not storage.has_padding:
                    filled[rank].buffers[storage.name].fill_(0xA5)

        def body(rank):
            m2n = M2n(m2n_fake.ThreadComm(world, rank), CPU, 10, lambda: None)
            windows = filled[rank].windows if rank in filled else None
            taken = carry(plan, rank, held.get(rank), windows, CPU, m2n)
            assert taken in (0, plan.m2n.buffer_bytes)
            buffers.append(taken)
            m2n.close()

        run_ranks(body, topology.num_ranks)
        executors = {
            rank: RankExecutor(
                plan, rank_schedule(plan, rank), held.get(rank),
                filled[rank].windows if rank in filled else None, CPU,
            )
            for rank in range(topology.num_ranks)
        }  # fmt: skip
        run_in_process(executors)
        most = max(one.peak_staging_bytes for one in executors.values())
        assert most + plan.m2n.buffer_bytes <= staging
        right &= all_right(pair, filled, destination, values)
    return plan, right, buffers if world.calls else []


def test_every_element_that_m2n_carries_is_in_its_place_beside_what_the_rounds_bring():
    tensors, names, in_place, laid_out = 0, set(), 0, 0
    for seed in range(80):
        random = Random(seed)
        pair = draw_even_pair(random)
        plan, right, buffers = refit(random, pair, versions=2 if seed % 8 == 0 else 1)
        assert right, seed
        tensors += plan.m2n.totals(plan.pairs)["tensors"]
        names |= {plan.pairs[index].name for one in plan.m2n.carried for index in one.tensors}
        in_place, laid_out = in_place + buffers.count(0), laid_out + len(buffers) - buffers.count(0)
    assert tensors > 300
    assert {"t0.w", "layers.1.k.w", "layers.0.experts.{expert}.up.w"} <= names
    assert in_place > 20
    assert laid_out > 100


def test_random_layouts_of_any_kind_are_exact_with_m2n():
    tensors = 0
    for seed in range(120):
        random = Random(seed)
        staging = random.choice([8000, 1 << 20])
        plan, right, _ = refit(random, draw_pair(random, max_ranks=4), staging=staging)
        assert right, seed
        tensors += sum(len(one.tensors) for one in plan.m2n.carried)
    assert tensors > 80


def test_the_stand_in_notices_a_wrong_argument():
    def shifted(plan):
        one = next(
            (one for one in plan.m2n.carried if len(one.shape) == 2 and one.shape[0] == one.shape[1]), None
        )
        if one is not None and one.source.shards > 1:
            side = one.source
            wrong = type(side)(side.start, side.mesh, side.axis, 1 - side.dim)
            plan.m2n.carried[plan.m2n.carried.index(one)] = type(one)(
                one.tensors, one.shape, one.dtype, wrong, one.destination
            )
            tampered.append(1)

    tampered, seen = [], []
    for seed in range(60):
        random = Random(seed)
        before = len(tampered)
        _, right, _ = refit(random, draw_even_pair(random), tamper=shifted)
        if len(tampered) > before:
            seen.append(right)
    assert seen
    assert not all(seen)


def test_values_are_cast_on_their_way_and_colocated_jobs_leave_m2n_nothing(tmp_path):
    jobs = (2, {"tp": 2}, {"tp": "shard(0)"}), (1, {"tp": 1}, {}, {"dtype": "bfloat16"})
    plan = plan_of(tmp_path, [4, 3], *jobs, dtype="float32")
    assert plan.m2n.carried[0].dtype == "bfloat16"
    world = m2n_fake.ThreadWorld(3)
    values = torch.randn(4, 3)
    filled = Destination.create(plan, 0, None, 1, CPU)

    class Source:
        def windows(self, name, lo, hi):
            yield lo, hi, values[lo[0] : hi[0], lo[1] : hi[1]]

        def in_place(self, name):
            return True

    def body(rank):
        m2n = M2n(m2n_fake.ThreadComm(world, rank), CPU, 10, lambda: None)
        carry(plan, rank, Source() if rank < 2 else None, filled.windows if rank == 2 else None, CPU, m2n)

    run_ranks(body, 3)
    assert torch.equal(filled.buffers["w"].view(torch.bfloat16).view(4, 3), values.to(torch.bfloat16))
    random = Random(3)
    jobs = jobs_of(draw_even_pair(random))
    shared = jobs.topology(1, True)
    plan = build_plan(jobs.source, jobs.destination, shared, "reshard", staging=1 << 20, m2n=True)
    assert set(plan.m2n.declined) == {"the jobs share ranks"}
    assert draw_topology(random, jobs).num_ranks


def test_what_the_library_refuses_names_the_tensor(tmp_path):
    plan = plan_of(tmp_path, [4], (1, {"a": 1}, {}), (1, {"a": 1}, {}))
    m2n = M2n(m2n_fake.ThreadComm(m2n_fake.ThreadWorld(2), 0), CPU, 10, lambda: None)
    (one,) = plan.m2n.carried
    with pytest.raises(PeerLostError, match=r"'model\.w': NCCL M2N: invalid argument: the buffer's shape"):
        m2n.reshard("model.w", one, torch.zeros(3, dtype=torch.bfloat16), None)


def test_without_the_package_its_libraries_or_a_communicator_it_says_what_is_missing(monkeypatch):
    assert m2n_fault() is None
    monkeypatch.setitem(sys.modules, "nccl.m2n", None)
    assert "nccl-extensions" in m2n_fault()
    with pytest.raises(DocumentError, match="--backend nccl"):
        open_m2n(object(), CPU, 1, lambda: None)

    def lacking():
        raise RuntimeError("no libnccl.so.2\nand more")

    monkeypatch.setattr(m2n_fake.install(), "init", lacking)
    with pytest.raises(DocumentError, match=r"--m2n: .* no libnccl\.so\.2$"):
        M2n(m2n_fake.ThreadComm(m2n_fake.ThreadWorld(1), 0), CPU, 1, lambda: None)


def documents(folder):
    model = {"model.layers.0.a.w": ((8, 6), "float32"), "b.w": ((4, 4), "bfloat16"), "c.w": ((7,), "uint8")}
    write_yaml(folder / "model.yaml", model_document(model))
    job = {"model": "model.yaml", "domain": 2}
    source = {
        "name": "train",
        "ranks": 2,
        "meshes": {"m": {"tp": 2}},
        "tensors": [{"match": "*", "place": {"tp": "shard(0)"}}],
    }
    rules = [{"match": "c.w"}, {"match": "*", "place": {"tp": "shard(1)"}}]
    destination = {"name": "infer", "ranks": 4, "meshes": {"m": {"dp": 2, "tp": 2}}, "tensors": rules}
    return (
        write_yaml(folder / "train.yaml", {**job, **source}),
        write_yaml(folder / "infer.yaml", {**job, **destination}),
    )


def test_between_processes_a_whole_refit_is_verified_with_m2n_again_and_again(tmp_path):
    done = run_module("tests.refit.m2n_harness", *documents(tmp_path), tmp_path / "out", timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    elements = 2 * math.prod((8, 6)) + 2 * math.prod((4, 4)) + 4 * 7
    assert report["verified_elements"] == 3 * elements
    assert report["m2n"] == {"tensors": 2, "bytes": 4 * 48 + 2 * 16}
    assert all("m2n" in one["phases"] for one in report["iterations"])
    assert {one["network_bytes"] for one in report["iterations"]} == {14}  # c.w alone, to two domains
    planned = run_cli("plan", *documents(tmp_path), "--m2n", "--mode", "reshard", "--json", "-")
    assert json.loads(planned.stdout)["digest"] == report["digest"]


def test_a_rank_that_dies_in_a_call_ends_the_refit_on_all_ranks_by_its_name(tmp_path):
    done = run_module("tests.refit.m2n_harness", *documents(tmp_path), tmp_path / "out", "kill", timeout=120)
    assert done.returncode == 4
    assert done.stderr.count("error: ") == 1
    assert "rank 3" in done.stderr
    assert "(last: m2n)" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--m2n"], "--m2n: NCCL M2N moves between GPUs, and the backend is gloo; leave --m2n out"),
        (
            ["--m2n", "--join", "127.0.0.1:1", "--role", "source", "--token", "x"],
            "start both in one torchrun",
        ),
    ],
)
def test_a_refit_that_cannot_use_m2n_ends_with_one_message(tmp_path, flags, told):
    done = run_cli("refit", *documents(tmp_path), "--timeout", "20", *flags)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert told in done.stderr
