"""Hundreds of random pairs of layouts, run in one process and held against tensors cut by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.plan.routes import MODES
from reshard_cli.plan.schedule import MAX_MESSAGE, pair_digests, rank_schedule, transfers
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.endpoints import Destination
from reshard_cli.spec.dtypes import ITEM_SIZE
from tests.random_layouts import RandomPair, draw_pair, draw_values, expected_storages, held_elements
from tests.support import make_jobs, refit_in_process

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
randoms = st.integers(0, 2**32).map(Random)


def draw_topology(random, jobs):
    """Return domains of the documents, domains that the jobs share, or the same GPUs for both."""
    kind = random.choice(["documents", "documents", "shared", "colocated"])
    one, other = jobs.source.num_ranks, jobs.destination.num_ranks
    if kind == "documents":
        return jobs.topology(None, False)
    if kind == "colocated":
        return jobs.topology(random.randint(1, max(one, other)), True)
    places = [f"host {random.randrange(3)}" for _ in range(one + other)]
    return Topology.of_machine(one, other, places, colocated=False)


def jobs_of(pair: RandomPair):
    with tempfile.TemporaryDirectory() as folder:
        return make_jobs(Path(folder), pair.model, pair.source, pair.destination)


def all_right(
    pair: RandomPair,
    filled: Mapping[int, Destination],
    destination: Sequence[int],
    values: dict[str, torch.Tensor],
) -> bool:
    """Say whether what destination ranks hold, by world rank, is right bit for bit, but for padding that is kept."""
    right = True
    for rank, one in filled.items():
        expected = expected_storages(pair, pair.destination, destination.index(rank), values)
        for storage in one.storages:
            if storage.num_elements and not storage.keep_padding:
                mine = one.buffers[storage.name].view(getattr(torch, storage.dtype)).view(storage.shape)
                right &= same(mine, expected[storage.name])
    return right


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel():
        return True
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def assert_right(pair, result, values):
    for rank, storages in enumerate(result.storages):
        expected = expected_storages(pair, pair.destination, rank, values)
        present = {name: tensor for name, tensor in storages.items() if tensor.numel()}
        assert present.keys() == {name for name, tensor in expected.items() if tensor.numel()}
        for name, tensor in present.items():
            assert same(tensor, expected[name]), (rank, name, tensor, expected[name])


def brute_force_bound(pair, topology):
    """Sum over the destination's domains of the bytes that it needs and that no rank in it holds."""
    total = 0
    for name, (_, dtype) in pair.shapes.items():
        have, want = (held_elements(pair, job, name) for job in (pair.source, pair.destination))
        for domain in set(topology.domain.tolist()):
            inside = set().union(
                *(have[job] for job, rank in enumerate(topology.source) if topology.domain[rank] == domain)
            )
            needed = set().union(
                *(
                    want[job]
                    for job, rank in enumerate(topology.destination)
                    if topology.domain[rank] == domain
                )
            )
            total += len(needed - inside) * ITEM_SIZE[dtype]
    return total


@MANY
@given(randoms)
def test_every_destination_storage_equals_whole_tensors_cut_by_hand_and_nothing_moves_twice(random):
    pair = draw_pair(random)
    jobs = jobs_of(pair)
    topology = draw_topology(random, jobs)
    values = draw_values(random, pair)
    result = refit_in_process(
        jobs, values, mode="reshard", topology=topology, from_storages=random.random() < 0.5
    )
    assert_right(pair, result, values)
    assert result.plan.network_bytes == brute_force_bound(pair, topology)
    traffic = traffic_of(result.plan)
    assert result.moved == traffic.network_bytes + traffic.domain_bytes
    assert traffic.send_network.sum() == traffic.receive_network.sum() == traffic.network_bytes


@MANY
@given(randoms)
def test_every_mode_and_any_staging_give_the_same_within_the_staging(random):
    pair = draw_pair(random)
    jobs = jobs_of(pair)
    values = draw_values(random, pair)
    topology = draw_topology(random, jobs)
    staging = random.choice([700, 2000, 10_000, 1 << 20])
    try:
        result = refit_in_process(
            jobs, values, mode=random.choice(MODES), staging=staging, topology=topology,
            from_storages=random.random() < 0.5,
        )  # fmt: skip
    except DocumentError as error:
        assert "give at least" in str(error)
        return
    assert_right(pair, result, values)
    assert result.peak_staging_bytes <= staging


@MANY
@given(randoms)
def test_both_ends_of_every_pair_agree_on_order_size_and_contents(random):
    pair = draw_pair(random)
    jobs = jobs_of(pair)
    topology = draw_topology(random, jobs)
    plan = build_plan(jobs.source, jobs.destination, topology, random.choice(MODES), staging=1 << 16)
    schedules = [rank_schedule(plan, rank) for rank in range(topology.num_ranks)]
    views = [pair_digests(schedule) for schedule in schedules]
    for rank, own in enumerate(views):
        for ends, digest in own.items():
            assert rank in ends
            assert ends[0] != ends[1]
            assert all(views[end][ends] == digest for end in ends)
    for schedule in schedules:
        for blocks in schedule.rounds:
            for phase in (0, 1):
                for transfer in transfers(blocks, schedule.rank, phase=phase):
                    assert transfer.num_bytes <= MAX_MESSAGE < 2**31


@MANY
@given(randoms)
def test_a_plan_is_the_same_whenever_it_is_made(random):
    pair = draw_pair(random)
    one, other = jobs_of(pair), jobs_of(pair)
    topology = draw_topology(random, one)
    mode = random.choice(MODES)
    first = build_plan(one.source, one.destination, topology, mode, staging=1 << 20)
    second = build_plan(other.source, other.destination, topology, mode, staging=1 << 20)
    assert first.digest == second.digest


def test_the_oracle_notices_two_swapped_elements():
    random = Random(5)
    pair = RandomPair(
        {"name": "m", "dtype": "uint8", "tensors": {"t0.w": [6]}},
        {"ranks": 1, "domain": 1, "meshes": {"m": {"a": 1}}, "tensors": [{"match": "*", "place": {}}]},
        {
            "ranks": 2,
            "domain": 1,
            "meshes": {"m": {"a": 2}},
            "tensors": [{"match": "*", "place": {"a": "shard(0)"}}],
        },
        {"t0.w": ((6,), "uint8")},
    )
    values = draw_values(random, pair)
    result = refit_in_process(jobs_of(pair), values)
    assert_right(pair, result, values)
    result.storages[1]["t0.w"][0] ^= 1
    with pytest.raises(AssertionError):
        assert_right(pair, result, values)
