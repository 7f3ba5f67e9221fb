"""The command line's loops of a job that joins another: a source that sends its versions, a destination that takes them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from reshard_cli.errors import ReshardError, TransferError
from reshard_cli.refit.documents import Described
from reshard_cli.refit.ends import DestinationEnd
from reshard_cli.refit.failing import wrapped
from reshard_cli.refit.joined import Membership, OwnProcess
from reshard_cli.refit.joined_destination import JoinedDestination
from reshard_cli.refit.joined_source import JoinedSource
from reshard_cli.refit.pair import Iteration, Pair
from reshard_cli.refit.prepare import RefitOptions
from reshard_cli.refit.session import (
    RefitReport,
    keep,
    load_target,
    open_destination,
    open_source_end,
    report_of,
)
from reshard_cli.refit.stopping import Stop
from reshard_cli.refit.turns import Turn, next_turn
from reshard_cli.transport.gate_client import StopAskedError
from reshard_cli.weights.watching import Watched

__all__ = ["JoinedRun", "RefitOfLoop", "run_joined"]

_WORLD = {"colocated": False, "joined": True}


@dataclass(frozen=True, slots=True)
class RefitOfLoop:
    """One refit as this job's first rank tells it: to which job, or from which, and whether it is there."""

    role: str
    job: str
    version: int
    committed: bool
    torn: bool
    seconds: float
    measured: Iteration | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """How to tell what happens: each refit, the end, and on standard error who comes and goes.

    `claim` says once, on one of the ranks that share a terminal, that this one is to tell of a failure.
    """

    on_refit: Callable[[RefitOfLoop], None]
    on_report: Callable[[RefitReport], None]
    on_note: Callable[[str], None]
    claim: Callable[[], bool]
    rejoin: bool = False


def run_joined(
    member: Membership,
    options: RefitOptions,
    source: Described,
    destination: Described,
    also: list[Described],
    run: JoinedRun,
    *,
    debug: bool = False,
) -> int:
    """Run this rank's loop; return its exit code. The first rank of the job that fails prints the message."""
    undo: list[Callable[[], None]] = []
    joined: JoinedSource | JoinedDestination | None = None
    try:
        with Stop() as stop:
            process = OwnProcess(lambda: stop.asked, run.claim)
            try:
                if member.role == "source":
                    loop = _SourceLoop(member, options, source, [destination, *also], run, process)
                    joined = loop.joined
                    report = loop.run(stop)
                else:
                    taking = _DestinationLoop(member, options, source, destination, run, undo, process)
                    joined = taking.joined
                    report = taking.run()
                joined.close()
            except StopAskedError:
                report = None  # nobody has come yet: as good an end as after a refit
        if report is not None:
            run.on_report(report)
        return 0
    except KeyboardInterrupt:
        error: Exception = TransferError(f"{member.role} rank {member.rank} was interrupted", member.rank)
    except Exception as caught:  # noqa: BLE001 - told, and the process ended: no peer is left waiting
        error = caught
    told = (
        error
        if isinstance(error, ReshardError)
        else wrapped(None, error, member.rank, f"{member.role} rank {member.rank}")
    )
    first = None if joined is None else joined.first_to_tell()
    if run.claim() if first is None else first:
        print(f"error: {told}", file=sys.stderr, flush=True)
        if debug:
            import traceback

            traceback.print_exception(error)
    for one in undo:
        one()
    code = told.exit_code
    if joined is not None:
        joined.tell(told)
        code = joined.exit_code(told)
    sys.stderr.flush()
    os._exit(code)  # no teardown: groups may have work in flight, and would abort the process


class _SourceLoop:
    def __init__(
        self, member: Membership, options: RefitOptions, own: Described, accepted: list[Described],
        run: JoinedRun, process: OwnProcess,
    ) -> None:  # fmt: skip
        self._options, self._run = options, run
        self._turn = Turn(1)
        self._watched = None if options.watch is None else Watched(options.watch)
        end, self._trainer = open_source_end(options, self._origin)
        note = run.on_note if member.rank == 0 else lambda _: None
        self.joined = JoinedSource(member, options, own, accepted, end, process=process, note=note)
        self._first = member.rank == 0

    def _origin(self, version: int) -> str:
        return self._turn.origin or self._options.origin

    def run(self, stop: Stop) -> RefitReport | None:
        """Send version after version; return the report on rank 0."""
        iterations: list[Iteration] = []
        pair: Pair | None = None
        done = 0
        while self._next(done, stop):
            if self._trainer is not None:
                self.joined.job.phase("the trainer's step")
                self._trainer.step()
            done += 1
            began = time.perf_counter()
            results = self.joined.refit(self._turn.version, rejoin=self._run.rejoin)
            seconds = time.perf_counter() - began
            for one in results:
                if self._first:
                    told = RefitOfLoop(
                        "source", one.job, one.version, one.committed, False, seconds, one.measured,
                        None if one.error is None else str(one.error),
                    )  # fmt: skip
                    self._run.on_refit(told)
                if one.measured is not None:
                    keep(iterations, one.measured)
                if one.error is not None:
                    self.joined.job.check()
                    if not self._run.rejoin:
                        raise one.error
                    if self._first:
                        self._run.on_note(one.told())
            pair = next((one.pair for one in self.joined.sessions.values()), pair)
        if self._trainer is not None:
            self._trainer.close()
        if not self._first or pair is None:
            return None
        sessions = [one.pair for one in self.joined.sessions.values()]
        return report_of(
            pair, iterations, _WORLD, peak=max((one.peak for one in sessions), default=0),
            compared=sum(one.compared_by_all for one in sessions), extra=pair.extra,
        )  # fmt: skip

    def _next(self, done: int, stop: Stop) -> bool:
        """Say whether there is another version, the same on all ranks of the job."""
        turn = next_turn(self.joined.job, self._options, self._watched, done, stop)
        if turn is not None:
            self._turn = turn
        return turn is not None


class _DestinationLoop:
    def __init__(
        self, member: Membership, options: RefitOptions, source: Described, own: Described, run: JoinedRun,
        undo: list[Callable[[], None]], process: OwnProcess,
    ) -> None:  # fmt: skip
        self._options, self._run = options, run
        # before it joins: an engine may take minutes to load, or not be there
        self._engine = load_target(options)

        def end(token: str) -> DestinationEnd:
            return open_destination(options, token, undo, self._engine)

        self.joined = JoinedDestination(member, options, own, source, end, process=process)
        self._first = member.rank == 0

    def run(self) -> RefitReport | None:
        """Take version after version until the source ends, or as many as were asked for; return the report on rank 0."""
        iterations: list[Iteration] = []
        limit = self._options.iterations
        done = 0
        while limit is None or done < limit:
            began = time.perf_counter()
            version = self.joined.refit()
            if version is None:
                break
            done += 1
            seconds = time.perf_counter() - began
            session = self.joined.session
            assert session is not None
            measured = session.pair.own
            if self._first and measured is not None:
                keep(iterations, measured)
                self._run.on_refit(
                    RefitOfLoop(
                        "destination", session.name, version, True, self.joined.torn, seconds, measured
                    )
                )
            if self._engine is not None:
                session.control.phase("the engine's step")
                self._engine.step()
        if self._engine is not None:
            self._engine.close()
        session = self.joined.session
        if session is None:
            return None
        pair = session.pair
        everybody = self.joined.job.gather("totals", [pair.peak, pair.compared], "reporting")
        if everybody is None:
            return None
        peak, compared = max(one[0] for one in everybody), sum(one[1] for one in everybody)
        return report_of(pair, iterations, _WORLD, peak=peak, compared=compared, extra=pair.extra)
