"""GPUs that work on their own time, for tests on a CPU: streams, marks, and communicators as strict as NCCL's.

Nothing that is given to a stream runs at once. A program runs until it waits; then any work that may run does, in
random order. A group of messages starts when its communicator comes to it and completes as a whole, when each
message has met its other side; both sides have to group alike. What NCCL would hang on is a Deadlock here.
"""

from __future__ import annotations

import contextlib
import threading
from random import Random

from reshard_cli.plan.entries import DOMAIN, NETWORK


class Deadlock(AssertionError):
    """No program can go on, and no work may run."""


class Work:
    """Something given to a stream: done once it has run, which it may after all that it follows."""

    def __init__(self, gpus, after, run=None, messages=()):
        self.gpus, self.after, self.run, self.messages = gpus, [one for one in after if one], run, messages
        self.done = False
        self.left = list(messages)

    def ready(self):
        return not self.done and all(one.done for one in self.after)

    def wait(self):
        self.gpus.wait_for(self)


class Gpus:
    """The GPUs of all ranks. `one_at_a_time`: a GPU runs groups in the order in which they were launched."""

    def __init__(self, domains, random: Random, one_at_a_time=False, marks_hold=True):
        self.domains, self.random, self.one_at_a_time, self.marks_hold = (
            domains,
            random,
            one_at_a_time,
            marks_hold,
        )
        self.waiting: list[Work] = []
        self.groups: dict[tuple, list[Work]] = {}
        self.launched: dict[int, Work] = {}
        self.turn = threading.Condition()
        self.holder: int | None = None
        self.blocked: dict[int, Work | None] = {}
        self.failure: BaseException | None = None
        self.num_groups = 0

    def step(self) -> bool:
        """Run one piece of work that may run; say whether there was one."""
        ready = [one for one in self.waiting if one.ready()]
        self.random.shuffle(ready)
        for work in ready:
            if work.messages:
                if not self._moved(work):
                    continue
                done = not work.left
            else:
                if work.run:
                    work.run()
                done = True
            if done:
                work.done = True
                self.waiting.remove(work)
            return True
        return False

    def _moved(self, work) -> bool:
        """Move what has met its other side: messages of a pair in order, group by group."""
        moved = False
        for sending, peer, data, rank, group in list(work.left):
            if not sending:
                continue
            other = self._facing(group, rank, peer)
            if other is None:
                continue
            theirs = next(one for one in other.left if not one[0] and one[1] == rank)
            theirs[2].copy_(data)
            work.left.remove((sending, peer, data, rank, group))
            other.left.remove(theirs)
            if not other.left:
                other.done = True
                self.waiting.remove(other)
            moved = True
        return moved

    def _facing(self, group, rank, peer):
        """Return the peer's group that faces this rank's current one, if it has started. Both have to be alike."""
        mine = next(one for one in self.groups[group, rank] if not one.done)
        theirs = next((one for one in self.groups.get((group, peer), []) if not one.done), None)
        if theirs is None or not theirs.ready():
            return None
        if all(message[1] != rank for message in theirs.left):
            return (
                None  # its group of another round still waits for others; the one that faces ours comes later
            )
        sides = [
            [[m[2].numel() for m in side.left if m[0] == sending and m[1] == other] for sending in order]
            for side, other, order in ((mine, peer, (True, False)), (theirs, rank, (False, True)))
        ]
        assert sides[0] == sides[1], f"ranks {rank} and {peer} group differently: {sides}"
        return theirs

    def wait_for(self, work):
        rank = next(one for one in self.blocked if threading.current_thread().name == f"rank {one}")
        while not work.done:
            if self.failure is not None:
                raise Deadlock("another rank failed") from self.failure
            if self.step():
                for one in self.blocked:
                    self.blocked[one] = None
                continue
            self.blocked[rank] = work
            if all(one is not None for one in self.blocked.values()):
                raise Deadlock(f"{len(self.waiting)} pieces of work never run")
            self._pass_on(rank)

    def _pass_on(self, rank):
        others = [one for one in sorted(self.blocked) if self.blocked[one] is None]
        self.holder = self.random.choice(others) if others else None
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.holder == rank)

    def run(self, programs):
        """Run a program a rank, one at a time, until all have ended. Raises the first failure."""
        self.blocked = dict.fromkeys(programs)

        def body(rank):
            with self.turn:
                self.turn.wait_for(lambda: self.holder == rank)
                try:
                    if self.failure is None:
                        programs[rank]()
                except BaseException as error:  # noqa: BLE001 - raised below
                    self.failure = self.failure or error
                del self.blocked[rank]
                if self.failure is not None:
                    for one in self.blocked:
                        self.blocked[one] = None
                for one in [
                    one for one in self.blocked if self.blocked[one] is not None and self.blocked[one].done
                ]:
                    self.blocked[one] = None
                waiting = sorted(self.blocked, key=lambda one: self.blocked[one] is not None)
                self.holder = waiting[0] if waiting else None
                self.turn.notify_all()

        threads = [threading.Thread(target=body, args=(one,), name=f"rank {one}") for one in programs]
        for thread in threads:
            thread.start()
        with self.turn:
            self.holder = min(programs)
            self.turn.notify_all()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        if self.failure is not None:
            raise self.failure


