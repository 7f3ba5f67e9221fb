"""A rank's connection to the gate: a store for everything else here, and how a job comes in.

The source's first rank opens the gate; everybody, itself included, connects to it, in any order.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.transport.control import Failure
from reshard_cli.transport.frames import (
    GREETING_LIMIT,
    PROTOCOL,
    end_when_silent,
    proof,
    receive_frame,
    send_frame,
)

__all__ = [
    "Address",
    "GateProcess",
    "GateStore",
    "JobAtGate",
    "StopAskedError",
    "open_gate",
    "parse_address",
]

_RETRY = 0.1
_SLICE = 1.0  # seconds of one wait at the gate; longer ones are asked for again: a cut network says nothing
_TURN = 0.05  # seconds of one wait of torch's process groups, and between two


class StopAskedError(TransferError):
    """This process was asked to end while it waited for the other job."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gate is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class JobAtGate:
    """A job at the gate: what it is compared by, its note (its documents), and which of its ranks are here."""

    entry: str
    name: str
    size: int
    facts: dict[str, Any]
    note: Any
    complete: bool
    here: list[int]


def parse_address(text: str, flag: str = "--join") -> Address:
    """Return the address of `HOST:PORT` or `tcp://HOST:PORT`. Raises DocumentError."""
    host, _, port = str(text).strip().removeprefix("tcp://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    number = int(port) if port.isdecimal() and len(port) <= 5 else 0
    if not _is_host(host) or not 0 < number < 65536:
        raise DocumentError(f"{flag}: {text!r} is not HOST:PORT, as 10.0.0.1:29600")
    return Address(host, number)


def _is_host(text: str) -> bool:
    """Say whether this may be a name or an address of a host, so that looking it up is worth waiting for."""
    if ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            return False
        return True
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return re.fullmatch(r"[\w.-]+", text) is not None


@dataclass(slots=True)
class GateProcess:
    """The gate as a child of this process; it ends by itself when this process does, or says `leave(end=True)`."""

    child: subprocess.Popen[bytes]

    def close(self) -> None:
        """Wait for it to end; take it away where it does not."""
        try:
            self.child.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.end()

    def end(self) -> None:
        """Take it away at once."""
        self.child.kill()
        self.child.wait()


def open_gate(address: Address, token: str, timeout: float = 120.0) -> GateProcess:
    """Listen at this address, which has to be one of this machine's. Raises TransferError where that fails.

    `timeout`: the seconds of silence after which a rank's connection is given up.
    """
    try:
        listener = _listening(address)
    except OSError as error:
        raise TransferError(
            f"cannot listen at {address}: {error.strerror or error}; give a free port on an address of the host "
            f"of the source's rank 0"
        ) from error
    command = [
        sys.executable, "-m", "reshard_cli.transport.gate", str(listener.fileno()), str(os.getpid()), str(timeout),
    ]  # fmt: skip
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True
        )
        assert child.stdin is not None
        with child.stdin as told:
            told.write(token.encode())
    finally:
        listener.close()
    return GateProcess(child)


def _listening(address: Address) -> socket.socket:
    family, kind, *_, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


_open: weakref.WeakSet[GateStore] = weakref.WeakSet()


def _close_inherited() -> None:
    """Let go of the connections in a forked child: the gate has to see when the rank itself is gone."""
    for store in list(_open):
        store.close()


os.register_at_fork(after_in_child=_close_inherited)


