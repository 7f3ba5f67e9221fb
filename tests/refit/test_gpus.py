"""Rounds on GPUs that work on their own time: exact in any order that streams allow, grouped alike, no deadlock."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch

from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.routes import MODES
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.refit.endpoints import Destination
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.transport.message import Message
from tests.plan.test_random_pairs import all_right, draw_topology, jobs_of
from tests.random_layouts import draw_pair, draw_values
from tests.refit.gpus import Deadlock, GpuExecutor, Gpus, GpuStreams, GpuTransport
from tests.support import storages_of

CPU = torch.device("cpu")


def refit(random: Random, *, one_at_a_time=False, marks_hold=True, staging=None):
    """Refit a random pair on simulated GPUs; return (groups launched, rounds, whether all is right)."""
    pair = draw_pair(random, max_ranks=3)
    jobs = jobs_of(pair)
    topology = draw_topology(random, jobs)
    values = draw_values(random, pair)
    size = staging or random.choice([1000, 3000, 1 << 20])
    try:
        plan = build_plan(jobs.source, jobs.destination, topology, random.choice(MODES), staging=size)
    except DocumentError:
        return 0, 0, True  # too little staging for the streams
    source, destination = topology.source.tolist(), topology.destination.tolist()
    gpus = Gpus(topology.domain.tolist(), random, one_at_a_time, marks_hold)
    programs, filled = {}, {}
    for rank in range(topology.num_ranks):
        held = storages_of(jobs, source.index(rank), values) if rank in source else None
        windows = None
        if rank in destination:
            filled[rank] = Destination.create(plan, destination.index(rank), None, 1, CPU)
            for storage in filled[rank].storages:
                if not storage.has_padding:
                    filled[rank].buffers[storage.name].fill_(0xA5)
            windows = filled[rank].windows
        executor = GpuExecutor(RankExecutor(plan, rank_schedule(plan, rank), held, windows, CPU), gpus)
        transport = GpuTransport(gpus, rank, executor.streams)
        programs[rank] = lambda executor=executor, transport=transport: run_rounds(
            executor, transport, lambda *_: contextlib.nullcontext()
        )
    gpus.run(programs)
    return gpus.num_groups, plan.num_rounds, all_right(pair, filled, destination, values)


@pytest.mark.parametrize("one_at_a_time", [False, True], ids=["any order", "one group at a time"])
def test_random_plans_are_exact_and_their_groups_match_on_gpus_that_work_on_their_own_time(one_at_a_time):
    groups = rounds = 0
    for seed in range(150):
        found = refit(Random(seed), one_at_a_time=one_at_a_time)
        assert found[2], seed
        groups, rounds = groups + found[0], max(rounds, found[1])
    assert groups > 500
    assert rounds > 4


def test_without_its_marks_a_refit_would_go_wrong():
    assert not all(refit(Random(seed), marks_hold=False, staging=1000)[2] for seed in range(60))


def exchange(programs):
    """Run two ranks of one domain each; a program is a list of (sends, receives) sizes to the other rank."""
    gpus = Gpus([0, 1], Random(1))

    def body(rank):
        transport = GpuTransport(gpus, rank, GpuStreams(gpus))
        for sends, receives in programs[rank]:
            data = [
                [Message(1 - rank, torch.zeros(n, dtype=torch.uint8)) for n in part]
                for part in (sends, receives)
            ]
            transport.start(*data).wait()

    gpus.run({rank: lambda rank=rank: body(rank) for rank in (0, 1)})


def test_the_simulated_communicator_refuses_what_nccl_would_hang_on_or_mix_up():
    exchange([[([4], [5]), ([6], [])], [([5], [4]), ([], [6])]])
    for wrong in (
        [[([4], []), ([5], [])], [([], [4, 5])]],  # grouped differently
        [[([4, 5], [])], [([], [5, 4])]],  # another order
        [[([4], [])], [([], [5])]],  # another size
        [[([4], []), ([], [4])], [([5], []), ([], [4])]],  # both send first
    ):
        with pytest.raises(AssertionError):
            exchange(wrong)
    with pytest.raises(Deadlock):
        exchange([[([4], [])], []])
