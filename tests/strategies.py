"""Hypothesis strategies for pairs of layouts of one model, and what each rank then holds, cut by hand.

Each family of tensors is drawn once (names, shapes, dtypes); each job then draws its own rules for it. What a
rank holds is worked out here from whole tensors with `torch.chunk` and `torch.cat` alone, axis by axis, never
with the package's geometry. Run over numbers instead of values it says which elements a rank holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from reshard_cli.spec.dtypes import ITEM_SIZE
from tests.support import POISON, model_document

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Axes = dict[str, int]
Place = dict[str, str]
Cutter = Callable[["Values", int], dict[str, Tensor]]


@dataclass(frozen=True)
class Logical:
    """A logical tensor: the experts of one projection are one, as dim 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def has_experts(self) -> bool:
        return "{expert}" in self.name

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def item_size(self) -> int:
        return ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Values:
    """Raw integers by logical name, and what an element of kept padding is."""

    whole: Mapping[str, Tensor]
    kept: Callable[[Tensor], int]


@dataclass
class Job:
    """A job's document, and its storages by family: functions of whole tensors and a rank."""

    document: dict[str, Any]
    cutters: list[Cutter] = field(default_factory=list)

    def storages(self, values: Values, rank: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for cutter in self.cutters:
            mine = cutter(values, rank)
            assert not found.keys() & mine.keys()
            found |= mine
        return found


@dataclass
class Pair:
    """A model and two jobs."""

    tensors: list[Logical]
    source: Job
    destination: Job

    @property
    def model(self) -> dict[str, Any]:
        named = {}
        for one in self.tensors:
            if one.has_experts:
                for expert in range(one.shape[0]):
                    named[one.name.replace("{expert}", str(expert))] = (one.shape[1:], one.dtype)
            else:
                named[one.name] = (one.shape, one.dtype)
        return model_document(named)


# what a rank holds, by hand


def chunks(whole: Tensor, number: int, dim: int) -> list[Tensor]:
    """Return what `torch.chunk` gives, and empty tensors where it gives too few."""
    found = list(torch.chunk(whole, number, dim)) if whole.shape[dim] else []
    return found + [whole.narrow(dim, 0, 0)] * (number - len(found))


def coordinate(axes: Axes, rank: int) -> dict[str, int]:
    """Return the rank's coordinate on each axis, the last axis running fastest."""
    every = list(itertools.product(*(range(size) for size in axes.values())))
    return dict(zip(axes, every[rank], strict=True))


def cut_by_hand(whole: Tensor, axes: Axes, place: Place, rank: int, experts: bool = False) -> Tensor:
    """Cut a whole tensor axis after axis, in the order of `place`; `stage` cuts nothing here."""
    at = coordinate(axes, rank)
    for axis, text in place.items():
        here, size = at[axis], axes[axis]
        if text == "expert":
            numbers = np.array_split(np.arange(whole.shape[0]), size)[here]
            whole = whole[torch.from_numpy(numbers)]
        elif text == "expert(round_robin)":
            whole = whole[here::size]
        elif text.startswith("shard("):
            inside = text.removeprefix("shard(").removesuffix(")").split(",")
            parts = int(inside[1].split("=")[1]) if len(inside) == 2 else size
            whole = chunks(whole, parts, int(inside[0]) + experts)[here * parts // size]
    return whole


def padded(whole: Tensor, pad: Mapping[str, int], filler: int, experts: bool = False) -> Tensor:
    """Return the tensor with its dims filled up to the multiples."""
    for text, multiple in pad.items():
        dim = int(text) + experts
        missing = list(whole.shape)
        missing[dim] = -whole.shape[dim] % multiple
        whole = torch.cat([whole, whole.new_full(missing, filler)], dim)
    return whole


def local_tensor(whole: Tensor, axes: Axes, rule: Mapping[str, Any], rank: int, kept: int, experts: bool):
    """Return what a rule leaves of a whole tensor on a rank: padded, each block by itself, then joined."""
    filler = kept if rule.get("padding") == "keep" else 0
    whole = padded(whole, rule.get("pad", {}), filler, experts)
    for text, sizes in rule.get("blocks", {}).items():
        dim = int(text) + experts
        parts = torch.split(whole, sizes, dim)
        return torch.cat([cut_by_hand(part, axes, rule["place"], rank, experts) for part in parts], dim)
    return cut_by_hand(whole, axes, rule["place"], rank, experts)


def elements_held(pair: Pair, job: Job) -> np.ndarray:
    """Return [ranks, elements of all tensors]: whether the rank holds the element."""
    numbers, total = {}, 0
    for one in pair.tensors:
        numbers[one.name] = torch.arange(total + 1, total + 1 + one.num_elements).view(one.shape)
        total += one.num_elements
    mask = np.zeros((job.document["ranks"], total + 1), bool)
    for rank in range(job.document["ranks"]):
        for storage in job.storages(Values(numbers, lambda _: 0), rank).values():
            mask[rank, storage.reshape(-1).numpy()] = True
    return mask[:, 1:]


def element_bytes(pair: Pair) -> np.ndarray:
    """Return the bytes of every element of all tensors."""
    sizes = [np.full(one.num_elements, one.item_size) for one in pair.tensors]
    return np.concatenate([np.zeros(0, np.int64), *sizes])


def random_values(pair: Pair, seed: int) -> dict[str, Tensor]:
    """Return random bits for every logical tensor (a bool is 0 or 1), in the tensor's own dtype."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for one in pair.tensors:
        size = one.num_elements * one.item_size
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        if one.dtype == "bool":
            raw &= 1
        dtype = getattr(torch, one.dtype)
        found[one.name] = raw.view(dtype).view(one.shape) if size else torch.empty(one.shape, dtype=dtype)
    return found


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers."""
    return tensor.view(RAW[tensor.element_size()])


def expected_storages(job: Job, values: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the bits of every storage of a rank; padding is zero, or still poison where a rule keeps it."""

    def poison(tensor: Tensor) -> int:
        size = tensor.element_size()
        return int(torch.full((size,), POISON, dtype=torch.uint8).view(tensor.dtype).item())

    return job.storages(Values({name: raw(value) for name, value in values.items()}, poison), rank)


# strategies

DTYPES = st.sampled_from(sorted(ITEM_SIZE))
SMALL = st.integers(1, 4)


@st.composite
def meshes(draw, ranks: int) -> Axes:
    """One to four axes whose product is `ranks`."""
    names = "abcd"[: draw(st.integers(1, 4))]
    axes = {}
    for name in names[:-1]:
        axes[name] = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
        ranks //= axes[name]
    axes[names[-1]] = ranks
    return axes


@st.composite
def places(draw, axes: Axes, dims: int, experts: bool = False) -> Place:
    """Some of the axes in any order, several perhaps on one dim, with fewer parts than coordinates too."""
    place = {}
    order = draw(st.permutations(list(axes)))
    for axis in reversed(order) if draw(st.booleans()) else order:
        kinds = ["replicate", *(["shard", "shard", "parts"] if dims else [])]
        kinds += ["expert", "expert(round_robin)"] if experts else []
        kind = draw(st.sampled_from(kinds))
        if kind == "replicate":
            if draw(st.booleans()):
                place[axis] = kind
        elif kind.startswith("expert"):
            place[axis] = kind
        else:
            dim = draw(st.integers(0, dims - 1))
            divisors = [n for n in range(1, axes[axis] + 1) if axes[axis] % n == 0]
            parts = f", parts={draw(st.sampled_from(divisors))}" if kind == "parts" else ""
            place[axis] = f"shard({dim}{parts})"
    return place


class Drawing:
    """One job while it is drawn: its meshes, pipeline, and the rules so far."""

    def __init__(self, draw: Callable[[st.SearchStrategy], Any], num_layers: int) -> None:
        self.draw = draw
        self.ranks = draw(st.integers(1, 8))
        self.meshes = {"dense": draw(meshes(self.ranks)), "expert": draw(meshes(self.ranks))}
        self.rules: list[dict[str, Any]] = []
        self.storage: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.cutters: list[Cutter] = []
        self.layers: list[int] = []
        self.stage_axis = None
        if draw(st.booleans()):
            self.stage_axis = draw(st.sampled_from(list(self.meshes["dense"])))
            left = num_layers
            for _ in range(self.meshes["dense"][self.stage_axis] - 1):
                self.layers.append(draw(st.integers(0, left)))
                left -= self.layers[-1]
            self.layers.append(left)
            self.more["pipeline"] = {
                "layers": self.layers,
                "first": ["first.*", "both.*"],
                "last": ["both.*"],
            }

    def rule(self, match: str, dims: int, experts: bool = False, shape: Sequence[int] = ()) -> dict[str, Any]:
        """Draw a rule; a shape lets it cut in blocks or keep padding."""
        draw = self.draw
        rule: dict[str, Any] = {"match": match}
        if experts:
            rule["mesh"] = draw(st.sampled_from(["expert", "dense"]))
        rule["place"] = draw(places(self.meshes[rule.get("mesh", "dense")], dims, experts))
        kind = draw(st.sampled_from(["plain", "plain", "pad", "blocks"])) if dims and shape else "plain"
        if kind == "pad":
            for dim in draw(st.sets(st.integers(0, dims - 1), min_size=1, max_size=2)):
                rule.setdefault("pad", {})[str(dim)] = draw(SMALL)
            rule["padding"] = draw(st.sampled_from(["zero", "keep"]))
        dim = draw(st.integers(0, dims - 1)) if kind == "blocks" else 0
        if kind == "blocks" and shape[dim]:
            cuts = sorted(draw(st.sets(st.integers(1, shape[dim]), max_size=2)) | {shape[dim]})
            rule["blocks"] = {str(dim): [stop - start for start, stop in itertools.pairwise([0, *cuts])]}
        if draw(st.integers(0, 5)) == 0:
            rule["route"] = "broadcast"
        self.rules.append(rule)
        return rule

    def axes(self, rule: Mapping[str, Any]) -> Axes:
        return self.meshes[rule.get("mesh", "dense")]

    def stage(self, rule: dict[str, Any]) -> None:
        """Let the rule pick layers, where this job has stages and the rule is of their mesh."""
        if self.stage_axis is not None and rule.get("mesh", "dense") == "dense" and self.draw(st.booleans()):
            rule["place"] = {axis: text for axis, text in rule["place"].items() if axis != self.stage_axis}
            rule["place"][self.stage_axis] = "stage"

    def holds(self, rule: Mapping[str, Any], rank: int, stages: set[int]) -> bool:
        """Say whether the rank's stage is among these, or the rule knows no stages."""
        if "stage" not in rule["place"].values():
            return True
        assert self.stage_axis is not None
        return coordinate(self.meshes["dense"], rank)[self.stage_axis] in stages

    def stage_of(self, layer: int) -> tuple[int, int]:
        """Return (stage, number inside the stage) of a layer."""
        for stage, count in enumerate(self.layers):
            if layer < count:
                return stage, layer
            layer -= count
        return 0, layer

    def local(self, values: Values, one: Logical, rule: Mapping[str, Any], rank: int) -> Tensor:
        whole = values.whole[one.name]
        return local_tensor(whole, self.axes(rule), rule, rank, values.kept(whole), one.has_experts)

    def job(self) -> Job:
        document = {
            "ranks": self.ranks, "domain": self.draw(st.integers(1, self.ranks)), "meshes": self.meshes,
            "tensors": self.rules, "storage": self.storage, **self.more,
        }  # fmt: skip
        return Job(document, self.cutters)


Family = tuple[list[Logical], Callable[[Drawing, bool], None]]


def swapped(tensor: Tensor, swap: bool) -> Tensor:
    return tensor.transpose(-1, -2) if swap else tensor


@st.composite
def plain_families(draw, name: str) -> Family:
    """A tensor of 0 to 5 dims, under its own name, another name, or transposed."""
    dims = draw(st.integers(0, 5))
    size = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13] if dims < 3 else [1, 2, 3, 4])
    one = Logical(name, tuple(draw(size) for _ in range(dims)), draw(DTYPES))

    def add(drawing: Drawing, source: bool) -> None:
        rule = drawing.rule(name, dims, shape=one.shape)
        stages = {0}
        if name.startswith("both."):
            stages = {0, len(drawing.layers) - 1}
        if name.startswith(("both.", "first.")):
            drawing.stage(rule)
        swap, stored = False, name
        if drawing.draw(st.booleans()):
            swap, stored = dims > 1 and drawing.draw(st.booleans()), f"stored.{name}"
            how = drawing.draw(st.sampled_from([{"rename": name}, *([{"concat": [name]}] if dims else [])]))
            drawing.storage.append({"tensor": stored, "transpose": swap, **how})
        drawing.cutters.append(
            lambda values, rank: (
                {stored: swapped(drawing.local(values, one, rule, rank), swap)}
                if drawing.holds(rule, rank, stages)
                else {}
            )
        )

    return [one], add


@st.composite
def fused_families(draw, name: str) -> Family:
    """Two or three tensors that fit along a dim, fused by their shards, by groups, or block by block."""
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    groups = draw(SMALL)
    shape = [draw(SMALL) for _ in range(dims)]
    dtype = draw(DTYPES)
    equal = draw(st.booleans())
    rows = [draw(st.integers(1, 3)) * groups] * 3
    if not equal:
        rows = [draw(st.integers(1, 3)) * groups for _ in range(3)]
    letters = "qkv"[: draw(st.integers(2, 3))]
    tensors = [
        Logical(f"{name}.{letter}", (*shape[:dim], count, *shape[dim + 1 :]), dtype)
        for letter, count in zip(letters, rows, strict=False)
    ]

    def add(drawing: Drawing, source: bool) -> None:
        pattern = f"{name}.{{{','.join(letters)}}}"
        kind = drawing.draw(st.sampled_from(["apart", "concat", "interleave", "interleave", "block"]))
        rule = drawing.rule(pattern, dims, shape=() if kind == "interleave" else tensors[0].shape)
        if not equal and str(dim) in rule.get("blocks", {}):
            del rule["blocks"]  # along this dim the operands differ in size
        if kind == "apart":
            for one in tensors:
                drawing.cutters.append(
                    lambda values, rank, one=one: {one.name: drawing.local(values, one, rule, rank)}
                )
            return
        swap = dims > 1 and drawing.draw(st.booleans())
        how: dict[str, Any] = {"tensor": f"{name}.fused", "concat": [pattern], "dim": dim, "transpose": swap}
        block = 1
        if kind == "interleave":
            how["interleave"] = groups
        elif kind == "block" and equal:
            plain = torch.zeros(tensors[0].shape, dtype=torch.int64)
            counts = {
                local_tensor(plain, drawing.axes(rule), rule, rank, 0, False).shape[dim]
                for rank in range(drawing.ranks)
            }
            common = math.gcd(*counts) or 1
            block = drawing.draw(st.sampled_from([n for n in range(1, common + 1) if common % n == 0]))
            how["block"] = block
        drawing.storage.append(how)

        def cutter(values: Values, rank: int) -> dict[str, Tensor]:
            if "interleave" in how:
                parts = [chunks(values.whole[one.name], groups, dim) for one in tensors]
                whole = torch.cat([part[group] for group in range(groups) for part in parts], dim)
                found = cut_by_hand(whole, drawing.axes(rule), rule["place"], rank)
            else:
                local = [drawing.local(values, one, rule, rank) for one in tensors]
                found = in_turns(local, dim, block) if "block" in how else torch.cat(local, dim)
            return {f"{name}.fused": swapped(found, swap)}

        drawing.cutters.append(cutter)

    return tensors, add


def in_turns(parts: Sequence[Tensor], dim: int, block: int) -> Tensor:
    """Return the tensors' rows in turns of `block` rows."""
    pieces = [torch.split(part, block, dim) for part in parts]
    rows = [piece for turn in zip(*pieces, strict=True) for piece in turn]
    return torch.cat(rows, dim)


@st.composite
def expert_families(draw, layers: Sequence[int]) -> Family:
    """Gate and up projections of all experts in some layers: apart, fused, stacked, transposed, in turns."""
    dims = draw(st.integers(0, 2))
    experts = draw(st.integers(1, 6))
    shape = tuple(draw(SMALL) for _ in range(dims))
    dtype = draw(DTYPES)
    tensors = {
        (layer, part): Logical(f"layers.{layer}.experts.{{expert}}.{part}_proj.w", (experts, *shape), dtype)
        for layer in layers
        for part in ("gate", "up")
    }

    def add(drawing: Drawing, source: bool) -> None:
        pattern = "layers.{layer}.experts.{expert}.{gate,up}_proj.w"
        rule = drawing.rule(pattern, dims, experts=True, shape=() if dims == 0 else shape)
        drawing.stage(rule)
        axes = drawing.axes(rule)
        kinds = ["apart", "fused", "local", "stack", "turns"] if dims else ["apart", "single"]
        kind = drawing.draw(st.sampled_from(kinds))
        if kind == "local" and drawing.layers and "stage" not in rule["place"].values():
            kind = "fused"  # layers of two stages on one rank would share a name
        swap = dims > 1 and drawing.draw(st.booleans())
        dim = drawing.draw(st.integers(0, dims - 1)) if dims else 0
        stored = {"fused": "w13.{layer}.{expert}", "local": "w13.{local_layer}.{local_expert}"}
        if kind in stored:
            how = {"tensor": stored[kind], "concat": [pattern], "dim": dim, "transpose": swap}
            drawing.storage.append(how)
        elif kind in ("stack", "turns"):
            how = {"tensor": "w13.{layer}", "concat": [pattern], "dim": dim + 1, "stack": "expert"}
            how |= {"transpose": swap} | ({"block": 1} if kind == "turns" else {})
            drawing.storage.append(how)
        elif kind == "single":
            for part in ("gate", "up"):
                one = pattern.replace("{gate,up}", part)
                how = {"tensor": f"scale.{{layer}}.{part}", "concat": [one], "stack": "expert"}
                drawing.storage.append(how)

        def cutter(values: Values, rank: int) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            only = {axis: text for axis, text in rule["place"].items() if text.startswith("expert")}
            numbers = cut_by_hand(torch.arange(experts), axes, only, rank).tolist()
            for layer in layers:
                stage, inner = drawing.stage_of(layer)
                if not drawing.holds(rule, rank, {stage}):
                    continue
                local = {
                    part: drawing.local(values, tensors[layer, part], rule, rank) for part in ("gate", "up")
                }
                if kind == "single":
                    found |= {f"scale.{layer}.{part}": one for part, one in local.items()}
                elif kind in ("stack", "turns"):
                    parts = list(local.values())
                    one = in_turns(parts, dim + 1, 1) if kind == "turns" else torch.cat(parts, dim + 1)
                    found[f"w13.{layer}"] = swapped(one, swap)
                elif kind == "apart":
                    for part, one in local.items():
                        name = f"layers.{layer}.experts.{{}}.{part}_proj.w"
                        found |= {name.format(e): one[nth] for nth, e in enumerate(numbers)}
                else:
                    one = swapped(torch.cat(list(local.values()), dim + 1), swap)
                    for nth, e in enumerate(numbers):
                        where = f"{inner}.{nth}" if kind == "local" else f"{layer}.{e}"
                        found[f"w13.{where}"] = one[nth]
            return found

        drawing.cutters.append(cutter)

    return list(tensors.values()), add


@st.composite
def layer_families(draw, num_layers: int) -> Family:
    """One small tensor in every layer, named by its layer or by its place in its stage."""
    shape = tuple(draw(st.lists(SMALL, max_size=2)))
    dtype = draw(DTYPES)
    tensors = [Logical(f"layers.{layer}.norm.w", shape, dtype) for layer in range(num_layers)]

    def add(drawing: Drawing, source: bool) -> None:
        rule = drawing.rule("layers.{layer}.norm.w", len(shape), shape=shape)
        drawing.stage(rule)
        by_place = "stage" in rule["place"].values() and drawing.draw(st.booleans())
        if by_place:
            drawing.storage.append({"tensor": "block.{local_layer}.norm", "rename": "layers.{layer}.norm.w"})

        def cutter(values: Values, rank: int) -> dict[str, Tensor]:
            found = {}
            for layer, one in enumerate(tensors):
                stage, inner = drawing.stage_of(layer)
                if drawing.holds(rule, rank, {stage}):
                    name = f"block.{inner}.norm" if by_place else one.name
                    found[name] = drawing.local(values, one, rule, rank)
            return found

        drawing.cutters.append(cutter)

    return tensors, add


@st.composite
def box_families(draw) -> Family:
    """A tensor that a job may hold in explicit boxes, which may overlap those of other ranks in part."""
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(dims))
    one = Logical("boxes.w", shape, draw(DTYPES))

    def interval(drawing: Drawing, size: int) -> list[int]:
        start = drawing.draw(st.integers(0, size - 1))
        return [start, drawing.draw(st.integers(start + 1, size))]

    def add(drawing: Drawing, source: bool) -> None:
        if drawing.draw(st.booleans()):
            rule = drawing.rule("boxes.w", dims, shape=shape)
            drawing.cutters.append(lambda values, rank: {"boxes.w": drawing.local(values, one, rule, rank)})
            return
        dim = drawing.draw(st.integers(0, dims - 1))
        cuts = drawing.draw(st.sets(st.integers(1, shape[dim]), max_size=3)) | {shape[dim]}
        owners: dict[int, list[list[list[int]]]] = {}
        for start, stop in itertools.pairwise([0, *sorted(cuts)]):
            slab = [[0, size] for size in shape]
            slab[dim] = [start, stop]
            for rank in drawing.draw(st.sets(st.integers(0, drawing.ranks - 1), min_size=1)):
                owners.setdefault(rank, []).append(slab)
        for rank in set(range(drawing.ranks)) - owners.keys():
            if drawing.draw(st.booleans()):
                owners[rank] = [[interval(drawing, size) for size in shape]]
        drawing.more["pieces"] = [
            {"tensor": "boxes.w", "rank": rank, "box": [list(each) for each in box]}
            for rank, boxes in owners.items()
            for box in boxes
        ]

        def cutter(values: Values, rank: int) -> dict[str, Tensor]:
            boxes = owners.get(rank, [])
            if not boxes:
                return {}
            kept = torch.zeros_like(values.whole[one.name])
            for box in boxes:
                inside = tuple(slice(*each) for each in box)
                kept[inside] = values.whole[one.name][inside]
            around = [(min(b[d][0] for b in boxes), max(b[d][1] for b in boxes)) for d in range(dims)]
            return {"boxes.w": kept[tuple(slice(*each) for each in around)]}

        drawing.cutters.append(cutter)

    return [one], add