class GateStore:
    """One connection to the gate. Values are text; raises TransferError when the gate is gone.

    A connection and those made with `another` go together: when one finds that the gate is lost, nobody has to
    find it out again.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        timeout: float,
        stop: Callable[[], bool] = lambda: False,
        together: weakref.WeakSet[GateStore] | None = None,
    ) -> None:
        """Connect and prove to know the token, waiting until the gate is open.

        Raises TransferError where nobody is there within `timeout` seconds, or the gate does not let this one in,
        StopAskedError where `stop` says so before.
        """
        self._address, self._token = address, token
        self._timeout = timeout
        self._lost = ""  # how the gate was lost
        self._together: weakref.WeakSet[GateStore] = weakref.WeakSet() if together is None else together
        self._lock = threading.Lock()
        self._for_groups: _GroupStore | None = None
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(deadline - time.monotonic(), 1.0)
                self._socket = socket.create_connection((address.host, address.port), timeout=min(5.0, left))
                self._greet()
                _open.add(self)
                self._together.add(self)
                return
            except (OSError, ValueError, KeyError) as error:
                if time.monotonic() > deadline:
                    raise TransferError(
                        f"nobody answers at {address} within {timeout:g} s (is the source job up, and its rank 0 there?): "
                        f"{error}"
                    ) from error
                if stop():
                    raise StopAskedError(f"asked to end while nobody answered at {address}") from error
                time.sleep(_RETRY)

    def _greet(self) -> None:
        peer = self._socket
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_silent(peer, self._timeout)
            hello = receive_frame(peer, GREETING_LIMIT)
            if hello.get("reshard-cli") != PROTOCOL:
                raise TransferError(
                    f"{self._address} speaks protocol {hello.get('reshard-cli')!r}, this is protocol {PROTOCOL}: "
                    f"use one version of reshard-cli in both jobs"
                )
            number = secrets.token_hex(32)
            own = proof(self._token, "client", hello["number"], number)
            send_frame(peer, {"reshard-cli": PROTOCOL, "number": number, "proof": own})
            answer = receive_frame(peer, GREETING_LIMIT)
            if "refused" in answer:
                raise TransferError(f"{self._address} does not let this rank in: {answer['refused']}")
            if answer.get("proof") != proof(self._token, "server", hello["number"], number):
                raise TransferError(f"{self._address} does not know the token: it is not the source's gate")
        except BaseException:
            peer.close()
            raise

    def another(self) -> GateStore:
        """Return another connection to the same gate."""
        return GateStore(self._address, self._token, self._timeout, together=self._together)

    def ask(self, seconds: float = 0.0, **frame: Any) -> dict[str, Any]:
        """Ask the gate something that takes it at most so many seconds. Raises TransferError."""
        with self._lock:
            try:
                self._socket.settimeout(seconds + max(self._timeout, 1.0))
                send_frame(self._socket, frame)
                answer = receive_frame(self._socket)
            except (OSError, ValueError) as error:
                self.give_up(str(error))
                raise TransferError(self._lost) from error
            except BaseException as error:  # an interrupt: the gate tells the others that this rank is gone
                self._lost = (
                    self._lost or f"lost the source's gate at {self._address}: {type(error).__name__}"
                )
                self._socket.close()
                raise
        if "error" in answer:
            raise TransferError(f"the gate at {self._address}: {answer['error']}")
        return answer

    def give_up(self, why: str) -> None:
        """Use this connection no more, as a late answer would be taken for the next one's; nor those beside it."""
        self._lost = self._lost or f"lost the source's gate at {self._address}: {why}"
        self._socket.close()
        for other in self._together:
            if other is not self and not other._lost:
                other._lost = self._lost
                with contextlib.suppress(OSError):
                    other._socket.shutdown(socket.SHUT_RDWR)  # its own thread comes back, and closes it

    # ---- a store ----------------------------------------------------------------------------------

    def set(self, key: str, value: str) -> None:
        self.ask(op="set", key=key, value=value)

    def get(self, key: str) -> bytes:
        value = self.ask(op="get", key=key)["value"]
        if value is None:
            raise TransferError(f"the gate at {self._address} has no {key!r} any more")
        return str(value).encode()

    def check(self, keys: list[str]) -> bool:
        return bool(self.ask(op="check", keys=keys)["value"])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return str(self.ask(op="compare_set", key=key, expected=expected, value=value)["value"]).encode()

    def delete_key(self, key: str) -> bool:
        return bool(self.ask(op="delete", key=key)["value"])

    def delete_all(self, prefix: str) -> None:
        """Delete every key under a prefix."""
        self.ask(op="delete", key=prefix, prefix=prefix)

    def wait_keys(self, keys: Sequence[str], unless: Sequence[str], seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            part = min(left, _SLICE)
            frame = {"op": "wait", "keys": list(keys), "unless": list(unless), "most": part}
            lacking: list[str] = self.ask(part, **frame)["lacking"]
            if not lacking or left <= part or (unless and any(self.check([key]) for key in unless)):
                return lacking

    def for_groups(self, prefix: str) -> Any:
        if self._for_groups is None:
            # kept, as torch keeps only what is its own of it
            self._for_groups = _GroupStore(self)
        return dist.PrefixStore(prefix, self._for_groups)  # type: ignore[attr-defined]

    # ---- jobs -------------------------------------------------------------------------------------

    def enter(
        self, role: str, job: str, name: str, rank: int, size: int, facts: dict[str, Any], note: Any
    ) -> str:
        """Come in as a rank of a job; return the job's entry. Raises TransferError with every difference."""
        answer = self.ask(
            op="enter", role=role, job=job, name=name, rank=rank, size=size, facts=facts, note=note
        )
        if "refused" in answer:
            raise TransferError("\n".join(answer["refused"]))
        return str(answer["entry"])

    def jobs(self, role: str) -> list[JobAtGate]:
        """Return the jobs of a role that are here and alive."""
        return [JobAtGate(**one) for one in self.ask(op="jobs", role=role)["jobs"]]

    def will(self, key: str, failure: Failure | None, phase_key: str) -> None:
        """Have this failure written (unless there is one) when the connection ends; None takes it back.

        `{phase}` in its message becomes the text under `phase_key` at that time.
        """
        self.ask(
            op="will", key=key, failure=None if failure is None else asdict(failure), phase_key=phase_key
        )

    def leave(self, *, end: bool = False) -> None:
        """Say goodbye: no will is carried out. `end`: the gate may close, too."""
        try:
            self.ask(op="leave", end=end)
        finally:
            self.close()

    def close(self) -> None:
        """End the connection as it is."""
        self._socket.close()


class _GroupStore(dist.Store):  # type: ignore[name-defined,misc]
    """The gate as torch's process groups want a store: values are bytes, kept as text."""

    def __init__(self, gate: GateStore) -> None:
        super().__init__()
        self._gate = gate

    def set(self, key: str, value: bytes | str) -> None:
        data = value if isinstance(value, bytes) else value.encode()
        self._gate.set(key, data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return str(self._gate.ask(op="get", key=key)["value"]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._gate.ask(op="add", key=key, amount=amount)["value"])

    def check(self, keys: list[str]) -> bool:
        return self._gate.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        # in short turns: the thread that connects may be left behind, and others ask by the same connection
        failure = "/".join([*keys[0].split("/", 2)[:2], "failure"])  # of the session that connects
        while lacking := self._gate.wait_keys(keys, [failure], _TURN):
            if time.monotonic() > deadline or self._gate.check([failure]):
                raise RuntimeError(f"Timed out waiting for {', '.join(lacking[:4])}")
            time.sleep(_TURN)

    def delete_key(self, key: str) -> bool:
        return self._gate.delete_key(key)
