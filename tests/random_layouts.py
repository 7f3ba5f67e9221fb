"""Random pairs of layouts of one model, and what every rank must hold, cut by hand with torch.

Nothing here uses the package's geometry: a rank's local tensor is cut from the whole one axis by axis with
`torch.chunk`, `array_split` or strides, and a storage is built from local tensors with `torch.cat`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reshard_cli.spec.dtypes import ITEM_SIZE
from tests.support import model_document

PER_LAYER = 2
Place = dict[str, str]


@dataclass
class RandomPair:
    """Documents of a model and two jobs, and the global shape and dtype of each logical tensor."""

    model: dict[str, Any]
    source: dict[str, Any]
    destination: dict[str, Any]
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


def draw_pair(random: Random, max_ranks: int = 6) -> RandomPair:
    """Return a random pair: 1 to 4 mesh axes a side, 0-D to 5-D tensors, experts, fused and padded storages."""
    named: dict[str, tuple[list[int], str]] = {}
    logical: dict[str, tuple[tuple[int, ...], str]] = {}
    for index in range(random.randint(1, 5)):
        dims = random.randint(0, 5)
        sizes = [0, 1, 2, 3, 5, 7, 8] if dims < 4 else [1, 2, 3]
        shape = [random.choice(sizes) for _ in range(dims)]
        named[f"t{index}.w"] = (shape, random.choice(list(ITEM_SIZE)))
        logical[f"t{index}.w"] = (tuple(shape), named[f"t{index}.w"][1])
    if random.random() < 0.6:
        shape, dtype = [random.randint(1, 6), random.randint(1, 4)], random.choice(["bfloat16", "uint8"])
        experts = random.randint(1, 5)
        for part in ("gate", "up"):
            for expert in range(experts):
                named[f"layers.0.experts.{expert}.{part}.w"] = (shape, dtype)
            logical[f"layers.0.experts.{{expert}}.{part}.w"] = ((experts, *shape), dtype)
    if random.random() < 0.5:
        groups, width = random.choice([1, 2, 3]), random.randint(1, 3)
        for part, rows in (("q", 2 * groups), ("k", groups), ("v", groups)):
            named[f"layers.1.{part}.w"] = ([rows, width], "float32")
            logical[f"layers.1.{part}.w"] = ((rows, width), "float32")
    if random.random() < 0.4:
        named["untied.w"] = ([random.randint(1, 9), 3], "float16")
        logical["untied.w"] = ((named["untied.w"][0][0], 3), "float16")
    jobs = [_draw_job(random, named, max_ranks, source=side == 0) for side in range(2)]
    return RandomPair(model_document(named), jobs[0], jobs[1], logical)


def _draw_job(
    random: Random, named: dict[str, tuple[list[int], str]], max_ranks: int, *, source: bool
) -> dict[str, Any]:
    ranks = random.randint(1, max_ranks)
    axes = _draw_axes(random, ranks)
    rules: list[dict[str, Any]] = []
    for name, (shape, _) in named.items():
        if name.startswith("t"):
            rule: dict[str, Any] = {"match": name, "place": _draw_place(random, axes, len(shape))}
            if shape and min(shape) and random.random() < 0.3:
                dim = random.randrange(len(shape))
                first = random.randint(1, shape[dim])
                rest = shape[dim] - first
                rule["blocks"] = {str(dim): [first, rest] if rest else [first]}
            elif shape and random.random() < 0.2:
                rule["pad"] = {str(random.randrange(len(shape))): random.randint(1, 4)}
            rules.append(rule)
    expert_place = {
        axis: random.choice(["expert", "expert(round_robin)", "shard(0)", "shard(1)", "replicate"])
        for axis in random.sample(list(axes), len(axes))
    }
    rules.append({"match": "layers.{layer}.experts.*", "place": expert_place})
    fused_place = {axis: random.choice(["shard(0)", "replicate"]) for axis in axes}
    rules.append({"match": "layers.{layer}.{q,k,v}.w", "place": fused_place})
    rules.append({"match": "*", "place": _draw_place(random, axes, 2)})
    job = {"ranks": ranks, "domain": random.randint(1, ranks), "meshes": {"m": axes}, "tensors": rules}
    storage = []
    if "layers.0.experts.0.gate.w" in named and random.random() < 0.8:
        operands = ["layers.{layer}.experts.{expert}.{gate,up}.w"]
        storage.append(
            random.choice(
                [
                    {"tensor": "w13", "stack": "expert", "concat": operands, "dim": random.choice([1, 2])},
                    {"tensor": "w13.{expert}", "concat": operands, "dim": random.choice([0, 1])},
                    {"tensor": "w13", "stack": "expert", "concat": operands, "dim": 1, "block": 1},
                    {"tensor": "gate.{expert}", "concat": [operands[0].replace("{gate,up}", "gate")],
                     "transpose": True},
                ]
            )
        )  # fmt: skip
    if "layers.1.q.w" in named and random.random() < 0.8:
        rule = {"tensor": "layers.{layer}.qkv", "concat": ["layers.{layer}.{q,k,v}.w"], "dim": 0}
        if random.random() < 0.6:
            rule["interleave"] = named["layers.1.k.w"][0][0]
        storage.append(rule)
    if "untied.w" in named and random.random() < 0.5:
        if random.random() < 0.5 and not source:
            job["alias"] = {"tied.w": "untied.w"}
        else:
            job["pieces"] = _draw_pieces(random, named["untied.w"][0], ranks)
    return {**job, **({"storage": storage} if storage else {})}


def _draw_axes(random: Random, ranks: int) -> dict[str, int]:
    names = "abcd"[: random.randint(1, 4)]
    axes = {}
    for name in names[:-1]:
        axes[name] = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        ranks //= axes[name]
    axes[names[-1]] = ranks
    return axes


def _draw_place(random: Random, axes: dict[str, int], dims: int) -> Place:
    place = {}
    for axis in random.sample(list(axes), len(axes)):
        if dims and random.random() < 0.7:
            dim = random.randrange(dims)
            parts = random.choice([n for n in range(1, axes[axis] + 1) if axes[axis] % n == 0])
            place[axis] = f"shard({dim})" if random.random() < 0.6 else f"shard({dim}, parts={parts})"
    return place


def _draw_pieces(random: Random, shape: list[int], ranks: int) -> list[dict[str, Any]]:
    """Cut dim 0 in two at a random row; rank 0 has all but what random ranks may have as well."""
    row = random.randint(0, shape[0])
    pieces = [
        {"tensor": "untied.w", "rank": 0, "box": [[0, row], [0, 3]]},
        {"tensor": "untied.w", "rank": 0, "box": [[row, shape[0]], [0, 3]]},
    ]
    for rank in range(1, ranks):
        start = random.randint(0, shape[0])
        pieces.append(
            {"tensor": "untied.w", "rank": rank, "box": [[start, shape[0]], [random.randint(0, 2), 3]]}
        )
    return pieces


def draw_values(random: Random, pair: RandomPair) -> dict[str, Tensor]:
    """Return random bits for every logical tensor (any NaN is fine, but a bool is 0 or 1)."""
    values = {}
    for name, (shape, dtype) in pair.shapes.items():
        size = math.prod(shape) * ITEM_SIZE[dtype]
        raw = torch.tensor([random.randrange(256) for _ in range(size)], dtype=torch.uint8)
        if dtype == "bool":
            raw &= 1
        values[name] = raw.view(getattr(torch, dtype)).view(shape) if size else torch.empty(
            shape, dtype=getattr(torch, dtype)
        )  # fmt: skip
    return values


def local_tensor(
    whole: Tensor, job: dict[str, Any], rank: int, rule: dict[str, Any], has_experts: bool
) -> Tensor:
    """Return the rank's local tensor, padding (zeros) included, cut from the whole one axis after the other."""
    for text, sizes in rule.get("blocks", {}).items():
        plain = {"place": rule["place"]}
        parts = torch.split(whole, sizes, int(text))
        return torch.cat([local_tensor(part, job, rank, plain, has_experts) for part in parts], int(text))
    axes = job["meshes"]["m"]
    for dim, multiple in rule.get("pad", {}).items():
        d = int(dim)
        missing = list(whole.shape)
        missing[d] = -whole.shape[d] % multiple
        whole = torch.cat([whole, torch.zeros(missing, dtype=whole.dtype)], d)
    at = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
    for axis, text in rule["place"].items():
        here, size = int(at[axis]), axes[axis]
        if text.startswith("shard"):
            dim = int(text[6]) + has_experts
            parts = int(text.split("=")[1].rstrip(")")) if "parts" in text else size
            whole = _chunk(whole, parts, dim)[here // (size // parts)]
        elif text == "expert":
            whole = whole[torch.from_numpy(np.array_split(np.arange(whole.shape[0]), size)[here])]
        elif text == "expert(round_robin)":
            whole = whole[here::size]
    return whole


def _chunk(whole: Tensor, parts: int, dim: int) -> list[Tensor]:
    chunks = list(torch.chunk(whole, parts, dim)) if whole.shape[dim] else []
    return chunks + [whole.narrow(dim, 0, 0)] * (parts - len(chunks))


def rule_of(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the rule that matches, by how the names of these pairs are made."""
    for rule in job["tensors"]:
        match = rule["match"]
        fits = match in ("*", name)
        fits |= match.startswith("layers.{layer}.experts") and "experts" in name
        fits |= match == "layers.{layer}.{q,k,v}.w" and name in [f"layers.1.{part}.w" for part in "qkv"]
        if fits:
            return rule
    raise AssertionError(name)


def held_elements(pair: RandomPair, job: dict[str, Any], name: str) -> list[set[int]]:
    """Return which elements (row-major numbers) of a logical tensor each rank holds."""
    shape, _ = pair.shapes[name]
    index = torch.arange(1, math.prod(shape) + 1).view(shape)  # 0 is padding
    storages = job.get("storage", [])
    explicit = [piece for piece in job.get("pieces", []) if piece["tensor"] == name]
    held: list[set[int]] = []
    for rank in range(job["ranks"]):
        if explicit:
            boxes = [piece["box"] for piece in explicit if piece["rank"] == rank]
            parts = [index[tuple(slice(*interval) for interval in box)] for box in boxes]
        elif any("interleave" in one for one in storages) and name in _QKV:
            parts = [_fused(pair, {name: index}, job, rank)]
        else:
            parts = [local_tensor(index, job, rank, rule_of(job, name), "{expert}" in name)]
        if name == "untied.w" and "alias" in job:
            parts.append(local_tensor(index, job, rank, rule_of(job, "tied.w"), False))
        held.append({int(i) - 1 for part in parts for i in part.reshape(-1)} - {-1})
    return held


_QKV = [f"layers.1.{part}.w" for part in "qkv"]


def _fused(pair: RandomPair, values: dict[str, Tensor], job: dict[str, Any], rank: int) -> Tensor:
    """Return the rank's cut of q, k and v interleaved group by group; operands not given are zeros."""
    groups = next(one["interleave"] for one in job["storage"] if "interleave" in one)
    operands = [
        values.get(name, torch.zeros(pair.shapes[name][0], dtype=next(iter(values.values())).dtype))
        for name in _QKV
    ]
    rows = [part for group in range(groups) for one in operands for part in [_chunk(one, groups, 0)[group]]]
    return local_tensor(torch.cat(rows), job, rank, rule_of(job, _QKV[0]), False)


def expected_storages(
    pair: RandomPair, job: dict[str, Any], rank: int, values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return every storage of one rank of the job, built from whole tensors by hand."""
    found: dict[str, Tensor] = {}
    rules = job.get("storage", [])
    covered: set[str] = set()
    for rule in rules:
        if "qkv" in rule["tensor"]:
            covered |= set(_QKV)
            found["layers.1.qkv"] = (
                _fused(pair, {name: values[name] for name in _QKV}, job, rank)
                if "interleave" in rule
                else torch.cat([_local(pair, job, rank, name, values) for name in _QKV])
            )
        else:
            found |= _expert_storages(pair, job, rank, values, rule, covered)
    for name in pair.shapes:
        if name in covered:
            continue
        explicit = [p["box"] for p in job.get("pieces", []) if p["tensor"] == name and p["rank"] == rank]
        if explicit:
            whole = tuple(
                slice(min(box[dim][0] for box in explicit), max(box[dim][1] for box in explicit))
                for dim in range(2)
            )
            found[name] = values[name][whole]
        elif "{expert}" in name:
            numbers = _expert_numbers(pair, job, rank, name)
            local = _local(pair, job, rank, name, values)
            for position, number in enumerate(numbers):
                if local[position].numel():
                    found[name.replace("{expert}", str(number))] = local[position]
        else:
            found[name] = _local(pair, job, rank, name, values)
    for alias, target in job.get("alias", {}).items():
        found[alias] = local_tensor(values[target], job, rank, rule_of(job, alias), False)
    return found


def _local(pair: RandomPair, job: dict[str, Any], rank: int, name: str, values: dict[str, Tensor]) -> Tensor:
    return local_tensor(values[name], job, rank, rule_of(job, name), "{expert}" in name)


def _expert_numbers(pair: RandomPair, job: dict[str, Any], rank: int, name: str) -> list[int]:
    experts = pair.shapes[name][0][0]
    place = {a: p for a, p in rule_of(job, name)["place"].items() if p.startswith("expert")}
    numbers = local_tensor(torch.arange(experts).view(-1, 1, 1), job, rank, {"place": place}, True)
    return numbers.reshape(-1).tolist()


def _expert_storages(
    pair: RandomPair,
    job: dict[str, Any],
    rank: int,
    values: dict[str, Tensor],
    rule: dict[str, Any],
    covered: set[str],
) -> dict[str, Tensor]:
    gate, up = (f"layers.0.experts.{{expert}}.{part}.w" for part in ("gate", "up"))
    covered.add(gate)
    local = [_local(pair, job, rank, gate, values)]
    if "transpose" not in rule:
        covered.add(up)
        local.append(_local(pair, job, rank, up, values))
    if rule.get("stack"):
        if "block" in rule:
            return {"w13": torch.stack(local, 2).flatten(1, 2)}
        return {"w13": torch.cat(local, rule["dim"])}
    found = {}
    for position, number in enumerate(_expert_numbers(pair, job, rank, gate)):
        parts = [one[position] for one in local]
        whole = parts[0].T.contiguous() if "transpose" in rule else torch.cat(parts, rule["dim"])
        if whole.numel():
            found[rule["tensor"].replace("{expert}", str(number))] = whole
    return found
