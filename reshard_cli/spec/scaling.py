"""Shrinks a pair of layouts and their model to what one machine can hold: the same axes, fewer of everything.

`scaled_pair` is a pure function of the documents. What its factor F means:

    ranks       F times as many in each job, but enough that every axis of several coordinates keeps several (if need
                be the whole); with `room`, as many as fit a cluster of so many ranks
    domains     shrink with the ranks; several domains stay several, of several ranks
    model       at most F times the bytes, shared alike by the number of layers, the number of experts and all other
                sizes (F = 0.0001 makes each about a tenth), down to the least that the axes can divide

Layers of every kind stay, in their order. Numbers of heads and groups stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from reshard_cli.errors import DocumentError
from reshard_cli.spec.layout_document import LayoutDocument, LoadedLayout, check_layout
from reshard_cli.spec.located import Located
from reshard_cli.spec.model import Model
from reshard_cli.spec.model_document import ModelDocument, model_of_document
from reshard_cli.spec.scaling_model import Cuts, ModelScaler, ScaledModel, apportioned
from reshard_cli.spec.scaling_ranks import JobScaler, Meshes, RankChoice, divisors, scaled_place

__all__ = ["Change", "Room", "ScaledPair", "scaled_pair"]

_BLOCK = 128  # of models whose file is in float8


@dataclass(frozen=True, slots=True)
class Room:
    """A cluster to be filled: so many ranks in all, on nodes of so many, each of which is a domain."""

    ranks: int
    per_node: int


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed, of which job or `model`, from what to what; `note`: what the shape has lost by it."""

    where: str
    what: str
    before: int | str
    after: int | str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ScaledPair:
    """The smaller jobs' documents, their model, and everything that was changed."""

    source: LoadedLayout
    destination: LoadedLayout
    model: Model
    changes: tuple[Change, ...]


def scaled_pair(
    source: LoadedLayout,
    destination: LoadedLayout,
    document: ModelDocument,
    located: Located,
    origin: str,
    factor: float,
    room: Room | None = None,
) -> ScaledPair:
    """Return the pair shrunk by `factor` (over 0, below 1), the model being that of `document` (from `origin`).

    Raises DocumentError, with what to do, for documents that say things in sizes of their own, and for a room in
    which they have no place.
    """
    if not 0 < factor < 1:
        raise DocumentError(
            f"--scale: {factor:g} is not between 0 and 1; 0.001 leaves a thousandth of the bytes"
        )
    full = model_of_document(document, located, origin)
    jobs = (JobScaler(source, full), JobScaler(destination, full))
    one, other = (job.choose(factor) for job in jobs) if room is None else _fitting(jobs, room)
    choices = (one, other)
    stages = [_stages_after(job, choice) for job, choice in zip(jobs, choices, strict=True)]
    axes = {pair for job, choice in zip(jobs, choices, strict=True) for pair in _axes(job, choice)}
    cuts = Cuts(tuple(sorted(axes)), max(stages), _block(jobs, full))
    scaler = ModelScaler(document, located, origin, cuts)
    model = scaler.scaled(full.num_bytes * factor)
    made = [_document(job, choice, model) for job, choice in zip(jobs, choices, strict=True)]
    changes = [
        *(change for job, choice, new in zip(jobs, choices, made, strict=True)
          for change in _job_changes(job, choice, new)),
        *_model_changes(model, full, factor),
    ]  # fmt: skip
    told = tuple(one for one in changes if one.before != one.after)
    return ScaledPair(made[0], made[1], model.model, told)


def _fitting(jobs: tuple[JobScaler, JobScaler], room: Room) -> tuple[RankChoice, RankChoice]:
    """Return the two choices that fill the room best: the least shape lost, then the most ranks, then the evenest."""
    found: list[tuple[tuple[int, int, float], RankChoice, RankChoice]] = []
    listed: list[list[RankChoice]] = []
    for job in jobs:
        ways = [one for one in divisors(job.document.ranks) if one < room.ranks and one % room.per_node == 0]
        choices = [job.of_ranks(one, room.per_node) for one in ways]
        listed.append([one for one in choices if one is not None])
        if not listed[-1]:
            possible = ", ".join(map(str, divisors(job.document.ranks)))
            raise DocumentError(
                f"--scale: {job.loaded.path}: has no place in a cluster of {room.ranks} ranks on nodes of {room.per_node}, "
                f"beside the other job on nodes of its own: it can have {possible} ranks; give --emulate more nodes, or "
                "nodes of 1 or 2 ranks"
            )
    ratio = jobs[0].document.ranks / jobs[1].document.ranks
    for one in listed[0]:
        for other in listed[1]:
            if one.ranks + other.ranks <= room.ranks:
                uneven = abs(one.ranks / other.ranks - ratio)
                found.append(((one.lost + other.lost, -one.ranks - other.ranks, uneven), one, other))
    if not found:
        raise DocumentError(
            f"--scale: the jobs need at least {listed[0][0].ranks} + {listed[1][0].ranks} ranks on nodes of "
            f"{room.per_node}, the cluster has {room.ranks}; give --emulate more nodes"
        )
    _, first, second = min(found, key=lambda each: each[0])
    return first, second


def _axes(job: JobScaler, choice: RankChoice) -> Iterable[tuple[int, int]]:
    for name, axes in job.meshes.items():
        for axis, size in axes.items():
            yield size, choice.meshes[name].get(axis, 1)


