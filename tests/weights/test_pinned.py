"""Copies through pinned buffers, with a GPU in place that does nothing before it is waited for."""

from __future__ import annotations

from random import Random

import pytest
import torch

from reshard_cli.refit.copies import Copies
from reshard_cli.weights.pinned import PinnedBuffers


class LateGpu:
    """Runs copies only when a mark behind them is waited for, or at the very end."""

    def __init__(self):
        self.queue = []
        self.waits = 0

    def start(self, target, source):
        self.queue.append((target, source))

    def mark(self):
        gpu, count = self, len(self.queue)

        class Mark:
            def wait(self):
                gpu.waits += 1
                gpu.catch_up(count)

        return Mark()

    def catch_up(self, count):
        for index, copy in enumerate(self.queue[:count]):
            if copy is not None:
                copy[0].copy_(copy[1])
                self.queue[index] = None


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
