"""A refit, or a loop of them, in one world of ranks: join, plan, and run one version after the other.

Both jobs were started together; `refit/joined.py` is for jobs that were started each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.schedule import RankSchedule
from reshard_cli.refit.endpoints import check_target
from reshard_cli.refit.ends import (
    DestinationEnd,
    FolderEnd,
    LiveEnd,
    LiveSourceEnd,
    MemoryEnd,
    OriginEnd,
    SourceEnd,
)
from reshard_cli.refit.environment import describe_environment
from reshard_cli.refit.joining import join
from reshard_cli.refit.pair import Iteration, Pair, Progress
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.refit.ranked import run_ranked
from reshard_cli.refit.stopping import Stop
from reshard_cli.refit.turns import Turn, next_turn
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World
from reshard_cli.weights.live import LiveEndpoint
from reshard_cli.weights.watching import Watched

__all__ = [
    "Iteration",
    "RefitReport",
    "keep",
    "load_target",
    "open_destination",
    "open_source_end",
    "report_of",
    "run_rank",
]

_KEPT = 10_000  # refits in a report


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
    state_dict: str
    m2n: dict[str, int] | None


def run_rank(
    world: World,
    options: RefitOptions,
    read: Callable[[], Jobs],
    *,
    on_report: Callable[[RefitReport], None],
    on_refit: Callable[[Iteration], None] = lambda _: None,
    progress: Progress | None = None,
    debug: bool = False,
    tamper: Callable[[RankSchedule], None] | None = None,
) -> int:
    """Run this process's part of the refit; return its exit code.

    `read` gives the two jobs' layouts; what is wrong with them is reported like any other failure, once.
    `on_refit` is called on rank 0 after each refit, `on_report` at the end. One rank prints the message of a
    failure; all return its exit code. `tamper` is a seam for tests: it may change this rank's schedule before
    it is agreed on.
    """

    def body(
        control: Control, undo: list[Callable[[], None]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        jobs, setup, topology = join(control, world, options, read)
        plan = build_plan(
            jobs.source, jobs.destination, topology, options.mode,
            staging=options.staging, allow_extra=options.allow_extra, m2n=options.m2n,
        )  # fmt: skip
        loop = _Loop(options, plan, control, setup, undo)
        undo.append(loop.pair.abort)
        report = loop.run(on_refit, progress, tamper)
        return loop.pair.close, lambda: None if report is None else on_report(report)

    return run_ranked(world, options.timeout, body, debug=debug)


def open_source_end(
    options: RefitOptions, origin_of: Callable[[int], str]
) -> tuple[SourceEnd, LiveEndpoint | None]:
    """Return the end that `--from` names, and the live object behind it, if it is one."""
    if options.origin.startswith("live:"):
        live = LiveEndpoint.load(options.origin, "--from")
        return LiveSourceEnd(live.tensors, allow_extra=options.allow_extra), live
    return OriginEnd(origin_of, options.allow_extra, options.trust_checkpoint), None


def load_target(options: RefitOptions) -> LiveEndpoint | None:
    """Return the live object that `--to` names, if it names one. Raises DocumentError."""
    return LiveEndpoint.load(options.target, "--to") if options.target.startswith("live:") else None


def open_destination(
    options: RefitOptions, token: str, undo: list[Callable[[], None]], live: LiveEndpoint | None
) -> DestinationEnd:
    """Return the end that `--to` names; `live`: the object behind it, if it is one."""
    if live is not None:
        return LiveEnd(
            live.tensors, allow_extra=options.allow_extra, double_buffer=options.double_buffer,
            hooks=live.hooks,
        )  # fmt: skip
    folder = check_target(options.target, token)
    if folder is None:
        return MemoryEnd(double_buffer=options.double_buffer)
    undo.append(folder.discard)
    return FolderEnd(folder)


class _Loop:
    """One rank's refits in a world of both jobs."""

    def __init__(
        self, options: RefitOptions, plan: Plan, control: Control, setup: dict[str, Any],
        undo: list[Callable[[], None]],
    ) -> None:  # fmt: skip
        self.options, self.plan, self.control, self.setup = options, plan, control, setup
        self._turn = Turn(1)
        self._watched = None if options.watch is None else Watched(options.watch)
        self._trainer: LiveEndpoint | None = None
        self._engine: LiveEndpoint | None = None
        control.phase("opening the ends")
        rank, topology = control.rank, plan.topology
        source: SourceEnd | None = None
        truth: SourceEnd | None = None
        if not options.origin.startswith("live:"):
            truth = source = OriginEnd(self._origin, options.allow_extra, options.trust_checkpoint)
        elif rank in topology.source.tolist():
            source, self._trainer = open_source_end(options, self._origin)
        end: DestinationEnd | None = None
        if rank in topology.destination.tolist():
            self._engine = load_target(options)
            end = open_destination(options, setup["token"], undo, self._engine)
        self.pair = Pair(options, plan, control, setup, source, end, truth=truth)

    def _origin(self, version: int) -> str:
        return self._turn.origin or self.options.origin

    def run(
        self,
        on_refit: Callable[[Iteration], None],
        progress: Progress | None,
        tamper: Callable[[RankSchedule], None] | None,
    ) -> RefitReport | None:
        """Run the refits; return the report on rank 0."""
        iterations: list[Iteration] = []
        done = 0
        with Stop() as stop:
            while self._next(done, stop):
                if self._trainer is not None:
                    self.control.phase("the trainer's step")
                    self._trainer.step()
                if not done:
                    self.pair.open(self._turn.version, tamper)
                done += 1
                one = self.pair.refit(self._turn.version, progress)
                if one is not None:
                    keep(iterations, one)
                    on_refit(one)
                if self._engine is not None:
                    self.control.phase("the engine's step")
                    self._engine.step()
        for live in (self._trainer, self._engine):
            if live is not None:
                live.close()
        return self._report(iterations)

    def _next(self, done: int, stop: Stop) -> bool:
        """Say whether there is another refit, the same on all ranks; `self._turn` is what it is of."""
        if self.options.iterations == 1 and self._watched is None:
            return done == 0
        turn = next_turn(self.control, self.options, self._watched, done, stop)
        if turn is not None:
            self._turn = turn
        return turn is not None

    def _report(self, iterations: list[Iteration]) -> RefitReport | None:
        pair = self.pair
        everybody = self.control.gather("totals", [pair.peak, pair.compared, pair.extra], "reporting")
        if everybody is None:
            return None
        return report_of(
            pair, iterations, {"colocated": self.options.colocated, "hosts": self.setup["hosts"]},
            peak=max(one[0] for one in everybody), compared=sum(one[1] for one in everybody),
            extra=sorted({name for one in everybody for name in one[2]}),
        )  # fmt: skip