class GpuStreams:
    """The streams of one rank's GPU."""

    def __init__(self, gpus: Gpus):
        self.gpus = gpus
        self.last: dict[str, Work | None] = {"pack": None, "unpack": None}
        self.current = "pack"

    def give(self, run=None, after=()):
        work = Work(self.gpus, [self.last[self.current], *after], run)
        self.gpus.waiting.append(work)
        self.last[self.current] = work
        return work

    def begin(self):
        pass

    @contextlib.contextmanager
    def _on(self, stream, after):
        before, self.current = self.current, stream
        if after is not None and self.gpus.marks_hold:
            self.give(after=[after])
        yield
        self.current = before

    def packing(self, after=None):
        return self._on("pack", after)

    def unpacking(self, after=None):
        return self._on("unpack", after)

    def mark(self):
        return self.give()

    def end(self):
        for work in self.last.values():
            if work is not None:
                work.wait()


class GpuExecutor:
    """A rank's executor whose copies run on its GPU's streams."""

    def __init__(self, executor, gpus):
        self.executor = executor
        self.streams = GpuStreams(gpus)
        self.num_rounds = executor.num_rounds
        self.sends, self.receives = executor.sends, executor.receives

    def pack(self, number):
        self.streams.give(lambda: self.executor.pack(number))

    def finish(self, number):
        self.streams.give(lambda: self.executor.finish(number))


class GpuTransport:
    """The communicators of one rank: of all ranks, and of its domain."""

    def __init__(self, gpus: Gpus, rank: int, streams: GpuStreams):
        self.gpus, self.rank, self.streams = gpus, rank, streams
        self.last: dict[object, Work] = {}

    def start(self, sends, receives, phase=NETWORK):
        gpus, domains = self.gpus, self.gpus.domains
        same = {domains[one.peer] == domains[self.rank] for one in (*sends, *receives)}
        assert same <= {phase == DOMAIN}, "a message on the other phase's communicator"
        group = "network" if phase == NETWORK else f"domain {domains[self.rank]}"
        messages = [(True, one.peer, one.data, self.rank, group) for one in sends]
        messages += [(False, one.peer, one.data, self.rank, group) for one in receives]
        if not messages:
            return type("Nothing", (), {"wait": lambda self: None})()
        after = [self.streams.last[self.streams.current], self.last.get(group)]
        if gpus.one_at_a_time:
            after.append(gpus.launched.get(self.rank))
        work = Work(gpus, after, messages=messages)
        gpus.waiting.append(work)
        gpus.groups.setdefault((group, self.rank), []).append(work)
        gpus.launched[self.rank] = self.last[group] = work
        gpus.num_groups += 1
        return work
