"""Random pairs of layouts, refitted in one process and held against whole tensors cut by hand."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.plan.routes import MODES
from reshard_cli.plan.schedule import count_messages, pair_digests, rank_schedule, transfers
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.prepare import Jobs
from reshard_cli.spec.dtypes import ITEM_SIZE
from tests.strategies import (
    Job,
    Logical,
    Pair,
    element_bytes,
    elements_held,
    expected_storages,
    layout_pairs,
    random_values,
    raw,
)
from tests.support import Result, make_jobs, refit_in_process

MANY = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
PAIRS = layout_pairs()
SEEDS = st.integers(0, 2**31)


def jobs_of(pair: Pair) -> Jobs:
    with tempfile.TemporaryDirectory() as folder:
        return make_jobs(Path(folder), pair.model, pair.source.document, pair.destination.document)


@st.composite
def topologies(draw, jobs: Jobs) -> Topology:
    """The documents' domains, domains that ranks of both jobs share, or GPUs that the jobs share."""
    one, other = jobs.source.num_ranks, jobs.destination.num_ranks
    kind = draw(st.sampled_from(["documents", "shared", "colocated", "colocated in odd places"]))
    if kind == "documents":
        return jobs.topology(None, False)
    if kind == "shared":
        hosts = st.lists(st.sampled_from("xyz"), min_size=one + other, max_size=one + other)
        return Topology.of_machine(one, other, draw(hosts), colocated=False)
    ranks = max(one, other)
    if kind == "colocated":
        return jobs.topology(draw(st.integers(1, ranks)), True)
    return Topology.of_machine(
        one, other, draw(st.lists(st.sampled_from("xyz"), min_size=ranks, max_size=ranks)), colocated=True
    )


def assert_as_cut_by_hand(pair: Pair, result: Result, values: dict[str, torch.Tensor]) -> None:
    for rank, storages in enumerate(result.storages):
        expected = expected_storages(pair.destination, values, rank)
        dtypes = {one.name: one.dtype for one in result.specifications[rank]}
        assert {name for name, one in storages.items() if one.numel()} == {
            name for name, one in expected.items() if one.numel()
        }
        for name, one in storages.items():
            if not one.numel() and name not in expected:
                continue
            assert tuple(one.shape) == tuple(expected[name].shape), (rank, name)
            assert str(one.dtype) == f"torch.{dtypes[name]}"
            assert torch.equal(raw(one), expected[name]), (rank, name, one, expected[name])


def lower_bound(pair: Pair, topology: Topology) -> int:
    """Sum over domains of the bytes that its destination ranks want and none of its source ranks holds."""
    held, wanted = elements_held(pair, pair.source), elements_held(pair, pair.destination)
    size = element_bytes(pair)
    total = 0
    for domain in np.unique(topology.domain):
        inside = held[topology.domain[topology.source] == domain].any(axis=0)
        needed = wanted[topology.domain[topology.destination] == domain].any(axis=0)
        total += int(size[needed & ~inside].sum())
    return total


@MANY
@given(PAIRS, st.data())
def test_reshard_gives_every_storage_bit_for_bit_and_moves_exactly_the_lower_bound(pair, data):
    jobs = jobs_of(pair)
    topology = data.draw(topologies(jobs))
    values = random_values(pair, data.draw(SEEDS))
    result = refit_in_process(
        jobs, values, mode="reshard", topology=topology, from_storages=data.draw(st.booleans())
    )
    assert_as_cut_by_hand(pair, result, values)
    assert result.plan.network_bytes == lower_bound(pair, topology)


@MANY
@given(PAIRS, st.sampled_from(MODES), st.sampled_from([150, 700, 3000, 20_000]), st.data())
def test_any_mode_within_any_staging_gives_every_storage_bit_for_bit(pair, mode, staging, data):
    jobs = jobs_of(pair)
    topology = data.draw(topologies(jobs))
    values = random_values(pair, data.draw(SEEDS))
    more = {"mode": mode, "topology": topology, "from_storages": data.draw(st.booleans())}
    try:
        result = refit_in_process(jobs, values, staging=staging, **more)
    except DocumentError as error:
        asked = re.search(r"give at least ([\d.]+) MiB", str(error))
        assert asked
        staging = int(float(asked[1]) * 2**20) + 1024  # the message has three decimals
        result = refit_in_process(jobs, values, staging=staging, **more)
    assert result.peak_staging_bytes <= staging
    assert_as_cut_by_hand(pair, result, values)


@MANY
@given(PAIRS, st.sampled_from(MODES), st.data())
def test_jobs_on_the_same_gpus_give_every_storage_bit_for_bit_in_every_mode(pair, mode, data):
    jobs = jobs_of(pair)
    ranks = max(jobs.source.num_ranks, jobs.destination.num_ranks)
    topology = jobs.topology(data.draw(st.integers(1, ranks)), True)
    values = random_values(pair, data.draw(SEEDS))
    result = refit_in_process(
        jobs, values, mode=mode, topology=topology, colocated=True, from_storages=data.draw(st.booleans())
    )
    assert_as_cut_by_hand(pair, result, values)
    if mode == "reshard":
        assert result.plan.network_bytes == lower_bound(pair, topology)
    assert result.plan.network_bytes >= lower_bound(pair, topology)


