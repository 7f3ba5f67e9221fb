"""Rounds that overlap as they do between processes: no message is overwritten, however early or late it moves."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from reshard_cli.plan.entries import DOMAIN, NETWORK
from tests import support
from tests.plan.test_relays import jobs_of
from tests.support import refit_in_process


def overlapped(executors, *, early):
    """Run the rounds as `run_rounds` does: the next one is packed and started before this one is waited for.

    early: a message moves when it is started, else when it is waited for.
    """
    moved = 0

    def messages(number, phase):
        ends = defaultdict(lambda: ([], []))
        for rank, executor in executors.items():
            for one in executor.sends(number, phase):
                ends[rank, one.peer][0].append(one.data)
            for one in executor.receives(number, phase):
                ends[one.peer, rank][1].append(one.data)
        return [pair for out, into in ends.values() for pair in zip(out, into, strict=True)]

    def move(pairs):
        nonlocal moved
        for out, into in pairs:
            into.copy_(out)
            moved += out.numel()

    def start(number):
        for executor in executors.values():
            executor.pack(number)
        pairs = messages(number, NETWORK)
        if early:
            move(pairs)
        return pairs

    count = max(one.num_rounds for one in executors.values())
    network = start(0)
    for number in range(count):
        following = start(number + 1) if number + 1 < count else []
        if not early:
            move(network)
        move(messages(number, DOMAIN))
        for executor in executors.values():
            executor.finish(number)
        network = following
    return moved


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("mode", ["broadcast", "reshard"])
@pytest.mark.parametrize("colocated", [True, False])
def test_a_refit_is_exact_when_rounds_overlap(tmp_path, monkeypatch, early, mode, colocated):
    shapes = [(900, 300), (64, 1024), (700, 512)]
    jobs = jobs_of(tmp_path, shapes, source=4, copies=3, tp=2, domain=2)
    monkeypatch.setattr(support, "run_in_process", lambda executors: overlapped(executors, early=early))
    torch.manual_seed(0)
    values = {f"layers.{i}.w": torch.randn(shape) for i, shape in enumerate(shapes)}
    result = refit_in_process(
        jobs, values, mode=mode, staging=1 << 18, topology=jobs.topology(2, colocated), colocated=colocated
    )
    assert result.plan.cut_rounds > 8
    for rank, storages in enumerate(result.storages):
        for name, tensor in storages.items():
            assert torch.equal(tensor, values[name].chunk(2)[rank % 2]), (rank, name)
