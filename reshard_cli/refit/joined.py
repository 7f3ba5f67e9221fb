"""Jobs that were started each by itself: they meet at the source's gate, and are refitted one version at a time.

The source's first rank opens the gate. Destination jobs come in when they are ready, leave, fail and come again; the
source takes those that are there at the beginning of a refit. With each it has a control plane, a plan and
connections of their own, so that the failure of one is none of the others'. Nothing of this uses torch's default
process group.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reshard_cli import __version__
from reshard_cli.errors import PeerLostError, ReshardError, TransferError
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.build import PLAN_VERSION, build_plan
from reshard_cli.refit.documents import Described, of_note
from reshard_cli.refit.ends import DestinationEnd, SourceEnd
from reshard_cli.refit.failing import settled, wrapped
from reshard_cli.refit.joining import meet
from reshard_cli.refit.pair import Iteration, Pair
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.transport.control import Control, Failure
from reshard_cli.transport.gate_client import (
    Address,
    GateProcess,
    GateStore,
    JobAtGate,
    open_gate,
)
from reshard_cli.transport.store import Prefixed, Store
from reshard_cli.transport.watchdog import Watchdog

__all__ = ["JoinedDestination", "JoinedSource", "Membership", "RefitOfJob"]

_LEFT = 0  # the exit code of a failure that is none: a job that went in good order
_SOURCE_FAILURE = "source/failure"
_SLICE = 1.0


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this process is: its job's role and identity (one start of it), its rank, and how many there are."""

    role: str
    identity: str
    rank: int
    size: int
    local_rank: int
    address: Address
    token: str


@dataclass(frozen=True, slots=True)
class RefitOfJob:
    """What one refit was to one destination job, as a source rank knows it. `measured`: on rank 0."""

    job: str
    version: int
    committed: bool
    measured: Iteration | None = None
    error: str | None = None


@dataclass(slots=True)
class _Session:
    """This rank's part in the refits of one destination job."""

    number: int
    name: str
    control: Control
    pair: Pair
    turns: int = 0


def _facts(
    options: RefitOptions, source: JobLayout | None, destinations: Sequence[JobLayout] | None
) -> dict[str, Any]:
    """Return what has to be equal in both jobs, before anything else. None: this side takes what comes."""
    return {
        "reshard-cli": __version__,
        "version of the plan": PLAN_VERSION,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "mode": options.mode,
        "staging bytes": options.staging,
        "verify": options.verify,
        "backend": options.backend,
        "domain": options.domain,
        "layout of the source": None if source is None else source.digest,
        "dtypes of the source": None if source is None else _dtypes(source),
        "layout of the destination": None if destinations is None else [one.digest for one in destinations],
        "dtypes of the destination": None if destinations is None else [_dtypes(one) for one in destinations],
    }


def _dtypes(layout: JobLayout) -> str:
    return ", ".join(sorted({tensor.dtype for tensor in layout.tensors}))


def _differences(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return every difference between two sides' facts, for people."""
    lines = []
    for key in [*own, *(key for key in other if key not in own)]:
        one, two = own.get(key), other.get(key)
        if key.endswith(("source", "destination")):
            if one is None or two is None:
                continue
            if isinstance(one, list) and isinstance(two, list):
                if set(one) & set(two):
                    continue
            elif one == two:
                continue
        elif one == two:
            continue
        lines.append(f"{key}: {_short(one)} here, {_short(two)} there")
    return lines


def _short(value: object) -> str:
    text = " or ".join(_short(one) for one in value) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:16] + "…"