@st.composite
def tied_families(draw) -> Family:
    """A tensor that a job may hold twice, cut in two ways."""
    shape = tuple(draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 2))))
    one = Logical("tied.w", shape, draw(DTYPES))

    def add(drawing: Drawing, source: bool) -> None:
        names = ["tied.w"]
        if drawing.draw(st.booleans()):
            drawing.more["alias"] = {"head.w": "tied.w"}
            names.append("head.w")
        for name in names:
            rule = drawing.rule(name, len(shape), shape=shape)
            drawing.cutters.append(
                lambda values, rank, name=name, rule=rule: {name: drawing.local(values, one, rule, rank)}
            )

    return [one], add


@st.composite
def layout_pairs(draw) -> Pair:
    """Two jobs of 1 to 8 ranks that hold one model, each in its own way."""
    num_layers = draw(st.integers(1, 4))
    layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=2))
    names = ["plain0.w", "plain1.w", "first.w", "both.w"]
    possible: list[st.SearchStrategy[Family]] = [plain_families(name) for name in names]
    possible += [
        fused_families("attention"),
        expert_families(sorted(layers)),
        box_families(),
        tied_families(),
    ]
    chosen = draw(st.lists(st.integers(0, len(possible) - 1), min_size=2, max_size=4, unique=True))
    families = [draw(layer_families(num_layers))]  # gives the model its number of layers
    families += [draw(possible[index]) for index in chosen]
    jobs = []
    for source in (True, False):
        drawing = Drawing(draw, num_layers)
        for _, add in families:
            add(drawing, source)
        drawing.rules.append({"match": "boxes.w"})
        jobs.append(drawing.job())
    return Pair([one for tensors, _ in families for one in tensors], *jobs)
