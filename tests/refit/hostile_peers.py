"""Those who join a running loop and mean no good, or are broken: strangers, and some who know the token.

Each attack is a function of the loop: it does its worst, and checks what it is told. What it leaves open is in `KEPT`.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import reshard_cli as rs
from reshard_cli.errors import TransferError
from reshard_cli.transport.frames import (
    GREETING_LIMIT,
    PROTOCOL,
    encoded,
    proof,
    receive_frame,
    send_frame,
)
from reshard_cli.transport.gate_client import Address, GateStore
from tests.refit.joined_harness import RANKS, TOKEN, Case, Fault, address_of, start, write_documents
from tests.refit.running_loop import RunningLoop
from tests.transport.gate_harness import connected, ends, framed, greeted, overheard

__all__ = ["ATTACKS", "KEPT"]

Attack = Callable[[RunningLoop], None]
ATTACKS: dict[str, Attack] = {}  # by what they do
KEPT: list[socket.socket] = []  # closed by the test at its end
CROWD = 1000
NOT_LET_IN = "the token is not this gate's"


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", " ")] = function
    return function


def attacks(*kinds: Any, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an attack of each kind: (what it is called, whatever the function is given)."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        for called, *given in kinds:

            def run(loop: RunningLoop, given: Any = given) -> None:
                function(loop, *given)

            ATTACKS[f"{name}: {called}"] = run
        return function

    return make


def gate_of(loop: RunningLoop) -> Address:
    return Address(loop.case.host, loop.case.port)


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


def refused(peer: socket.socket, why: str = NOT_LET_IN) -> None:
    """Fail unless the gate says why it does not let this one in, and closes."""
    assert receive_frame(peer)["refused"] == why
    assert ends(peer, 3)


# ---- strangers ------------------------------------------------------------------------------------


@attack
def wrong_token(loop: RunningLoop) -> None:
    with pytest.raises(TransferError, match=NOT_LET_IN):
        GateStore(gate_of(loop), "another", 5)


@attack
def wrong_token_of_a_whole_job(loop: RunningLoop) -> None:
    with pytest.raises(TransferError, match=NOT_LET_IN):
        joined(loop, token=TOKEN + " ")


@attack
def replayed_answer(loop: RunningLoop) -> None:
    recorded = overheard(gate_of(loop), "overheard")
    length = struct.unpack(">I", recorded[:4])[0]
    assert TOKEN.encode() not in recorded
    for sent in (recorded[: 4 + length], bytes(recorded)):  # the answer alone, and all that came after it
        with connected(gate_of(loop)) as replay:
            receive_frame(replay)
            replay.sendall(sent)
            with suppress(ConnectionError):  # what was sent too much resets the connection
                refused(replay)


@attack
def answer_of_another_connection_at_the_same_time(loop: RunningLoop) -> None:
    """The number of one connection, proven by somebody who was made to believe that it is his."""
    with connected(gate_of(loop)) as one, connected(gate_of(loop)) as other:
        first, second = receive_frame(one)["number"], receive_frame(other)["number"]
        number = secrets.token_hex(32)
        right = proof(TOKEN, "client", first, number)
        send_frame(other, {"reshard-cli": PROTOCOL, "number": number, "proof": right})
        refused(other)
        assert first != second


@attack
def own_challenge_reflected(loop: RunningLoop) -> None:
    with connected(gate_of(loop)) as peer:
        hello = receive_frame(peer)
        send_frame(peer, {**hello, "proof": hello["number"]})
        refused(peer)


@attack
def proof_of_the_gate_reflected(loop: RunningLoop) -> None:
    with greeted(gate_of(loop)) as honest:
        send_frame(honest, {"op": "leave"})
    with connected(gate_of(loop)) as peer:
        hello = receive_frame(peer)
        answer = proof(TOKEN, "server", hello["number"], hello["number"])  # the right one, of the other side
        send_frame(peer, {"reshard-cli": PROTOCOL, "number": hello["number"], "proof": answer})
        refused(peer)


@attacks(
    ("random", bytes(range(256)) * 4),
    ("http", b"GET / HTTP/1.1\r\nHost: here\r\nUser-Agent: scanner\r\n\r\n"),
    ("tls", bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 194),
    ("ssh", b"SSH-2.0-OpenSSH_9.6\r\n"),
    ("4 gib announced", struct.pack(">I", (1 << 32) - 1)),
    ("one byte too many", struct.pack(">I", GREETING_LIMIT + 1) + b"x" * (GREETING_LIMIT + 1)),
    ("nothing announced", struct.pack(">I", 0)),
    ("deep json", framed(b"[" * GREETING_LIMIT)),
    ("deep object", framed(b'{"a":' * 200 + b"1" + b"}" * 20)),
    ("nan", framed(b'{"reshard-cli": NaN, "number": Infinity, "proof": -Infinity}')),
    ("not utf-8", framed(b'{"reshard-cli": 1, "number": "\xff\xfe\x80"}')),
    ("lone surrogate", framed(b'{"reshard-cli": 1, "number": "%s", "proof": "\\udfff"}' % (b"0" * 64))),
    ("digits", framed(b"9" * 1000)),
    ("pickle", b"\x80\x04\x95\x1a\x00\x00\x00cposix\nsystem\n"),
    ("an operation", framed(b'{"op":"get","key":"source/failure"}')),
    ("the end", framed(b'{"op":"leave","end":true}')),
    name="garbage",
)
def garbage(loop: RunningLoop, sent: bytes) -> None:
    with connected(gate_of(loop)) as peer:
        peer.sendall(sent)
        assert ends(peer, 3)


@attacks(
    ("numbers of other kinds", {"number": [["0" * 64]], "proof": {"a": 1}}),
    ("no proof", {"number": "0" * 64}),
    ("an empty proof", {"number": "0" * 64, "proof": ""}),
    ("an empty number", {"number": "", "proof": "0" * 64}),
    ("letters that are no ascii", {"number": "0" * 64, "proof": "é" * 64}),
    name="greeting",
)
def greeting(loop: RunningLoop, said: dict[str, Any]) -> None:
    with connected(gate_of(loop)) as peer:
        receive_frame(peer)
        send_frame(peer, {"reshard-cli": PROTOCOL, **said})
        refused(peer)


@attacks(
    ("silence", b""),
    ("half a length", b"\0\0"),
    ("half a greeting", struct.pack(">I", 300) + b'{"reshard-cli": 1,'),
    name="half-open",
)
def half_open(loop: RunningLoop, sent: bytes) -> None:
    peer = connected(gate_of(loop))
    peer.sendall(sent)
    KEPT.append(peer)


@attacks(("at once", b"", 1), ("in mid-greeting", b"\0\0\1\0{", 1), ("300 times", b"\0", 300), name="reset")
def reset(loop: RunningLoop, sent: bytes, times: int) -> None:
    for _ in range(times):
        peer = connected(gate_of(loop))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sendall(sent)
        peer.close()


@attack
def writing_end_closed_at_once(loop: RunningLoop) -> None:
    with connected(gate_of(loop)) as peer:
        peer.shutdown(socket.SHUT_WR)
        assert ends(peer, 3)


@attack
def a_crowd_at_once(loop: RunningLoop) -> None:
    """A thousand that stay; somebody who knows the token comes in all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * CROWD:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CROWD), hard))
    crowd = [connected(gate_of(loop)) for _ in range(CROWD)]
    loop.goes_on()
    joined_and_gone(loop)
    for one in crowd:
        one.close()


