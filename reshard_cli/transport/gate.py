"""The gate: where the ranks of separately started jobs meet. A process of its own beside the source's first rank.

It lets in who knows the token, keeps small values for those, remembers which jobs are there, and tells the
others when one of them is gone: every rank leaves a will, which is carried out when its connection ends without a
goodbye. It knows nothing of weights or plans, and imports nothing but the standard library, so that it starts at
once and a crowd of strangers costs the trainer no time. It ends with its parent, after the others were told.

`python -m reshard_cli.transport.gate LISTENING_FD PARENT_PID TIMEOUT`, with the token on standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import math
import os
import secrets
import socket
import struct
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from reshard_cli.transport.frames import GREETING_LIMIT, PROTOCOL, encoded, end_when_silent, proof

__all__ = ["Gate", "main"]

Frame = dict[str, Any]

_GREETING_SECONDS = 5.0
_MOST_STRANGERS = 128  # connections that have not proven anything yet; more of them push out the oldest
_OUTLAST = 8.0  # seconds that the gate outlives its parent, for the others to read why
_MOST_OF_A_FRAME = 1 << 28  # bytes from somebody who knows the token
_MOST_OF_A_KEY = 4096
_DEEPEST = 256  # calls, and so objects in objects: those who are told of a value read it with a fuller stack
_LENGTH = struct.Struct(">I")


@dataclass(slots=True)
class _Job:
    """A job that has come, or is coming: one start of it. `lost`: one of its ranks is gone."""

    entry: str
    role: str
    identity: str
    name: str
    size: int
    facts: Frame
    note: Any
    ranks: set[int] = field(default_factory=set)
    connected: int = 0
    lost: bool = False

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.size


@dataclass(slots=True)
class _Peer:
    """A connection that has proven to know the token."""

    wills: dict[str, Frame] = field(default_factory=dict)
    job: _Job | None = None
    left: bool = False
    cut_off: bool = False


class Gate:
    """The values, the jobs and the connections."""

    def __init__(self, token: str, timeout: float) -> None:
        """`timeout`: the seconds of silence after which the network to a rank, or its host, is taken to be down."""
        self._token, self._timeout = token, timeout
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._strangers: OrderedDict[int, asyncio.StreamWriter] = OrderedDict()
        self._peers: set[int] = set()
        self._jobs: list[_Job] = []
        self._gone: list[str] = []  # entries of jobs of which nobody is connected any more
        self._numbers, self._entries = itertools.count(1), itertools.count(1)
        self._operations: dict[str, Callable[[_Peer, Frame], Awaitable[Frame]]] = {
            "set": self._set, "get": self._get, "check": self._check, "compare_set": self._compare_set,
            "add": self._add, "delete": self._delete, "wait": self._wait, "will": self._will,
            "enter": self._enter, "jobs": self._list, "leave": self._leave,
        }  # fmt: skip
        self.ended = False

    @property
    def crowd(self) -> int:
        """How many that know the token are connected."""
        return len(self._peers)

    # ---- connections ------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        number = next(self._numbers)
        self._strangers[number] = writer
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.popitem(last=False)[1].transport.abort()
        peer = _Peer()
        reading: asyncio.Task[Frame] | None = None
        try:
            if not await asyncio.wait_for(self._greeted(reader, writer), _GREETING_SECONDS):
                return
            self._strangers.pop(number, None)
            self._peers.add(number)
            end_when_silent(writer.get_extra_info("socket"), self._timeout)
            reading = asyncio.ensure_future(_read(reader, _MOST_OF_A_FRAME))
            while not peer.left:
                frame = await reading
                reading = asyncio.ensure_future(_read(reader, _MOST_OF_A_FRAME))
                writer.write(encoded(await self._answered(peer, frame, reading)))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, ValueError, RecursionError) as error:
            # a stranger without manners, or a peer that is gone: its will says the rest
            peer.cut_off = isinstance(error, OSError) and not isinstance(error, ConnectionError)
        finally:
            self._strangers.pop(number, None)
            self._peers.discard(number)
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            self._parted(peer)
            writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1)

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = secrets.token_hex(32)
        writer.write(encoded({"reshard-cli": PROTOCOL, "number": own}))
        await writer.drain()
        frame = await _read(reader, GREETING_LIMIT)
        number, answer = frame.get("number"), frame.get("proof")
        right = isinstance(number, str) and isinstance(answer, str) and len(number) >= 32
        right = right and hmac.compare_digest(
            str(answer).encode(), proof(self._token, "client", own, str(number)).encode()
        )
        if frame.get("reshard-cli") != PROTOCOL:
            await self._told_off(writer, f"this is protocol {PROTOCOL} of reshard-cli")
            return False
        if not right:
            await self._told_off(writer, "the token is not this gate's")
            return False
        writer.write(encoded({"proof": proof(self._token, "server", own, str(number))}))
        await writer.drain()
        return True

    @staticmethod
    async def _told_off(writer: asyncio.StreamWriter, why: str) -> None:
        writer.write(encoded({"refused": why}))
        await writer.drain()

    async def _answered(self, peer: _Peer, frame: Frame, following: asyncio.Task[Frame]) -> Frame:
        """Return the answer; raises what ended the connection meanwhile, as somebody who waits may die."""
        answering = asyncio.ensure_future(self._answer(peer, frame))
        try:
            await asyncio.wait({answering, following}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                following.result()
            return await answering
        finally:
            answering.cancel()

    async def _answer(self, peer: _Peer, frame: Frame) -> Frame:
        operation = self._operations.get(str(frame.get("op")))
        if operation is None:
            return {"error": f"no operation {str(frame.get('op'))[:60]!r}"}
        try:
            return await operation(peer, frame)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            return {"error": f"{frame.get('op')}: {type(error).__name__}: {str(error)[:200]}"}

    def _parted(self, peer: _Peer) -> None:
        """Carry out what a connection leaves behind; forget a job when its last one has ended."""
        if not peer.left:
            self._bequeath(peer)
        job = peer.job
        if job is not None:
            job.connected -= 1
            if not job.connected:
                self._forget(job.entry)
                self._gone.append(job.entry)

    def _forget(self, entry: str) -> None:
        prefix = f"entries/{entry}/"
        for key in [one for one in self._values if one.startswith(prefix) or one == f"complete/{entry}"]:
            del self._values[key]

    def _bequeath(self, peer: _Peer) -> None:
        for key, will in peer.wills.items():
            phase = self._values.get(str(will.get("phase_key")), "starting")
            failure = dict(will["failure"])
            how = "is cut off from the gate" if peer.cut_off else "is not running any more"
            failure["message"] = str(failure["message"]).replace("{how}", how).replace("{phase}", phase)
            if key not in self._values:
                self._put(key, json.dumps(failure))
        if peer.job is not None:
            peer.job.lost = True

    # ---- values -----------------------------------------------------------------------------------

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _set(self, _: _Peer, frame: Frame) -> Frame:
        self._put(_key(frame), _text(frame["value"]))
        return {}

    async def _get(self, _: _Peer, frame: Frame) -> Frame:
        return {"value": self._values.get(frame["key"])}

    async def _check(self, _: _Peer, frame: Frame) -> Frame:
        return {"value": all(key in self._values for key in frame["keys"])}

    async def _compare_set(self, _: _Peer, frame: Frame) -> Frame:
        key, expected = _key(frame), _text(frame["expected"])
        if self._values.get(key, "") == expected:
            self._put(key, _text(frame["value"]))
        return {"value": self._values.get(key, expected)}

    async def _add(self, _: _Peer, frame: Frame) -> Frame:
        key = _key(frame)
        total = int(self._values.get(key, "0")) + int(frame["amount"])
        self._put(key, str(total))
        return {"value": total}

    async def _delete(self, _: _Peer, frame: Frame) -> Frame:
        there = [key for key in self._values if key == frame["key"] or _under(key, frame.get("prefix"))]
        for key in there:
            del self._values[key]
        return {"value": len(there)}

    async def _wait(self, _: _Peer, frame: Frame) -> Frame:
        """Wait until all keys are there, or one of `unless` is, at most so many seconds."""
        most = float(frame["most"])
        if not math.isfinite(most):
            raise ValueError(f"a wait of {most} s")
        deadline = time.monotonic() + most
        while True:
            lacking = [key for key in frame["keys"] if key not in self._values]
            stopped = any(key in self._values for key in frame["unless"])
            left = deadline - time.monotonic()
            if not lacking or stopped or left <= 0:
                return {"lacking": lacking}
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            watched = (lacking[0], *frame["unless"])
            for key in watched:
                self._waiting[key].add(future)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(future, left)
            finally:
                for key in watched:
                    self._waiting[key].discard(future)
                    if not self._waiting[key]:
                        del self._waiting[key]

    # ---- jobs -------------------------------------------------------------------------------------

    async def _will(self, peer: _Peer, frame: Frame) -> Frame:
        key, failure = _key(frame), frame["failure"]
        if failure is None:
            peer.wills.pop(key, None)
        else:
            _text(failure["message"])
            peer.wills[key] = {"failure": failure, "phase_key": _text(frame["phase_key"])}
        return {}

    async def _enter(self, peer: _Peer, frame: Frame) -> Frame:
        """Take a rank of a job in, if it fits its job and the job fits the other side's."""
        role, identity, rank, size = frame["role"], frame["job"], int(frame["rank"]), int(frame["size"])
        if peer.job is not None or role not in ("source", "destination") or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} as {str(role)[:60]!r}")
        if not isinstance(frame["facts"], dict):
            raise TypeError("facts are an object")
        _text(frame["name"])
        job = next(
            (
                one
                for one in reversed(self._jobs)
                if (one.role, one.identity) == (role, identity) and not one.lost and rank not in one.ranks
            ),
            None,
        )
        if job is None:
            if role == "source" and any(one.role == role and not one.lost for one in self._jobs):
                return {"refused": ["there is a source job already; one gate serves one"]}
            self._jobs = [one for one in self._jobs if not one.lost]
            for gone in self._gone:  # what others still wrote about them
                self._forget(gone)
            self._gone.clear()
            entry = f"{role}-{next(self._entries)}"
            job = _Job(entry, role, identity, frame["name"], size, frame["facts"], frame.get("note"))
            self._jobs.append(job)
        elif job.size != size or job.facts != frame["facts"]:
            lines = _differences(job.facts, frame["facts"])
            if job.size != size:
                lines.append(f"ranks: {size} here, {job.size} there")
            return {
                "refused": [
                    f"rank {rank} of {job.name!r} differs from its job's other ranks: {line}"
                    for line in lines
                ]
            }
        job.note = job.note or frame.get("note")  # only the job's rank 0 says it, whoever is first
        job.ranks.add(rank)
        job.connected += 1
        peer.job = job
        if job.complete:
            self._put(f"complete/{job.entry}", "1")
            self._put(f"complete/{role}", "1")
        return {"entry": job.entry}

    async def _list(self, _: _Peer, frame: Frame) -> Frame:
        """Return the jobs of a role that are whole and alive, with what they are compared by."""
        return {
            "jobs": [
                {
                    "entry": one.entry, "name": one.name, "size": one.size, "facts": one.facts,
                    "note": one.note, "complete": one.complete, "here": sorted(one.ranks),
                }
                for one in self._jobs
                if one.role == frame["role"] and not one.lost
            ]
        }  # fmt: skip

    async def _leave(self, peer: _Peer, frame: Frame) -> Frame:
        peer.left = True
        if peer.job is not None:
            peer.job.lost = True
        if frame.get("end"):
            self.ended = True
        return {}


