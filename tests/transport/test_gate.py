"""The gate: it lets in who knows the token, keeps the others out at no cost, and never outlives its source for long."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from random import Random

import pytest

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.transport.control import Failure
from reshard_cli.transport.frames import GREETING_LIMIT, receive_frame, send_frame
from reshard_cli.transport.gate_client import Address, GateStore, open_gate, parse_address
from tests.transport.gate_harness import (
    TOKEN,
    connected,
    descriptors,
    drawn_frame,
    ends,
    framed,
    free_port,
    greeted,
    opened_gate,
    overheard,
    resident_bytes,
)

INPUTS = int(os.environ.get("RESHARD_FUZZ", "400"))
LOST = Failure(0, 4, "infer 0 is not running any more (last: {phase})", 0)


def test_who_does_not_know_the_token_is_told_so_and_not_let_in() -> None:
    with opened_gate() as (address, _), pytest.raises(TransferError, match="the token is not this gate's"):
        GateStore(address, "another", 5)


def test_the_token_and_the_proof_of_another_connection_are_of_no_use_on_the_wire() -> None:
    with opened_gate() as (address, _):
        recorded = overheard(address, "key")
        assert TOKEN.encode() not in recorded
        assert b'"key":"key"' in recorded
        length = struct.unpack(">I", recorded[:4])[0]
        with connected(address) as replay:
            receive_frame(replay)
            replay.sendall(recorded[: 4 + length])
            assert receive_frame(replay) == {"refused": "the token is not this gate's"}
            assert ends(replay, 2)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def pretend() -> None:
        peer, _ = server.accept()
        with peer:
            send_frame(peer, {"reshard-cli": 1, "number": "0" * 64})
            seen.extend(json.dumps(receive_frame(peer)).encode())
            send_frame(peer, {"proof": "0" * 64})

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(TransferError, match="does not know the token"):
        GateStore(Address("127.0.0.1", server.getsockname()[1]), TOKEN, 5)
    thread.join(10)
    server.close()
    assert TOKEN.encode() not in seen


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\xff" * 64, struct.pack(">I", (1 << 32) - 1), framed(b"[]"),
        framed(b"{}"), framed(b'{"op":"get","key":"a"}'), struct.pack(">I", GREETING_LIMIT + 1) + b"x",
        framed(b"[" * 1000),
    ],
)  # fmt: skip
def test_a_stranger_that_sends_something_else_is_closed_at_once(sent: bytes) -> None:
    with opened_gate() as (address, _), connected(address) as peer:
        peer.sendall(sent)
        assert ends(peer, 3)


def test_strangers_that_stay_silent_or_drip_are_closed_after_a_while_and_a_crowd_costs_little() -> None:
    with opened_gate() as (address, process):
        store = GateStore(address, TOKEN, 20)
        before = resident_bytes(process.child.pid)
        crowd = [connected(address) for _ in range(600)]
        deadline = time.monotonic() + 4
        while descriptors(process.child.pid) > 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        few = descriptors(process.child.pid) <= 200
        drip = connected(address)
        receive_frame(drip)
        closed_after = None
        dripped = [b"\0", b"\0", b"\1", b"\0"] + [b"{"] * 100  # a frame of 256 bytes, one after the other
        began = time.monotonic()
        while closed_after is None and time.monotonic() - began < 15:
            try:
                drip.sendall(dripped.pop(0))
                drip.settimeout(0.5)
                if not drip.recv(1):
                    closed_after = time.monotonic() - began
            except TimeoutError:
                continue
            except OSError:
                closed_after = time.monotonic() - began
        assert closed_after is not None
        assert closed_after > 3
        late = GateStore(address, TOKEN, 20)
        late.set("key", "value")
        assert store.get("key") == b"value"
        ended = [ends(one, 3) for one in crowd]
        for one in [*crowd, drip]:
            one.close()
        assert all(ended)
        assert few
        late.leave()
        assert resident_bytes(process.child.pid) - before < 64 << 20
        store.leave()


def test_a_rank_that_dies_while_it_waits_at_the_gate_is_known_to_be_dead_at_once() -> None:
    with opened_gate() as (address, _):
        other = GateStore(address, TOKEN, 5)
        other.set("phase/0", "network")
        peer = greeted(address)
        will = {"reporter": 0, "exit_code": 4, "message": LOST.message, "rank": 0}
        send_frame(peer, {"op": "will", "key": "failure", "failure": will, "phase_key": "phase/0"})
        receive_frame(peer)
        send_frame(peer, {"op": "wait", "keys": ["never"], "unless": [], "most": 30})
        time.sleep(0.2)
        peer.close()
        assert other.wait_keys(["failure"], [], 5) == []
        assert (
            json.loads(other.get("failure"))["message"] == "infer 0 is not running any more (last: network)"
        )
        other.leave()


def test_a_forked_child_does_not_keep_its_parents_connection_open() -> None:
    """As the workers of a data loader do: they inherit every file descriptor."""
    with opened_gate() as (address, _):
        script = (
            "import os, signal, sys, time\n"
            "from reshard_cli.transport.control import Failure\n"
            "from reshard_cli.transport.gate_client import Address, GateStore\n"
            f"store = GateStore(Address('{address.host}', {address.port}), '{TOKEN}', 20)\n"
            "store.will('failure', Failure(0, 4, 'gone', 0), 'phase/0')\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    time.sleep(60)\n"
            "    os._exit(0)\n"
            "print(child, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        try:
            assert rank.wait(20) == -signal.SIGKILL
            store = GateStore(address, TOKEN, 5)
            assert store.wait_keys(["failure"], [], 5) == []
            store.leave()
        finally:
            os.kill(child, signal.SIGKILL)
            rank.stdout.close()


def test_what_a_job_left_at_the_gate_goes_with_it() -> None:
    with opened_gate() as (address, process):
        for _ in range(20):
            rank = GateStore(address, TOKEN, 5)
            entry = rank.enter("destination", "infer", "infer", 0, 1, {}, {"document": "x" * 1000})
            rank.set(f"entries/{entry}/phase/0", "joining")
            rank.leave()
        store = GateStore(address, TOKEN, 5)
        assert store.jobs("destination") == []
        time.sleep(0.2)
        left = store.ask(op="delete", key="", prefix="")["value"]
        assert left <= 2  # that a destination job came, and what the last one left
        store.leave()
        assert descriptors(process.child.pid) < 20


@pytest.mark.parametrize(
    ("frame", "wrong"),
    [
        ({"op": "set", "key": "k" * 10000, "value": ""}, "a key of 10000 characters"),
        ({"op": "set", "key": "k", "value": {"a": 1}}, "dict is no text"),
        ({"op": "will", "key": "k", "failure": 3, "phase_key": "p"}, "will"),
        ({"op": "wait", "keys": ["k"], "unless": [], "most": float("nan")}, "a wait of nan s"),
        ({"op": "enter", "role": "thief", "job": "j", "rank": 0, "size": 1}, "rank 0 of 1 as 'thief'"),
        ({"op": "enter", "role": "source", "job": "j", "rank": 2, "size": 2}, "rank 2 of 2"),
        ({"op": "shell"}, "no operation 'shell'"),
        ({}, "no operation 'None'"),
    ],
)  # fmt: skip
def test_a_wrong_operation_is_answered_with_what_is_wrong(frame: dict[str, object], wrong: str) -> None:
    with opened_gate() as (address, _), greeted(address) as peer:
        send_frame(peer, frame)
        assert wrong in receive_frame(peer)["error"]
        send_frame(peer, {"op": "get", "key": "k"})
        assert receive_frame(peer) == {"value": None}


@pytest.mark.parametrize("before", [True, False], ids=["before the greeting", "after the greeting"])
def test_the_gate_survives_whatever_is_sent_to_it(before: bool) -> None:
    random = Random(f"gate/{before}")
    with opened_gate() as (address, process):
        memory = 0
        peer: socket.socket | None = None
        for number in range(INPUTS):
            if peer is None or random.random() < 0.1:
                if peer is not None:
                    peer.close()
                peer = connected(address) if before else greeted(address)
            try:
                peer.sendall(drawn_frame(random))
                if before or random.random() < 0.2:
                    peer.close()
                    peer = None
            except OSError:
                peer.close()
                peer = None
            if number == INPUTS // 4:
                memory = resident_bytes(process.child.pid)
        if peer is not None:
            peer.close()
        store = GateStore(address, TOKEN, 20)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert process.child.poll() is None
        assert resident_bytes(process.child.pid) - memory < 64 << 20
        store.leave()
        deadline = time.monotonic() + 10
        while descriptors(process.child.pid) > 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert descriptors(process.child.pid) <= 20


def test_a_port_in_use_is_told_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            TransferError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"
        ):
            open_gate(Address("127.0.0.1", port), TOKEN)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_the_address_may_be_a_name_or_ipv6(host: str) -> None:
    port = free_port("::1" if ":" in host else "127.0.0.1")
    address = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    process = open_gate(address, TOKEN)
    try:
        store = GateStore(address, TOKEN, 20)
        store.set("key", "value")
        assert store.get("key") == b"value"
        store.leave(end=True)
        process.close()
        assert process.child.returncode == 0
    finally:
        process.end()


@pytest.mark.parametrize("token", ["two\nlines\r\n", "Schlüssel 🔑", " ", "x" * 4096])
def test_any_text_can_be_the_secret(token: str) -> None:
    address = Address("127.0.0.1", free_port())
    process = open_gate(address, token)
    try:
        GateStore(address, token, 20).leave()
    finally:
        process.end()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:29600", Address("10.0.0.1", 29600)),
        ("tcp://trainer-0.jobs.svc:1", Address("trainer-0.jobs.svc", 1)),
        ("[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535)),
        ("::1:29600", Address("::1", 29600)),
        (" localhost:29600\n", Address("localhost", 29600)),
        ("host_with_line:29600", Address("host_with_line", 29600)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "host", "host:", ":29600", "host:0", "host:65536", "host:-1", "host:1e3", "host:" + "9" * 5000,
        "http://host:1", "tcp://host:1/", "a..b:1", "a" * 70 + ":1", "a b:1", "user@host:1", "a:b:1", "[host:1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anybody_waits_for_it(text: str) -> None:
    with pytest.raises(DocumentError, match="is not HOST:PORT, as"):
        parse_address(text)


def test_the_address_is_free_as_soon_as_the_source_has_ended_though_others_read_on() -> None:
    with opened_gate() as (address, _):
        reader, source = GateStore(address, TOKEN, 5), GateStore(address, TOKEN, 5)
        source.set("source/ended", "1")
        source.leave(end=True)
        time.sleep(0.5)
        assert reader.get("source/ended") == b"1"
        following = open_gate(address, TOKEN)
        following.end()
        reader.leave()