@settings(MANY, max_examples=110)
@given(PAIRS, st.sampled_from(MODES), st.sampled_from([2000, 1 << 20]), st.data())
def test_planned_traffic_is_what_the_ranks_really_exchange(pair, mode, staging, data):
    jobs = jobs_of(pair)
    topology = data.draw(topologies(jobs))
    try:
        result = refit_in_process(jobs, random_values(pair, 0), mode=mode, topology=topology, staging=staging)
    except DocumentError as error:
        assert "--staging" in str(error)
        return
    plan, traffic = result.plan, traffic_of(result.plan)
    assert result.moved == traffic.network_bytes + traffic.domain_bytes
    counted = {key: np.zeros(topology.num_ranks, np.int64) for key in ("out", "in", "near out", "near in")}
    messages = 0
    for rank in range(topology.num_ranks):
        for blocks in rank_schedule(plan, rank).rounds:
            for phase in (0, 1):
                for one in transfers(blocks, rank, phase=phase):
                    near = topology.domain[one.origin] == topology.domain[one.target]
                    if one.origin == rank:
                        messages += 1
                        counted["near out" if near else "out"][rank] += one.num_bytes
                    if one.target == rank:
                        counted["near in" if near else "in"][rank] += one.num_bytes
    assert counted["out"].tolist() == traffic.send_network.tolist()
    assert counted["in"].tolist() == traffic.receive_network.tolist()
    assert counted["near out"].tolist() == traffic.send_domain.tolist()
    assert counted["near in"].tolist() == traffic.receive_domain.tolist()
    assert counted["out"].sum() == plan.network_bytes == traffic.network_bytes
    # a carrier's message ends early where the next sender's wider elements would not line up
    widths = {one.item_size for one in plan.entries.classes}
    assert count_messages(plan) == messages or (len(widths) > 1 and count_messages(plan) < messages)


@settings(MANY, max_examples=110)
@given(PAIRS, st.sampled_from(MODES), st.sampled_from([5000, 1 << 20]), st.data())
def test_both_ends_of_every_pair_have_one_digest_of_their_messages(pair, mode, staging, data):
    jobs = jobs_of(pair)
    topology = data.draw(topologies(jobs))
    try:
        plan = build_plan(jobs.source, jobs.destination, topology, mode, staging=staging)
    except DocumentError as error:
        assert "--staging" in str(error)
        return
    found = defaultdict(list)
    for rank in range(topology.num_ranks):
        schedule = rank_schedule(plan, rank)
        for ends, digest in pair_digests(schedule).items():
            assert rank in ends
            found[ends].append(digest)
        for blocks in schedule.rounds:
            for phase in (0, 1):
                for one in transfers(blocks, rank, phase=phase):
                    assert 0 < one.num_bytes < 2**31
    for ends, digests in found.items():
        assert ends[0] != ends[1]
        assert len(digests) == 2, ends
        assert digests[0] == digests[1]


@settings(MANY, max_examples=40)
@given(PAIRS)
def test_a_plan_is_a_pure_function_of_its_two_documents(pair):
    one, other = jobs_of(pair), jobs_of(pair)
    plans = [
        build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)
        for jobs in (one, other)
    ]
    assert plans[0].digest == plans[1].digest
    assert one.source.digest == other.source.digest


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZE))
@pytest.mark.parametrize("from_storages", [False, True])
def test_every_bit_pattern_of_every_dtype_arrives_unchanged(dtype, from_storages):
    size = ITEM_SIZE[dtype]
    one = Logical("w", (64, 9), dtype)
    axes = {"a": 3}
    cut = [{"match": "w", "place": {"a": "shard(1)"}}]
    source = {
        "ranks": 2,
        "domain": 2,
        "meshes": {"m": {"b": 2}},
        "tensors": [{"match": "w", "place": {"b": "shard(0)"}}],
    }
    pair = Pair(
        [one],
        Job(source),
        Job(
            {"ranks": 3, "domain": 1, "meshes": {"m": axes}, "tensors": cut},
            [lambda values, rank: {"w": torch.chunk(values.whole["w"], 3, 1)[rank]}],
        ),
    )
    pattern = torch.arange(64 * 9 * size) % (2 if dtype == "bool" else 256)
    values = {"w": pattern.to(torch.uint8).view(getattr(torch, dtype)).view(64, 9)}
    result = refit_in_process(jobs_of(pair), values, from_storages=from_storages)
    assert_as_cut_by_hand(pair, result, values)


def test_the_comparison_notices_one_flipped_bit_one_missing_storage_and_poison():
    one = Logical("w", (6,), "uint8")
    whole = [{"match": "w"}]
    pair = Pair(
        [one],
        Job({"ranks": 1, "tensors": whole}),
        Job({"ranks": 1, "tensors": whole}, [lambda values, rank: {"w": values.whole["w"]}]),
    )
    values = random_values(pair, 1)
    jobs = jobs_of(pair)
    result = refit_in_process(jobs, values)
    assert_as_cut_by_hand(pair, result, values)
    result.storages[0]["w"][5] ^= 1
    with pytest.raises(AssertionError):
        assert_as_cut_by_hand(pair, result, values)
    result.storages[0].clear()
    with pytest.raises(AssertionError):
        assert_as_cut_by_hand(pair, result, values)


def test_rows_taken_in_turns_are_cut_where_the_turns_change_and_not_where_a_piece_begins():
    kinds = [Logical("a", (4,), "int64"), Logical("b", (4,), "int64")]
    rules = [{"match": "*", "blocks": {"0": [1, 3]}}]  # a's second piece begins inside the first turn
    document = {"ranks": 1, "tensors": rules, "storage": [{"tensor": "ab", "concat": ["{a,b}"], "block": 2}]}
    pair = Pair(kinds, Job({"ranks": 1, "tensors": [{"match": "*"}]}), Job(document))
    result = refit_in_process(jobs_of(pair), {"a": torch.arange(4), "b": torch.arange(10, 14)})
    assert result.storages[0]["ab"].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