# ---- those who know the token ---------------------------------------------------------------------


@contextmanager
def known(loop: RunningLoop) -> Iterator[GateStore]:
    """Connect with the right token; the connection ends without a goodbye."""
    store = GateStore(gate_of(loop), TOKEN, 10)
    try:
        yield store
    finally:
        store.close()


def joined(loop: RunningLoop, rank: int = 0, **more: Any) -> rs.Session:
    case = loop.case
    settings: dict[str, Any] = {
        "role": "destination", "rendezvous": address_of(case), "token": TOKEN, "rank": rank, "world_size": RANKS,
        "timeout": 5.0, "verify": True, "job": secrets.token_hex(4), **more,
    }  # fmt: skip
    source, destination = (more.pop(name, case.folder / f"{name}.yaml") for name in ("train", "infer"))
    settings = {key: value for key, value in settings.items() if key not in ("train", "infer")}
    return rs.join(source, destination, **settings)


def joined_and_gone(loop: RunningLoop) -> None:
    """A whole job of another layout that comes, says what it is, and leaves before its first refit."""
    with known(loop) as store:
        entry = store.enter("destination", secrets.token_hex(4), "visitor", 0, 2, {}, None)
        assert entry in [one.entry for one in store.jobs("destination")]
        store.leave()


def facts_of_the_loop(store: GateStore) -> tuple[dict[str, Any], Any]:
    """Return what the loop's own destination says of itself: facts that fit, and its note."""
    job = next(one for one in store.jobs("destination") if one.name == "infer")
    return dict(job.facts), job.note


@contextmanager
def whole_job(
    loop: RunningLoop, name: str, facts: dict[str, Any], note: Any
) -> Iterator[tuple[GateStore, str]]:
    """Enter with every rank of a job of two; they go without a goodbye at the block's end."""
    stores = [GateStore(gate_of(loop), TOKEN, 10) for _ in range(RANKS)]
    try:
        identity = secrets.token_hex(4)
        entries = {
            store.enter("destination", identity, name, rank, RANKS, facts, note if rank == 0 else None)
            for rank, store in enumerate(stores)
        }
        assert len(entries) == 1
        yield stores[0], entries.pop()
    finally:
        for one in stores:
            one.close()


