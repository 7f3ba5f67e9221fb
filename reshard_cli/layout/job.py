"""A job's layout: every tensor of the model with its rule, its geometry and its place in a storage.

`build_layout` joins a checked document with a model. Tensors that are cut alike share one geometry, so
the arrays are computed some twenty times for a model of a thousand tensors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from reshard_cli.errors import DocumentError, Problem, WeightsError
from reshard_cli.layout.boxes import disjoint
from reshard_cli.layout.casts import Casts
from reshard_cli.layout.digest import layout_digest
from reshard_cli.layout.distinct import BoxKey, DistinctBoxes, distinct_boxes
from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.holdings import (
    Holdings,
    Interleaved,
    blocked_holdings,
    explicit_holdings,
    interleaved_holdings,
    placed_holdings,
)
from reshard_cli.layout.pipeline import Stages
from reshard_cli.layout.scaled import CutBlock, cut_block, scaled_holdings
from reshard_cli.layout.storage_groups import StorageGroup, check_groups, group_storages
from reshard_cli.spec.layout_document import LoadedLayout, PieceRule, TensorRule
from reshard_cli.spec.located import KeyPath
from reshard_cli.spec.model import LogicalTensor, Model, rename_model
from reshard_cli.spec.names import Pattern, fill, has_digit, normalise, template_of
from reshard_cli.spec.placement import Expert, Placement, Shard, Stage
from reshard_cli.spec.preset import with_preset

__all__ = ["JobLayout", "build_layout"]


@dataclass(slots=True)
class JobLayout:
    """All tensors of a job, their geometries, and how they are grouped into storages."""

    loaded: LoadedLayout
    model: Model
    tensors: list[HeldTensor]
    geometries: list[Holdings]
    groups: list[StorageGroup]
    stages: Stages
    digest: str = field(default="", repr=False)
    _distinct: dict[tuple[int, ...], DistinctBoxes] = field(default_factory=dict, repr=False)
    _boxes: dict[BoxKey, DistinctBoxes] = field(default_factory=dict, repr=False)
    _scaled: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def distinct_boxes(self, geometries: tuple[int, ...]) -> DistinctBoxes:
        """Return the distinct boxes of a tensor with these geometries; worked out once for all plans."""
        if geometries not in self._distinct:
            parts = [self.geometries[one] for one in geometries]
            self._distinct[geometries] = distinct_boxes(parts, self._boxes)
        return self._distinct[geometries]

    def scale_geometry(self, geometry: int, shape: tuple[int, ...], size: int) -> int | None:
        """Return the geometry of the block scales of a tensor that is held without; None where blocks are cut.

        The first time it is worked out, and kept with the others.
        """
        key = (geometry, size)
        if key not in self._scaled:
            holdings = self.geometries[geometry]
            if cut_block(holdings, shape, size) is not None:
                return None
            self._scaled[key] = len(self.geometries)
            # where the scales would lie on the rank is of no meaning: they lie nowhere
            flat = replace(holdings, local_lo=np.zeros_like(holdings.local_lo))
            self.geometries.append(scaled_holdings(flat, shape, size, cover=False))
        return self._scaled[key]

    @property
    def name(self) -> str:
        """The job's name."""
        return self.loaded.document.name

    @property
    def num_ranks(self) -> int:
        """The job's number of ranks."""
        return self.loaded.document.ranks


