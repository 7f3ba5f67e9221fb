"""Jobs that were started each by itself: what a rank of either has at the source's gate.

The source's first rank opens the gate. Destination jobs come in when they are ready, leave, fail and come again; the
source takes those that are there at the beginning of a refit. With each it has a control plane, a plan and
connections of their own, so that the failure of one is none of the others'. Nothing of this uses torch's default
process group.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard_cli import __version__
from reshard_cli.errors import DocumentError, PeerLostError, ReshardError, TransferError, printable
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.build import PLAN_VERSION, build_plan
from reshard_cli.refit.ends import DestinationEnd, SourceEnd
from reshard_cli.refit.failing import cut_off, settled, wrapped
from reshard_cli.refit.joining import meet
from reshard_cli.refit.pair import Pair
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.transport.control import Control, Failure
from reshard_cli.transport.gate_client import (
    Address,
    GateStore,
    StopAskedError,
)
from reshard_cli.transport.store import Prefixed, Store
from reshard_cli.transport.watchdog import Watchdog

__all__ = [
    "LEFT",
    "SLICE",
    "SOURCE_FAILURE",
    "JobLeftError",
    "Joined",
    "JoinedSession",
    "Membership",
    "OwnProcess",
    "differences",
    "facts_of",
]

LEFT = 0  # the exit code of a failure that is none: a job that went in good order
SOURCE_FAILURE = "source/failure"
SLICE = 1.0


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
class OwnProcess:
    """A process that is this program's own: `stop` says when it is asked to end.

    `claim` says once, on one of the ranks that share a terminal, that this one is to tell of a failure.
    """

    stop: Callable[[], bool]
    claim: Callable[[], bool]


@dataclass(slots=True)
class JoinedSession:
    """This rank's part in the refits of one destination job."""

    number: int
    name: str
    control: Control
    pair: Pair
    turns: int = 0