def answered(store: GateStore, entry: str, what: str) -> Any:
    """Return what the source says to a job that came in."""
    assert store.wait_keys([f"entries/{entry}/{what}"], [], 30) == [], f"the source did not say {what}"
    return json.loads(store.get(f"entries/{entry}/{what}"))


@attacks(("none", None), ("another", PROTOCOL + 1), ("text", "1"), name="protocol")
def wrong_protocol(loop: RunningLoop, version: Any) -> None:
    with connected(gate_of(loop)) as peer:
        hello = receive_frame(peer)
        number = secrets.token_hex(32)
        right = proof(TOKEN, "client", hello["number"], number)
        send_frame(peer, {"reshard-cli": version, "number": number, "proof": right})
        refused(peer, f"this is protocol {PROTOCOL} of reshard-cli")


@attacks(
    ("another layout", {"infer": "train.yaml"}, "layout of the destination: "),
    ("another source", {"train": "infer.yaml"}, "layout of the source: "),
    ("another mode", {"mode": "broadcast"}, "mode: broadcast here, hybrid there"),
    ("not verified", {"verify": False}, "verify: False here, True there"),
    name="does not fit",
)
def does_not_fit(loop: RunningLoop, more: dict[str, Any], told: str) -> None:
    given = {key: loop.case.folder / one if str(one).endswith(".yaml") else one for key, one in more.items()}
    with pytest.raises(TransferError, match=told):
        joined(loop, **given)


@attacks(
    ("another version", {"reshard-cli": "9.9.9"}, "reshard-cli: "),
    ("another digest", {"layout of the destination": ["0" * 16]}, "layout of the destination: "),
    ("no layout", {"layout of the destination": None}, "it does not say what its own layout is"),
    ("two layouts", {"layout of the destination": ["{own}", "0" * 16]}, "it does not say what"),
    ("a layout that is a number", {"layout of the destination": 5}, "layout of the destination"),
    ("a layout that is an object", {"layout of the destination": [{"a": 1}]}, "layout of the destination"),
    ("a mode that is a list", {"mode": [1]}, "mode: "),
    ("more than there is", {"more": "x" * 5000}, "more: "),
    ("lists in lists", {"mode": nested(100)}, "mode: "),
    name="facts that pass its own check",
)
def facts_that_do_not_fit(loop: RunningLoop, change: dict[str, Any], told: str) -> None:
    """A job that does not compare: by an error, or another program."""
    with known(loop) as store:
        facts, note = facts_of_the_loop(store)
    own = facts["layout of the destination"]
    if isinstance(change.get("layout of the destination"), list):
        change = {
            "layout of the destination": [
                own[0] if one == "{own}" else one for one in change["layout of the destination"]
            ]
        }
    with whole_job(loop, "odd", {**facts, **change}, note) as (store, entry):
        assert told in "\n".join(answered(store, entry, "refused"))


@attacks(
    ("none", None, "odd"),
    ("a number", 7, "odd"),
    ("no yaml", {"layout": {"name": "x"}, "model": "}{"}, "odd"),
    ("an alias bomb", {"layout": {"name": "x"}, "model": "a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]\n"}, "odd"),
    ("lone surrogates", {"layout": {"name": "\udfff"}, "model": "\udfff"}, "odd"),
    ("lists in lists", {"layout": nested(100), "model": "name: x"}, "odd"),
    ("of the other job", "train", "odd"),
    ("a name that is a path", None, "../../../../../../tmp/reshard-cli-was-here"),
    ("a name that steers", None, "\x1b[2J\r\n\0"),
    name="note",
)
def note_that_cannot_be_read(loop: RunningLoop, note: Any, name: str) -> None:
    """A job whose facts fit, but whose own words of its layout do not."""
    with known(loop) as store:
        facts, _ = facts_of_the_loop(store)
        if note == "train":
            note = store.jobs("source")[0].note
    before = sorted(os.listdir("/tmp"))
    with whole_job(loop, name, facts, note) as (store, entry):
        assert "the layout that" in "\n".join(answered(store, entry, "refused"))
    assert [one for one in os.listdir("/tmp") if "was-here" in one and one not in before] == []


@attack
def second_source(loop: RunningLoop) -> None:
    with known(loop) as store, pytest.raises(TransferError, match="there is a source job already"):
        store.enter("source", "another", "train", 0, RANKS, {}, None)


@attack
def second_source_at_the_same_address(loop: RunningLoop) -> None:
    with pytest.raises(TransferError, match=r"cannot listen at .*: Address already in use"):
        joined(loop, role="source")