class _Joined:
    """What a rank of either job has: its connection to the gate, and its sign of life."""

    def __init__(self, member: Membership, options: RefitOptions, *, ends_process: bool) -> None:
        self.member, self.options = member, options
        self.gate = GateStore(member.address, member.token, options.timeout)
        self.watchdog = Watchdog(self._another, parent=None, ends=ends_process)
        self.closed = False

    def _another(self) -> Store:
        return self.gate.another()

    def _enter(self, facts: dict[str, Any], note: dict[str, Any] | None, name: str) -> str:
        """Come in with all of the job's ranks; return its entry."""
        member = self.member
        own_note = note if member.rank == 0 else None
        entry = self.gate.enter(member.role, member.identity, name, member.rank, member.size, facts, own_note)
        lost = Failure(
            member.rank, TransferError.exit_code, f"{name} {member.rank} is not running any more", member.rank
        )
        self.gate.will(f"entries/{entry}/failure", lost, "")
        if member.role == "source":
            self.gate.will(_SOURCE_FAILURE, lost, "")
        if self._wait(f"complete/{entry}", [f"entries/{entry}/failure"], self.options.timeout):
            raise PeerLostError(
                f"joining: not all {member.size} ranks of {name!r} came within {self.options.timeout:g} s"
            )
        return entry

    def _wait(self, key: str, unless: Sequence[str], seconds: float) -> bool:
        """Wait for a key; return whether it is lacking still. Raises a failure under one of `unless`."""
        lacking = self.gate.wait_keys([key], unless, seconds)
        if lacking:
            for one in unless:
                if self.gate.check([one]):
                    raise Failure(**json.loads(self.gate.get(one))).error()
        return bool(lacking)

    def _session(
        self, number: int, rank: int, jobs: Jobs, source: SourceEnd | None,
        end: Callable[[str], DestinationEnd] | None,
    ) -> _Session:  # fmt: skip
        """Meet the ranks of the other job and agree on a plan; nothing is connected yet."""
        store = Prefixed(self.gate, f"session/{number}/")
        num_ranks = jobs.num_ranks(False)
        control = Control(store, rank, num_ranks, self.options.timeout, lambda one: jobs.name_of(one, False))
        lost = Failure(
            rank, TransferError.exit_code,
            f"{control.name_of(rank)} is not running any more (last: {{phase}})", rank,
        )  # fmt: skip
        self.gate.will(f"{store.prefix}failure", lost, f"{store.prefix}phase/{rank}")
        # a source goes on without a job that failed; its transports' timeouts bring it back
        self.watchdog.add(
            control, lambda inner: Prefixed(inner, store.prefix),
            (lambda _: None) if self.member.role == "source" else None,
        )  # fmt: skip
        try:
            setup, topology = meet(control, self.member.local_rank, self.options, jobs)
            plan = build_plan(
                jobs.source, jobs.destination, topology, self.options.mode,
                staging=self.options.staging, allow_extra=self.options.allow_extra,
            )  # fmt: skip
            control.phase("opening the ends")
            made = None if end is None else end(setup["token"])
            pair = Pair(self.options, plan, control, setup, source, made)
        except Exception as error:
            raise self._failed(control, None, error) from error
        other = jobs.source.name if end is not None else jobs.destination.name
        return _Session(number, other, control, pair)

    def _failed(self, control: Control, pair: Pair | None, error: Exception) -> ReshardError:
        """Settle who was first to fail, tell the session's other ranks, and let go of its connections."""
        told = error if isinstance(error, ReshardError) else wrapped(control, error, control.rank)
        with contextlib.suppress(RuntimeError, TransferError):
            told = settled(control, told)
            control.fail(told)
            failure = control.failure()
            if failure is not None:
                told = failure.error() if failure.exit_code != _LEFT else _JobLeftError(failure.message)
        self._drop(control, pair)
        return told

    def _drop(self, control: Control, pair: Pair | None) -> None:
        self.watchdog.remove(control)
        prefix = control.store.prefix if isinstance(control.store, Prefixed) else ""
        with contextlib.suppress(TransferError):
            self.gate.will(f"{prefix}failure", None, "")
        if pair is not None:
            pair.close()


class _JobLeftError(TransferError):
    """A destination job went in good order."""


