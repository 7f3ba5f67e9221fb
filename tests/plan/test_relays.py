"""Relays: where the source's NICs are the bottleneck, a byte leaves the source once, and everything is still exact."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_cli.plan.build import build_plan
from reshard_cli.plan.cost import predict, traffic_of
from reshard_cli.plan.schedule import count_messages, rank_schedule, transfers
from reshard_cli.spec.hardware_profile import read_hardware
from tests.support import make_jobs, model_document, refit_in_process, run_cli


def jobs_of(folder, shapes, source, copies, tp, domain, source_text="shard(0)", text="shard(0)"):
    """Return a small source job, and a destination of `copies` replicas of tp ranks."""
    model = model_document({f"layers.{i}.w": (shape, "float32") for i, shape in enumerate(shapes)})
    one = {"ranks": source, "domain": domain, "meshes": {"m": {"r": source}},
           "tensors": [{"match": "*", "place": {"r": source_text}}]}  # fmt: skip
    other = {"ranks": copies * tp, "domain": domain, "meshes": {"m": {"dp": copies, "tp": tp}},
             "tensors": [{"match": "*", "place": {"tp": text}}]}  # fmt: skip
    return make_jobs(folder, model, one, other)


def plan_of(jobs, mode="reshard"):
    return build_plan(jobs.source, jobs.destination, jobs.topology(None, False), mode, staging=64 << 20)


def test_one_node_feeds_three_and_sends_every_byte_once(tmp_path):
    shapes = [(1024, 1024)] * 16
    jobs = jobs_of(tmp_path, shapes, source=2, copies=3, tp=2, domain=2)
    plan = plan_of(jobs)
    traffic = traffic_of(plan)
    size = 16 * 4 << 20
    assert traffic.network_bytes == plan.entries.needed_bytes == 3 * size
    assert traffic.send_network[:2].tolist() == [size / 2, size / 2]
    assert traffic.receive_network[2:].tolist() == [size / 2] * 6
    assert traffic.send_network.max() == size / 2  # no relay sends more than it takes
    assert plan.num_rounds == plan.cut_rounds + 4
    hardware = read_hardware("dgx-h100", 8)
    bound = size / 2 / hardware.nic_achieved
    assert bound <= predict(plan, traffic, hardware, "reshard").parts["NIC, sending"] <= 1.001 * bound


def test_the_plan_says_so(tmp_path):
    jobs = jobs_of(tmp_path, [(1024, 1024)] * 16, source=2, copies=3, tp=2, domain=2)
    files = (tmp_path / "source.yaml", tmp_path / "destination.yaml", "--model", tmp_path / "model.yaml")
    report = json.loads(run_cli("plan", *files, "--json", "-").stdout)
    assert report["relays"] == {"network_bytes": 2 * 16 * 4 << 20, "rounds_behind": 4}
    assert report["rounds"] == plan_of(jobs).num_rounds
    assert "from one destination domain to the next" in run_cli("plan", *files).stdout


def test_a_source_that_can_feed_two_chains_does(tmp_path):
    jobs = jobs_of(tmp_path, [(1024, 1024)] * 8, source=4, copies=4, tp=2, domain=2)
    plan = plan_of(jobs)
    traffic = traffic_of(plan)
    size = 8 * 4 << 20
    # four domains want all of it, and two nodes have two NICs each: two chains of two domains
    assert traffic.send_network[:4].sum() == 2 * size
    assert traffic.send_network.max() <= traffic.receive_network.max() == size / 2
    assert plan.num_rounds == plan.cut_rounds + 2


@pytest.mark.parametrize(("source", "copies"), [(8, 2), (4, 1)])
def test_where_the_source_is_no_bottleneck_there_are_none(tmp_path, source, copies):
    plan = plan_of(jobs_of(tmp_path, [(1024, 1024)] * 4, source=source, copies=copies, tp=4, domain=4))
    assert plan.streams.longest_lag == 0
    assert plan.num_rounds == plan.cut_rounds


@st.composite
def cases(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=5))
    texts = st.sampled_from(["shard(0)", "shard(1)", "replicate"])
    return (
        shapes, draw(st.integers(1, 3)), draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 3])),
        draw(st.integers(1, 3)), draw(texts), draw(texts), draw(st.sampled_from([1 << 14, 1 << 26])),
    )  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_relayed_refits_are_exact_on_random_layouts(tmp_path_factory, case):
    shapes, source, copies, tp, domain, source_text, text, staging = case
    jobs = jobs_of(tmp_path_factory.mktemp("jobs"), shapes, source, copies, tp, domain, source_text, text)
    torch.manual_seed(0)
    values = {f"layers.{i}.w": torch.randn(shape) for i, shape in enumerate(shapes)}
    result = refit_in_process(jobs, values, staging=staging)
    plan, traffic = result.plan, traffic_of(result.plan)
    assert traffic.network_bytes == plan.entries.needed_bytes
    assert result.moved == traffic.network_bytes + traffic.domain_bytes
    assert result.peak_staging_bytes <= staging
    for held, specifications in zip(result.storages, result.specifications, strict=True):
        for one in specifications:
            for window in one.windows:
                sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
                view = torch.as_strided(held[one.name], sizes, window.strides, window.offset)
                box = tuple(slice(a, b) for a, b in zip(window.lo, window.hi, strict=True))
                assert torch.equal(view, values[window.tensor][box])
    received = np.zeros(plan.topology.num_ranks, np.int64)
    messages = 0
    for rank in range(plan.topology.num_ranks):
        for blocks in rank_schedule(plan, rank).rounds:
            for phase in (0, 1):
                for one in transfers(blocks, rank, phase=phase):
                    if one.target == rank and phase == 0:
                        received[rank] += one.num_bytes
                    messages += one.origin == rank
    assert received.tolist() == traffic.receive_network.tolist()
    assert count_messages(plan) == messages
