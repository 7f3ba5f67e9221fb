"""The broadcast route: gathered at roots, one copy out, into each destination domain once, on any overlap of rounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import traffic_of
from reshard_cli.plan.entries import NETWORK
from reshard_cli.plan.streams import GATHERS, KEEPS, SENDS_HELD
from tests.plan.test_relays import jobs_of
from tests.support import refit_in_process

SIZE = 4 << 20  # bytes of a tensor of (1024, 1024) float32


def plan_of(jobs, mode="broadcast", staging=64 << 20):
    return build_plan(jobs.source, jobs.destination, jobs.topology(None, False), mode, staging=staging)


def test_the_source_gathers_half_in_its_first_domain_and_sends_one_copy_out(tmp_path):
    # domains 0 and 1 of the source hold a half each; three destination domains
    jobs = jobs_of(tmp_path, [(1024, 1024)] * 8, source=4, copies=3, tp=2, domain=2)
    plan = plan_of(jobs)
    traffic, size = traffic_of(plan), 8 * SIZE
    assert traffic.send_network[2:4].sum() == traffic.receive_network[:2].sum() == size / 2
    assert traffic.send_network[:2].sum() == size
    assert traffic.receive_network[4:].reshape(3, 2).sum(axis=1).tolist() == [size] * 3
    assert traffic.send_network[4:].reshape(3, 2).sum(axis=1).tolist() == [size, size, 0]
    assert plan.streams.longest_lag == 6  # the gather, and two domains before the last


def test_roots_take_turns_and_every_rank_gets_the_whole(tmp_path):
    jobs = jobs_of(tmp_path, [(1024, 1024)] * 8, source=2, copies=2, tp=2, domain=2)
    plan = plan_of(jobs)
    traffic, size = traffic_of(plan), 8 * SIZE
    assert traffic.send_network[:2].tolist() == [size / 2, size / 2]
    # each root has half of its part itself, and gives the other root half of what it holds
    assert traffic.send_domain[:2].tolist() == [size / 4, size / 4]
    taken = (traffic.receive_network + traffic.receive_domain)[2:]
    assert taken.tolist() == [size] * 4


@pytest.mark.parametrize("mode", ["broadcast", "hybrid-ffn"])
def test_every_destination_domain_is_entered_by_every_byte_once(tmp_path, mode):
    jobs = jobs_of(tmp_path, [(300, 7), (64, 1024), (5, 3)], source=3, copies=2, tp=3, domain=2)
    plan = plan_of(jobs, mode)
    streams = plan.streams
    size = plan.entries.total_bytes.sum()
    for domain in np.unique(plan.topology.domain[plan.topology.destination]):
        into = (streams.kind == NETWORK) & (plan.topology.domain[streams.carrier] == domain)
        edges = sorted(zip(streams.start[into].tolist(), streams.stop[into].tolist(), strict=True))
        assert edges[-1][1] - edges[0][0] == size
        assert all(one[1] == other[0] for one, other in pairwise(edges))


def test_what_is_sent_on_was_taken_two_rounds_before_by_the_same_rank(tmp_path):
    plan = plan_of(jobs_of(tmp_path, [(300, 70)] * 3, source=4, copies=3, tp=2, domain=2))
    streams = plan.streams
    kept = {
        (streams.carrier[i], streams.start[i], streams.stop[i], streams.lag[i])
        for i in np.nonzero(streams.held & KEEPS)[0]
    }
    sent = {
        (streams.sender[i], streams.start[i], streams.stop[i], streams.lag[i] - 2)
        for i in np.nonzero(streams.held & SENDS_HELD)[0]
    }
    assert sent == kept
    assert np.any(streams.held & GATHERS)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 4),
    st.sampled_from(["shard(0)", "shard(1)", "replicate"]), st.sampled_from([1 << 14, 1 << 26]),
)  # fmt: skip
def test_broadcast_equals_reshard_bit_for_bit_on_random_layouts(
    tmp_path_factory, shapes, source, copies, tp, domain, text, staging
):
    jobs = jobs_of(tmp_path_factory.mktemp("jobs"), shapes, source, copies, tp, domain, text)
    torch.manual_seed(0)
    values = {f"layers.{i}.w": torch.randn(shape) for i, shape in enumerate(shapes)}
    found = [refit_in_process(jobs, values, staging=staging, mode=mode) for mode in ("reshard", "broadcast")]
    for one, other in zip(found[0].storages, found[1].storages, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    traffic = traffic_of(found[1].plan)
    assert found[1].moved == traffic.network_bytes + traffic.domain_bytes
    assert found[1].peak_staging_bytes <= staging
