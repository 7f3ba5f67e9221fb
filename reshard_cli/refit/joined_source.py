"""A rank of a source job that destination jobs join: it takes them in, refits them, and goes on when one fails."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reshard_cli.errors import ReshardError, TransferError
from reshard_cli.layout.job import JobLayout
from reshard_cli.refit.documents import Described, of_note
from reshard_cli.refit.ends import SourceEnd
from reshard_cli.refit.failing import wrapped
from reshard_cli.refit.joined import (
    LEFT,
    SLICE,
    SOURCE_FAILURE,
    JobLeftError,
    Joined,
    JoinedSession,
    Membership,
    OwnProcess,
    differences,
    facts_of,
)
from reshard_cli.refit.pair import Iteration
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.transport.control import Control
from reshard_cli.transport.gate_client import GateProcess, StopAskedError, open_gate
from reshard_cli.transport.lanes import Lanes
from reshard_cli.transport.store import Prefixed

__all__ = ["JoinedSource", "RefitOfJob"]

_AT_ONCE = 8  # jobs, each with its own staging in flight


@dataclass(frozen=True, slots=True)
class RefitOfJob:
    """What one refit was to one destination job, as a source rank knows it.

    `measured`: on rank 0. `committed`: whether the job has the version, as far as this rank knows; an `error` may have
    come after that.
    """

    job: str
    version: int
    committed: bool = True
    measured: Iteration | None = None
    error: ReshardError | None = None

    def told(self) -> str:
        """Return what its error ended, for people."""
        if self.committed:
            return f"{self.job} has version {self.version}, and failed after that: {self.error}"
        return f"version {self.version} did not reach {self.job}: {self.error}"


class JoinedSource(Joined):
    """A rank of the source job."""

    def __init__(
        self,
        member: Membership,
        options: RefitOptions,
        own: Described,
        accepted: Sequence[Described] | None,
        end: SourceEnd,
        *,
        process: OwnProcess | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`accepted`: the layouts of destination jobs that are let in; None: any. `note` is told, on rank 0, who
        comes and goes; `process`: see `Joined`. Raises TransferError.
        """
        self._gate_process: GateProcess | None = None
        if member.rank == 0:
            self._gate_process = open_gate(member.address, member.token, options.timeout)
        try:
            super().__init__(member, options, process)
        except BaseException:
            if self._gate_process is not None:
                self._gate_process.end()
            raise
        self.own, self.end = own, end
        # kernels of several NCCL communicators on one GPU may wait for each other, so there one job follows another
        gloo = options.backend == "gloo" or (options.backend == "auto" and not torch.cuda.is_available())
        self._lanes = Lanes(self.gate, _AT_ONCE if gloo else 1)
        self.store = self._lanes.store
        self._note = note
        self._layouts: dict[str, JobLayout] = {}  # of the jobs that came, by what they say
        self._facts = facts_of(
            options, own.layout, None if accepted is None else [one.layout for one in accepted]
        )
        self.sessions: dict[int, JoinedSession] = {}
        self._turn = 0
        self._lost: dict[int, ReshardError] = {}
        self._stale: list[int] = []
        self._next_session = 1
        self._seen: set[str] = set()
        try:
            self.entry = self._enter(self._facts, own.note, own.layout.name)
        except BaseException:
            self._leave()
            raise
        self.watchdog.start()

    def refit(
        self, version: int, *, wait: float | None = None, released: Callable[[], None] = lambda: None,
        rejoin: bool = True,
    ) -> list[RefitOfJob]:  # fmt: skip
        """Refit every destination job that is there; return what it was to each of them.

        Rank 0 waits up to `wait` seconds (default: the timeout) for a first job. Raises TransferError where none
        comes; returns at once where this process is asked to end meanwhile.
        Over gloo, several jobs are refitted at once. A job that fails does not keep the others from theirs; it is let
        go, and may come in again. `released` is called when the source's tensors are not read any more.
        `rejoin`: a job that failed since the last refit is waited for like a first one; else its failure is raised.
        """
        turn = self._agreed_turn(version, self.options.timeout if wait is None else wait, rejoin)
        for number in [one for one in self.sessions if one not in turn]:
            gone = self.sessions.pop(number)
            self._drop(gone.control, gone.pair)
            self._lost[number] = TransferError(f"{gone.name} is gone")
        reading, lock = set(turn), threading.Lock()

        def let_go(number: int) -> None:
            with lock:
                last = reading == {number}
                reading.discard(number)
            if last:
                released()

        calls = [partial(self._refit_one, number, version, partial(let_go, number)) for number in turn]
        try:
            done = self._lanes.run(calls)
        except BaseException:  # an interrupt: whoever runs them still closes them, as the gate is given up
            self.sessions.clear()
            raise
        return [one for one in done if one is not None]

    def _refit_one(self, number: int, version: int, released: Callable[[], None]) -> RefitOfJob | None:
        try:
            return self._refitted(number, version, released)
        finally:
            released()

    def _refitted(self, number: int, version: int, released: Callable[[], None]) -> RefitOfJob | None:
        session = self.sessions.get(number)
        name = f"job {number}" if session is None else session.name
        try:
            if number in self._lost:
                raise self._lost[number]
            if session is None:
                about = json.loads(self.store.get(f"session/{number}/about"))
                name = about["shown"]
                session = self._admitted(number, about)
                session.pair.open(version)
                self.sessions[number] = session
            session.turns += 1
            session.pair.applied = False
            if self.member.rank == 0:
                session.control.store.set(f"turn/{session.turns}", json.dumps(version))
                session.control.store.delete_key(f"turn/{session.turns - 2}")
            session.control.barrier(f"begin/{session.turns}", "beginning the refit")
            return RefitOfJob(name, version, measured=session.pair.refit(version, released=released))
        except Exception as error:  # noqa: BLE001 - told to the others, and returned to the caller
            told = error if session is None else self._failed(session.control, session.pair, error)
            if not isinstance(told, ReshardError):
                told = wrapped(None, told, self.member.rank, f"{self.own.layout.name} {self.member.rank}")
            self.sessions.pop(number, None)
            self._lost[number] = told
            if isinstance(told, JobLeftError):
                self._note(str(told))
                return None
            return RefitOfJob(name, version, session is not None and session.pair.applied, error=told)
        except BaseException as error:  # an interrupt: nobody waits for this rank
            if session is not None:
                self._failed(session.control, session.pair, error)
            raise

    def _admitted(self, number: int, about: dict[str, Any]) -> JoinedSession:
        layout = self._layout_of(about["name"], about["digest"], about["note"])
        session = self._session(number, self.member.rank, Jobs(self.own.layout, layout), self.end, None)
        session.name = about["shown"]
        return session

    def _layout_of(self, name: str, digest: str, note: Any) -> JobLayout:
        """Return a job's layout by its own words, and not by this side's: their order is that of its plan."""
        text = json.dumps(note, sort_keys=True)
        layout = self._layouts.get(text)
        if layout is None:
            layout = of_note(note, name, digest)
            self._layouts[text] = layout
        return layout

    def _agreed_turn(self, version: int, wait: float, rejoin: bool) -> list[int]:
        """Return the sessions of this refit, the same on all source ranks."""
        self._turn += 1
        key = f"turn/{self._turn}"
        self.job.phase(f"beginning version {version}")
        if self.member.rank == 0:
            try:
                told: dict[str, Any] = {"version": version, "sessions": self._present(wait, rejoin)}
            except TransferError as error:
                told = {"error": str(error)}
            self.job.store.set(key, json.dumps(told))
            self.job.store.delete_key(f"turn/{self._turn - 2}")
        else:
            told = self.job.read_shared(key, 0, self._first_has_ended)
            if told is None:
                raise TransferError(f"{self.own.layout.name} 0 has closed its session", 0)
        self._tidy()
        if "error" in told:
            raise TransferError(told["error"])
        if told["version"] != version:
            other = TransferError(
                f"{self.own.layout.name} {self.member.rank} is at version {version}, rank 0 at {told['version']}: "
                f"all ranks refit in the same order",
                self.member.rank,
            )
            for number in told["sessions"]:  # whose other ranks would wait for this one
                store = Prefixed(self.gate, f"session/{number}/")
                Control(store, self.member.rank, self.member.size, self.options.timeout).fail(other)
            raise other
        return list(told["sessions"])

    def _first_has_ended(self) -> bool:
        """Say whether rank 0 is gone in good order; tell it where this rank is asked to end."""
        if self._stop():
            self.job.store.set("stop", "1")
        return self.gate.check(["source/ended"])

    def _present(self, wait: float, rejoin: bool) -> list[int]:
        """Return the sessions that go on, and the new ones; wait for a first one."""
        alive, gone = [], []
        for number, session in self.sessions.items():
            failure = session.control.failure()
            if failure is None:
                alive.append(number)
            elif failure.exit_code != LEFT and not rejoin:
                raise TransferError(failure.message, failure.rank)
            else:
                gone.append(failure.message)
                self._note(failure.message)
        deadline = time.monotonic() + wait
        while True:
            alive += self._newcomers()
            if alive:
                return alive
            if time.monotonic() > deadline:
                more = f" after {'; '.join(gone)}" if gone else ""
                raise TransferError(
                    f"no destination job came to {self.member.address} within {wait:g} s{more}"
                )
            try:
                self._wait("complete/destination", [SOURCE_FAILURE], SLICE)
            except StopAskedError:
                return []
            if self.job.store.check(["stop"]):
                return []
            if self.gate.check(["complete/destination"]):
                self.gate.delete_key("complete/destination")

    def _tidy(self) -> None:
        """Take away what is kept, here and at the gate, of sessions that ended before the last refit."""
        for number in self._stale:
            if self.member.rank == 0:
                self.gate.delete_all(f"session/{number}/")
            self._lost.pop(number, None)
        self._stale = list(self._lost)

    def _newcomers(self) -> list[int]:
        numbers, shown = [], set[str]()
        there = self.gate.jobs("destination")
        self._seen &= {job.entry for job in there}
        for job in there:
            if not job.complete or job.entry in self._seen:
                continue
            self._seen.add(job.entry)
            own: Any = job.facts.get("layout of the destination")
            lines = differences(self._facts, job.facts)
            if not isinstance(own, list) or len(own) != 1:
                lines.append("it does not say what its own layout is")
            if not lines:
                try:
                    self._layout_of(job.name, own[0], job.note)
                except TransferError as error:
                    lines.append(str(error))
            if lines:
                self.gate.set(f"entries/{job.entry}/refused", json.dumps(lines))
                self._note(f"{job.name} was not let in: {'; '.join(lines)}")
                continue
            number = self._next_session
            self._next_session += 1
            taken = {one.name for one in self.sessions.values()} | shown
            name = f"{job.name} (job {number})" if job.name in taken else job.name  # replicas have one layout
            shown.add(name)
            about = {"name": job.name, "shown": name, "digest": own[0], "note": job.note}
            self.gate.set(f"session/{number}/about", json.dumps(about))
            self.gate.set(f"entries/{job.entry}/session", json.dumps(number))
            self._note(f"{name} ({job.size} ranks) came in")
            numbers.append(number)
        return numbers

    def close(self) -> None:
        """Tell the destination jobs that there is no other version, and go."""
        if self.closed:
            return
        with contextlib.suppress(TransferError):  # a gate that is lost has nobody to tell
            for session in self.sessions.values():
                session.control.phase("closed its session")
                if self.member.rank == 0:
                    session.control.store.set(f"turn/{session.turns + 1}", json.dumps(None))
            if self.member.rank == 0:
                self.gate.set("source/ended", "1")
        for session in self.sessions.values():
            session.pair.close()
        self.sessions.clear()
        self._leave()

    def abandon(self, error: ReshardError) -> None:
        """Go, and tell everybody that this rank failed."""
        if self.closed:
            return
        self.tell(error)
        for session in self.sessions.values():
            session.pair.close()
        self.sessions.clear()
        self._leave()

    def _controls(self) -> list[Control]:
        return [session.control for session in self.sessions.values()]

    def _leave(self) -> None:
        self.closed = True
        self.watchdog.end()
        self._lanes.close()
        with contextlib.suppress(TransferError):
            # only whoever opened the gate ends it: this may be a rank of a second source, that was not let in
            self.gate.leave(end=self._gate_process is not None)
        if self._gate_process is not None:
            self._gate_process.close()
