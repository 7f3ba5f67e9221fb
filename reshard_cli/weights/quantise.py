"""Casts a tensor to float8 with a scale for each block, while it is read.

In a block of size x size (smaller at the end of a dim), scale = max|x| / 448 for float8_e4m3fn (57344 for
float8_e5m2), in float32, and 1 where all is zero; the value is x / scale, computed in float32, clamped to the
format's largest number and rounded to nearest even. A weight is then value * scale: DeepSeek-V3's rule, which
vLLM's and SGLang's block-scaled kernels read. Not-a-number or infinity in a block spoils that block, and only it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from reshard_cli.errors import WeightsError
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.spec.casts import SCALE_SUFFIX
from reshard_cli.weights.tensors import torch_dtype
from reshard_cli.weights.windows import Boxed, Corner, Source, intersection, within

__all__ = ["Made", "QuantisingSource", "made_of", "quantise"]

_AT_ONCE = 1 << 22  # elements cast at a time: bounds the memory beside the result


@dataclass(frozen=True, slots=True)
class Made:
    """Something that is made of a tensor: its values in float8, or the scales of its blocks."""

    weight: str
    shape: tuple[int, ...]
    dtype: str
    block: int
    scales: bool


def made_of(pairs: Iterable[TensorPair], *, at: Iterable[str]) -> dict[str, Made]:
    """Return by name what is made of the tensors that are cast in blocks at these sides (sender, receiver)."""
    sides = set(at)
    found = {}
    for pair in pairs:
        if pair.quantised not in sides or pair.scale_of is not None:
            continue
        assert pair.block is not None
        values = Made(pair.name, pair.shape, pair.destination_dtype, pair.block, scales=False)
        found[pair.name] = values
        found[pair.name + SCALE_SUFFIX] = Made(
            pair.name, pair.shape, pair.destination_dtype, pair.block, scales=True
        )
    return found


def quantise(values: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the float8 values [rows, columns] and the float32 scales of its blocks, of whole blocks."""
    rows, columns = values.shape
    high, wide = -(-rows // block), -(-columns // block)
    padded = pad(values.to(torch.float32), (0, wide * block - columns, 0, high * block - rows))
    blocks = padded.view(high, block, wide, block)
    largest = torch.finfo(dtype).max
    scales = blocks.abs().amax(dim=(1, 3)) / largest
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    cast = (blocks / scales[:, None, :, None]).clamp(-largest, largest)
    whole = cast.view(high * block, wide * block)[:rows, :columns].to(dtype)
    return whole, scales


class QuantisingSource:
    """Another source, of which some tensors are cast in blocks; those need whole blocks of it."""

    def __init__(self, base: Source, made: Mapping[str, Made]) -> None:
        """`made` is by the names that are asked for; every other name is the base's."""
        self.base = base
        self._made = made

    def in_place(self, name: str) -> bool:
        """Say whether the tensor's bytes lie somewhere as they are."""
        return name not in self._made and self.base.in_place(name)

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield the box in parts of bounded size. Raises WeightsError where the base lacks a part of a block."""
        made = self._made.get(name)
        if made is None:
            yield from self.base.windows(name, lo, hi)
            return
        for part_lo, part_hi in _strips(made, lo, hi):
            around = _of_scales if made.scales else _outwards
            outer_lo, outer_hi = around(made, part_lo, part_hi)
            matrix = self._gathered(made, outer_lo, outer_hi)
            values, scales = quantise(matrix.reshape(matrix.shape[-2:]), made.block, torch_dtype(made.dtype))
            whole, origin = values, outer_lo
            if made.scales:
                whole, origin = scales, (*part_lo[:-2], *(one // made.block for one in outer_lo[-2:]))
            shaped = whole.reshape([1] * (len(part_lo) - 2) + list(whole.shape))
            yield part_lo, part_hi, within(shaped, origin, part_lo, part_hi)

    def _gathered(self, made: Made, lo: Corner, hi: Corner) -> Tensor:
        """Return a box of the base's tensor in float32."""
        shape = [b - a for a, b in zip(lo, hi, strict=True)]
        found: Tensor | None = None
        seen: Tensor | None = None
        for part_lo, part_hi, values in self.base.windows(made.weight, lo, hi):
            if (part_lo, part_hi) == (lo, hi):
                return values.to(torch.float32)
            if found is None or seen is None:
                found = torch.empty(shape, dtype=torch.float32, device=values.device)
                seen = torch.zeros(shape, dtype=torch.bool, device=values.device)
            shared = intersection(lo, hi, part_lo, part_hi)
            assert shared is not None
            within(found, lo, *shared).copy_(within(values, part_lo, *shared))
            within(seen, lo, *shared).fill_(True)
        if found is None or seen is None or not bool(seen.all()):
            raise WeightsError(
                f"tensor {made.weight!r}: only a part of box {[list(one) for one in zip(lo, hi, strict=True)]} is "
                f"here, and a cast needs whole blocks of {made.block}"
            )
        return found


def _strips(made: Made, lo: Corner, hi: Corner) -> Iterator[tuple[Corner, Corner]]:
    """Yield the box one matrix after the other, each in strips that end between blocks."""
    if len(lo) > 2:
        for index in range(lo[0], hi[0]):
            for part_lo, part_hi in _strips(made, lo[1:], hi[1:]):
                yield (index, *part_lo), (index + 1, *part_hi)
        return
    unit = 1 if made.scales else made.block
    columns = max(1, (hi[1] - lo[1]) * (made.block if made.scales else 1))
    step = max(1, _AT_ONCE // (columns * made.block)) * unit
    row = lo[0]
    while row < hi[0]:
        stop = min(hi[0], (row // unit) * unit + step)
        yield (row, lo[1]), (stop, hi[1])
        row = stop


def _outwards(made: Made, lo: Corner, hi: Corner) -> tuple[Corner, Corner]:
    """Return the smallest box of whole blocks around a box of values."""
    size = made.block
    outer_lo = (*lo[:-2], *(one // size * size for one in lo[-2:]))
    ends = zip(hi[-2:], made.shape[-2:], strict=True)
    return outer_lo, (*hi[:-2], *(min(whole, -(-one // size) * size) for one, whole in ends))


def _of_scales(made: Made, lo: Corner, hi: Corner) -> tuple[Corner, Corner]:
    """Return the box of values to which a box of scales belongs."""
    size = made.block
    outer_lo = (*lo[:-2], *(one * size for one in lo[-2:]))
    ends = zip(hi[-2:], made.shape[-2:], strict=True)
    return outer_lo, (*hi[:-2], *(min(whole, one * size) for one, whole in ends))
