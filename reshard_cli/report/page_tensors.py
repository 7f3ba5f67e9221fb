"""Works out the table of tensors of a plan's page: one row for all tensors that differ only in their layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.plan.build import Plan
from reshard_cli.plan.entries import NETWORK
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.names import template_of

__all__ = ["network_bytes_by_pair", "tensor_rows"]

_MOST_ROWS = 2000


@dataclass(slots=True)
class _Row:
    name: str
    shape: list[int] | None
    dtype: str
    route: str
    count: int = 0
    size: int = 0
    network: int = 0
    layers: list[int] = field(default_factory=list)

    def data(self) -> list[Any]:
        return [
            self.name, self.count, _ranges(sorted(set(self.layers))), self.shape, self.dtype, self.route,
            self.size, self.network,
        ]  # fmt: skip


def network_bytes_by_pair(plan: Plan) -> Ints:
    """Return the network bytes of each of the plan's pairs of tensors."""
    entries, streams = plan.entries, plan.streams
    found = np.zeros(len(plan.pairs), np.int64)
    crossing = streams.kind == NETWORK
    upto = _bytes_before(entries.start, streams.start[crossing]) - _bytes_before(
        entries.start, streams.stop[crossing]
    )
    of_class = np.zeros(len(entries.classes), np.int64)
    np.add.at(of_class, entries.tensor_class, np.diff(upto))
    # the tensors of a class are cut alike, and each has all of the class's boxes
    for one, amount in zip(entries.classes, of_class.tolist(), strict=True):
        found[one.tensors] = amount // len(one.tensors)
    return found


def _bytes_before(positions: Ints, edges: Ints) -> Ints:
    """Return for each position the distances to it from all edges before it, added up."""
    ordered = np.sort(edges)
    count = np.searchsorted(ordered, positions)
    total = np.concatenate([[0], np.cumsum(ordered)])[count]
    distances: Ints = count * positions - total
    return distances


def tensor_rows(plan: Plan) -> list[list[Any]]:
    """Return the rows: name, count, layers, shape, dtype, route, bytes, network bytes; the largest first.

    The bytes are those of one copy as it travels. Beyond 2000 rows the smallest become one, without a shape.
    """
    rows: dict[tuple[str, tuple[int, ...], str, str], _Row] = {}
    crossing = network_bytes_by_pair(plan).tolist()
    for pair, route, network in zip(plan.pairs, plan.routes, crossing, strict=True):
        name, layer, _ = template_of(pair.name)
        dtype = pair.source_dtype
        if pair.destination_dtype != dtype:
            dtype += f" → {pair.destination_dtype}"
        key = (name, pair.shape, dtype, route)
        row = rows.setdefault(key, _Row(name, list(pair.shape), dtype, route))
        row.count += pair.num_names
        row.size += math.prod(pair.shape) * item_size(pair.wire_dtype)
        row.network += network
        if layer is not None:
            row.layers.append(layer)
    ordered = sorted(rows.values(), key=lambda row: (-row.size, row.name))
    kept, rest = ordered[:_MOST_ROWS], ordered[_MOST_ROWS:]
    if rest:
        other = _Row(f"… {len(rest):,} smaller groups of tensors", None, "various", "various")
        for row in rest:
            other.count += row.count
            other.size += row.size
            other.network += row.network
        kept.append(other)
    return [row.data() for row in kept]


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as people write them: 0–2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(low) if low == high else f"{low}–{high}" for low, high in runs[:12]]
    return ", ".join(shown) + (", …" if len(runs) > 12 else "")
