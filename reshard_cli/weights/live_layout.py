"""The layout document of a live model, from the DTensors of its state dict: FSDP2, HSDP, TP, and their products.

Nothing is communicated: every rank derives the same document from its own state dict. What a document cannot
say is refused with the reason: pending sums, ranks in an irregular order, one pipeline stage's part of a model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from reshard_cli.errors import WeightsError
from reshard_cli.layout.cut import cut
from reshard_cli.spec.dtypes import ITEM_SIZE
from reshard_cli.spec.model import LogicalTensor, Model, group_experts
from reshard_cli.spec.model_document import model_document_text
from reshard_cli.spec.names import normalise, template_of
from reshard_cli.spec.placement import Placement, Shard

__all__ = ["Layout", "layout_of_state_dict"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A job's layout document, as plain values, and the model that its tensors make."""

    layout: dict[str, Any]
    model: Model

    @classmethod
    def of(
        cls, state_dict: Mapping[str, Any], *, name: str = "train", domain: int = 8, cast: bool = False
    ) -> Layout:
        """Return the layout of a live model, as `layout_of_state_dict` does. `domain`: ranks per NVLink domain.

        cast: on a destination: have values of other dtypes cast to those of its tensors, which is refused otherwise.
        """
        return layout_of_state_dict(state_dict, name=name, domain=domain, cast=cast)

    def layout_text(self) -> str:
        """Return the layout document as YAML."""
        return yaml.safe_dump(self.layout, sort_keys=False, default_flow_style=None, width=110)

    def model_text(self) -> str:
        """Return the model document as YAML."""
        return model_document_text(self.model, self.model.name)


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of a mesh: the ranks of neighbouring coordinates are `stride` apart."""

    name: str
    size: int
    stride: int


_Place = tuple[tuple[str, int], ...]  # (axis, dim of the tensor) in the order in which they cut
_Rule = tuple[tuple[_Axis, ...], _Place, str | None]  # the mesh, the cuts, the dtype to cast to


def layout_of_state_dict(
    state_dict: Mapping[str, Any],
    *,
    name: str,
    domain: int = 8,
    ranks: int | None = None,
    cast: bool = False,
) -> Layout:
    """Return the layout of a live model, the same on every rank.

    `ranks`: the job's, 0 to ranks - 1 of the process group; default: all of it. `cast`: each rule asks for the dtype
    that its tensors have. Plain tensors are replicated; values that are no tensors are left out. Raises WeightsError
    for what no document says.
    """
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rules: dict[str, _Rule] = {}
    tensors = []
    for full_name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        plain = normalise(full_name)
        if plain in rules:
            raise WeightsError(f"two tensors of the state dict are {plain!r} once wrappers are taken off")
        if set(plain) & set("*{}"):
            raise WeightsError(f"tensor {plain!r}: a name with *, {{ or }} cannot be matched by a document")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZE:
            raise WeightsError(f"tensor {plain!r} has dtype {dtype}, which is not known here")
        try:
            rules[plain] = (*_rule_of(value, ranks), dtype if cast else None)
        except ValueError as error:
            raise WeightsError(f"tensor {plain!r}: {error}") from error
        tensors.append(LogicalTensor(plain, tuple(value.shape), dtype))
    if not tensors:
        raise WeightsError("the state dict holds no tensor")
    return Layout(_document(name, ranks, domain, rules), Model(name, tuple(group_experts(tensors)), name))


def _rule_of(value: Tensor, ranks: int) -> tuple[tuple[_Axis, ...], _Place]:
    """Return the mesh (all its axes, outermost first) and the cuts of one tensor. Raises ValueError."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return (), ()
    mesh = value.device_mesh
    root = _axes(_root(mesh), ranks)
    if math.prod(axis.size for axis in root) != ranks:
        covered = math.prod(axis.size for axis in root)
        raise ValueError(
            f"its mesh has {covered} ranks, the job {ranks}; a document's mesh covers all of them"
        )
    if any(axis.name == "pp" for axis in root):
        raise ValueError(
            "its mesh has an axis pp, so that this is one pipeline stage's part of the model; write the document "
            "with an engine preset, or with `pipeline` and `stage`"
        )
    own = _axes(mesh, ranks)
    names = {(axis.size, axis.stride): axis.name for axis in root}
    if all((axis.size, axis.stride) in names for axis in own if axis.size > 1):
        own = [_Axis(names.get((axis.size, axis.stride), axis.name), axis.size, axis.stride) for axis in own]
        axes = _filled(root, ranks)
    else:  # axes of the root that were flattened into one, or split
        axes = _filled(own, ranks)
    place = _place(value.shape, own, value.placements)
    _check_local(value, axes, place)
    return axes, place


