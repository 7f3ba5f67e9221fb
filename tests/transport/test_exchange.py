"""The transports: what they hand to the process groups, and how a lost peer is told."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from reshard_cli.errors import DocumentError, PeerLostError, TransferError
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.transport import exchange, nccl
from reshard_cli.transport import message as messages
from reshard_cli.transport.exchange import GlooTransport
from reshard_cli.transport.message import Message
from reshard_cli.transport.nccl import NcclTransport
from reshard_cli.transport.shared_gpu import check_shared_gpu, sharing_fault


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

    def wait(self, *_):
        if self.fails:
            raise RuntimeError(self.fails)


def message(peer: int, size: int) -> Message:
    return Message(peer, torch.zeros(size, dtype=torch.uint8))


class Names:
    """A store of which a group sees the prefix alone."""

    def for_groups(self, prefix):
        return prefix


@pytest.fixture(name="two_ranks")
def connected_gloo():
    """Two ranks that are connected, in threads; whoever waits for the other one's message waits in vain."""
    store = PrefixStore("gloo", HashStore())

    class Shared:
        def for_groups(self, _):
            return store

    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda rank: GlooTransport(Shared(), rank, 2, 600.0), range(2)))


@pytest.fixture(name="gloo")
def recorded_gloo(monkeypatch):
    group = Recorder()
    monkeypatch.setattr(exchange.dist, "ProcessGroupGloo", lambda *_: group)
    return GlooTransport(Names(), 0, 4, 1.0), group


class NcclGroup(Recorder):
    """A communicator that refuses what ProcessGroupNCCL's would hang on or refuse."""

    made: list[NcclGroup]

    class Options:
        _timeout = None

    def __init__(self, prefix, rank, size, options):
        super().__init__()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "torch would end the trainer"
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1", "torch would watch the group in a thread"
        self.prefix, self.rank, self.size, self.options = prefix, rank, size, options
        self.connected = self.open = False
        self.left = 2  # looks at the GPU until it is done
        self.ends = True
        self.failure = ""
        self.aborting = threading.Event()
        NcclGroup.made.append(self)

    def eager_connect_single_device(self, device):
        assert device == torch.device("cuda", 3)
        self.connected = True

    def _post(self, kind, tensors, peer):
        assert self.open, "a send or receive outside a group connects two ranks by themselves"
        assert self.connected, "the first group of a communicator would wait for all of its ranks"
        assert 0 <= peer < self.size
        assert peer != self.rank
        self.calls.append((kind, peer, tensors[0].numel()))

    def send(self, tensors, peer, tag):
        self._post("send", tensors, peer)

    def recv(self, tensors, peer, tag):
        self._post("recv", tensors, peer)

    def _start_coalescing(self):
        assert not self.open
        self.open = True
        self.calls.append("start")

    def _end_coalescing(self):
        assert self.calls[-1] != "start", "torch returns no work for an empty group"
        self.open = False
        self.calls.append("end")
        return self

    def wait(self):
        if self.failure and self.left <= 0:
            raise RuntimeError(self.failure)

    def synchronize(self):
        pass

    def is_completed(self):
        self.left -= 1
        return self.ends and self.left <= 0

    def abort(self):
        self.calls.append("abort")
        self.aborting.set()
        for other in NcclGroup.made:  # memory is freed, which waits for the kernels of all others
            other.aborting.wait(20)
        if self.failure == "hangs in abort":
            threading.Event().wait(30)
        self.calls.append("aborted")

    def shutdown(self):
        raise AssertionError("waits for the others to do the same, with no limit; torch 2.6 has none")


@pytest.fixture(name="make_nccl")
def made_nccl(monkeypatch):
    NcclGroup.made = []
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setattr(nccl, "check_shared_gpu", lambda *_: None)
    monkeypatch.setattr(nccl.torch.cuda, "current_device", lambda: 3)

    def make(rank=0, num_ranks=4, domains=None, timeout=5.0, check=lambda: None):
        return NcclTransport(Names(), rank, num_ranks, timeout, domains, check), NcclGroup.made

    return make


def test_a_wait_of_some_seconds_does_not_last_for_the_timeout(two_ranks):
    with pytest.raises(PeerLostError, match="receiving from rank 1: it did not answer in time") as caught:
        two_ranks[0].start([], [message(1, 8)]).wait(0.3)
    assert caught.value.rank == 1


def test_gloo_numbers_the_messages_of_each_ordered_pair_and_receives_are_posted_first(gloo):
    transport, group = gloo
    transport.start([message(1, 5), message(1, 6), message(2, 7)], [message(1, 8)]).wait()
    transport.start([message(1, 9)], []).wait()
    assert group.calls == [
        ("recv", 1, 0, 8), ("send", 1, 0, 5), ("send", 1, 1, 6), ("send", 2, 0, 7), ("send", 1, 2, 9),
    ]  # fmt: skip


