"""Calls that run side by side at the gate: in order, with connections of their own, and what of it is raised."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest

from reshard_cli.errors import TransferError
from reshard_cli.transport.gate_client import GateStore
from reshard_cli.transport.lanes import Lanes
from reshard_cli.transport.store import Prefixed
from tests.transport.gate_harness import TOKEN, descriptors, opened_gate


def test_a_call_that_waits_at_the_gate_keeps_none_of_the_others_from_it():
    with opened_gate() as (address, _):
        gate = GateStore(address, TOKEN, 20)
        lanes = Lanes(gate, 4)
        store = Prefixed(lanes.store, "here/")

        def wait_for(number: int) -> str:
            assert not store.wait_keys([f"key/{number}"], [], 15)
            value = store.get(f"key/{number}").decode()
            store.set(f"key/{number - 1}", f"after {value}")
            return value

        def first() -> str:
            time.sleep(0.2)  # the others wait by now
            store.set("key/3", "the last")
            return "said"

        began = time.monotonic()
        done = lanes.run([*(partial(wait_for, number) for number in (1, 2, 3)), first])
        assert done == ["after after the last", "after the last", "the last", "said"]
        assert time.monotonic() - began < 10
        assert gate.get("here/key/0") == b"after after after the last"
        lanes.close()
        gate.leave()


def test_calls_beyond_the_lanes_follow_in_order_and_nothing_grows():
    with opened_gate() as (address, process):
        gate = GateStore(address, TOKEN, 20)
        lanes = Lanes(gate, 3)
        running: set[int] = set()
        most = 0
        lock = threading.Lock()
        began: list[int] = []

        def call(number: int) -> int:
            nonlocal most
            with lock:
                began.append(number)
                running.add(number)
                most = max(most, len(running))
            time.sleep(0.05)
            with lock:
                running.discard(number)
            return number

        for _ in range(3):
            began.clear()
            assert lanes.run([partial(call, number) for number in range(8)]) == list(range(8))
            # those that start together may come in any order
            assert all(abs(place - number) < 3 for place, number in enumerate(began))
        assert most == 3
        assert sum(one.name.startswith("lane") for one in threading.enumerate()) == 3
        held = descriptors(process.child.pid)
        lanes.close()
        deadline = time.monotonic() + 10
        while descriptors(process.child.pid) > held - 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert descriptors(process.child.pid) == held - 3
        deadline = time.monotonic() + 10
        while (
            any(one.name.startswith("lane") for one in threading.enumerate()) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert not any(one.name.startswith("lane") for one in threading.enumerate())
        gate.leave()


@pytest.mark.parametrize(("most", "count"), [(1, 3), (4, 1), (4, 0)])
def test_calls_that_do_not_run_at_once_run_on_the_calling_thread(most, count):
    with opened_gate() as (address, _):
        gate = GateStore(address, TOKEN, 20)
        lanes = Lanes(gate, most)
        assert lanes.run([threading.get_ident] * count) == [threading.get_ident()] * count
        gate.leave()


def test_an_exception_is_raised_when_all_calls_have_ended():
    with opened_gate() as (address, _):
        gate = GateStore(address, TOKEN, 20)
        lanes = Lanes(gate, 4)
        ended = []

        def slow() -> None:
            time.sleep(0.3)
            ended.append(True)

        def wrong() -> None:
            raise SystemExit(7)

        with pytest.raises(SystemExit):
            lanes.run([wrong, slow])
        assert ended == [True]
        assert lanes.run([lambda: 1, lambda: 2]) == [1, 2]
        lanes.close()
        gate.leave()


def test_without_the_gate_every_call_finds_out_for_itself():
    with opened_gate() as (address, process):
        gate = GateStore(address, TOKEN, 2)
        process.end()
        lanes = Lanes(gate, 4)

        def ask() -> str:
            with pytest.raises(TransferError) as caught:
                lanes.store.get("anything")
            return str(caught.value)

        assert all("lost the source's gate" in one for one in lanes.run([ask, ask]))


def test_an_interrupt_gives_the_gate_up_and_waits_for_no_call():
    with opened_gate() as (address, _):
        gate = GateStore(address, TOKEN, 20)
        lanes = Lanes(gate, 2)
        told: list[str] = []
        ended = threading.Event()

        def wait() -> None:
            try:
                while lanes.store.wait_keys(["never"], [], 60):
                    pass
            except TransferError as error:
                told.append(str(error))
            if len(told) == 2:
                ended.set()

        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                lanes.run([wait, wait])
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 10
        assert ended.wait(10)
        assert all("lost the source's gate" in one and "KeyboardInterrupt" in one for one in told), told
        with pytest.raises(TransferError, match="KeyboardInterrupt"):
            gate.get("anything")
