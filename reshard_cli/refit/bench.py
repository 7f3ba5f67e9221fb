"""Measures refits: all modes on the same layouts, interleaved, warmed up, beside a bare exchange on the same wires.

Weights are synthetic and lie in memory on both sides, as with live ranks. Every repeat starts together on all
ranks; what counts is the slowest rank. Modes take turns repeat by repeat, so that drift hits all alike.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reshard_cli.errors import VerifyError
from reshard_cli.plan.bound import DomainBound, domain_bound
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.entries import NETWORK
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.agreement import agree
from reshard_cli.refit.clock import Clock
from reshard_cli.refit.endpoints import Destination, open_source
from reshard_cli.refit.environment import describe_environment
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.joining import join
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.refit.ranked import run_ranked
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.refit.verify import verify_rank, wire_dtypes
from reshard_cli.transport.control import Control
from reshard_cli.transport.counters import network_counters
from reshard_cli.transport.exchange import open_transport
from reshard_cli.transport.launcher import World
from reshard_cli.transport.message import Message, Transport
from reshard_cli.weights.memory import held_in_memory
from reshard_cli.weights.quantise import QuantisingSource, made_of
from reshard_cli.weights.synthetic import SyntheticSource

__all__ = ["BenchOptions", "BenchResult", "ModeResult", "run_bench_rank"]

_PROBES = 5
_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: modes in turn, so many refits of each; the first `warmup` of them do not count."""

    modes: tuple[Mode, ...]
    warmup: int = 2
    repeats: int = 7
    probe_bytes: int = 32 << 20


@dataclass(slots=True)
class ModeResult:
    """What was measured of one mode: seconds and interface bytes (None without a NIC) of every repeat."""

    mode: Mode
    digest: str
    network_bytes: int
    busiest_bytes: int
    rounds: int
    seconds: list[float] = field(default_factory=list)
    measured: list[int | None] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    verified: int | None = None


@dataclass(slots=True)
class BenchResult:
    """All that rank 0 knows: results by mode, the bare exchange's rate by domain, the network's bound."""

    results: list[ModeResult]
    probe_rates: list[float]
    bound: DomainBound
    model_bytes: int
    world: dict[str, Any]
    backend: str
    warmup: int
    environment: dict[str, Any]
    layouts: dict[str, str]


