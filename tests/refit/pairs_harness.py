"""Runs many random pairs between real gloo processes in one world: `python -m tests.refit.pairs_harness`.

Arguments: FIRST and LAST seed. Every rank draws the same pairs; the ranks that a pair needs exchange it over
their gloo group, and each destination rank compares its storages with tensors cut by hand.
"""

from __future__ import annotations

import contextlib
import sys
from random import Random

import torch

from reshard_cli.plan.build import build_plan
from reshard_cli.plan.routes import MODES
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.refit.endpoints import Destination
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import GlooTransport
from reshard_cli.transport.launcher import World, launch
from reshard_cli.transport.store import connect_store
from tests.plan.test_random_pairs import draw_topology, jobs_of, same
from tests.random_layouts import draw_pair, draw_values, expected_storages
from tests.support import WholeTensors, storages_of

WORLD = 6


def run(world: World, seeds: range) -> int:
    torch.set_num_threads(1)
    store = connect_store(world.host, world.port, 60)
    control = Control(store, world.rank, WORLD, 60)
    transport = GlooTransport(store, world.rank, WORLD, 60)
    elements = 0
    for seed in seeds:
        elements += run_pair(transport, world.rank, Random(seed))
        control.barrier(f"pair/{seed}", f"seed {seed}")
    totals = control.gather("elements", elements, "ending")
    if totals is not None:
        print(f"pairs {len(seeds)} elements {sum(totals)}")
    control.barrier("end", "ending")
    transport.close()
    return 0


def run_pair(transport: GlooTransport, rank: int, random: Random) -> int:
    """Run one pair on this rank; return the elements compared. Raises AssertionError where one differs."""
    pair = draw_pair(random, max_ranks=3)
    jobs = jobs_of(pair)
    topology = draw_topology(random, jobs)
    values = draw_values(random, pair)
    mode = random.choice(MODES)
    stored = random.random() < 0.5
    staging = random.choice([4000, 1 << 20])
    if rank >= topology.num_ranks:
        return 0
    plan = build_plan(jobs.source, jobs.destination, topology, mode, staging=staging)
    source_rank = topology.source.tolist().index(rank) if rank in topology.source else None
    job_rank = topology.destination.tolist().index(rank) if rank in topology.destination else None
    source = None
    if source_rank is not None:
        source = storages_of(jobs, source_rank, values) if stored else WholeTensors(values)
    cpu = torch.device("cpu")
    destination = None if job_rank is None else Destination.create(plan, job_rank, None, 1, cpu)
    if destination is not None:
        for storage in destination.storages:
            if not storage.has_padding:
                destination.buffers[storage.name].fill_(0xA5)
    windows = None if destination is None else destination.windows
    executor = RankExecutor(plan, rank_schedule(plan, rank), source, windows, cpu)
    run_rounds(executor, transport, lambda *_: contextlib.nullcontext())
    if destination is None or job_rank is None:
        return 0
    compared = 0
    expected = expected_storages(pair, pair.destination, job_rank, values)
    for storage in destination.storages:
        if storage.num_elements:
            mine = destination.buffers[storage.name].view(getattr(torch, storage.dtype)).view(storage.shape)
            assert same(mine, expected[storage.name]), storage.name
            compared += mine.numel()
    return compared


if __name__ == "__main__":
    chosen = range(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(launch(WORLD, 60, lambda world: run(world, chosen)))
