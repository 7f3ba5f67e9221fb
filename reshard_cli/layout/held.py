"""One tensor as a job holds it: the outcome of the document's rules for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HeldTensor"]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor as a job holds it.

    `logical` is the name of the tensor whose values it has: its own, or the target of its alias.
    `dtype_asked` says that the document itself gave the dtype, which asks a destination for a cast.
    `block` is the block size of a tensor with block scales; `scale_of` names the tensor whose scales it is.
    """

    name: str
    logical: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None
    has_experts: bool
    geometry: int
    rule: int | None
    dtype_asked: bool
    padding: Literal["zero", "keep"]
    route: Literal["broadcast", "reshard"] | None
    block: int | None = None
    scale_of: str | None = None
