"""A smaller model of the same kind: fewer layers, fewer experts, narrower sizes; every kind of layer stays.

The sizes that a model document names are what shrinks: layers, experts, and all other sizes alike, until the model
has at most the bytes that are wanted. Numbers of heads and groups, sizes of 16 and less, and sizes that only pick
layers stay as they are. A size stays a multiple of what cuts it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reshard_cli.errors import DocumentError
from reshard_cli.spec.located import Located
from reshard_cli.spec.model import LogicalTensor, Model
from reshard_cli.spec.model_document import ModelDocument, model_of_document
from reshard_cli.spec.names import fill, template_of

__all__ = ["Cuts", "ModelScaler", "ScaledModel", "apportioned", "layers_by_kind"]

_SMALL = 16  # sizes up to this stay: convolutions, numbers of dense layers
_ALIGNED = 16  # elements: a scaled size stays a multiple of so many where it was
_STEPS = 8  # of the shrinking, for each factor of two
_MOST_STEPS = 40 * _STEPS


@dataclass(frozen=True, slots=True)
class Cuts:
    """What cuts the sizes: (coordinates before, after) of every axis, and the side of float8 blocks, if any."""

    axes: tuple[tuple[int, int], ...]
    num_stages: int = 1
    block: int | None = None

    def unit(self, size: int) -> int:
        """Return what a size has to stay a multiple of, so that what divided evenly still does."""
        base = self.block if self.block is not None and size % self.block == 0 else math.gcd(size, _ALIGNED)
        whole = [after for before, after in self.axes if size % (base * before) == 0]
        even = [after for before, after in self.axes if size % before == 0]
        return math.lcm(base * math.lcm(1, *whole), *even)


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """The smaller model; `kept`: its layers by their numbers in the full one; `sizes`: (name, before, after)."""

    model: Model
    kept: tuple[int, ...]
    num_layers: int
    sizes: tuple[tuple[str, int, int], ...]


def apportioned(weights: Sequence[int], total: int) -> list[int]:
    """Divide `total` in proportion to the weights, by largest remainders; every positive weight gets at least 1."""
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    found = [max(int(weight > 0), math.floor(share)) for weight, share in zip(weights, shares, strict=True)]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        rooms = [
            step * (share - one) if step > 0 or one > 1 else -math.inf
            for share, one in zip(shares, found, strict=True)
        ]
        found[rooms.index(max(rooms))] += step
    return found


def layers_by_kind(tensors: Iterable[LogicalTensor], boundary: int | None = None) -> list[list[int]]:
    """Return the layers in groups that have the same tensors; `boundary`: the first layer of another part."""
    content: dict[int, set[tuple[str, tuple[int, ...], str]]] = defaultdict(set)
    for tensor in tensors:
        if tensor.layer is not None:
            template = template_of(tensor.name.replace("{expert}", "0"))[0]
            content[tensor.layer].add((template, tensor.shape, tensor.dtype))
    kinds: dict[tuple[bool, frozenset[tuple[str, tuple[int, ...], str]]], list[int]] = defaultdict(list)
    for layer in sorted(content):
        kinds[boundary is not None and layer >= boundary, frozenset(content[layer])].append(layer)
    return list(kinds.values())


class ModelScaler:
    """Makes smaller models of one model document."""

    def __init__(self, document: ModelDocument, located: Located, origin: str, cuts: Cuts) -> None:
        """Raises DocumentError for a document whose shapes are plain numbers."""
        self.document, self.located, self.origin, self.cuts = document, located, origin, cuts
        self.full = model_of_document(document, located, origin)
        self.experts = self._expert_sizes()
        self.scalable = self._scalable()
        if not self.scalable:
            raise DocumentError(
                f"--scale: {origin}: names no sizes that could shrink; write its shapes as expressions of `sizes`, "
                "as layouts/models/ do"
            )

    def _expert_sizes(self) -> set[str]:
        """Return the names of sizes that are the number of experts."""
        found = {self.document.ranges.expert}
        for pattern, entry in self.document.tensors.items():
            shape = entry if isinstance(entry, list) else entry.shape
            if not isinstance(entry, list) and entry.experts is not None:
                found.add(entry.experts)
            if ".experts." in pattern and "{expert}" not in pattern and shape:
                found.add(shape[0])  # grouped experts
        return {name for name in found if isinstance(name, str) and name in self.document.sizes}

    def _scalable(self) -> list[str]:
        picking = {str(self.document.ranges.layer)}
        chosen = [entry.layers for entry in self.document.tensors.values() if not isinstance(entry, list)]
        for one in [*self.document.sets.values(), *chosen]:
            if one is not None and not isinstance(one, (str, list)):
                picking |= set(re.findall(r"\w+", repr(one.model_dump())))
        config = self.document.config
        counts = {one for name, one in config.items() if "num_" in name or name.startswith("n_")}
        repeated = {one for one in config.values() if isinstance(one, int)}  # would not follow a smaller size
        return [
            name
            for name, size in self.document.sizes.items()
            if isinstance(size, int)
            and size > _SMALL
            and size not in repeated
            and name not in picking | self.experts
            and name not in counts
            and not name.endswith(("heads", "groups"))
        ]

    def scaled(self, most_bytes: float) -> ScaledModel:
        """Return the largest of the smaller models that has at most so many bytes; the smallest where none has."""
        low, high = 0, _MOST_STEPS
        while low < high:
            middle = (low + high) // 2
            if self.shrunk(2 ** (-middle / _STEPS)).model.num_bytes <= most_bytes:
                high = middle
            else:
                low = middle + 1
        return self.shrunk(2 ** (-low / _STEPS))

    def shrunk(self, by: float) -> ScaledModel:
        """Return the model with layers, experts and sizes multiplied by this (at most 1), each as far as it can."""
        sizes = {}
        for name in [*self.scalable, *sorted(self.experts)]:
            size = self.document.sizes[name]
            if isinstance(size, int):
                unit = self._expert_unit(size) if name in self.experts else self.cuts.unit(size)
                sizes[name] = min(size, max(1, math.floor(size * by / unit)) * unit)
        ranges = self.document.ranges
        if isinstance(ranges.expert, int):
            unit = self._expert_unit(ranges.expert)
            fewer = min(ranges.expert, max(1, math.floor(ranges.expert * by / unit)) * unit)
            ranges = ranges.model_copy(update={"expert": fewer})
        document = self.document.model_copy(
            update={"sizes": {**self.document.sizes, **sizes}, "ranges": ranges}
        )
        model = model_of_document(document, self.located, self.origin)
        boundary = model.config.get("num_hidden_layers")
        kinds = layers_by_kind(model.tensors, boundary)
        kept = self._kept(kinds, by)
        config = dict(model.config)
        if boundary is not None:
            config["num_hidden_layers"] = sum(layer < boundary for layer in kept)
        changed = [
            (name, before, sizes[name]) for name, before in self.document.sizes.items()
            if name in sizes and isinstance(before, int) and before != sizes[name]
        ]  # fmt: skip
        if isinstance(ranges.expert, int) and ranges.expert != self.document.ranges.expert:
            changed.append(("experts", int(str(self.document.ranges.expert)), ranges.expert))
        return ScaledModel(
            replace(model, tensors=_renumbered(model.tensors, kept), config=config), tuple(kept),
            sum(map(len, kinds)), tuple(changed),
        )  # fmt: skip

    def _expert_unit(self, experts: int) -> int:
        return math.lcm(1, *(after for before, after in self.cuts.axes if experts % before == 0))

    def _kept(self, kinds: Sequence[Sequence[int]], by: float) -> list[int]:
        """Return the layers that stay: of every kind its share, evenly spread, and enough for every stage."""
        total = sum(map(len, kinds))
        if not total:
            return []
        least = min(total, max(len(kinds), self.cuts.num_stages))
        counts = apportioned([len(kind) for kind in kinds], max(least, round(total * by)))
        return sorted(
            kind[int((nth + 0.5) * len(kind) / count)]
            for kind, count in zip(kinds, counts, strict=True)
            for nth in range(min(count, len(kind)))
        )


def _renumbered(tensors: Iterable[LogicalTensor], kept: Sequence[int]) -> tuple[LogicalTensor, ...]:
    numbers = {layer: number for number, layer in enumerate(kept)}
    found = []
    for tensor in tensors:
        if tensor.layer is None:
            found.append(tensor)
        elif tensor.layer in numbers:
            template, _, expert = template_of(tensor.name.replace("{expert}", "0"))
            number = numbers[tensor.layer]
            name = fill(template, layer=number, expert=None if tensor.has_experts else expert)
            found.append(replace(tensor, name=name, layer=number))
    return tuple(found)
