"""Copies through pinned buffers, with a GPU in place that does nothing before it is waited for."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from reshard_cli.refit import executor
from reshard_cli.refit.copies import Copies
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.weights.pinned import PinnedBuffers
from reshard_cli.weights.streams import streams_of


class LateGpu:
    """Runs a stream's copies only when a mark behind them is waited for, or at the very end."""

    def __init__(self):
        self.streams = {"pack": [], "unpack": []}
        self.current = "pack"
        self.waits = 0

    @property
    def queue(self):
        return self.streams[self.current]

    def start(self, target, source):
        self.queue.append((target, source))

    def mark(self, *_):
        gpu, queue, count = self, self.queue, len(self.queue)

        class Mark:
            def wait(self):
                gpu.waits += 1
                gpu.catch_up(count, queue)

        return Mark()

    def catch_up(self, count, queue=None):
        queue = self.queue if queue is None else queue
        for index, copy in enumerate(queue[:count]):
            if copy is not None:
                torch.Tensor.copy_(*copy)
                queue[index] = None


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __getitem__(self, key):
        return super().__getitem__(key).as_subclass(OnGpu)


def pairs(random, out):
    found = []
    for _ in range(random.randint(1, 12)):
        shape = [random.randint(1, 9) for _ in range(random.randint(0, 3))]
        dtype = random.choice([torch.float32, torch.bfloat16, torch.uint8])
        source = torch.rand(shape).mul(200).to(dtype)
        cast = random.choice([dtype, torch.float32])
        target = torch.zeros([2 * one for one in shape], dtype=cast)
        for dim, one in enumerate(shape):
            target = target.narrow(dim, 0, one)  # strided
        found.append((target, source))
    return found


@pytest.mark.parametrize("out", [False, True], ids=["onto the GPU", "off the GPU"])
def test_every_copy_arrives_though_the_gpu_is_late_and_the_buffers_are_small(out):
    random = Random(3)
    waits = 0
    for _ in range(100):
        gpu = LateGpu()
        buffers = PinnedBuffers(random.choice([16, 48, 4096]), gpu.mark, pin=False, start=gpu.start)
        for _ in range(3):
            copies = pairs(random, out)
            given = [(target, source.clone()) for target, source in copies]
            if not out:
                given = [(target.as_subclass(OnGpu), source) for target, source in given]
            buffers.run(given)
            for _, source in given:
                source.zero_()  # a source on the CPU may change at once
            if not out:
                gpu.catch_up(len(gpu.queue))
            for target, source in copies:
                assert torch.equal(target, source.to(target.dtype))
        waits += gpu.waits
    assert waits > 100


def test_a_buffer_is_not_filled_again_before_both_streams_are_done_with_it():
    gpu = LateGpu()
    buffers = PinnedBuffers(1024, gpu.mark, pin=False, start=gpu.start)
    first, second, folder = (torch.zeros(4) for _ in range(3))
    buffers.run([(first.as_subclass(OnGpu), torch.full((4,), 1.0))])  # packs a round
    gpu.current = "unpack"
    buffers.run([(folder, torch.full((4,), 2.0).as_subclass(OnGpu))])  # unpacks the one before
    gpu.current = "pack"
    buffers.run([(second.as_subclass(OnGpu), torch.full((4,), 3.0))])  # packs the next
    gpu.catch_up(len(gpu.queue))
    assert (first.tolist(), folder.tolist(), second.tolist()) == ([1.0] * 4, [2.0] * 4, [3.0] * 4)


def test_the_gpu_is_waited_for_where_the_staging_is_on_the_cpu(monkeypatch):
    """Backend gloo between live tensors on GPUs: the messages leave from the CPU."""
    late = LateGpu()
    devices = []

    def mark(device):
        devices.append(device)
        return late.mark()

    monkeypatch.setattr(executor, "mark_on", mark)

    class Unpinned(PinnedBuffers):
        def __init__(self, num_bytes, mark):
            super().__init__(num_bytes, mark, pin=False, start=late.start)

    monkeypatch.setattr(executor, "PinnedBuffers", Unpinned)
    one = object.__new__(RankExecutor)
    one._pinned, one.peak_staging_bytes = None, 0
    one.plan, one.streams = SimpleNamespace(staging=1 << 20), streams_of(torch.device("cpu"))
    arena = torch.zeros(4)
    one._pinned_buffers().run([(arena, torch.arange(4.0).as_subclass(OnGpu))])
    assert arena.tolist() == [0, 1, 2, 3]
    assert devices == [torch.device("cuda", 0)]


def test_the_buffers_stay_within_the_room_that_they_are_given():
    assert PinnedBuffers.size_within(1 << 30) == 32 << 20
    assert PinnedBuffers.size_within(1_000_000) == 500_000
    assert PinnedBuffers.size_within(100_000) == 0


def test_only_copies_between_a_gpu_and_the_cpu_go_through_them():
    gpu = LateGpu()
    buffers = PinnedBuffers(64, gpu.mark, pin=False, start=gpu.start)
    asked = []

    def ask():
        asked.append(1)
        return buffers

    copies = Copies(ask)
    targets = [torch.zeros(3), torch.zeros(3).as_subclass(OnGpu), torch.zeros(3, dtype=torch.float64)]
    for target in targets:
        copies.add(target, torch.ones(3))
    copies.run()
    assert asked == [1]
    assert [target.tolist() for target in targets] == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    gpu.catch_up(1)
    assert targets[1].tolist() == [1, 1, 1]
