"""What a document can have a tensor cast to: another dtype, or float8 with a scale for each square block.

A block-scaled tensor is a pair: `X.weight` in float8 and `X.weight_scale_inv` in float32, one scale for each
block of size x size of the last two dims, by which a float8 value is multiplied to have the weight back
(DeepSeek-V3's checkpoints; vLLM and SGLang hold them so).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reshard_cli.spec.dtypes import ITEM_SIZE, dtype_hint

__all__ = ["SCALE_SUFFIX", "Blockwise", "block_of", "parse_cast", "scale_shape", "weight_of_scale"]

SCALE_SUFFIX = "_scale_inv"
_BLOCKWISE = re.compile(r"blockwise\(\s*(\w+)\s*(?:,\s*(\d+)\s*)?\)")
_SIZES = (128, 64, 32, 16, 256, 512)  # 128 first: small tensors fit several


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Float8 of this dtype, with a float32 scale for each block of size x size."""

    dtype: str
    size: int


def parse_cast(text: str) -> str | Blockwise:
    """Return the dtype name, or what `blockwise(float8_e4m3fn, 128)` says. Raises ValueError for other text."""
    if text in ITEM_SIZE:
        return text
    found = _BLOCKWISE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is neither a dtype nor blockwise(float8_e4m3fn, 128); {dtype_hint(text)}")
    dtype, size = found[1], int(found[2] or 128)
    if dtype not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(f"blockwise takes float8_e4m3fn or float8_e5m2, not {dtype!r}")
    if not 1 <= size <= 1 << 20:
        raise ValueError(f"a block has at least 1 row and at most 2**20, not {size}")
    return Blockwise(dtype, size)


def scale_shape(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of this shape, of at least two dims."""
    return (*shape[:-2], *(-(-one // size) for one in shape[-2:]))


def block_of(shape: Sequence[int], scales: Sequence[int]) -> int | None:
    """Return the block size at which tensors of these shapes are a pair, or None where they are none."""
    if len(shape) < 2 or len(shape) != len(scales):
        return None
    return next((size for size in _SIZES if scale_shape(shape, size) == tuple(scales)), None)


def weight_of_scale(name: str) -> str | None:
    """Return the name of the tensor whose scales have this name, or None where it is no scale's name."""
    return name.removesuffix(SCALE_SUFFIX) if name.endswith(SCALE_SUFFIX) else None
