"""Fewer ranks for one job: smaller meshes with the same axes, chosen so that as few axes as possible become 1.

Every axis is divided by a whole number, so that what it cut evenly it still does. Documents with an engine are
scaled by their `parallel` sizes, the others by their meshes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard_cli.errors import DocumentError
from reshard_cli.spec.layout_document import LayoutDocument, LoadedLayout, Pipeline
from reshard_cli.spec.model import Model
from reshard_cli.spec.names import has_digit
from reshard_cli.spec.placement import Shard, parse_placement
from reshard_cli.spec.preset import PresetError, expanded
from reshard_cli.spec.scaling_model import layers_by_kind

__all__ = ["JobScaler", "Meshes", "RankChoice", "divisors", "scaled_place"]

Meshes = Mapping[str, Mapping[str, int]]
_REFUSED = {
    "pieces": "its explicit boxes (`pieces`) are written for its own sizes",
    "storage.unzip": "a storage rule's `unzip` has rows of the model's own head size",
    "tensors.blocks": "a rule's `blocks` are rows of the model's own size",
    "digits": "its rules name layers or experts by number",
    "config": "its `config` has sizes of the model's own (they belong into the model document)",
    "meshes": "it has an engine and meshes of its own",
}


@dataclass(frozen=True, slots=True)
class RankChoice:
    """One way to cut a job down: its ranks, domain and meshes, what its document says, and how much shape is lost.

    `lost`: 0 where every axis of several coordinates still has several, and an axis that reached over several domains
    still does. `lopsided` is larger the more unequally the axes shrink.
    """

    ranks: int
    domain: int
    meshes: Meshes
    values: dict[str, Any]
    lost: int
    lopsided: float


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


class JobScaler:
    """Finds smaller meshes for one job of a model, which is the one of full size."""

    def __init__(self, loaded: LoadedLayout, model: Model) -> None:
        """Raises DocumentError for a document that says things in sizes of its own."""
        self.loaded = loaded
        self.document = loaded.document
        found = _refusal(self.document)
        if found is not None:
            raise DocumentError(
                f"--scale: {loaded.path}: {_REFUSED[found]}, which a smaller model does not have; write a small layout "
                "by hand, or let an engine preset make the rules"
            )
        self.expanded = self.document
        if self.document.engine is not None:
            try:
                self.expanded = expanded(self.document, model)
            except PresetError as error:
                raise DocumentError(problems=[loaded.located.problem(error.path, str(error))]) from error
        # to know which sizes go together, one layer of each kind is enough
        layers = {kind[0] for kind in layers_by_kind(model.tensors)}
        kept = tuple(one for one in model.tensors if one.layer is None or one.layer in layers)
        self.model = replace(model, tensors=kept)
        self.meshes: Meshes = self.expanded.meshes or {"ranks": {"rank": self.document.ranks}}
        self.num_domains = -(-self.document.ranks // self.document.domain)
        self._choices: dict[tuple[int, int | None], RankChoice | None] = {}

    def choose(self, factor: float) -> RankChoice:
        """Return the smallest job of at least `factor` times the ranks that loses the least of its shape."""
        ranks = self.document.ranks
        least = min(ranks, 4 if self.num_domains > 1 and self.document.domain > 1 else 2)
        wanted = max(least, math.ceil(ranks * factor))
        best: RankChoice | None = None
        for one in divisors(ranks):
            found = self.of_ranks(one) if one >= wanted else None
            if found is not None and (best is None or found.lost < best.lost):
                best = found
            if best is not None and not best.lost:
                break
        assert best is not None  # the job as it is
        return best

    def of_ranks(self, ranks: int, domain: int | None = None) -> RankChoice | None:
        """Return the best way to have so many ranks, or None; `domain`: instead of one that suits the ranks."""
        key = (ranks, domain)
        if key not in self._choices:
            best: RankChoice | None = None
            for values, meshes in self._ways(ranks):
                lost, lopsided = self._cost(meshes, domain or self._domain(ranks))
                found = RankChoice(
                    ranks, domain or self._domain(ranks), meshes, values, lost=lost, lopsided=lopsided
                )
                if best is None or (found.lost, found.lopsided) < (best.lost, best.lopsided):
                    best = found
            self._choices[key] = best
        return self._choices[key]

    def _domain(self, ranks: int) -> int:
        """Return the domain's ranks: scaled as the job, but several of several, and several domains where there were."""
        if self.num_domains == 1:
            return ranks
        most = max(2, self.document.domain * ranks // self.document.ranks)
        fitting = [one for one in divisors(ranks) if one <= min(most, self.document.domain, ranks // 2)]
        return max(fitting, default=1)

    def _ways(self, ranks: int) -> Iterator[tuple[dict[str, Any], Meshes]]:
        """Yield what the document may say for so many ranks, and the meshes that this makes."""
        if self.document.engine is None:
            yield from self._mesh_ways(ranks)
            return
        keys = [key for key, size in self.document.parallel.items() if size > 1]
        for sizes in itertools.product(*(divisors(self.document.parallel[key]) for key in keys)):
            parallel = {**self.document.parallel, **dict(zip(keys, sizes, strict=True))}
            if any(ranks % size for size in sizes):
                continue
            values = {"ranks": ranks, "parallel": parallel}
            # one layer a stage: how many there are is settled later
            pipeline = Pipeline(layers=[1] * parallel.get("pp", 1), first=[], last=[])
            try:
                made = expanded(self.document.model_copy(update={**values, "pipeline": pipeline}), self.model)
            except PresetError:
                continue  # these sizes do not go together
            yield values, made.meshes

    def _mesh_ways(self, ranks: int) -> Iterator[tuple[dict[str, Any], Meshes]]:
        # axes of one name and size in several meshes are one axis
        axes = sorted({(axis, size) for mesh in self.meshes.values() for axis, size in mesh.items()})
        for sizes in itertools.product(*(divisors(size) for _, size in axes)):
            new = dict(zip(axes, sizes, strict=True))
            meshes = {
                name: {axis: new[axis, size] for axis, size in mesh.items()}
                for name, mesh in self.meshes.items()
            }
            if all(math.prod(mesh.values()) == ranks for mesh in meshes.values()):
                values: dict[str, Any] = {"ranks": ranks}
                if self.document.meshes:
                    values["meshes"] = meshes
                yield values, meshes

    def _cost(self, meshes: Meshes, domain: int) -> tuple[int, float]:
        """Return (axes lost or gained, those that the document names twice as dear; how unequally they shrink)."""
        lost, lopsided = 0, 0.0
        for name, axes in self.meshes.items():
            for axis in {**axes, **meshes[name]}:
                before, after = axes.get(axis, 1), meshes[name].get(axis, 1)
                # an axis that an engine derives from the others is mostly one of replicas
                weight = 2 if self.document.engine is None or axis in self.document.parallel else 1
                lost += weight * ((before > 1) != (after > 1))
                lopsided += math.log2(before / after) ** 2
            last = list(axes)[-1]
            before, after = axes[last], meshes[name].get(last, 1)
            lost += (before > self.document.domain) and not after > domain
        return lost, lopsided


def _refusal(document: LayoutDocument) -> str | None:
    """Return why a document cannot be scaled, as a key of _REFUSED."""
    if document.pieces:
        return "pieces"
    if any(rule.unzip for rule in document.storage):
        return "storage.unzip"
    if any(rule.blocks for rule in document.tensors):
        return "tensors.blocks"
    if any("num_" not in key and not key.startswith("n_") for key in document.config):
        return "config"
    if document.engine is not None and document.meshes:
        return "meshes"
    numbered = [rule.match for rule in document.tensors] + [
        text for rule in document.storage for text in (*rule.concat, rule.rename or "")
    ]
    if any(has_digit(part) for text in numbered for part in text.split(".") if part.isdigit()):
        return "digits"
    return None


def scaled_place(
    place: Mapping[str, str], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, str]:
    """Return a rule's placements for the smaller axes: of `parts` there are as many as the axis still has room for."""
    found = {}
    for axis, text in place.items():
        placement = parse_placement(text)
        if isinstance(placement, Shard) and placement.parts is not None and axis in after:
            parts = max(1, math.gcd(placement.parts, after[axis]))
            text = f"shard({placement.dim}, parts={parts})" if before[axis] != after[axis] else text
        found[axis] = text
    return found