def _block(jobs: Iterable[JobScaler], model: Model) -> int | None:
    """Return the side of the float8 blocks that the model or a job's casts have."""
    for job in jobs:
        document = job.expanded
        for text in [rule.cast for rule in document.casts] + [rule.cast or "" for rule in document.tensors]:
            found = re.search(r"blockwise\(.*?(\d+)\s*\)", text)
            if found is not None:
                return int(found[1])
    return _BLOCK if any(tensor.dtype.startswith("float8") for tensor in model.tensors) else None


def _stages_after(job: JobScaler, choice: RankChoice) -> int:
    """Return the number of pipeline stages of the smaller job."""
    return 1 if len(_stage_layers(job)) < 2 else _stage_axis(job, choice.meshes)


def _stage_axis(job: JobScaler, meshes: Meshes) -> int:
    """Return the coordinates of the axis of stages; 1 where no rule has stages."""
    for rule in job.expanded.tensors:
        for axis, text in rule.place.items():
            if text.strip() == "stage":
                return meshes[rule.mesh or next(iter(meshes))].get(axis, 1)
    return 1


def _stage_layers(job: JobScaler) -> list[int]:
    """Return the layers of each stage of the full job; equal ones where the document does not say."""
    pipeline = job.expanded.pipeline
    if pipeline is not None and pipeline.layers is not None:
        return list(pipeline.layers)
    return [1] * (1 if pipeline is None else _stage_axis(job, job.meshes))


def _document(job: JobScaler, choice: RankChoice, model: ScaledModel) -> LoadedLayout:
    """Return the smaller job's document, with the stages' layers written out."""
    values = job.document.model_dump(exclude_unset=True)
    values |= choice.values | {"ranks": choice.ranks, "domain": choice.domain}
    for name in ("first_layers", "last_layers"):
        values.get("options", {}).pop(name, None)
    stages, before = _stages_after(job, choice), _stage_layers(job)
    own = {key: value for key, value in values.pop("pipeline", {}).items() if key != "layers"}
    if stages > 1 or (job.document.engine is None and job.document.pipeline is not None):
        values["pipeline"] = {**own, "layers": _merged(before, stages, _num_layers(model))}
    if job.document.engine is None:
        for rule in values.get("tensors", []):
            name = rule.get("mesh") or next(iter(job.meshes))
            rule["place"] = scaled_place(rule.get("place", {}), job.meshes[name], choice.meshes[name])
    for rule in values.get("storage", []):
        if rule.get("layers") is not None:
            numbers = {layer: number for number, layer in enumerate(model.kept)}
            rule["layers"] = [numbers[layer] for layer in rule["layers"] if layer in numbers]
    document = LayoutDocument.model_validate(values)
    located, path = job.loaded.located, job.loaded.path
    if document.engine is not None:
        return LoadedLayout(document, located, path, {}, (), ())
    return check_layout(document, located, path)


def _num_layers(model: ScaledModel) -> int:
    """Return the layers that stages hold: the model's own, without draft layers behind them."""
    layers = {tensor.layer for tensor in model.model.tensors if tensor.layer is not None}
    return model.model.config.get("num_hidden_layers", len(layers))


def _merged(before: list[int], stages: int, num_layers: int) -> list[int]:
    """Return the layers of the fewer stages, in proportion to those of the neighbours that each is made of."""
    each = len(before) // stages
    return apportioned([sum(before[nth * each : (nth + 1) * each]) for nth in range(stages)], num_layers)


def _job_changes(job: JobScaler, choice: RankChoice, made: LoadedLayout) -> Iterable[Change]:
    before, name = job.document, job.document.name
    yield Change(name, "ranks", before.ranks, choice.ranks)
    yield Change(name, "ranks of a domain", min(before.domain, before.ranks), choice.domain)
    domains = -(-choice.ranks // choice.domain)
    lost = "" if (domains > 1) == (job.num_domains > 1) else "one against several"
    yield Change(name, "domains", job.num_domains, domains, lost)
    seen: set[tuple[str, int, int]] = set()
    for mesh, axes in job.meshes.items():
        for axis in {**axes, **choice.meshes[mesh]}:
            sizes = axes.get(axis, 1), choice.meshes[mesh].get(axis, 1)
            if sizes[0] != sizes[1] and (axis, *sizes) not in seen:
                seen.add((axis, *sizes))
                note = "" if min(sizes) > 1 else "no room for this axis" if sizes[1] == 1 else "a new axis"
                yield Change(name, f"axis {axis}", *sizes, note)
    after = made.document.pipeline
    layers = job.expanded.pipeline
    if layers is not None and layers.layers is not None and len(layers.layers) > 1:
        now = after.layers if after is not None and after.layers is not None else []
        yield Change(name, "layers of the stages", _counts(layers.layers), _counts(now) or "all on one")


def _counts(layers: Iterable[int]) -> str:
    """Return the layers of each stage in few words: `11, 6 x 12, 11`."""
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(str(count) if times == 1 else f"{times} x {count}" for times, count in runs)


def _model_changes(model: ScaledModel, full: Model, factor: float) -> Iterable[Change]:
    if len(model.kept) != model.num_layers:
        yield Change("model", "layers", model.num_layers, len(model.kept))
    for name, before, after in model.sizes:
        yield Change("model", name, before, after)
    yield Change("model", "tensors", full.num_tensors, model.model.num_tensors)
    enough = model.model.num_bytes <= factor * full.num_bytes
    note = (
        ""
        if enough
        else f"no smaller one divides evenly; --scale {factor:g} would be {round(factor * full.num_bytes):,}"
    )
    yield Change("model", "bytes", full.num_bytes, model.model.num_bytes, note)
