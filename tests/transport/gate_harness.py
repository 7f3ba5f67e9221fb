"""A gate in this process's child, and peers that speak to it by hand: for tests of the gate."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard_cli.transport.frames import PROTOCOL, proof, receive_frame, send_frame
from reshard_cli.transport.gate_client import Address, GateProcess, GateStore, open_gate

TOKEN = "a-secret-that-is-never-sent"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def opened_gate(host: str = "127.0.0.1") -> Iterator[tuple[Address, GateProcess]]:
    """Open a gate; it is gone afterwards, however the test ended."""
    address = Address(host, free_port(host))
    process = open_gate(address, TOKEN)
    try:
        GateStore(address, TOKEN, 20).leave()
        yield address, process
    finally:
        process.end()


def connected(address: Address, seconds: float = 10) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=seconds)


def greeted(address: Address) -> socket.socket:
    """Return a connection that has proven to know the token, to go on with by hand."""
    peer = connected(address)
    hello = receive_frame(peer)
    number = secrets.token_hex(32)
    answer = proof(TOKEN, "client", hello["number"], number)
    send_frame(peer, {"reshard-cli": PROTOCOL, "number": number, "proof": answer})
    assert receive_frame(peer)["proof"] == proof(TOKEN, "server", hello["number"], number)
    return peer


def ends(peer: socket.socket, seconds: float) -> bool:
    """Say whether the other side closes the connection within so many seconds, whatever it says before."""
    peer.settimeout(seconds)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def drawn_value(random: Any, depth: int = 0) -> Any:
    """Return a random JSON value, of the kind that operations are given and of every other."""
    simple = [
        None, True, False, 0, -1, 1 << 70, 1e308, float("inf"), float("nan"), "", "key", "source", "destination",
        "x" * 5000, "\ud800", "entries/", "1", "{phase}", "9" * 5000,
    ]  # fmt: skip
    kind = random.random()
    if depth > 2 or kind < 0.7:
        return random.choice(simple)
    if kind < 0.85:
        return [drawn_value(random, depth + 1) for _ in range(random.randrange(3))]
    return {str(number): drawn_value(random, depth + 1) for number in range(random.randrange(3))}


OPERATIONS = (
    "set", "get", "check", "compare_set", "add", "delete", "wait", "will", "enter", "jobs", "leave", "", "eval",
)  # fmt: skip
FIELDS = (
    "key", "value", "keys", "unless", "most", "expected", "amount", "prefix", "failure", "phase_key", "role", "job",
    "name", "rank", "size", "facts", "note", "end",
)  # fmt: skip


def drawn_frame(random: Any) -> bytes:
    """Return what a peer may send that means no good, or is broken."""
    kind = random.random()
    if kind < 0.1:
        return random.randbytes(random.randrange(1, 200))
    if kind < 0.15:
        return framed(random.randbytes(random.randrange(0, 200)))
    if kind < 0.2:
        return struct.pack(">I", random.choice([0, 1, 1 << 20, (1 << 32) - 1])) + random.randbytes(8)
    if kind < 0.25:
        return framed(
            random.choice([b"[" * 900, b'{"op":' * 150, b"[]", b"null", b"1" * 5000, b'{"op":"get"}'])
        )
    frame = {"op": random.choice(OPERATIONS)}
    for name in FIELDS:
        if random.random() < 0.6:
            frame[name] = drawn_value(random)
    if frame["op"] == "leave":
        frame.pop("end", None)  # who knows the token may end the gate
    if isinstance(frame.get("most"), int | float | str) and frame["op"] == "wait":
        frame["most"] = random.choice([0, 0.01, -1, float("nan"), "1e-3", None])
    data = bytearray(json.dumps(frame).encode())
    if random.random() < 0.2 and data:
        data[random.randrange(len(data))] = random.randrange(256)
    whole = framed(bytes(data))
    return whole[: random.randrange(len(whole))] if random.random() < 0.1 else whole


def overheard(address: Address, key: str) -> bytearray:
    """Return what somebody who knows the token sent to the gate to set a key, past a proxy that listens."""
    recorded = bytearray()
    proxy = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        near, _ = proxy.accept()
        with near, connected(address) as far:
            threads = [
                threading.Thread(target=copy, args=both)
                for both in ((near, far, recorded), (far, near, bytearray()))
            ]
            for one in threads:
                one.start()
            for one in threads:
                one.join()

    def copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                kept.extend(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=pass_on)
    thread.start()
    store = GateStore(Address("127.0.0.1", proxy.getsockname()[1]), TOKEN, 5)
    store.set(key, "value")
    store.delete_key(key)
    store.leave()
    thread.join(10)
    proxy.close()
    return recorded