class _Builder:
    """Applies a document's rules to a model's tensors and collects what does not fit."""

    def __init__(self, loaded: LoadedLayout, model: Model) -> None:
        self.loaded = loaded
        self.document = loaded.document
        try:
            self.model = rename_model(model, loaded.document.rename)
        except WeightsError as error:
            if not loaded.document.rename:
                raise
            problem = loaded.located.problem(("rename",), str(error))
            raise DocumentError(problems=[problem]) from error
        self.problems: dict[tuple[KeyPath, str], tuple[Problem, int]] = {}
        self.check_left_out()
        self.loaded = with_preset(loaded, self.model)
        self.document = self.loaded.document
        self.matched: dict[str, int | None] = {}
        self.placed: dict[object, int] = {}
        self.stage_of: dict[object, frozenset[int] | None] = {}
        self.casts = Casts(self.loaded, self.rule_of, self.add)
        self.numbered = any(has_digit(pattern.text) for pattern in self.loaded.matches)
        self.by_name = {tensor.name: tensor for tensor in self.model.tensors}
        held = [tensor for tensor in self.model.tensors if not self.loaded.leaves_out(tensor.name)]
        self.stages = Stages.of(self.loaded, replace(self.model, tensors=tuple(held)))
        self.geometries: list[Holdings] = []
        self.keys: dict[object, int] = {}
        self.pieces = self._pieces_by_tensor()

    def add(self, path: KeyPath, kind: str, message: str) -> None:
        """Note a problem; the same kind at the same place is noted once, and counted."""
        problem, count = self.problems.get((path, kind), (self.loaded.located.problem(path, message), 0))
        self.problems[path, kind] = (problem, count + 1)

    def _pieces_by_tensor(self) -> dict[str, list[tuple[int, PieceRule]]]:
        found: dict[str, list[tuple[int, PieceRule]]] = defaultdict(list)
        for index, piece in enumerate(self.document.pieces):
            name = normalise(piece.tensor)
            if name not in self.by_name and self._of_expert(name) is None:
                self.add(("pieces", index, "tensor"), "unknown", f"the model has no tensor {piece.tensor!r}")
                continue
            found[name].append((index, piece))
        return found

    def _of_expert(self, name: str) -> tuple[LogicalTensor, int] | None:
        template, layer, expert = template_of(name)
        tensor = self.by_name.get(fill(template, layer=layer))
        if tensor is None or expert is None or not tensor.has_experts or expert >= tensor.shape[0]:
            return None
        return tensor, expert

    def explicit(self, tensor: LogicalTensor) -> list[tuple[int, PieceRule, list[list[int]]]]:
        """Return (position, piece, box in the tensor's dims) of the pieces of this tensor."""
        found = [(index, piece, piece.box) for index, piece in self.pieces.get(tensor.name, [])]
        if tensor.has_experts and self.pieces:
            for expert, name in enumerate(tensor.names()):
                found += [
                    (index, piece, [[expert, expert + 1], *piece.box])
                    for index, piece in self.pieces.get(name, [])
                ]
        return found

    def held(self, tensor: LogicalTensor, logical: str, interleaved: Interleaved | None) -> HeldTensor | None:
        """Return the tensor as this job holds it, or None after noting why it cannot."""
        explicit = self.explicit(tensor)
        rule_index = self.rule_of(tensor)
        rule = None if rule_index is None else self.document.tensors[rule_index]
        asked = self.casts.asked_dtype(tensor, rule_index)
        if explicit:
            geometry = self.explicit_geometry(tensor, explicit)
        elif rule is None or rule_index is None:
            self.add(("tensors",), "unmatched", f"no rule matches tensor {tensor.name!r}; add one, or '*'")
            return None
        else:
            geometry = self.placed_geometry(tensor, rule_index, rule, interleaved)
        if geometry is None:
            return None
        return HeldTensor(
            name=tensor.name,
            logical=logical,
            shape=tensor.shape,
            dtype=asked or tensor.dtype,
            layer=tensor.layer,
            has_experts=tensor.has_experts,
            geometry=geometry,
            rule=rule_index,
            dtype_asked=asked is not None,
            padding=rule.padding if rule else "zero",
            route=rule.route if rule else None,
            block=self.casts.blocks.get(tensor.name),
        )

    def held_scale(self, tensor: LogicalTensor, logical: str, weight: HeldTensor) -> HeldTensor | None:
        """Return the scales of a tensor as this job holds them: cut as the tensor is, in blocks."""
        assert weight.block is not None
        cover = weight.route == "broadcast"
        key = ("scales", weight.geometry, weight.block, cover)
        if key not in self.keys:
            holdings = self.geometries[weight.geometry]
            try:
                scaled = scaled_holdings(holdings, weight.shape, weight.block, cover=cover)
            except CutBlock as error:
                where = self.cut_at(weight)
                mend = f"cut it at multiples of {weight.block}, or give it route: broadcast"
                self.add(where, "block", f"tensor {weight.name!r} has block scales, but {error}; {mend}")
                return None
            self.keys[key] = len(self.geometries)
            self.geometries.append(scaled)
        return HeldTensor(
            name=tensor.name,
            logical=logical,
            shape=tensor.shape,
            dtype=tensor.dtype,
            layer=tensor.layer,
            has_experts=tensor.has_experts,
            geometry=self.keys[key],
            rule=weight.rule,
            dtype_asked=False,
            padding=weight.padding,
            route=weight.route,
            scale_of=weight.name,
        )

    def cut_at(self, weight: HeldTensor) -> KeyPath:
        """Return where the document says how a tensor with block scales is cut: its rule, or the piece that cuts."""
        size, own = weight.block or 1, self.by_name.get(weight.name)
        pieces = [] if own is None else self.explicit(own)
        for index, _, box in pieces:
            edges = zip(box[-2:], weight.shape[-2:], strict=True)
            if any(low % size or (high % size and high != whole) for (low, high), whole in edges):
                return ("pieces", index, "box")
        if pieces:
            return ("pieces", pieces[0][0])
        return ("pieces",) if weight.rule is None else ("tensors", weight.rule)

    def rule_of(self, tensor: LogicalTensor) -> int | None:
        """Return the first rule that matches; a rule has to match all experts of a projection or none."""
        probes = [tensor.name]
        if tensor.has_experts:
            # without a number in any rule, what fits the first expert fits all
            probes = tensor.names() if self.numbered else [fill(tensor.name, expert=0)]
        found = [self._first_match(probe) for probe in probes]
        if len(set(found)) > 1:
            rule = min(index for index in found if index is not None)
            message = f"matches only some experts of {tensor.name!r}; write {{expert}} or *"
            self.add(("tensors", rule, "match"), "experts", message)
        return found[0]

    def check_left_out(self) -> None:
        """Refuse patterns of `leave_out` that are none, or take some experts of a projection and not the others."""
        for index, text in enumerate(self.document.leave_out):
            where: KeyPath = ("leave_out", index)
            try:
                pattern = Pattern(text)
            except ValueError as error:
                self.add(where, "pattern", str(error))
                continue
            for tensor in self.model.tensors if has_digit(text) else ():
                if tensor.has_experts and len({pattern.matches(name) for name in tensor.names()}) > 1:
                    self.add(
                        where,
                        "experts",
                        f"leaves out only some experts of {tensor.name!r}; write {{expert}} or *",
                    )
        self.raise_problems()

    def _first_match(self, name: str) -> int | None:
        # names that differ in their numbers alone meet the same rules, unless a rule has a number in it
        key = name if self.numbered else template_of(name)[0]
        if key not in self.matched:
            fitting = (i for i, pattern in enumerate(self.loaded.matches) if pattern.matches(name))
            self.matched[key] = next(fitting, None)
        return self.matched[key]

    def placed_geometry(
        self, tensor: LogicalTensor, index: int, rule: TensorRule, interleaved: Interleaved | None
    ) -> int | None:
        # tensors of one rule, shape and stage are alike in all that follows
        quick = (index, tensor.shape, tensor.has_experts, self._stage(index, tensor), interleaved)
        if quick in self.placed:
            return self.placed[quick]
        found = self.new_geometry(tensor, index, rule, interleaved)
        if found is not None:
            self.placed[quick] = found
        return found

    def _stage(self, index: int, tensor: LogicalTensor) -> frozenset[int] | None:
        key = (index, tensor.name if tensor.layer is None else tensor.layer)
        if key not in self.stage_of:
            staged = any(isinstance(placement, Stage) for placement in self.loaded.places[index].values())
            self.stage_of[key] = self.stages.of_tensor(tensor.name, tensor.layer) if staged else None
        return self.stage_of[key]

    def new_geometry(
        self, tensor: LogicalTensor, index: int, rule: TensorRule, interleaved: Interleaved | None
    ) -> int | None:
        """Return the geometry of a tensor of a kind not met before, or None after noting what does not fit."""
        place = self.loaded.places[index]
        where: KeyPath = ("tensors", index)
        fits = [self.fits(where, axis, placement, tensor) for axis, placement in place.items()]
        dims = len(tensor.shape) - tensor.has_experts
        for dim in rule.pad:
            if int(dim) >= dims:
                fits.append(False)
                self.add((*where, "pad", dim), "dim", f"tensor {tensor.name!r} has {dims} dims")
        for dim, sizes in rule.blocks.items():
            if int(dim) >= dims or sum(sizes) != tensor.shape[int(dim) + tensor.has_experts]:
                fits.append(False)
                rows = tensor.shape[int(dim) + tensor.has_experts] if int(dim) < dims else "no"
                message = f"{sizes} are {sum(sizes)} rows, dim {dim} of tensor {tensor.name!r} has {rows}"
                self.add((*where, "blocks", dim), "blocks", message)
            if interleaved is not None:
                fits.append(False)
                message = f"{tensor.name!r} is interleaved in its storage, and cannot be cut in blocks too"
                self.add((*where, "blocks", dim), "interleaved", message)
        if rule.pad and interleaved is not None:
            fits.append(False)
            message = f"{tensor.name!r} is interleaved in its storage, and cannot be padded too"
            self.add((*where, "pad", next(iter(rule.pad))), "interleaved", message)
        stage: frozenset[int] | None = None
        axis = next((axis for axis, placement in place.items() if isinstance(placement, Stage)), None)
        if axis is not None and all(fits):
            stage = self._stage(index, tensor)
            if not stage:
                fits.append(False)
                message = (
                    f"tensor {tensor.name!r} has no layer and is in neither pipeline.first nor pipeline.last"
                    if tensor.layer is None
                    else f"tensor {tensor.name!r}: no stage holds layer {tensor.layer}"
                )
                self.add((*where, "place", axis), "stage", message)
        if not all(fits):
            return None
        pad = {int(dim) + tensor.has_experts: multiple for dim, multiple in rule.pad.items()}
        axes = self.loaded.meshes[self.loaded.mesh_of(index)]
        key = (
            tensor.shape, tensor.has_experts, tuple(axes.items()), tuple(place.items()),
            tuple(sorted(pad.items())), stage, interleaved, repr(rule.blocks),
        )  # fmt: skip
        if key not in self.keys:
            if rule.blocks:
                dim, sizes = next(iter(rule.blocks.items()))
                holdings = blocked_holdings(
                    tensor.shape, axes, place, int(dim) + tensor.has_experts, sizes,
                    stage=stage, has_experts=tensor.has_experts,
                )  # fmt: skip
            elif interleaved is None:
                holdings = placed_holdings(
                    tensor.shape, axes, place, stage=stage, has_experts=tensor.has_experts, pad=pad
                )
            else:
                holdings = interleaved_holdings(
                    tensor.shape, axes, place, interleaved, stage=stage, has_experts=tensor.has_experts
                )
            self.keys[key] = len(self.geometries)
            self.geometries.append(holdings)
        return self.keys[key]

    def fits(self, rule: KeyPath, axis: str, placement: Placement, tensor: LogicalTensor) -> bool:
        """Say whether the placement can cut the tensor; note why it cannot."""
        path = (*rule, "place", axis)
        dims = len(tensor.shape) - tensor.has_experts
        if isinstance(placement, Shard) and not -dims <= placement.dim < dims:
            self.add(path, "dim", f"shard({placement.dim}) of tensor {tensor.name!r}, which has {dims} dims")
            return False
        if isinstance(placement, Expert) and not tensor.has_experts:
            grouped = any(part in ("experts", "expert") for part in tensor.name.split("."))
            if not grouped or not tensor.shape:
                self.add(path, "expert", f"tensor {tensor.name!r} has no experts to cut")
                return False
        return True

    def explicit_geometry(
        self, tensor: LogicalTensor, pieces: list[tuple[int, PieceRule, list[list[int]]]]
    ) -> int | None:
        good: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        for index, piece, box in pieces:
            where: KeyPath = ("pieces", index, "box")
            if len(box) != len(tensor.shape):
                dims = len(tensor.shape)
                self.add(where, "dims", f"has {len(box)} dims, tensor {tensor.name!r} has {dims}")
                continue
            outside = [dim for dim, (_, stop) in enumerate(box) if stop > tensor.shape[dim]]
            if outside:
                size = tensor.shape[outside[0]]
                message = f"dim {outside[0]} stops at {box[outside[0]][1]}, the tensor at {size}"
                self.add(where, "outside", message)
                continue
            good.append((piece.rank, tuple((start, stop) for start, stop in box)))
        if len(good) < len(pieces):
            return None
        holdings = explicit_holdings(len(tensor.shape), self.document.ranks, good)
        for rank in np.unique(holdings.rank):
            mine = holdings.rank == rank
            if not disjoint(holdings.lo[mine], holdings.hi[mine]):
                where = ("pieces", next(index for index, piece, _ in pieces if piece.rank == rank))
                self.add(where, "overlap", f"rank {rank} holds elements of {tensor.name!r} twice")
        self.geometries.append(holdings)
        return len(self.geometries) - 1

    def aliases(self) -> list[tuple[LogicalTensor, str]]:
        """Return (tensor under its alias name, name that it stands for) for every alias."""
        found = []
        for name, target in self.document.alias.items():
            original = self.by_name.get(normalise(target))
            if original is None:
                self.add(("alias", name), "unknown", f"the model has no tensor {target!r}")
                continue
            own = self.by_name.get(normalise(name))
            if own is not None and own.shape != original.shape:
                message = f"{list(own.shape)} cannot equal {target!r} {list(original.shape)}"
                self.add(("alias", name), "shape", message)
                continue
            if original.has_experts != ("{expert}" in name):
                self.add(
                    ("alias", name), "experts", f"both names have {{expert}} or none; {target!r} differs"
                )
                continue
            layer = template_of(normalise(name))[1]
            found.append(
                (
                    LogicalTensor(
                        normalise(name), original.shape, original.dtype, layer, original.has_experts
                    ),
                    original.name,
                )
            )
        return found

    def raise_problems(self) -> None:
        """Raise DocumentError if anything was noted."""
        if not self.problems:
            return
        listed = []
        for problem, count in self.problems.values():
            more = f" (and {count - 1} more tensors)" if count > 1 else ""
            listed.append(Problem(problem.file, problem.line, problem.key, problem.message + more))
        raise DocumentError(problems=listed)


