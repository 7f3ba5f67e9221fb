"""One message of an exchange: bytes for, or from, one peer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Message"]


@dataclass(frozen=True, slots=True)
class Message:
    """`peer` is a world rank, `data` flat uint8 that is sent from or received into."""

    peer: int
    data: Tensor
