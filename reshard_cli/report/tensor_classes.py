"""The tensors of a plan by class: alike but for the layer, with what both jobs do to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.build import Plan
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.refit.prepare import Jobs
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.names import Pattern, template_of

__all__ = [
    "cast_at",
    "largest_tensors",
    "memory_of",
    "placement_text",
    "tensor_classes",
    "tensors_like",
    "why_of",
]

_LARGEST = 10
_ANY_EXPERT = "987654321"


def tensor_classes(jobs: Jobs, plan: Plan) -> list[dict[str, Any]]:
    """Return the classes in the model's order: name with {layer}, count, shape, dtypes, route, placements."""
    source, destination = _by_logical(jobs.source), _by_logical(jobs.destination)
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for pair, route in zip(plan.pairs, plan.routes, strict=True):
        template = _template(pair.name)
        held, wanted = source[_held_name(pair)], destination[pair.name]
        key = (template, pair.shape, pair.source_dtype, pair.destination_dtype, route, held.rule, wanted.rule)
        if key not in found:
            found[key] = {
                "name": template,
                "tensors": 0,
                "shape": list(pair.shape),
                "source_dtype": pair.source_dtype,
                "destination_dtype": pair.destination_dtype,
                "route": route,
                "cast_at": cast_at(pair),
                "why": why_of(jobs, held, wanted) if route == "broadcast" else "",
                "bytes": 0,
                "source": placement_text(jobs.source, held),
                "destination": placement_text(jobs.destination, wanted),
            }
        one = found[key]
        one["tensors"] += pair.num_names
        one["bytes"] += _bytes(pair.shape, pair.source_dtype)
    total = sum(one["bytes"] for one in found.values())
    for one in found.values():
        one["share"] = one["bytes"] / total if total else 0.0
    return list(found.values())


def tensors_like(jobs: Jobs, plan: Plan, pattern: str) -> list[dict[str, Any]]:
    """Return every tensor whose name fits the pattern, with both placements. Raises ValueError for a bad one."""
    compiled = Pattern(pattern)
    source, destination = _by_logical(jobs.source), _by_logical(jobs.destination)
    return [
        {
            "name": pair.name,
            "shape": list(pair.shape),
            "dtype": pair.source_dtype,
            "route": route,
            "bytes": _bytes(pair.shape, pair.source_dtype),
            "source": placement_text(jobs.source, source[_held_name(pair)]),
            "destination": placement_text(jobs.destination, destination[pair.name]),
        }
        for pair, route in zip(plan.pairs, plan.routes, strict=True)
        if compiled.matches(pair.name) or compiled.matches(pair.name.replace("{expert}", "0"))
    ]


def largest_tensors(plan: Plan) -> list[dict[str, Any]]:
    """Return the ten largest tensors; the experts of a projection are one."""
    sizes = np.array([_bytes(pair.shape, pair.source_dtype) for pair in plan.pairs], np.int64)
    return [
        {
            "name": plan.pairs[index].name,
            "shape": list(plan.pairs[index].shape),
            "bytes": int(sizes[index]),
            "route": plan.routes[index],
        }
        for index in np.argsort(-sizes, kind="stable")[:_LARGEST].tolist()
    ]


def memory_of(jobs: Jobs, plan: Plan) -> dict[str, int]:
    """Return the bytes of weights on the fullest rank of each job, padding included.

    landing_bytes: what the fullest destination rank needs beside them for values that it casts in blocks.
    """
    landing = {pair.name: pair.wire_dtype for pair in plan.pairs if pair.quantised == "receiver"}
    landed = [(one, landing[one.logical]) for one in jobs.destination.tensors if one.logical in landing]
    return {
        "source_bytes": _fullest(jobs.source, [(one, one.dtype) for one in jobs.source.tensors]),
        "destination_bytes": _fullest(
            jobs.destination, [(one, one.dtype) for one in jobs.destination.tensors]
        ),
        "landing_bytes": _fullest(jobs.destination, landed),
    }


def _fullest(layout: JobLayout, tensors: Iterable[tuple[HeldTensor, str]]) -> int:
    counts: dict[tuple[int, int], int] = {}
    for tensor, dtype in tensors:
        key = (tensor.geometry, item_size(dtype))
        counts[key] = counts.get(key, 0) + 1
    held = np.zeros(layout.num_ranks, np.int64)
    for (geometry, size), count in counts.items():
        one = layout.geometries[geometry]
        held += np.prod(one.local_shape, axis=1, dtype=np.int64) * one.present * size * count
    return int(held.max(initial=0))


def placement_text(layout: JobLayout, tensor: HeldTensor) -> str:
    """Return what the job's mesh does to a tensor, as its document writes it."""
    if tensor.rule is None:
        return "explicit pieces"
    rule = layout.loaded.document.tensors[tensor.rule]
    axes = layout.loaded.meshes[layout.loaded.mesh_of(tensor.rule)]
    parts = [f"{axis} ({axes[axis]}): {text}" for axis, text in rule.place.items() if text != "replicate"]
    parts += [f"blocks of dim {dim}: {sizes}" for dim, sizes in rule.blocks.items()]
    parts += [f"dim {dim} padded to {multiple}" for dim, multiple in rule.pad.items()]
    return ", ".join(parts) or "whole on every rank"


def why_of(jobs: Jobs, held: HeldTensor, wanted: HeldTensor) -> str:
    """Return the reason that a document gives for a tensor's route."""
    for layout, tensor in ((jobs.destination, wanted), (jobs.source, held)):
        if tensor.rule is not None:
            told = layout.loaded.document.tensors[tensor.rule].why
            if told:
                return told
    return ""


def cast_at(pair: TensorPair) -> str:
    """Return which side casts: sender, receiver, or nothing where there is no cast."""
    if pair.quantised:
        return pair.quantised
    if pair.source_dtype == pair.destination_dtype:
        return ""
    return "sender" if pair.wire_dtype == pair.destination_dtype else "receiver"


def _held_name(pair: TensorPair) -> str:
    """Return the name of the source's tensor: scales that the sender makes are those of another."""
    return pair.scale_of if pair.quantised and pair.scale_of else pair.name


def _by_logical(layout: JobLayout) -> dict[str, HeldTensor]:
    found: dict[str, HeldTensor] = {}
    for tensor in layout.tensors:
        found.setdefault(tensor.logical, tensor)
    return found


def _template(name: str) -> str:
    return template_of(name.replace("{expert}", _ANY_EXPERT))[0]


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * item_size(dtype)