def facts_of(
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


def differences(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return every difference between two sides' facts, for people."""
    lines = []
    for key in [*own, *(key for key in other if key not in own)]:
        one, two = own.get(key), other.get(key)
        if key.endswith(("source", "destination")):
            if one is None or two is None:
                continue
            if isinstance(one, list) and isinstance(two, list):
                if any(layout in two for layout in one):
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


class Joined:
    """What a rank of either job has: its connection to the gate, and its sign of life."""

    def __init__(self, member: Membership, options: RefitOptions, process: OwnProcess | None) -> None:
        """`process`: where it is this program's own, and may be ended."""
        # how many refits each side wants is its own affair
        self.member, self.options = member, replace(options, iterations=None)
        self._process = process
        self.gate = GateStore(member.address, member.token, options.timeout, self._stop)
        self.store: Store = self.gate  # by which the sessions ask
        self.watchdog = Watchdog(
            self._another, parent=None, ends=process is not None, last_words=self._end_told
        )
        self.job: Control
        self.closed = False

    def _stop(self) -> bool:
        return self._process is not None and self._process.stop()

    def _another(self) -> Store:
        return self.gate.another()

    def _enter(self, facts: dict[str, Any], note: dict[str, Any] | None, name: str) -> str:
        """Come in with all of the job's ranks; return its entry. `self.job` is the job's own control plane then."""
        member, timeout = self.member, self.options.timeout
        own_note = note if member.rank == 0 else None
        entry = self.gate.enter(member.role, member.identity, name, member.rank, member.size, facts, own_note)
        prefix = "source/" if member.role == "source" else f"entries/{entry}/"
        self.job = self._controlled(prefix, member.rank, member.size, lambda rank: f"{name} {rank}")
        if self._wait(f"complete/{entry}", [f"{prefix}failure"], timeout):
            here = next((one.here for one in self.gate.jobs(member.role) if one.entry == entry), [])
            late = [rank for rank in range(member.size) if rank not in here]
            names = ", ".join(f"{name} {rank}" for rank in late[:8])
            raise PeerLostError(f"joining: {names or name} did not come within {timeout:g} s")
        return entry

    def _controlled(self, prefix: str, rank: int, num_ranks: int, name_of: Callable[[int], str]) -> Control:
        """Return a control plane under a prefix of the gate's keys, with this rank's will and signs of life."""
        control = Control(Prefixed(self.store, prefix), rank, num_ranks, self.options.timeout, name_of)
        lost = Failure(rank, TransferError.exit_code, f"{name_of(rank)} {{how}} (last: {{phase}})", rank)
        self.gate.will(f"{prefix}failure", lost, f"{prefix}phase/{rank}")
        # a source goes on without a job that failed; its transports' timeouts bring it back
        self.watchdog.add(
            control, lambda inner: Prefixed(inner, prefix),
            (lambda _: None) if self.member.role == "source" else None,
        )  # fmt: skip
        return control

    def _wait(self, key: str, unless: Sequence[str], seconds: float) -> bool:
        """Wait for a key; return whether it is lacking still.

        Raises a failure under one of `unless`, StopAskedError where this process is to end.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if not self.gate.wait_keys([key], unless, min(left, SLICE)):
                return False
            for one in unless:
                if self.gate.check([one]):
                    raise Failure(**json.loads(self.gate.get(one))).error()
            if self._stop():
                raise StopAskedError(f"asked to end while {key!r} was not there")
            if left <= SLICE:
                return True

    def first_to_tell(self) -> bool | None:
        """Say whether this rank is the one of its job to tell people of a failure; None: nobody can say any more."""
        try:
            told: bytes = self.job.store.compare_set("told", "", str(self.member.rank))
        except (TransferError, AttributeError):
            return None  # the gate is gone
        return told.decode() == str(self.member.rank)

    def _end_told(self, store: Store | None, failure: Failure | None) -> None:
        """Tell people why the watchdog ends this process, where no other rank of the job has: all may be stuck."""
        why = "lost the source's gate" if failure is None else failure.message
        assert self._process is not None
        first = False
        if store is None or not isinstance(self.job.store, Prefixed):
            first = self._process.claim()
        else:
            with contextlib.suppress(TransferError):
                own = f"the watchdog of {self.member.rank}"
                first = Prefixed(store, self.job.store.prefix).compare_set("told", "", own).decode() == own
        if first:
            print(f"error: {printable(why)}", file=sys.stderr, flush=True)

    def fail(self, error: ReshardError) -> None:
        """Tell the job's other ranks of a failure that ends this one."""
        with contextlib.suppress(TransferError, AttributeError):
            self.job.fail(error)

    def tell(self, error: ReshardError) -> None:
        """Tell every rank of both jobs of a failure that ends this one."""
        self.fail(error)
        if (
            error.exit_code == DocumentError.exit_code
        ):  # this job's own affair, that the other one cannot mend
            rank = self.member.rank
            error = TransferError(f"{self.job.name_of(rank)} ended: {error}", rank)
        for control in self._controls():
            with contextlib.suppress(TransferError):  # a gate that is lost has nobody to tell
                control.fail(error)

    def exit_code(self, error: ReshardError) -> int:
        """Return the exit code of the job's first failure, that of all its ranks, after this one has told its own.

        Another rank's own affair comes back from the other job as the transfer's failure, perhaps before that rank ends.
        """
        with contextlib.suppress(TransferError):  # the gate is lost
            failure = self.job.failure()
            if failure is not None:
                return failure.exit_code
        return error.exit_code

    def _controls(self) -> list[Control]:
        """Return the control planes with the other job's ranks."""
        raise NotImplementedError

    def _session(
        self, number: int, rank: int, jobs: Jobs, source: SourceEnd | None,
        end: Callable[[str], DestinationEnd] | None,
    ) -> JoinedSession:  # fmt: skip
        """Meet the ranks of the other job and agree on a plan; nothing is connected yet."""
        control = self._controlled(
            f"session/{number}/", rank, jobs.num_ranks(False), lambda one: jobs.name_of(one, False)
        )
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
        return JoinedSession(number, other, control, pair)

    def _failed(self, control: Control, pair: Pair | None, error: BaseException) -> ReshardError:
        """Settle who was first to fail, tell the session's other ranks, and let go of its connections."""
        told = error if isinstance(error, ReshardError) else wrapped(control, error, control.rank)
        try:
            told = settled(control, told)
            control.fail(told)
            failure = control.failure()
            if failure is not None:
                told = failure.error() if failure.exit_code != LEFT else JobLeftError(failure.message)
        except (RuntimeError, TransferError) as lost:
            told = cut_off(control, told, lost)
        if pair is not None:
            pair.abort()  # messages may be in flight, to ranks that are lost
        self._drop(control, pair)
        return told

    def _drop(self, control: Control, pair: Pair | None) -> None:
        self.watchdog.remove(control)
        prefix = control.store.prefix if isinstance(control.store, Prefixed) else ""
        with contextlib.suppress(TransferError):
            self.gate.will(f"{prefix}failure", None, "")
        if pair is not None:
            pair.close()


class JobLeftError(TransferError):
    """A destination job went in good order."""
