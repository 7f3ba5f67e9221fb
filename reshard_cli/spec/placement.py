"""What an axis of the mesh does to a tensor, as a document writes it: `shard(0, parts=4)`, `stage`, …"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Expert", "Placement", "Replicate", "Shard", "Stage", "parse_placement"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dimension `dim` as `torch.chunk` does; with `parts`, into fewer parts than coordinates.

    With parts=n over k·n coordinates, k neighbours hold the same part.
    """

    dim: int
    parts: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The axis picks the layers by the document's pipeline."""


@dataclass(frozen=True, slots=True)
class Expert:
    """The axis cuts the experts: blocks with the remainder on the first ranks, or dealt out in turn."""

    round_robin: bool = False


Placement = Replicate | Shard | Stage | Expert

_SHARD = re.compile(r"shard\(\s*(?P<dim>-?\d+)\s*(?:,\s*parts\s*=\s*(?P<parts>\d+)\s*)?\)")
_FORMS = "shard(DIM), shard(DIM, parts=N), stage, expert, expert(round_robin), replicate"


def parse_placement(text: str) -> Placement:
    """Read one placement. Raises ValueError naming the forms where it is none of them."""
    word = text.strip()
    if word == "replicate":
        return Replicate()
    if word == "stage":
        return Stage()
    if word == "expert":
        return Expert()
    if re.fullmatch(r"expert\(\s*round_robin\s*\)", word):
        return Expert(round_robin=True)
    match = _SHARD.fullmatch(word)
    if match is None:
        raise ValueError(f"{text!r} is no placement; write one of: {_FORMS}")
    parts = match["parts"]
    if parts is not None and int(parts) < 1:
        raise ValueError(f"{text!r}: parts must be at least 1")
    return Shard(int(match["dim"]), None if parts is None else int(parts))
