"""A rank of a destination job that was started by itself: it comes in at the source's gate, and takes its versions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict

from reshard_cli.errors import PeerLostError, ReshardError, TransferError
from reshard_cli.refit.documents import Described, of_note
from reshard_cli.refit.ends import DestinationEnd
from reshard_cli.refit.joined import (
    LEFT,
    SLICE,
    SOURCE_FAILURE,
    Joined,
    JoinedSession,
    Membership,
    OwnProcess,
    differences,
    facts_of,
)
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.transport.control import Control, Failure
from reshard_cli.transport.gate_client import JobAtGate
from reshard_cli.transport.store import Prefixed

__all__ = ["JoinedDestination"]


class JoinedDestination(Joined):
    """A rank of a destination job."""

    def __init__(
        self,
        member: Membership,
        options: RefitOptions,
        own: Described,
        source: Described | None,
        end: Callable[[str], DestinationEnd],
        *,
        process: OwnProcess | None = None,
    ) -> None:
        """`source`: the source's layout as this side knows it, to be compared; None: the source says it.

        `end` makes where values go, with a word that all ranks of the job share; `process`: see `Joined`. Raises
        TransferError with all differences where the source has something else.
        """
        super().__init__(member, options, process)
        self.own = own
        self._end = end
        self.end: DestinationEnd | None = None
        self.session: JoinedSession | None = None
        facts = facts_of(options, None if source is None else source.layout, [own.layout])
        try:
            if self._wait("complete/source", [], options.timeout):
                raise PeerLostError(
                    f"no whole source job came to {member.address} within {options.timeout:g} s"
                )
            there = self._source_at_gate()
            lines = differences(facts, there.facts)
            if lines:
                told = "\n  ".join(lines)
                raise TransferError(
                    f"{own.layout.name} does not fit {there.name} at {member.address}:\n  {told}"
                )
            # its own words, and not what this side has of them: their order is that of its plan
            self._source = of_note(there.note, there.name, there.facts["layout of the source"])
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

    def refit(self) -> int | None:
        """Take the source's next version; return it, or None where the source has ended or this job is to end.

        Waits for it as long as the source lives. Raises TransferError, WeightsError, VerifyError: then this job
        is out, and has to join again.
        """
        session = self.session
        if session is None:
            session = self._admitted()
            if session is None:
                return None
            self.session = session
        try:
            version = self._next(session)
            if version is None:
                return None
            session.control.barrier(f"begin/{session.turns}", "beginning the refit")
            session.pair.refit(version)
            return version
        except Exception as error:
            raise self._failed(session.control, session.pair, error) from error
        except BaseException as error:  # an interrupt: nobody waits for this rank
            self._failed(session.control, session.pair, error)
            raise

    def _next(self, session: JoinedSession) -> int | None:
        """Return the source's next version, the same on all ranks of the job; None where it, or this job, ends."""
        session.turns += 1
        key, control = f"turn/{session.turns}", session.control
        control.phase("waiting for the next refit")
        if self.member.rank == 0:
            there = not self._ending() and control.wait_while_alive(key, 0, self._ending)
            version = json.loads(control.store.get(key)) if there else None
            self.job.store.set(key, json.dumps(version))
            self.job.store.delete_key(f"turn/{session.turns - 2}")
        else:

            def stopping() -> bool:
                control.check()
                return self._stop()

            # asked before there is a wait, too: a source that is fast has always the next version
            if self._stop() or not self.job.wait_while_alive(key, 0, stopping):
                self.job.store.set("stop", "1")
            version = self.job.read_shared(key, 0)
        return None if version is None else int(version)

    def _ending(self) -> bool:
        """Say whether this rank, or another one of the job, was asked to end."""
        return self._stop() or self.job.store.check(["stop"])

    def _admitted(self) -> JoinedSession | None:
        """Wait until the source takes this job in; None where it ended before."""
        key, refused = f"entries/{self.entry}/session", f"entries/{self.entry}/refused"
        unless = [f"entries/{self.entry}/failure", SOURCE_FAILURE, "source/ended"]
        while self.gate.wait_keys([key], [*unless, refused], SLICE):
            if self.gate.check(["source/ended"]) or self._stop():
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
            with contextlib.suppress(TransferError):  # a gate that is lost has nobody to tell
                session.control.phase("closed its session")
                gone = self.gate.ask(op="add", key=f"{store.prefix}leaving", amount=1)["value"]
                if gone == self.member.size:
                    left = Failure(session.control.rank, LEFT, f"{self.own.layout.name} left", None)
                    store.compare_set("failure", "", json.dumps(asdict(left)))
            self._drop(session.control, session.pair)
            self.session = None
        self._leave()

    def abandon(self, error: ReshardError) -> None:
        """Go, and tell everybody that this rank failed."""
        if self.closed:
            return
        self.tell(error)
        if self.session is not None:
            self._drop(self.session.control, self.session.pair)
            self.session = None
        self._leave()

    def _controls(self) -> list[Control]:
        return [] if self.session is None else [self.session.control]

    def _leave(self) -> None:
        self.closed = True
        self.watchdog.end()
        with contextlib.suppress(TransferError):
            self.gate.leave()