def report_of(
    pair: Pair,
    iterations: list[Iteration],
    world: dict[str, Any],
    *,
    peak: int,
    compared: int,
    extra: list[str],
) -> RefitReport:
    """Return the report of refits between two jobs. `world`: what there is to say of it beside the jobs."""
    plan, backend = pair.plan, pair.setup["backend"]
    jobs = {
        "ranks": plan.topology.num_ranks,
        "source": {"name": plan.source.name, "ranks": plan.source.num_ranks},
        "destination": {"name": plan.destination.name, "ranks": plan.destination.num_ranks},
    }
    return RefitReport(
        world=jobs | world, backend=backend, mode=plan.mode, digest=plan.digest, iterations=iterations,
        verified=True if pair.options.verify else None, verified_elements=compared, peak_staging_bytes=peak,
        environment=describe_environment(backend), casts=_casts_of(plan), extra=extra,
        state_dict=pair.state_dict, m2n=None if plan.m2n is None else plan.m2n.totals(plan.pairs),
    )  # fmt: skip


def keep(iterations: list[Iteration], one: Iteration) -> None:
    """Add a refit to those that are reported: of a loop without an end, the last ones."""
    iterations.append(one)
    if len(iterations) > _KEPT:
        del iterations[0]


def _casts_of(plan: Plan) -> list[str]:
    """Return the casts of a plan, as `float32 -> bfloat16`."""
    pairs = [(pair.source_dtype, pair.destination_dtype) for pair in plan.pairs]
    return sorted({f"{one} -> {other}" for one, other in pairs if one != other})
