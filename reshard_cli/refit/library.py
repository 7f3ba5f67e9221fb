"""The library: a running job joins the other one, binds its tensors, and is refitted version by version.

    import reshard_cli as rs

    session = rs.join("train.yaml", "infer.yaml", role="source", rendezvous="tcp://10.0.0.1:29600", token=token)
    session.bind(model)
    session.refit(version=step)
    session.close()

The destination does the same with `role="destination"`, and its `refit()` returns the version that came.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from reshard_cli.errors import DocumentError, ReshardError, TransferError, VerifyError
from reshard_cli.plan.routes import Mode
from reshard_cli.refit.documents import Described, described
from reshard_cli.refit.ends import LiveEnd, LiveSourceEnd
from reshard_cli.refit.failing import wrapped
from reshard_cli.refit.joined import Membership
from reshard_cli.refit.joined_destination import JoinedDestination
from reshard_cli.refit.joined_source import JoinedSource, RefitOfJob
from reshard_cli.refit.prepare import RefitOptions, check_timeout, check_token, parse_domain
from reshard_cli.transport.gate_client import parse_address
from reshard_cli.weights.live import Bindable, Hooks, LiveTensors
from reshard_cli.weights.live_layout import Layout

__all__ = ["Handle", "Session", "identity_of_job", "join", "place_in_job"]

Document = str | Path | Layout
Role = Literal["source", "destination"]


def join(
    source: Document | None,
    destination: Document | Sequence[Document] | None,
    *,
    role: Role,
    rendezvous: str,
    token: str,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    model: str | Path | None = None,
    mode: Mode = "hybrid",
    staging: int = 512 << 20,
    timeout: float = 120.0,
    backend: Literal["auto", "nccl", "gloo"] = "auto",
    domain: str | None = None,
    verify: bool = False,
    allow_extra: bool = False,
    double_buffer: bool = False,
) -> Session:
    """Join the other job, on every rank of this one; return when this side is whole and fits the other.

    `source`, `destination`: layout documents, or `Layout`s. A job needs its own; the other side's may be None,
    then it is taken as the other side says, else it is compared. A source may name several destination layouts.
    `rendezvous`: HOST:PORT, an address of the source's rank 0, which listens there. `token`: the secret that both
    jobs share. `rank` and `world_size` of this job are taken from torch's default process group or from torchrun's
    environment where they are not given; the group is not used for anything else. `job` names this start of
    the job where several come from one environment. staging in bytes, timeout in seconds.

    Raises DocumentError for a wrong document, TransferError where the other side does not come, does not know
    the token, or has something else (all differences at once).
    """
    if role not in ("source", "destination"):
        raise DocumentError(f"role: {role!r} is neither 'source' nor 'destination'")
    for name, value, choices in (
        ("mode", mode, get_args(Mode)),
        ("backend", backend, ("auto", "nccl", "gloo")),
    ):
        if value not in choices:
            raise DocumentError(f"{name}: {value!r} is none of {', '.join(choices)}")
    check_token(token, "token")
    check_timeout(timeout, "timeout")
    parse_domain(domain, "domain")
    if not isinstance(staging, int) or staging < 1:
        raise DocumentError(f"staging: {staging!r} is not a number of bytes, as {512 << 20}, the default")
    own_rank, size, local_rank = place_in_job(rank, world_size)
    options = RefitOptions(
        source=Path(), destination=Path(), mode=mode, verify=verify, staging=staging, timeout=timeout,
        backend=backend, domain=domain, allow_extra=allow_extra, double_buffer=double_buffer,
    )  # fmt: skip
    path = None if model is None else Path(model)
    member = Membership(
        role, identity_of_job(job), own_rank, size, local_rank, parse_address(rendezvous, "rendezvous"), token
    )
    train = None if source is None else described(source, path)
    several = isinstance(destination, (list, tuple))
    if several and not destination:
        raise DocumentError("destination: an empty list lets nobody in; None lets in whoever knows the token")
    given: Sequence[Any] = destination if several else [destination]  # type: ignore[assignment]
    infer = None if destination is None else [described(one, path) for one in given]
    if role == "source":
        if train is None:
            raise DocumentError("source: the source job has to say its own layout")
        _check_size(train, size)
        return Session.of_source(member, options, train, infer)
    if infer is None or len(infer) != 1:
        raise DocumentError("destination: a destination job has to say its own layout, and only that")
    _check_size(infer[0], size)
    return Session.of_destination(member, options, infer[0], train)


def place_in_job(rank: int | None, world_size: int | None) -> tuple[int, int, int]:
    """Return (rank, ranks of the job, rank on this host). Raises DocumentError where only a part is known."""
    environment = os.environ
    if rank is None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif rank is None and "RANK" in environment:
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    elif rank is None:
        rank, world_size = 0, world_size or 1
    if not isinstance(rank, int) or not isinstance(world_size, int) or not 0 <= rank < world_size:
        raise DocumentError(f"rank {rank!r} of {world_size!r}: give both, rank from 0 to world_size - 1")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return rank, world_size, torch.cuda.current_device()  # the program has chosen
    gpus = torch.cuda.device_count()
    if "LOCAL_RANK" in environment:
        return rank, world_size, _number("LOCAL_RANK")
    return rank, world_size, rank % gpus if gpus else 0


def _number(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        raise DocumentError(f"environment: {name} is {text!r}, not a whole number as torchrun sets it")
    return int(text)


def identity_of_job(job: str | None = None) -> str:
    """Return what all ranks of one start of a job share, and no other job at the same gate does."""
    if job is not None:
        return job
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


def _check_size(own: Described, size: int) -> None:
    if own.layout.num_ranks != size:
        raise DocumentError(
            f"layout {own.layout.name!r} has {own.layout.num_ranks} ranks, this job has {size}"
        )


class Handle:
    """A refit that runs beside what the caller does."""

    def __init__(self, run: Callable[[Handle], Any]) -> None:
        self._released = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._told = False

        # a thread has a device and a stream of its own, which know nothing of what the caller's was given
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        order = torch.cuda.stream(torch.cuda.current_stream()) if started else contextlib.nullcontext()

        def work() -> None:
            try:
                with order:
                    self._result = run(self)
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                self._error = error
            finally:
                self._released.set()

        self._thread = threading.Thread(target=work, name="refit")
        self._thread.start()

    def release(self) -> None:
        """Say that the tensors are not read any more."""
        self._released.set()

    def wait_released(self) -> None:
        """Wait until the bound tensors are not read any more: they may be changed then."""
        self._released.wait()

    @property
    def done(self) -> bool:
        """Whether the refit has come to its end."""
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """Wait for the end; return what `refit` would have, or raise what it would have."""
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error
        return self._result

    def settle(self) -> None:
        """Wait for the end; raise what it would have, unless `wait` did so already."""
        self._thread.join()
        if not self._told:
            self.wait()


class Session:
    """This rank of a job that has joined the other one."""

    def __init__(
        self,
        role: Role,
        live: LiveTensors,
        source: JoinedSource | None,
        destination: JoinedDestination | None,
    ) -> None:
        self.role = role
        self._live = live
        self._source, self._destination = source, destination
        self._hooks: Hooks = Hooks()
        self._running: Handle | None = None
        self._turn = threading.Lock()
        self._owner: int | None = None  # the thread that is in a refit
        self._closed = False

    @classmethod
    def of_source(
        cls, member: Membership, options: RefitOptions, own: Described, accepted: Sequence[Described] | None
    ) -> Session:
        """Join as the source; see `join`."""
        live = LiveTensors(None)
        end = LiveSourceEnd(live, allow_extra=options.allow_extra)
        return cls("source", live, JoinedSource(member, options, own, accepted, end), None)

    @classmethod
    def of_destination(
        cls, member: Membership, options: RefitOptions, own: Described, source: Described | None
    ) -> Session:
        """Join as a destination; see `join`."""
        live = LiveTensors(None)
        session: Session

        def end(_: str) -> LiveEnd:
            return LiveEnd(
                live,
                allow_extra=options.allow_extra,
                double_buffer=options.double_buffer,
                hooks=session._hooks,
            )

        joined = JoinedDestination(member, options, own, source, end)
        session = cls("destination", live, None, joined)
        return session

    def bind(
        self,
        tensors: Bindable,
        *,
        before: Callable[[int], object] | None = None,
        after: Callable[[int], object] | None = None,
        load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None,
    ) -> None:
        """Name this rank's tensors: a module, a mapping by storage name, or a function that returns one.

        They are looked up again at every refit; of a DTensor its local part counts. On a destination, `before` is
        called with the version just before the tensors are written, `after` when all of it is there on all ranks.
        `load_weights`, the engine's own loader, gets (name, tensor) of what the documents give `route: broadcast`
        and the engine does not have by that name: values that it has to change.
        """
        self._live.bind(tensors)
        self._hooks.before, self._hooks.after, self._hooks.load_weights = before, after, load_weights

    @property
    def version(self) -> int | None:
        """On a destination: the version that is wholly there, or None."""
        return None if self._destination is None else self._destination.version

    @property
    def torn(self) -> bool:
        """On a destination: whether the tensors are part one version, part another."""
        return self._destination is not None and self._destination.torn

    def refit(self, version: int | None = None) -> int | None:
        """Run one refit; return its version. Every rank of the job calls it.

        A source names the version, and sends it to all destination jobs that are there; it waits up to the
        timeout for a first one. A destination waits for the source's next version as long as the source lives;
        None: the source has closed. Raises TransferError where a rank was lost, with its name, and VerifyError where
        an element was found wrong (`verify`): a source may go on, and the job that failed may join again; a
        destination has to join again.
        """
        version = self._asked("refit", version)
        self._settle()
        return self._refit(version)

    def _asked(self, what: str, version: int | None) -> int | None:
        """Return the version to refit. Raises DocumentError where this session cannot, whatever the other side does."""
        self._check_free(what)
        if self._closed:
            raise DocumentError(f"{what}: this session is closed; join again")
        if self._source is None:
            if version is not None:
                raise DocumentError("version: the source says which one comes; leave it out on a destination")
            return None
        try:
            if version is None or isinstance(version, bool):
                raise TypeError
            return operator.index(version)
        except TypeError:
            raise DocumentError(
                f"version: the source has to say which version it sends, a whole number, not {version!r}"
            ) from None

    def _check_free(self, what: str) -> None:
        if self._owner == threading.get_ident():
            raise DocumentError(
                f"{what}: called by a hook of the refit that runs; call it when that has returned"
            )

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Keep other threads out: a rank takes part in one refit at a time, in the order of all ranks."""
        if not self._turn.acquire(blocking=False):
            raise DocumentError(f"{what}: another thread is in a refit of this session; wait for it")
        try:
            self._owner = threading.get_ident()
            yield
        finally:
            self._owner = None
            self._turn.release()

    def _settle(self) -> None:
        """Come to the end of a refit that runs. Raises its error where nobody has asked its handle."""
        running, self._running = self._running, None
        if running is not None:
            running.settle()

    def _refit(self, version: int | None, released: Callable[[], None] = lambda: None) -> int | None:
        with self._alone("refit"):
            if self._destination is not None:
                return self._destination.refit()
            assert self._source is not None
            assert version is not None
            done = self._source.refit(version, released=released)
        if any(one.error is not None for one in done):
            raise _failure(done)
        return version

    def refit_async(
        self, version: int | None = None, *, until: Literal["packed", "snapshot"] | None = None
    ) -> Handle:
        """Start a refit and return at once, or after a snapshot; a source has to say which in `until`.

        `snapshot`: the source's tensors are copied first, at the cost of their memory, and may be changed as soon
        as this returns. `packed`: nothing is copied; they may be changed after `handle.wait_released()`. A destination
        needs `double_buffer`, so that it can go on with the old version; its `before` hook says when it cannot.
        A source's tensors are looked up by the caller's thread; a destination's hooks are called by another one.
        """
        version = self._asked("refit_async", version)
        self._settle()
        if self._destination is not None:
            if not self._destination.options.double_buffer:
                raise DocumentError("refit_async: a destination needs double_buffer=True to go on meanwhile")
            self._running = Handle(lambda _: self._refit(version))
            return self._running
        assert self._source is not None
        end = self._source.end
        assert isinstance(end, LiveSourceEnd)
        if until not in ("packed", "snapshot"):
            raise DocumentError(f"until: a source says 'packed' or 'snapshot', not {until!r}")
        end.take(copied=until == "snapshot")

        def run(handle: Handle) -> int | None:
            try:
                return self._refit(version, handle.release)
            finally:
                end.drop()

        self._running = Handle(run)
        if until == "snapshot":
            self._running.release()
        return self._running

    def close(self) -> None:
        """Leave in good order. The other side's ranks see it, and do not wait."""
        self._check_free("close")
        try:
            self._settle()
        finally:
            with self._alone("close"):
                self._closed = True
                for joined in (self._source, self._destination):
                    if joined is not None:
                        joined.close()

    def __enter__(self) -> Session:
        """Leave in good order at the end of the block; after an exception, tell the other ranks of it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        joined = self._source or self._destination
        if error is None or joined is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        if self._running is not None:
            try:
                self._settle()
            except ReshardError as late:
                error.add_note(f"and the refit that ran beside it failed: {late}")
        self._closed = True
        member = joined.member
        name = f"{joined.own.layout.name} {member.rank}"
        joined.abandon(error if isinstance(error, ReshardError) else wrapped(None, error, member.rank, name))


def _failure(done: Sequence[RefitOfJob]) -> ReshardError:
    """Return one error for all jobs that failed: wrong values weigh more than a lost job."""
    verify = any(isinstance(one.error, VerifyError) for one in done)
    lines = [one.told() for one in done if one.error is not None]
    reached = [one.job for one in done if one.error is None]
    message = "\n  ".join(lines) + (f"; it is on {', '.join(reached)}" if reached else "")
    return VerifyError(message) if verify else TransferError(message)