def test_nccl_launches_a_phase_as_one_group_in_the_order_of_the_plan(make_nccl):
    transport, (group,) = make_nccl()
    transport.start([message(1, 5), message(2, 6)], [message(1, 8)]).wait()
    assert group.calls == ["start", ("send", 1, 5), ("send", 2, 6), ("recv", 1, 8), "end"]
    transport.start([], []).wait()
    assert len(group.calls) == 5


def test_nccl_has_a_communicator_of_all_ranks_and_one_of_each_domain_with_its_ranks_only(make_nccl):
    transport, groups = make_nccl(rank=3, num_ranks=5, domains=[0, 7, 0, 7, 7])
    assert [(one.prefix, one.rank, one.size) for one in groups] == [
        ("nccl/network", 3, 5), ("nccl/domain/7", 1, 3),
    ]  # fmt: skip
    transport.start([message(0, 5)], [], NETWORK).wait()
    transport.start([message(4, 6)], [message(1, 7)], DOMAIN).wait()
    assert groups[0].calls == ["start", ("send", 0, 5), "end"]
    assert groups[1].calls == ["start", ("send", 2, 6), ("recv", 0, 7), "end"]
    transport.close()
    assert [one.calls[-1] for one in groups] == ["aborted", "aborted"]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_a_rank_alone_in_its_domain_makes_no_communicator_for_it(make_nccl):
    _, groups = make_nccl(rank=1, num_ranks=3, domains=[0, 1, 2])
    assert [one.prefix for one in groups] == ["nccl/network"]


def test_a_gpu_is_waited_for_some_seconds_whatever_the_control_plane_says(make_nccl, monkeypatch):
    def lost():
        raise TransferError("the store is lost")

    monkeypatch.setattr(nccl, "_CHECK", 0.0)
    transport, (group,) = make_nccl(check=lost)
    transport.start([message(2, 8)], []).wait(5.0)
    group.ends = False
    with pytest.raises(PeerLostError, match=r"not done in 0.05 s"):
        transport.start([message(2, 8)], []).wait(0.05)


def test_a_gpu_that_is_not_done_in_time_is_told_with_its_peer_and_another_ranks_failure_comes_first(
    make_nccl, monkeypatch
):
    transport, (group,) = make_nccl(timeout=0.05)
    group.ends = False
    with pytest.raises(PeerLostError, match=r"exchanging with ranks 2: not done in 0.05 s") as caught:
        transport.start([message(2, 5)], []).wait()
    assert caught.value.rank == 2

    def check():
        raise TransferError("rank 3 raised ValueError", 3)

    monkeypatch.setattr(nccl, "_CHECK", 0.0)
    pending = nccl._NcclPending(group, [2], 60, check)
    with pytest.raises(TransferError, match="rank 3 raised ValueError"):
        pending.wait()


def test_messages_that_complete_by_failing_are_a_failure(make_nccl):
    transport, (group,) = make_nccl()
    group.failure = "NCCL communicator was aborted\nmore"
    with pytest.raises(PeerLostError, match=r"exchanging with ranks 1, 2: NCCL communicator was aborted$"):
        transport.start([message(1, 5)], [message(2, 5)]).wait()


def test_an_abort_reaches_every_communicator_and_does_not_block(make_nccl, monkeypatch):
    transport, groups = make_nccl(domains=[0, 0, 1, 1])
    groups[0].failure = "hangs in abort"
    monkeypatch.setattr(nccl, "_ABORT", 0.5)
    transport.abort()
    assert [one.calls for one in groups] == [["abort"], ["abort", "aborted"]]


def test_what_torchrun_says_of_errors_does_not_hold_for_our_groups_and_is_left_as_it_was(
    make_nccl, monkeypatch
):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    make_nccl()  # the group holds it against what it has to be
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize(
    ("version", "environment", "told"),
    [
        ((2, 29, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "NCCL 2.29.7 cannot (2.30 can)"),
        ((2, 30, 3), {}, "only with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ((2, 30, 3), {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "only with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ((2, 30, 3), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, None),
        ((3, 0), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, None),
    ],
)
def test_ranks_share_a_gpu_only_where_nccl_can(version, environment, told):
    fault = sharing_fault(version, environment)
    assert fault is None if told is None else told in fault


def test_the_second_rank_on_a_gpu_is_told_who_the_first_is(monkeypatch):
    claimed: dict[str, str] = {}

    class Claims:
        def compare_set(self, key, expected, value):
            assert expected == ""
            return claimed.setdefault(key, value).encode()

    properties = type("Properties", (), {"uuid": "GPU-5"})()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 27, 3))
    check_shared_gpu(Claims(), 4)
    with pytest.raises(DocumentError, match=r"ranks 4 and 6 share GPU GPU-5: NCCL 2.27.3 cannot"):
        check_shared_gpu(Claims(), 6)


def test_a_message_above_the_limit_is_sent_as_several(gloo, monkeypatch):
    transport, group = gloo
    monkeypatch.setattr(messages, "MAX_MESSAGE", 10)
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
