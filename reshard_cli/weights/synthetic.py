"""A source whose every element is a function of the tensor's name, its global index and the version.

So a destination can be checked without any file, and any two elements that change places are noticed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from reshard_cli.spec.dtypes import item_size
from reshard_cli.weights.tensors import torch_dtype
from reshard_cli.weights.windows import Boxed, Corner

__all__ = ["SyntheticSource"]

_CHUNK = 1 << 17  # elements that are made at a time: bounds the memory beside the result
# of a float's bits, all but the highest exponent bit: the value is finite, so casts are plain too
_FINITE = {
    "float64": 0xBFFFFFFFFFFFFFFF, "float32": 0xBFFFFFFF, "float16": 0xBFFF, "bfloat16": 0xBFFF,
    "float8_e4m3fn": 0xBF, "float8_e5m2": 0xBF, "float8_e8m0fnu": 0x7F, "complex64": 0xBFFFFFFFBFFFFFFF,
    "bool": 0x01,
}  # fmt: skip


class SyntheticSource:
    """Makes the values of any box of any tensor."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], str]], version: int = 1) -> None:
        """`tensors`: global shape and dtype by logical name."""
        self._tensors = tensors
        self.version = version

    def in_place(self, name: str) -> bool:
        """Say that every value is made when it is asked for."""
        return False

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield the box in parts of bounded size, in order."""
        yield from self._parts(name, lo, hi, 0)

    def _parts(self, name: str, lo: Corner, hi: Corner, dim: int) -> Iterator[Boxed]:
        inner = math.prod(b - a for a, b in zip(lo[dim + 1 :], hi[dim + 1 :], strict=True))
        if dim == len(lo) or inner * (hi[dim] - lo[dim]) <= _CHUNK:
            yield lo, hi, self._make(name, lo, hi)
            return
        rows = max(1, _CHUNK // inner) if inner else hi[dim] - lo[dim]
        for start in range(lo[dim], hi[dim], rows):
            stop = min(start + rows, hi[dim])
            part_lo, part_hi = (*lo[:dim], start, *lo[dim + 1 :]), (*hi[:dim], stop, *hi[dim + 1 :])
            if inner > _CHUNK:
                yield from self._parts(name, part_lo, part_hi, dim + 1)
            else:
                yield part_lo, part_hi, self._make(name, part_lo, part_hi)

    def _make(self, name: str, lo: Corner, hi: Corner) -> Tensor:
        shape, dtype = self._tensors[name]
        index = np.zeros((), np.uint64)
        stride = 1
        for dim in range(len(shape) - 1, -1, -1):
            axis = np.arange(lo[dim], hi[dim], dtype=np.uint64) * np.uint64(stride)
            index = axis.reshape((-1,) + (1,) * (len(shape) - 1 - dim)) + index
            stride *= shape[dim]
        seed = hashlib.sha256(f"{name}/{self.version}".encode()).digest()
        with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
            value = index * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(seed[:8], np.uint64)[0]
            value ^= value >> np.uint64(29)
            value *= np.uint64(0xBF58476D1CE4E5B9)
            value ^= value >> np.uint64(32)
        size = item_size(dtype)
        value &= np.uint64(_FINITE.get(dtype, (1 << (8 * size)) - 1))
        raw = value.astype(f"<u{size}").reshape([b - a for a, b in zip(lo, hi, strict=True)])
        flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
        return flat.view(torch_dtype(dtype)).view(raw.shape)
