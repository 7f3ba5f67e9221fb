"""One rank's side of a measurement: the plans of some modes over one pair of layouts, and refits of them on a clock.

All modes share the same storages and staging, so that they differ in nothing but the plan. Weights are synthetic
and lie in memory on both sides.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reshard_cli.errors import VerifyError
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.entries import NETWORK
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.agreement import agree
from reshard_cli.refit.bench_result import Measured
from reshard_cli.refit.clock import Clock
from reshard_cli.refit.endpoints import Destination, open_source
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.refit.verify import verify_rank, wire_dtypes
from reshard_cli.transport.control import Control
from reshard_cli.transport.counters import network_counters
from reshard_cli.transport.message import Message, Transport
from reshard_cli.weights.memory import held_in_memory
from reshard_cli.weights.quantise import QuantisingSource, made_of
from reshard_cli.weights.synthetic import SyntheticSource

__all__ = ["BenchSide", "Together", "busiest_bytes"]

_POISON = 0xA5


class Together:
    """Makes all ranks wait for each other by messages, which the store's answers are too slow for."""

    def __init__(self, control: Control, transport: Transport, device: torch.device) -> None:
        self.control, self.transport = control, transport
        self._byte = torch.zeros(max(1, control.num_ranks), dtype=torch.uint8, device=device)

    def wait(self) -> None:
        """Return when every rank has called this."""
        ranks = [rank for rank in range(self.control.num_ranks) if rank != 0]
        mine = self._byte[self.control.rank : self.control.rank + 1]
        if self.control.rank == 0:
            parts = [Message(rank, self._byte[rank : rank + 1]) for rank in ranks]
            self.transport.start([], parts).wait()
            self.transport.start(parts, []).wait()
        else:
            self.transport.start([Message(0, mine)], []).wait()
            self.transport.start([], [Message(0, mine)]).wait()


class BenchSide:
    """Plans, storages and executors of one rank. `key` tells one side's exchanges from another's in one world."""

    def __init__(
        self, control: Control, jobs: Jobs, topology: Topology, options: RefitOptions, modes: Sequence[Mode],
        device: torch.device, key: str = "",
    ) -> None:  # fmt: skip
        self.control, self.jobs, self.topology, self.options = control, jobs, topology, options
        self.device, self.key = device, key
        self.plans: dict[Mode, Plan] = {}
        for mode in modes:  # each by itself, so that its digest is that of `plan` and `refit`
            self.plans[mode] = build_plan(
                jobs.source, jobs.destination, topology, mode,
                staging=options.staging, allow_extra=options.allow_extra,
            )  # fmt: skip
        self.destination: Destination | None = None
        self.executors: Mapping[Mode, RankExecutor] = {}

    def prepare(self) -> None:
        """Make the weights and an executor for each mode, on the same storages and the same arenas."""
        control, plan = self.control, next(iter(self.plans.values()))
        source, destination = self.topology.source.tolist(), self.topology.destination.tolist()
        held: Any = None
        if control.rank in source:
            control.phase("making the source")
            own = [pair for pair in plan.pairs if not (pair.quantised and pair.scale_of)]
            origin = SyntheticSource({pair.name: (pair.shape, pair.source_dtype) for pair in own})
            held = held_in_memory(plan.source, source.index(control.rank), origin, self.device)
            made = made_of(plan.pairs, at=["sender"])
            held = QuantisingSource(held, made) if made else held
        if control.rank in destination:
            job = destination.index(control.rank)
            self.destination = Destination.create(plan, job, None, 1, self.device)
        windows = None if self.destination is None else self.destination.windows
        executors = {}
        for mode, one in self.plans.items():
            control.phase("scheduling")
            schedule = rank_schedule(one, control.rank)
            agree(control, one, schedule, self.options, key=f"{self.key}{mode}")
            executors[mode] = RankExecutor(one, schedule, held, windows, self.device)
        sizes = [max(one) for one in zip(*(one.arena_bytes for one in executors.values()), strict=True)]
        arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        for executor in executors.values():
            executor.lend(arenas)
        self.executors = executors

    def poison(self) -> None:
        """Overwrite what the last refit brought, where padding does not have to stay zero."""
        if self.destination is not None:
            for storage in self.destination.storages:
                if not storage.has_padding:
                    self.destination.buffers[storage.name].fill_(_POISON)

    def measure(self, mode: Mode, what: str, together: Together, refits: int = 1) -> Measured | None:
        """Run so many refits back to back on all ranks; return on rank 0 what one of them took on average."""
        clock = Clock(self.control)
        self.control.phase(f"{self.key}{mode}, {what}")
        counted = network_counters()
        together.wait()
        began = time.perf_counter()
        for _ in range(refits):
            run_rounds(self.executors[mode], together.transport, clock.phase)
            if self.destination is not None and self.destination.landing is not None:
                with clock.phase("cast"):
                    self.destination.cast()
        seconds = time.perf_counter() - began
        together.wait()
        after = network_counters()
        sent = sum(after[name][0] - counted[name][0] for name in after if name in counted)
        own = {
            "seconds": seconds, "phases": dict(clock.seconds), "host": socket.gethostname(),
            "sent": sent if after else None,
        }  # fmt: skip
        everybody = self.control.gather(f"bench/{self.key}{mode}/{what}", own, "measuring")
        if everybody is None:
            return None
        hosts = {one["host"]: one["sent"] for one in everybody}
        known = [one for one in hosts.values() if one is not None]
        names = sorted({name for one in everybody for name in one["phases"]})
        return Measured(
            max(one["seconds"] for one in everybody) / refits,
            {name: max(one["phases"].get(name, 0.0) for one in everybody) / refits for name in names},
            round(sum(known) / refits) if len(hosts) > 1 and len(known) == len(hosts) else None,
        )

    def verified(self, mode: Mode) -> int | None:
        """Compare every element that the last refit, of this mode, brought; return their number on rank 0.

        Raises VerifyError naming the first that is wrong.
        """
        compared = 0
        if self.destination is not None:
            self.control.phase("verifying")
            plan = self.plans[mode]
            truth, _ = open_source(
                "synthetic", plan, [], 1, allow_extra=self.options.allow_extra, casts=("sender", "receiver")
            )
            try:
                compared = verify_rank(
                    self.control.rank, self.destination.storages, self.destination.buffers, truth,
                    wire_dtypes(plan),
                )  # fmt: skip
            except VerifyError as error:
                raise VerifyError(f"mode {mode}: {error}") from error
        everybody = self.control.gather(f"verified/{self.key}{mode}", compared, "verifying")
        return None if everybody is None else sum(everybody)


def busiest_bytes(plan: Plan) -> int:
    """Return the network bytes of the busiest rank and direction."""
    streams = plan.streams
    crossing = streams.kind == NETWORK
    size = streams.num_bytes[crossing]
    loads = [
        np.bincount(one[crossing], size, minlength=plan.topology.num_ranks)
        for one in (streams.sender, streams.carrier)
    ]
    return int(max(load.max(initial=0) for load in loads))
