"""Frames between the gate and the ranks that join at it, and the proof that both know the token.

A frame is its length in four bytes and a JSON object: nothing is unpickled. The token itself is never sent:
each side sends a number that it just drew, and the other answers with a keyed digest of both numbers, so an
answer that was overheard is of no use for another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
from typing import Any

__all__ = [
    "GREETING_LIMIT", "PROTOCOL", "encoded", "end_when_silent", "proof", "receive_frame", "send_frame",
]  # fmt: skip

PROTOCOL = 1
GREETING_LIMIT = 1024  # bytes of a frame from somebody who has not proven anything yet
_LIMIT = 1 << 30
_LENGTH = struct.Struct(">I")
_PROBE = 1  # seconds without a word after which the other side's kernel is asked, and asked again


def end_when_silent(peer: socket.socket, seconds: float) -> None:
    """Have a connection end when the other side's machine was silent for so long, as a cut network says nothing.

    The kernel answers for a process that is busy, or stopped: what this finds is a network or a host that is down.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * max(seconds, _PROBE)))


def encoded(value: dict[str, Any]) -> bytes:
    """Return a frame."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def proof(token: str, side: str, server_number: str, client_number: str) -> str:
    """Return what only somebody who knows the token can say about these two numbers. `side`: who says it."""
    told = f"reshard-cli/{PROTOCOL}|{side}|{server_number}|{client_number}"
    return hmac.new(token.encode(), told.encode(), hashlib.sha256).hexdigest()


def send_frame(peer: socket.socket, value: dict[str, Any]) -> None:
    """Send one frame. Raises OSError."""
    peer.sendall(encoded(value))


def receive_frame(peer: socket.socket, limit: int = _LIMIT) -> dict[str, Any]:
    """Receive one frame. Raises OSError where the connection ends, ValueError for what is no frame."""
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes")
    value = json.loads(_exactly(peer, length))
    if not isinstance(value, dict):
        raise ValueError("a frame that is no object")
    return value


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
