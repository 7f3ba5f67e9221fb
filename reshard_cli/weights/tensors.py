"""Bytes and dtypes in torch: raw views, exact copies, casts."""

from __future__ import annotations

import torch
from torch import Tensor

from reshard_cli.errors import WeightsError

__all__ = ["as_bytes", "copy_exact", "raw", "same_bits", "torch_dtype", "typed"]

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name. Raises WeightsError where this torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"dtype {name} needs a newer torch than {torch.__version__}")
    return dtype


def typed(data: Tensor, dtype: str) -> Tensor:
    """Return flat bytes (uint8, starting at a multiple of the element size) as elements of `dtype`."""
    return data.view(torch_dtype(dtype)) if data.numel() else data.new_empty(0, dtype=torch_dtype(dtype))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes, flat, without a copy."""
    # a dim of one element may have any stride, and keeps it when it is reshaped
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw(tensor: Tensor) -> Tensor:
    """Return a view of whole numbers as wide as the elements, which are copied and compared as they are."""
    return tensor.view(_RAW[tensor.element_size()])


def copy_exact(target: Tensor, source: Tensor) -> None:
    """Copy bit for bit where the dtypes are equal, else with torch's cast."""
    if target.dtype == source.dtype:
        raw(target).copy_(raw(source))
    else:
        target.copy_(source)


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Return elementwise whether two tensors of one dtype are equal bit for bit (NaN equals NaN)."""
    return raw(one) == raw(other)