class JoinedSource(_Joined):
    """A rank of the source job."""

    def __init__(
        self,
        member: Membership,
        options: RefitOptions,
        own: Described,
        accepted: Sequence[Described] | None,
        end: SourceEnd,
        *,
        ends_process: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`accepted`: the layouts of destination jobs that are let in; None: any. `note` is told, on rank 0, who
        comes and goes. Raises TransferError.
        """
        self._process: GateProcess | None = None
        if member.rank == 0:
            self._process = open_gate(member.address, member.token)
        super().__init__(member, options, ends_process=ends_process)
        self.own, self.end = own, end
        self._note = note
        self._layouts = {one.layout.digest: one.layout for one in accepted or ()}
        self._facts = _facts(
            options, own.layout, None if accepted is None else [one.layout for one in accepted]
        )
        self.sessions: dict[int, _Session] = {}
        self._turn = 0
        self._next_session = 1
        self._seen: set[str] = set()
        try:
            self.entry = self._enter(self._facts, own.note, own.layout.name)
        except BaseException:
            self._leave(end=True)
            raise
        self.watchdog.start()

    def refit(self, version: int, *, wait: float | None = None) -> list[RefitOfJob]:
        """Refit every destination job that is there; return what it was to each of them.

        Rank 0 waits up to `wait` seconds (default: the timeout) for a first job. Raises TransferError where none
        comes. A job that fails does not keep the others from theirs; it is let go, and may come in again.
        """
        turn = self._agreed_turn(version, self.options.timeout if wait is None else wait)
        done = []
        for number in [one for one in self.sessions if one not in turn]:
            gone = self.sessions.pop(number)
            self._drop(gone.control, gone.pair)
        for number in turn:
            done.append(self._refit_one(number, version))
        return [one for one in done if one is not None]

    def _refit_one(self, number: int, version: int) -> RefitOfJob | None:
        session = self.sessions.get(number)
        try:
            if session is None:
                session = self._admitted(number)
                session.pair.open(version)
                self.sessions[number] = session
            session.turns += 1
            if self.member.rank == 0:
                key = f"turn/{session.turns}"
                session.control.store.set(key, json.dumps(version))
            session.control.barrier(f"begin/{session.turns}", "beginning the refit")
            measured = session.pair.refit(version)
            return RefitOfJob(session.name, version, True, measured)
        except Exception as error:  # noqa: BLE001 - told to the others, and returned to the caller
            name = f"job {number}" if session is None else session.name
            told = error if session is None else self._failed(session.control, session.pair, error)
            self.sessions.pop(number, None)
            if isinstance(told, _JobLeftError):
                self._note(str(told))
                return None
            return RefitOfJob(name, version, False, error=str(told))

    def _admitted(self, number: int) -> _Session:
        about = json.loads(self.gate.get(f"session/{number}/about"))
        layout = self._layouts.get(about["digest"])
        if layout is None:
            layout = of_note(about["note"], about["name"])
            self._layouts[about["digest"]] = layout
        return self._session(number, self.member.rank, Jobs(self.own.layout, layout), self.end, None)

    def _agreed_turn(self, version: int, wait: float) -> list[int]:
        """Return the sessions of this refit, the same on all source ranks."""
        self._turn += 1
        key = f"source/turn/{self._turn}"
        if self.member.rank == 0:
            try:
                told: dict[str, Any] = {"version": version, "sessions": self._present(wait)}
            except TransferError as error:
                told = {"error": str(error)}
            self.gate.set(key, json.dumps(told))
            self.gate.delete_key(f"source/turn/{self._turn - 2}")
        else:
            if self._wait(key, [_SOURCE_FAILURE], wait + self.options.timeout):
                raise PeerLostError(f"rank 0 of {self.own.layout.name!r} did not begin refit {version}", 0)
            told = json.loads(self.gate.get(key))
        if "error" in told:
            raise TransferError(told["error"])
        if told["version"] != version:
            raise TransferError(
                f"{self.own.layout.name} {self.member.rank} is at version {version}, rank 0 at {told['version']}: "
                f"all ranks refit in the same order",
                self.member.rank,
            )
        return list(told["sessions"])

    def _present(self, wait: float) -> list[int]:
        """Return the sessions that go on, and the new ones; wait for a first one."""
        alive = []
        for number, session in self.sessions.items():
            failure = session.control.failure()
            if failure is None:
                alive.append(number)
            else:
                self._note(failure.message)
        waited = 0.0
        while True:
            alive += self._newcomers()
            if alive:
                return alive
            if waited >= wait:
                raise TransferError(f"no destination job came to {self.member.address} within {wait:g} s")
            # a key that never comes: what counts is that a failure of this job ends the waiting
            self._wait("complete/destination", [_SOURCE_FAILURE], _SLICE)
            if self.gate.check(["complete/destination"]):
                self.gate.delete_key("complete/destination")
            waited += _SLICE

    def _newcomers(self) -> list[int]:
        numbers = []
        for job in self.gate.jobs("destination"):
            if not job.complete or job.entry in self._seen:
                continue
            self._seen.add(job.entry)
            lines = _differences(self._facts, job.facts)
            own = job.facts.get("layout of the destination") or []
            if len(own) != 1:
                lines.append("it does not say what its own layout is")
            if lines:
                self.gate.set(f"entries/{job.entry}/refused", json.dumps(lines))
                self._note(f"{job.name} was not let in: {'; '.join(lines)}")
                continue
            number = self._next_session
            self._next_session += 1
            about = {"name": job.name, "digest": own[0], "note": job.note}
            self.gate.set(f"session/{number}/about", json.dumps(about))
            self.gate.set(f"entries/{job.entry}/session", json.dumps(number))
            self._note(f"{job.name} ({job.size} ranks) came in")
            numbers.append(number)
        return numbers

    def close(self) -> None:
        """Tell the destination jobs that there is no other version, and go."""
        if self.closed:
            return
        for session in self.sessions.values():
            if self.member.rank == 0:
                session.control.store.set(f"turn/{session.turns + 1}", json.dumps(None))
            session.pair.close()
        self.sessions.clear()
        if self.member.rank == 0:
            self.gate.set("source/ended", "1")
        self._leave(end=self.member.rank == 0)

    def _leave(self, *, end: bool) -> None:
        self.closed = True
        self.watchdog.end()
        with contextlib.suppress(TransferError):
            self.gate.leave(end=end)
        if self._process is not None:
            self._process.close()


class JoinedDestination(_Joined):
    """A rank of a destination job."""

    def __init__(
        self,
        member: Membership,
        options: RefitOptions,
        own: Described,
        source: Described | None,
        end: Callable[[str], DestinationEnd],
        *,
        ends_process: bool = False,
    ) -> None:
        """`source`: the source's layout as this side knows it, to be compared; None: the source says it.

        `end` makes where values go, with a word that all ranks of the job share. Raises TransferError with all
        differences where the source has something else.
        """
        super().__init__(member, options, ends_process=ends_process)
        self.own = own
        self._end = end
        self.end: DestinationEnd | None = None
        self.session: _Session | None = None
        facts = _facts(options, None if source is None else source.layout, [own.layout])
        try:
            if self._wait("complete/source", [], options.timeout):
                raise PeerLostError(
                    f"no whole source job came to {member.address} within {options.timeout:g} s"
                )
            there = self._source_at_gate()
            lines = _differences(facts, there.facts)
            if lines:
                told = "\n  ".join(lines)
                raise TransferError(
                    f"{own.layout.name} does not fit {there.name} at {member.address}:\n  {told}"
                )
            self._source = source.layout if source is not None else of_note(there.note, there.name)
            self.entry = self._enter(facts, own.note, own.layout.name)
        except BaseException:
            self._leave()
            raise
        self.watchdog.start()

    def _source_at_gate(self) -> JobAtGate:
        jobs = self.gate.jobs("source")
        if not jobs:
            raise PeerLostError(f"the source job at {self.member.address} is gone")
        return jobs[0]

    @property
    def version(self) -> int | None:
        """The version that is wholly there, or None."""
        return None if self.end is None or self.end.torn else self.end.version

    @property
    def torn(self) -> bool:
        """Whether a refit has begun to write over the weights and has not come to its end."""
        return self.end is not None and self.end.torn

    def refit(self, stop: Callable[[], bool] = lambda: False) -> int | None:
        """Take the source's next version; return it, or None where the source has ended or `stop` says so.

        Waits for it as long as the source lives. Raises TransferError, WeightsError, VerifyError: then this job
        is out, and has to join again.
        """
        session = self.session
        if session is None:
            session = self._admitted(stop)
            if session is None:
                return None
            self.session = session
        try:
            session.turns += 1
            key = f"turn/{session.turns}"
            session.control.phase("waiting for the next refit")
            while session.control.store.wait_keys([key], ["failure"], _SLICE):
                session.control.check()
                if stop():
                    session.turns -= 1
                    return None
            version = json.loads(session.control.store.get(key))
            if version is None:
                return None
            session.control.barrier(f"begin/{session.turns}", "beginning the refit")
            session.pair.refit(version)
            return int(version)
        except Exception as error:
            raise self._failed(session.control, session.pair, error) from error

    def _admitted(self, stop: Callable[[], bool]) -> _Session | None:
        """Wait until the source takes this job in; None where it ended before."""
        key, refused = f"entries/{self.entry}/session", f"entries/{self.entry}/refused"
        unless = [f"entries/{self.entry}/failure", _SOURCE_FAILURE, "source/ended"]
        while self.gate.wait_keys([key], [*unless, refused], _SLICE):
            if self.gate.check(["source/ended"]) or stop():
                return None
            for one in unless[:2]:
                if self.gate.check([one]):
                    raise Failure(**json.loads(self.gate.get(one))).error()
            if self.gate.check([refused]):
                lines = json.loads(self.gate.get(refused))
                raise TransferError("the source did not let this job in:\n  " + "\n  ".join(lines))
        number = json.loads(self.gate.get(key))
        rank = self._source.num_ranks + self.member.rank
        jobs = Jobs(self._source, self.own.layout)

        def made(token: str) -> DestinationEnd:
            self.end = self._end(token)
            return self.end

        session = self._session(number, rank, jobs, None, made)
        try:
            session.pair.open(0)
        except Exception as error:
            raise self._failed(session.control, session.pair, error) from error
        return session

    def close(self) -> None:
        """Leave in good order: the source goes on without this job."""
        if self.closed:
            return
        session = self.session
        if session is not None:
            store = session.control.store
            assert isinstance(store, Prefixed)
            gone = self.gate.ask(op="add", key=f"{store.prefix}leaving", amount=1)["value"]
            if gone == self.member.size:
                left = Failure(session.control.rank, _LEFT, f"{self.own.layout.name} left", None)
                store.compare_set("failure", "", json.dumps(asdict(left)))
            self._drop(session.control, session.pair)
            self.session = None
        self._leave()

    def _leave(self) -> None:
        self.closed = True
        self.watchdog.end()
        with contextlib.suppress(TransferError):
            self.gate.leave()