def _key(frame: Frame) -> str:
    key = _text(frame["key"])
    if len(key) > _MOST_OF_A_KEY:
        raise ValueError(f"a key of {len(key)} characters")
    return key


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    return value


def _under(key: str, prefix: str | None) -> bool:
    return prefix is not None and key.startswith(prefix)


def _differences(one: Frame, other: Frame) -> list[str]:
    return [
        f"{key}: {other.get(key)} here, {one.get(key)} there" for key in one if one[key] != other.get(key)
    ]


async def _read(reader: asyncio.StreamReader, limit: int) -> Frame:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes")
    value = json.loads(await reader.readexactly(length))
    if not isinstance(value, dict):
        raise ValueError("a frame that is no object")
    return value


async def _run(listener: socket.socket, parent: int, timeout: float, token: str) -> None:
    gate = Gate(token, timeout)
    server = await asyncio.start_server(gate.serve, sock=listener, backlog=1024)
    deadline: float | None = None
    while deadline is None or (time.monotonic() < deadline and gate.crowd):
        await asyncio.sleep(0.1)
        if deadline is None and (gate.ended or os.getppid() != parent):
            deadline = time.monotonic() + _OUTLAST
            server.close()  # who is here may read on; the address is free for the next source
    os._exit(0)  # strangers may be in mid-greeting, and are owed nothing


def main() -> None:
    """Serve until the parent is gone or says the end, and nobody is left."""
    token = sys.stdin.buffer.read().decode()
    listener = socket.socket(fileno=int(sys.argv[1]))
    sys.setrecursionlimit(_DEEPEST)
    # an interrupt of the terminal goes to everybody in it: the ranks say themselves when they are done
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_run(listener, int(sys.argv[2]), float(sys.argv[3]), token))


if __name__ == "__main__":
    main()
