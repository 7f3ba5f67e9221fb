"""Copies are exact however their views lie, and neighbours are copied as one."""

import random

import pytest
import torch

from reshard_cli.refit.copies import Copies
from reshard_cli.weights.tensors import as_bytes
from tests.weights.test_pinned import OnGpu


def test_neighbours_on_both_sides_are_one_copy():
    staging, storage = torch.zeros(1000), torch.arange(1000.0)
    copies = Copies()
    for start in range(0, 1000, 10):
        copies.add(staging[start : start + 10].view(2, 5), storage[start : start + 10].view(2, 5))
    assert len(copies) == 1
    for _ in range(2):
        staging.zero_()
        copies.run()
        assert torch.equal(staging, storage)
        assert len(copies) == 1


@pytest.mark.parametrize(
    "order", ["gap in the target", "gap in the source", "backwards", "other allocations", "other widths"]
)
def test_what_is_no_neighbour_is_a_copy_of_its_own(order):
    targets, sources = torch.zeros(64), torch.arange(64.0)
    copies = Copies()
    pairs = {
        "gap in the target": [(targets[:8], sources[:8]), (targets[9:17], sources[8:16])],
        "gap in the source": [(targets[:8], sources[:8]), (targets[8:16], sources[9:17])],
        "backwards": [(targets[8:16], sources[8:16]), (targets[:8], sources[:8])],
        "other allocations": [(torch.zeros(8), sources[:8]), (torch.zeros(8), sources[8:16])],
        "other widths": [(targets[:8], sources[:8]), (targets[8:16], sources[8:16].to(torch.float64))],
    }[order]
    for target, source in pairs:
        copies.add(target, source)
    assert len(copies) == 2
    copies.run()
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype))


def test_neighbours_of_different_dtypes_are_copied_bit_for_bit():
    staging = torch.zeros(24, dtype=torch.uint8)
    storage = torch.randint(0, 256, (24,), dtype=torch.uint8)
    copies = Copies()
    for start, stop, dtype in ((0, 8, torch.bfloat16), (8, 16, torch.float32), (16, 24, torch.float8_e4m3fn)):
        copies.add(staging[start:stop].view(dtype), storage[start:stop].view(dtype))
    assert len(copies) == 1
    copies.run()
    assert torch.equal(staging, storage)


def test_copies_on_a_gpu_are_batches_of_one_width_and_casts_are_none(monkeypatch):
    """Before torch 2.11 a batch on a GPU is cast to the dtype of its first target (pytorch issue 173383)."""
    batches = []

    def fast(targets, sources):
        assert len({one.dtype for one in (*targets, *sources)}) == 1
        batches.append(len(targets))
        for target, source in zip(targets, sources, strict=True):
            torch.Tensor.copy_(target, source)

    monkeypatch.setattr(torch, "_foreach_copy_", fast)
    copies = Copies()
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
    targets = [torch.zeros(3, dtype=one).as_subclass(OnGpu) for one in dtypes]
    for target in targets:
        copies.add(target, torch.ones(3).as_subclass(OnGpu))
    same = [torch.zeros(6, dtype=one)[::2].as_subclass(OnGpu) for one in dtypes]
    for target in same:
        copies.add(target, torch.ones(3, dtype=target.dtype).as_subclass(OnGpu))
    copies.run()
    assert [target.float().tolist() for target in targets + same] == [[1.0] * 3] * 8
    assert sorted(batches) == [1, 2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_random_cuts_of_random_views_are_exact(seed):
    chance = random.Random(seed)
    dtype = chance.choice([torch.bfloat16, torch.float32, torch.uint8, torch.float64])
    rows, columns = chance.randint(1, 9), chance.randint(1, 9)
    values = torch.randint(0, 100, (rows, columns)).to(dtype)
    lying = {
        "rows": lambda: torch.zeros(rows, columns, dtype=dtype),
        "columns": lambda: torch.zeros(columns, rows, dtype=dtype).t(),
        "wide": lambda: torch.zeros(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1],
        "every third": lambda: torch.zeros(3 * rows, columns, dtype=dtype)[::3],
    }
    source, target = chance.choice([*lying.values()])(), chance.choice([*lying.values()])()
    source.copy_(values)
    copies = Copies()
    row = 0
    while row < rows:
        stop = chance.randint(row + 1, rows)
        cut = chance.randint(0, columns)
        for part in (slice(0, cut), slice(cut, columns)):
            copies.add(target[row:stop, part], source[row:stop, part])
        row = stop
    copies.run()
    assert torch.equal(target, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_one_element_has_bytes_whatever_its_strides_say(dtype):
    element = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(dtype)[1:, 2:].as_strided((1, 1), (7, 3), 5)
    assert element.is_contiguous()
    assert torch.equal(as_bytes(element).view(dtype), torch.tensor([6]).to(dtype))
    assert as_bytes(torch.tensor(3.0)).numel() == 4
    assert as_bytes(torch.zeros(0, 4, dtype=dtype)).numel() == 0