def run_bench_rank(
    world: World,
    options: RefitOptions,
    bench: BenchOptions,
    read: Callable[[], Jobs],
    *,
    on_result: Callable[[BenchResult], None],
    progress: Callable[[str], None] = lambda _: None,
    debug: bool = False,
) -> int:
    """Run this process's part of the bench; return its exit code. `on_result` is called on rank 0."""

    def body(
        control: Control, undo: list[Callable[[], None]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        jobs, setup, topology = join(control, world, options, read)
        rank = _BenchRank(control, jobs, topology, options, bench, setup, undo)
        result = rank.run(progress)
        return rank.close, lambda: None if result is None else on_result(result)

    return run_ranked(world, options.timeout, body, debug=debug)


class _BenchRank:
    def __init__(
        self, control: Control, jobs: Jobs, topology: Topology, options: RefitOptions, bench: BenchOptions,
        setup: dict[str, Any], undo: list[Callable[[], None]],
    ) -> None:  # fmt: skip
        self.undo = undo
        self.control, self.jobs, self.topology = control, jobs, topology
        self.options, self.bench, self.setup = options, bench, setup
        self.device = torch.device("cpu")
        if setup["backend"] == "nccl":
            self.device = torch.device("cuda", setup["local_rank"])
            torch.cuda.set_device(self.device)
        self.plans: dict[Mode, Plan] = {}
        for mode in bench.modes:
            self.plans[mode] = build_plan(
                jobs.source, jobs.destination, topology, mode,
                staging=options.staging, allow_extra=options.allow_extra, known=self.plans.values(),
            )  # fmt: skip
        self.destination: Destination | None = None
        self.transport: Transport | None = None
        self._byte = torch.zeros(max(1, control.num_ranks), dtype=torch.uint8, device=self.device)

    def run(self, progress: Callable[[str], None]) -> BenchResult | None:
        executors = self._executors()
        control = self.control
        control.phase("connecting")
        self.transport = open_transport(
            self.setup["backend"], control.store, control.rank, control.num_ranks, self.options.timeout,
            domains=self.topology.domain.tolist(), check=control.check,
        )  # fmt: skip
        self.undo.append(self.transport.abort)
        control.barrier("connected", "connecting")
        results = [
            ModeResult(mode, plan.digest, plan.network_bytes, _busiest(plan), plan.num_rounds)
            for mode, plan in self.plans.items()
        ]
        for result in results:
            for _ in range(self.bench.warmup):
                progress(f"warming up {result.mode}")
                self._poison()
                self._measured(executors[result.mode], result.mode, "warm-up", None)
            if self.options.verify:
                result.verified = self._verified(executors[result.mode], result)
        rates = [self._probe() for _ in range(_PROBES)]
        for repeat in range(self.bench.repeats):
            # every mode comes first, second, … equally often
            turn = repeat % len(results)
            for result in results[turn:] + results[:turn]:
                progress(f"repeat {repeat + 1} of {self.bench.repeats}: {result.mode}")
                self._measured(executors[result.mode], result.mode, f"{repeat}", result)
        if control.rank != 0:
            return None
        plan = next(iter(self.plans.values()))
        return BenchResult(
            results=results, probe_rates=[rate for rate in rates if rate is not None],
            bound=domain_bound(plan), model_bytes=self.jobs.destination.model.num_bytes,
            world={
                "ranks": control.num_ranks, "hosts": self.setup["hosts"],
                "source": {"name": plan.source.name, "ranks": plan.source.num_ranks},
                "destination": {"name": plan.destination.name, "ranks": plan.destination.num_ranks},
            },
            backend=self.setup["backend"], warmup=self.bench.warmup,
            environment=describe_environment(self.setup["backend"]),
            layouts={"source": plan.source.digest, "destination": plan.destination.digest},
        )  # fmt: skip

    def _executors(self) -> dict[Mode, RankExecutor]:
        """Return an executor for each mode, on the same storages and the same arenas."""
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
            agree(control, one, schedule, self.options, key=mode)
            executors[mode] = RankExecutor(one, schedule, held, windows, self.device)
        sizes = [max(one) for one in zip(*(one.arena_bytes for one in executors.values()), strict=True)]
        arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        for executor in executors.values():
            executor.lend(arenas)
        return executors

    def _poison(self) -> None:
        if self.destination is not None:
            for storage in self.destination.storages:
                if not storage.has_padding:
                    self.destination.buffers[storage.name].fill_(_POISON)

    def _together(self) -> None:
        """Wait until all ranks are here, by messages: the store's answer takes milliseconds."""
        assert self.transport is not None
        ranks = [rank for rank in range(self.control.num_ranks) if rank != 0]
        mine = self._byte[self.control.rank : self.control.rank + 1]
        if self.control.rank == 0:
            parts = [Message(rank, self._byte[rank : rank + 1]) for rank in ranks]
            self.transport.start([], parts).wait()
            self.transport.start(parts, []).wait()
        else:
            self.transport.start([Message(0, mine)], []).wait()
            self.transport.start([], [Message(0, mine)]).wait()

    def _measured(self, executor: RankExecutor, mode: Mode, key: str, result: ModeResult | None) -> None:
        """Run one refit on all ranks; add what it took to the result (on rank 0)."""
        assert self.transport is not None
        clock = Clock(self.control)
        self.control.phase(f"{mode}, {key}")
        counted = network_counters()
        self._together()
        began = time.perf_counter()
        run_rounds(executor, self.transport, clock.phase)
        if self.destination is not None and self.destination.landing is not None:
            with clock.phase("cast"):
                self.destination.cast()
        seconds = time.perf_counter() - began
        self._together()
        after = network_counters()
        sent = sum(after[name][0] - counted[name][0] for name in after if name in counted)
        own = {
            "seconds": seconds, "phases": dict(clock.seconds), "host": socket.gethostname(),
            "sent": sent if after else None,
        }  # fmt: skip
        everybody = self.control.gather(f"bench/{mode}/{key}", own, "measuring")
        if everybody is None or result is None:
            return
        result.seconds.append(max(one["seconds"] for one in everybody))
        hosts = {one["host"]: one["sent"] for one in everybody}
        known = [one for one in hosts.values() if one is not None]
        result.measured.append(sum(known) if len(hosts) > 1 and len(known) == len(hosts) else None)
        names = {name for one in everybody for name in one["phases"]}
        result.phases.append(
            {name: max(one["phases"].get(name, 0.0) for one in everybody) for name in sorted(names)}
        )

    def _verified(self, executor: RankExecutor, result: ModeResult) -> int | None:
        """Compare every element that the last refit brought; return their number on rank 0."""
        compared = 0
        if self.destination is not None:
            self.control.phase("verifying")
            plan = self.plans[result.mode]
            truth, _ = open_source(
                "synthetic", plan, [], 1, allow_extra=self.options.allow_extra, casts=("sender", "receiver")
            )
            try:
                compared = verify_rank(
                    self.control.rank, self.destination.storages, self.destination.buffers, truth,
                    wire_dtypes(plan),
                )  # fmt: skip
            except VerifyError as error:
                raise VerifyError(f"mode {result.mode}: {error}") from error
        everybody = self.control.gather(f"verified/{result.mode}", compared, "verifying")
        return None if everybody is None else sum(everybody)

    def _probe(self) -> float | None:
        """Send bytes from source ranks to as many destination ranks; return the best domain's rate on rank 0.

        Bytes per second of one domain: what its NICs together take of a bare exchange. (A sender is done when
        its last bytes are in buffers, a receiver when they are there.)
        """
        assert self.transport is not None
        topology, rank = self.topology, self.control.rank
        pairs = [
            (int(one), int(other))
            for one, other in zip(topology.source, topology.destination, strict=False)
            if topology.domain[one] != topology.domain[other]
        ]
        data = torch.zeros(self.bench.probe_bytes, dtype=torch.uint8, device=self.device)
        self.control.phase("probing the network")
        self._together()
        began = time.perf_counter()
        sends = [Message(other, data) for one, other in pairs if one == rank]
        receives = [Message(one, data) for one, other in pairs if other == rank]
        self.transport.start(sends, receives).wait()
        seconds = time.perf_counter() - began
        self._together()
        everybody = self.control.gather("probe", [seconds, len(receives)], "probing the network")
        if everybody is None or not pairs:
            return None
        domains = topology.domain[: self.control.num_ranks]
        rates = []
        for domain in np.unique(domains):
            mine = [everybody[one] for one in np.nonzero(domains == domain)[0].tolist() if everybody[one][1]]
            if mine:
                rates.append(len(mine) * self.bench.probe_bytes / max(one[0] for one in mine))
        return float(max(rates))

    def close(self) -> None:
        """Close the connections; everybody has passed the last barrier."""
        if self.transport is not None:
            self.transport.close()


def _busiest(plan: Plan) -> int:
    """Return the network bytes of the busiest rank and direction."""
    streams = plan.streams
    crossing = streams.kind == NETWORK
    size = streams.num_bytes[crossing]
    loads = [
        np.bincount(one[crossing], size, minlength=plan.topology.num_ranks)
        for one in (streams.sender, streams.carrier)
    ]
    return int(max(load.max(initial=0) for load in loads))