@attack
def later_rank_of_a_second_source(loop: RunningLoop) -> None:
    with pytest.raises(TransferError, match="there is a source job already"):
        joined(loop, role="source", rank=1)


@attacks(
    ("out of range", RANKS, RANKS), ("negative", -1, RANKS), ("of none", 0, 0), ("huge", 1 << 70, 2),
    name="rank",
)  # fmt: skip
def rank_that_cannot_be(loop: RunningLoop, rank: int, size: int) -> None:
    with known(loop) as store:
        facts, note = facts_of_the_loop(store)
        with pytest.raises(TransferError, match=f"rank {rank} of {size}"):
            store.enter("destination", "infer", "infer", rank, size, facts, note)


@attack
def rank_that_is_taken(loop: RunningLoop) -> None:
    """It begins another start of the job, which never becomes whole."""
    with known(loop) as store:
        facts, note = facts_of_the_loop(store)
        entry = store.enter("destination", "infer", "infer", 0, RANKS, facts, note)
        assert store.check([f"complete/{entry}"]) is False


@attack
def rank_of_a_job_of_another_size(loop: RunningLoop) -> None:
    with known(loop) as one, known(loop) as other:
        facts, note = facts_of_the_loop(one)
        one.enter("destination", "odd", "odd", 0, RANKS, facts, note)
        with pytest.raises(TransferError, match="ranks: 3 here, 2 there"):
            other.enter("destination", "odd", "odd", 1, RANKS + 1, facts, note)


@attack
def first_rank_whose_other_one_never_comes(loop: RunningLoop) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match="infer 1 did not come within 1 s"):
        joined(loop, timeout=1.0)
    assert time.monotonic() - began < 1 + 5
    loop.goes_on()


@attack
def job_that_enters_and_says_no_more(loop: RunningLoop) -> None:
    """It stops the source for its timeout, once; the loop's own pair has its versions before and after."""
    with known(loop) as store:
        facts, note = facts_of_the_loop(store)
    with whole_job(loop, "mute", facts, note) as (store, entry):
        answered(store, entry, "session")
        loop.goes_on(2, loop.case.timeout + 5)
        errors = [one["error"] for one in loop.lines("train", 0) if one["error"]]
        assert "mute" in errors[-1]


@attack
def job_that_enters_and_is_gone(loop: RunningLoop) -> None:
    with known(loop) as store:
        facts, note = facts_of_the_loop(store)
    with whole_job(loop, "gone", facts, note) as (store, entry):
        answered(store, entry, "session")
    loop.goes_on(2, loop.case.timeout + 5)


@attacks(
    ("rank 0 planning", "planning", 0),
    ("rank 1 connecting", "connecting", 1),
    ("rank 0 receiving", "network", 0),
    ("rank 1 committing", "committing", 1),
    name="killed",
)
def killed(loop: RunningLoop, point: str, guilty: int) -> None:
    """A job that fits, one of whose ranks is killed: its other rank is told whose, and the loop goes on."""
    folder = loop.case.folder / point
    folder.mkdir()
    write_documents(folder)
    case = Case(folder, loop.case.port, timeout=loop.case.timeout, fault=Fault("infer", guilty, point, 1))
    ranks = [start(case, "infer", rank) for rank in range(RANKS)]
    for one in ranks:
        one.join(30)
        one.kill()
    told = json.loads((folder / f"infer-{1 - guilty}.json").read_text())
    assert f"infer {guilty}" in told["error"], told
    assert told["guilty"] == 4


@attacks(
    ("no operation", {"op": "eval", "key": "1"}),
    ("no key", {"op": "set", "value": ""}),
    ("a wait for ever", {"op": "wait", "keys": ["k"], "unless": [], "most": float("inf")}),
    ("a will of nothing", {"op": "will", "key": "k", "failure": {}, "phase_key": "p"}),
    name="operation",
)
def wrong_operation(loop: RunningLoop, frame: dict[str, Any]) -> None:
    with greeted(gate_of(loop)) as peer:
        send_frame(peer, frame)
        assert receive_frame(peer)["error"]


@attack
def value_too_deep_for_those_who_read_it(loop: RunningLoop) -> None:
    with greeted(gate_of(loop)) as peer:
        frame = encoded(
            {"op": "enter", "role": "destination", "job": "deep", "rank": 0, "size": 1, "name": "deep"}
        )
        deep = b',"facts":{"mode":' + b"[" * 900 + b"]" * 900 + b"}}"
        peer.sendall(framed(frame[4:-1] + deep))
        assert ends(peer, 3)


@attack
def frame_of_4_gib_from_one_who_knows_the_token(loop: RunningLoop) -> None:
    with greeted(gate_of(loop)) as peer:
        peer.sendall(struct.pack(">I", (1 << 32) - 1) + b"{")
        assert ends(peer, 3)