def build_layout(loaded: LoadedLayout, model: Model) -> JobLayout:
    """Return the layout of this job for this model.

    Raises DocumentError with all problems: tensors that no rule matches, dims that a tensor lacks, layers
    without a stage, storages whose operands do not fit together.
    """
    builder = _Builder(loaded, model)
    loaded = builder.loaded
    aliases = builder.aliases()
    alias_names = {tensor.name for tensor, _ in aliases}
    plain = [
        (tensor, tensor.name)
        for tensor in builder.model.tensors
        if tensor.name not in alias_names and not loaded.leaves_out(tensor.name)
    ]
    everything = builder.casts.with_scales(plain + aliases)
    places = {tensor.name: position for position, (tensor, _) in enumerate(everything)}
    follows = [None if builder.explicit(one) else builder.casts.follows(one) for one, _ in everything]
    weights = {position: places[name] for position, name in enumerate(follows) if name is not None}
    groups = group_storages(
        loaded, [tensor for tensor, _ in everything], builder.add, weights, builder.casts.blocks
    )
    interleaved = {
        position: part for group in groups for position, part in group.interleaved_parts(everything).items()
    }
    found: dict[int, HeldTensor | None] = {}
    for position, (tensor, logical) in enumerate(everything):
        if position not in weights:
            found[position] = builder.held(tensor, logical, interleaved.get(position))
    for position, weight in weights.items():
        whole = found[weight]
        found[position] = None if whole is None else builder.held_scale(*everything[position], whole)
    builder.raise_problems()
    held = [one for _, one in sorted(found.items()) if one is not None]
    check_groups(loaded, groups, held, builder.geometries, builder.stages, builder.add)
    builder.raise_problems()
    layout = JobLayout(loaded, builder.model, held, builder.geometries, groups, builder.stages)
    layout.digest = layout_digest(builder.document, held, builder.geometries, groups, builder.stages)
    return layout
