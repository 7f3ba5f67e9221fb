"""One rank's refit from start to end: join, plan, bind, agree, run the rounds, verify, commit.

Read `run_rank` from top to bottom. Every step is named to the control plane, so that a message about a
rank can say what it was doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reshard_cli.errors import VerifyError
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.plan.schedule import RankSchedule, rank_schedule
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.agreement import agree
from reshard_cli.refit.clock import Clock
from reshard_cli.refit.endpoints import Destination, check_target, open_source
from reshard_cli.refit.environment import describe_environment
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.joining import join
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.refit.ranked import run_ranked
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.refit.verify import verify_rank, wire_dtypes
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import open_transport
from reshard_cli.transport.launcher import World
from reshard_cli.transport.message import Transport
from reshard_cli.weights.rank_folder import PendingFolder
from reshard_cli.weights.windows import Source

__all__ = ["Iteration", "RefitReport", "run_rank"]

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Iteration:
    """One refit of a loop: its version, seconds by phase (of the slowest rank), bytes really sent."""

    version: int
    seconds: float
    phases: dict[str, float]
    network_bytes: int
    domain_bytes: int


@dataclass(slots=True)
class RefitReport:
    """What rank 0 knows at the end."""

    world: dict[str, Any]
    backend: str
    mode: str
    digest: str
    iterations: list[Iteration]
    verified: bool | None
    verified_elements: int
    peak_staging_bytes: int
    environment: dict[str, Any]
    casts: list[str]
    extra: list[str]


def run_rank(
    world: World,
    options: RefitOptions,
    read: Callable[[], Jobs],
    *,
    on_report: Callable[[RefitReport], None],
    progress: Progress | None = None,
    debug: bool = False,
    tamper: Callable[[RankSchedule], None] | None = None,
) -> int:
    """Run this process's part of the refit; return its exit code.

    `read` gives the two jobs' layouts; what is wrong with them is reported like any other failure, once.
    `on_report` is called on rank 0 at the end. One rank prints the message of a failure; all return its
    exit code. `tamper` is a seam for tests: it may change this rank's schedule before it is agreed on.
    """

    def body(
        control: Control, undo: list[Callable[[], None]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        jobs, setup, topology = join(control, world, options, read)
        plan = build_plan(
            jobs.source, jobs.destination, topology, options.mode,
            staging=options.staging, allow_extra=options.allow_extra,
        )  # fmt: skip
        folder = check_target(options.target, setup["token"])
        if folder is not None:
            undo.append(folder.discard)
        session = _Session(options, jobs, plan, topology, control, setup, folder, undo)
        report = session.run(progress, tamper)
        return session.close, lambda: None if report is None else on_report(report)

    return run_ranked(world, options.timeout, body, debug=debug)


class _Session:
    """One rank after the join: bound to its ends, agreed with its peers, running refits."""

    def __init__(
        self,
        options: RefitOptions,
        jobs: Jobs,
        plan: Plan,
        topology: Topology,
        control: Control,
        setup: dict[str, Any],
        folder: PendingFolder | None,
        undo: list[Callable[[], None]],
    ) -> None:
        self.undo = undo
        self.options, self.plan, self.control, self.setup, self.folder = options, plan, control, setup, folder
        self.jobs = jobs
        rank = control.rank
        source, destination = topology.source.tolist(), topology.destination.tolist()
        self.source_rank = source.index(rank) if rank in source else None
        self.destination_rank = destination.index(rank) if rank in destination else None
        self.device = torch.device("cpu")
        if setup["backend"] == "nccl":
            self.device = torch.device("cuda", setup["local_rank"])
            torch.cuda.set_device(self.device)
        self.transport: Transport | None = None
        self.sent = {NETWORK: 0, DOMAIN: 0}
        self.compared = 0
        self.extra = plan.extra
        self.peak = 0

    def run(
        self, progress: Progress | None, tamper: Callable[[RankSchedule], None] | None
    ) -> RefitReport | None:
        """Run all iterations; return the report on rank 0."""
        self.control.phase("scheduling")
        schedule = rank_schedule(self.plan, self.control.rank)
        if tamper is not None:
            tamper(schedule)
        self.control.phase("reading the source")
        self._check_source()
        agree(self.control, self.plan, schedule, self.options)
        self.control.phase("connecting")
        self.transport = open_transport(
            self.setup["backend"], self.control.store, self.control.rank, self.control.num_ranks,
            self.options.timeout, domains=self.plan.topology.domain.tolist(), check=self.control.check,
        )  # fmt: skip
        self.undo.append(self.transport.abort)
        self.control.barrier("connected", "connecting")
        iterations = []
        executor: RankExecutor | None = None
        destination: Destination | None = None
        for version in range(1, self.options.iterations + 1):
            clock = Clock(self.control)
            began = time.perf_counter()
            with clock.phase("bind"):
                if executor is None or self.folder is not None:
                    destination = self._destination(version)
                    lent = [] if executor is None else executor.arenas
                    executor = self._executor(schedule, destination, version)
                    executor.lend(lent)
                else:
                    if self.options.origin == "synthetic":
                        # another version's values, which are made when asked for: no view of them was kept
                        executor.source = self._source(version)
                    if destination is not None:
                        destination.zero_padding()
            self._rounds(executor, clock, progress)
            if destination is not None and destination.landing is not None:
                with clock.phase("cast"):
                    destination.cast()
            if self.options.verify and destination is not None:
                with clock.phase("verify"):
                    self._verify(destination, version)
            with clock.phase("commit"):
                self._commit(destination, version)
            seconds = time.perf_counter() - began
            self.peak = max(self.peak, executor.peak_staging_bytes)
            one = self._gathered(version, seconds, clock)
            if one is not None:
                iterations.append(one)
        return self._report(iterations)

    def _check_source(self) -> None:
        """Hold the source's headers against the documents on every rank that will read it."""
        if self.source_rank is None and not (self.options.verify and self.destination_rank is not None):
            return
        ranks = [] if self.source_rank is None else [self.source_rank]
        _, extra = open_source(self.options.origin, self.plan, ranks, 1, allow_extra=self.options.allow_extra)
        self.extra = sorted({*self.extra, *extra})

    def _destination(self, version: int) -> Destination | None:
        if self.destination_rank is None:
            return None
        return Destination.create(self.plan, self.destination_rank, self.folder, version, self.device)

    def _source(self, version: int) -> Source | None:
        if self.source_rank is None:
            return None
        source, _ = open_source(
            self.options.origin, self.plan, [self.source_rank], version, allow_extra=self.options.allow_extra
        )
        return source

    def _executor(
        self, schedule: RankSchedule, destination: Destination | None, version: int
    ) -> RankExecutor:
        windows = None if destination is None else destination.windows
        return RankExecutor(self.plan, schedule, self._source(version), windows, self.device)

    def _rounds(self, executor: RankExecutor, clock: Clock, progress: Progress | None) -> None:
        assert self.transport is not None

        def done(rounds: int) -> None:
            if progress is not None:
                progress(rounds, executor.num_rounds)
            if rounds % 16 == 0:
                self.control.check()

        self.sent = run_rounds(executor, self.transport, clock.phase, done)

    def _verify(self, destination: Destination, version: int) -> None:
        """Compare this rank's elements with the source, found by the layouts alone."""
        ranks = list(range(self.plan.source.num_ranks))
        truth, _ = open_source(
            self.options.origin, self.plan, ranks, version,
            allow_extra=self.options.allow_extra, casts=("sender", "receiver"),
        )  # fmt: skip
        wires = wire_dtypes(self.plan)
        try:
            self.compared += verify_rank(
                self.control.rank, destination.storages, destination.buffers, truth, wires
            )
        except VerifyError as error:
            raise VerifyError(
                f"{error} ({self.control.name_of(self.control.rank)}); nothing was committed"
            ) from error

    def _commit(self, destination: Destination | None, version: int) -> None:
        """Publish the version when every destination rank has all of it."""
        if destination is not None and destination.mapped is not None:
            destination.mapped.flush()
        self.control.barrier(f"complete/{version}", "committing")
        if self.folder is None:
            return
        if self.destination_rank == 0:
            self.folder.publish()
        self.control.barrier(f"published/{version}", "committing")

    def _gathered(self, version: int, seconds: float, clock: Clock) -> Iteration | None:
        own = {
            "seconds": seconds,
            "phases": dict(clock.seconds),
            "network": self.sent[NETWORK],
            "domain": self.sent[DOMAIN],
        }
        everybody = self.control.gather(f"iteration/{version}", own, "reporting")
        if everybody is None:
            return None
        phases: dict[str, float] = {}
        for one in everybody:
            for name, value in one["phases"].items():
                phases[name] = max(phases.get(name, 0.0), value)
        return Iteration(
            version,
            max(one["seconds"] for one in everybody),
            phases,
            sum(one["network"] for one in everybody),
            sum(one["domain"] for one in everybody),
        )

    def _report(self, iterations: list[Iteration]) -> RefitReport | None:
        everybody = self.control.gather("totals", [self.peak, self.compared], "reporting")
        if everybody is None:
            return None
        plan = self.plan
        casts = sorted(
            {
                f"{pair.source_dtype} -> {pair.destination_dtype}"
                for pair in plan.pairs
                if pair.source_dtype != pair.destination_dtype
            }
        )
        return RefitReport(
            world={
                "ranks": self.control.num_ranks,
                "source": {"name": plan.source.name, "ranks": plan.source.num_ranks},
                "destination": {"name": plan.destination.name, "ranks": plan.destination.num_ranks},
                "colocated": self.options.colocated,
                "hosts": self.setup["hosts"],
            },
            backend=self.setup["backend"],
            mode=plan.mode,
            digest=plan.digest,
            iterations=iterations,
            verified=True if self.options.verify else None,
            verified_elements=sum(one[1] for one in everybody),
            peak_staging_bytes=max(one[0] for one in everybody),
            environment=describe_environment(self.setup["backend"]),
            casts=casts,
            extra=self.extra,
        )

    def close(self) -> None:
        """Close the connections; everybody has passed the last barrier."""
        if self.transport is not None:
            self.transport.close()
