"""The transports: what they hand to the process groups, and how a lost peer is told."""

from __future__ import annotations

import pytest
import torch

from reshard_cli.errors import PeerLostError
from reshard_cli.transport import exchange
from reshard_cli.transport.exchange import GlooTransport, NcclTransport
from reshard_cli.transport.message import Message


class Recorder:
    """Stands in for a process group and writes down what is asked of it."""

    def __init__(self, *_: object, fails: str = "") -> None:
        self.calls: list[tuple] = []
        self.fails = fails

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer, tag, tensors[0].numel()))
        return self

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer, tag, tensors[0].numel()))
        return self

    def _start_coalescing(self):
        self.calls.append(("start",))

    def _end_coalescing(self):
        self.calls.append(("end",))
        return self

    def wait(self, *_):
        if self.fails:
            raise RuntimeError(self.fails)


def message(peer: int, size: int) -> Message:
    return Message(peer, torch.zeros(size, dtype=torch.uint8))


@pytest.fixture(name="gloo")
def recorded_gloo(monkeypatch):
    group = Recorder()
    monkeypatch.setattr(exchange.dist, "ProcessGroupGloo", lambda *_: group)
    monkeypatch.setattr(exchange, "prefixed", lambda *_: None)
    return GlooTransport(None, 0, 4, 1.0), group


@pytest.fixture(name="nccl")
def recorded_nccl(monkeypatch):
    group = Recorder()

    class Kind:
        class Options:
            _timeout = None

        def __new__(cls, *_: object):
            return group

    monkeypatch.setattr(exchange.dist, "ProcessGroupNCCL", Kind, raising=False)
    monkeypatch.setattr(exchange, "prefixed", lambda *_: None)
    monkeypatch.setattr(
        exchange.torch.cuda, "current_stream", lambda: type("S", (), {"synchronize": lambda self: None})()
    )
    return NcclTransport(None, 0, 4, 1.0), group


def test_gloo_numbers_the_messages_of_each_ordered_pair_and_receives_are_posted_first(gloo):
    transport, group = gloo
    transport.start([message(1, 5), message(1, 6), message(2, 7)], [message(1, 8)]).wait()
    transport.start([message(1, 9)], []).wait()
    assert group.calls == [
        ("recv", 1, 0, 8), ("send", 1, 0, 5), ("send", 1, 1, 6), ("send", 2, 0, 7), ("send", 1, 2, 9),
    ]  # fmt: skip


def test_nccl_launches_a_phase_as_one_group_in_the_order_of_the_plan(nccl):
    transport, group = nccl
    transport.start([message(1, 5), message(2, 6)], [message(1, 8)]).wait()
    assert group.calls == [("start",), ("send", 1, 0, 5), ("send", 2, 0, 6), ("recv", 1, 0, 8), ("end",)]
    transport.start([], []).wait()
    assert len(group.calls) == 5


def test_a_message_above_the_limit_is_sent_as_several(gloo, monkeypatch):
    transport, group = gloo
    monkeypatch.setattr(exchange, "MAX_MESSAGE", 10)
    transport.start([message(1, 25)], [message(3, 10)]).wait()
    assert group.calls == [("recv", 3, 0, 10), ("send", 1, 0, 10), ("send", 1, 1, 10), ("send", 1, 2, 5)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Timed out waiting 5000ms for recv operation to complete", "it did not answer in time"),
        ("Read error [127.0.0.1]:4: Connection reset by peer", "it closed the connection"),
        ("Connection closed by peer [127.0.0.1]:4", "it closed the connection"),
        ("something new\nwith more lines", "something new"),
    ],
)
def test_a_failure_names_the_peer_and_says_what_it_did(gloo, text, told):
    transport, group = gloo
    group.fails = text
    with pytest.raises(PeerLostError) as caught:
        transport.start([], [message(3, 1)]).wait()
    assert caught.value.rank == 3
    assert str(caught.value) == f"receiving from rank 3: {told}"