def _root(mesh: Any) -> Any:
    """Return the mesh that this one was sliced from: it has all ranks."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch before 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _axes(mesh: Any, ranks: int) -> list[_Axis]:
    """Return a mesh's axes in its own order. Raises ValueError where its ranks are no regular grid."""
    grid = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"axis{dim}" for dim in range(grid.dim()))
    first = int(grid.reshape(-1)[0])
    expected = torch.full(grid.shape, first, dtype=torch.int64)
    axes = []
    for dim, (name, size) in enumerate(zip(names, grid.shape, strict=True)):
        stride = 1 if size == 1 else int(grid.select(dim, 1).reshape(-1)[0]) - first
        axes.append(_Axis(str(name), size, stride))
        shape = [size if one == dim else 1 for one in range(grid.dim())]
        expected += torch.arange(size).view(shape) * stride
    # where every rank has its digits, those of the first are 0 on the mesh's own axes
    regular = torch.equal(expected, grid.to(torch.int64).cpu()) and all(
        axis.stride > 0 and (axis.size == 1 or first // axis.stride % axis.size == 0) for axis in axes
    )
    if not regular or not 0 <= first < ranks:
        raise ValueError(
            f"the ranks {grid.tolist()} of its mesh {', '.join(map(str, names))} are no regular grid of the "
            f"job's ranks 0 to {ranks - 1}; a document counts ranks row by row"
        )
    return axes


def _filled(own: Sequence[_Axis], ranks: int) -> tuple[_Axis, ...]:
    """Return a mesh over all ranks with these axes, outermost first; `rest` axes fill it up. Raises ValueError."""
    axes: list[_Axis] = []
    inner = ranks  # the ranks that one step of the axis before spans

    def fill(size: int, stride: int) -> None:
        if size > 1:
            number = sum(axis.name.startswith("rest") for axis in axes)
            axes.append(_Axis(f"rest{number or ''}", size, stride))

    for axis in sorted((one for one in own if one.size > 1), key=lambda one: -one.stride):
        span = axis.size * axis.stride
        if inner % span:
            raise ValueError(f"axis {axis.name!r} (every {axis.stride} ranks) does not nest in the others")
        fill(inner // span, span)
        axes.append(axis)
        inner = axis.stride
    fill(inner, 1)
    return tuple(axes)


def _place(shape: Sequence[int], axes: Sequence[_Axis], placements: Sequence[Any]) -> _Place:
    """Return which axis cuts which dim, in the order of the cuts. Raises ValueError.

    DTensor cuts from left to right, but a _StridedShard stands for an axis that cuts after others to its right,
    as FSDP2 cuts what TP has cut before: those whose sizes multiply to its split factor.
    """
    orders: dict[int, list[_Axis]] = defaultdict(list)
    strided: set[int] = set()
    for axis, placement in reversed(list(zip(axes, placements, strict=True))):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            why = (
                "its values are still to be summed over the ranks"
                if placement.is_partial()
                else "no document says"
            )
            raise ValueError(f"axis {axis.name!r} does {placement} to it: {why}")
        if axis.size == 1:
            continue
        order = orders[placement.dim]
        after = 0
        if kind == "_StridedShard":
            factor = int(placement.split_factor)
            products = [math.prod(one.size for one in order[:count]) for count in range(len(order) + 1)]
            if factor not in products:
                raise ValueError(
                    f"axis {axis.name!r} does {placement} to it, and no axes make up that factor"
                )
            after = products.index(factor)
            if after:
                strided.add(placement.dim)
        order.insert(after, axis)
    for dim in strided:
        parts = math.prod(axis.size for axis in orders[dim])
        if shape[dim] % parts:
            raise ValueError(
                f"dim {dim} of {shape[dim]} rows is cut unevenly by strided axes ({parts} parts), which DTensor "
                "and FSDP2 understand differently"
            )
    return tuple((axis.name, dim) for dim in sorted(orders) for axis in orders[dim])


def _check_local(value: Any, axes: Sequence[_Axis], place: _Place) -> None:
    """Hold what was understood against the shard that this rank really has."""
    sizes = {axis.name: axis.size for axis in axes} or {"rank": 1}
    placed: dict[str, Placement] = {axis: Shard(dim) for axis, dim in place}
    shards = cut(tuple(value.shape), sizes, placed)
    expected = tuple(int(count) for count in shards.count[dist.get_rank()])
    local = tuple(value.to_local().shape)
    if local != expected and (math.prod(local) or math.prod(expected)):
        raise ValueError(f"this rank's shard is {list(local)}, its placements make it {list(expected)}")


def _document(name: str, ranks: int, domain: int, rules: Mapping[str, _Rule]) -> dict[str, Any]:
    """Return the layout document: the most frequent rule last and for all names, the others by pattern."""
    usual = max(Counter(rules.values()).items(), key=lambda one: one[1])[0]
    meshes: dict[tuple[_Axis, ...], str] = {}
    for axes, place, _ in [usual, *rules.values()]:
        if place and axes not in meshes:
            meshes[axes] = f"mesh{len(meshes) + 1 if meshes else ''}"
    document: dict[str, Any] = {"name": name, "ranks": ranks, "domain": domain}
    if meshes:
        document["meshes"] = {key: {axis.name: axis.size for axis in axes} for axes, key in meshes.items()}
    first = next(iter(meshes.values()), None)

    def entry(match: str, rule: _Rule) -> dict[str, Any]:
        axes, place, dtype = rule
        written: dict[str, Any] = {"match": match}
        if place and meshes[axes] != first:
            written["mesh"] = meshes[axes]
        if place:
            written["place"] = {axis: f"shard({dim})" for axis, dim in place}
        if dtype is not None:
            written["dtype"] = dtype
        return written

    patterns = _patterns(rules, usual)
    document["tensors"] = [entry(match, rule) for match, rule in patterns] + [entry("*", usual)]
    return document


def _patterns(rules: Mapping[str, _Rule], usual: _Rule) -> list[tuple[str, _Rule]]:
    """Return (pattern, rule) of all names that do not follow the usual rule; tensors of all layers as one."""
    templates: dict[str, list[str]] = defaultdict(list)
    for name in rules:
        templates[template_of(name)[0]].append(name)
    found: dict[_Rule, list[str]] = defaultdict(list)
    for template, names in templates.items():
        kinds = {rules[name] for name in names}
        if len(kinds) == 1 and kinds != {usual}:
            found[kinds.pop()].append(template if len(names) > 1 else names[0])
        else:
            for name in names:
                if rules[name] != usual:
                    found[rules[name]].append(name)
    return [(pattern, rule) for rule, texts in found.items() for pattern in _merged(texts)]


def _merged(texts: Sequence[str]) -> list[str]:
    """Return patterns for these; those that differ only in the last component but one become `{a,b}`."""
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for text in texts:
        head, _, tail = text.rpartition(".")
        front, _, middle = head.rpartition(".")
        families[front, tail].append(middle if not set(middle) & set("{}") else f"\0{middle}")
    merged = []
    for (front, tail), middles in families.items():
        plain = [one for one in middles if one and not one.startswith("\0")]
        rest = [one.removeprefix("\0") for one in middles if one not in plain]
        choices = [f"{{{','.join(plain)}}}"] if len(plain) > 1 else plain
        merged += [".".join(part for part in (front, one, tail) if part) for one in [*choices, *rest]]
    return merged
