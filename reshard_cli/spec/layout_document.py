"""The layout document: which job it is, its meshes, and what they do to each tensor.

`LayoutDocument` is the schema; `read_layout_document` also checks everything that needs no model: that
meshes fit the ranks, that rules name real axes and meshes, that patterns and placements can be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from reshard_cli.errors import DocumentError, Problem
from reshard_cli.spec.casts import Blockwise, parse_cast
from reshard_cli.spec.checking import StrictDocument, read_document
from reshard_cli.spec.dtypes import ITEM_SIZE, dtype_hint
from reshard_cli.spec.located import KeyPath, Located
from reshard_cli.spec.names import Pattern, expand_braces, fill, name_fault, normalise
from reshard_cli.spec.placement import Placement, Shard, Stage, parse_placement

__all__ = [
    "CastRule",
    "LayoutDocument",
    "LoadedLayout",
    "PieceRule",
    "Pipeline",
    "StorageRule",
    "TensorRule",
    "check_layout",
    "leave_out_path",
    "leaves_out",
    "read_layout_document",
]

_MOST = 1 << 20  # ranks; more is a slip of the pen
Parsed = TypeVar("Parsed")


class Pipeline(StrictDocument):
    """Which layers each coordinate of the `stage` axis holds, and where tensors without a layer live."""

    layers: list[int] | None = Field(None, description="layers per stage; left out: an even split")
    first: list[str] = Field([], description="patterns of tensors on the first stage")
    last: list[str] = Field([], description="patterns of tensors on the last stage")


class TensorRule(StrictDocument):
    """What the axes of one mesh do to the tensors that match; the first rule that matches wins."""

    match: str = Field(description="name pattern: *, {a,b}, {layer}, {expert}")
    mesh: str | None = Field(None, description="a key of `meshes`; default: the first")
    place: dict[str, str] = Field(
        {}, description="axis: shard(d), shard(d, parts=n), stage, expert, replicate"
    )
    pad: dict[str, int] = Field({}, description="dim: padded up to a multiple of this before it is cut")
    blocks: dict[str, list[int]] = Field(
        {}, description="dim: sizes of its blocks, each of which is cut by itself"
    )
    padding: Literal["zero", "keep"] = Field("zero", description="what a refit does to padding rows")
    dtype: str | None = Field(None, description="storage dtype of these tensors")
    cast: str | None = Field(
        None, description="a dtype, or blockwise(float8_e4m3fn, 128): also scales under NAME_scale_inv"
    )
    route: Literal["broadcast", "reshard"] | None = Field(None, description="how these tensors travel")
    why: str | None = Field(None, description="the reason for the route, said in the plan")


class StorageRule(StrictDocument):
    """How pieces lie in the rank's own tensor: concatenated, stacked, interleaved, transposed, renamed."""

    tensor: str = Field(
        min_length=1, description="the storage's name; {layer} {expert} {local_layer} {local_expert}"
    )
    concat: list[str] = Field([], description="name patterns of the operands, in order")
    rename: str | None = Field(None, description="instead of concat: a pattern; its *s go into `tensor`")
    dim: int = Field(0, ge=0, description="dim of the storage along which operands follow each other")
    stack: Literal["expert"] | None = Field(None, description="the rank's experts become dim 0")
    interleave: int | None = Field(
        None, ge=1, description="groups: the whole operands are laid group by group, before the cut"
    )
    block: int | None = Field(None, ge=1, description="rows: the rank's shards take turns, block by block")
    unzip: dict[str, int] = Field(
        {},
        description="with interleave, operand number: rows; within a group its even runs of these lie first",
    )
    layers: list[int] | None = Field(None, description="only at these layers; default: all")
    transpose: bool = Field(False, description="the last two dims are swapped in the storage")


class CastRule(StrictDocument):
    """What the tensors that match are cast to; over what their tensor rule says of `dtype` and `cast`."""

    match: str = Field(description="name pattern: *, {a,b}, {layer}, {expert}")
    cast: str = Field(description="a dtype, or blockwise(float8_e4m3fn, 128)")


class PieceRule(StrictDocument):
    """One explicit box of a tensor on one rank. Pieces of a tensor replace its placement altogether."""

    tensor: str
    rank: int = Field(ge=0)
    box: list[list[int]] = Field(description="[start, stop] per dim of the tensor")


class LayoutDocument(StrictDocument):
    """One job's layout: ranks, meshes, rules for tensors, storage, and explicit pieces."""

    name: str = Field(min_length=1)
    ranks: int = Field(ge=1, le=_MOST)
    domain: int = Field(8, ge=1, le=_MOST, description="consecutive ranks per NVLink domain; default 8")
    model: str | None = Field(None, description="a model document or checkpoint folder, seen from here")
    dtype: str | None = Field(None, description="storage dtype where no rule says otherwise")
    engine: str | None = Field(None, description="preset: gives meshes, tensors, storage, pipeline")
    parallel: dict[str, int] = Field({}, description="the engine's sizes, as {tp: 4, pp: 8, ep: 16}")
    options: dict[str, int] = Field({}, description="the engine's other numbers; `layouts ENGINE` lists them")
    config: dict[str, Annotated[int, Field(ge=0, le=1 << 53)]] = Field(
        {}, description="over the model's config, for the engine preset"
    )
    meshes: dict[str, dict[str, int]] = Field({}, description="axes outermost first; product = ranks")
    pipeline: Pipeline | None = None
    tensors: list[TensorRule] = Field([])
    storage: list[StorageRule] = Field([])
    casts: list[CastRule] = Field([], description="the first that matches a tensor says what it is cast to")
    pieces: list[PieceRule] = Field([])
    leave_out: list[str] = Field(
        [], description="patterns of the model's tensors that this job does not hold"
    )
    alias: dict[str, str] = Field({}, description="tied tensor: the tensor that it equals")
    rename: dict[str, str] = Field({}, description="model name pattern: name in this document's rules")


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """A checked layout document with what its text was parsed into, and its lines for later messages."""

    document: LayoutDocument
    located: Located
    path: Path
    meshes: dict[str, dict[str, int]]
    places: tuple[dict[str, Placement], ...]
    matches: tuple[Pattern, ...]
    casts: tuple[tuple[Pattern, str | Blockwise], ...] = ()

    def leaves_out(self, name: str) -> bool:
        """Say whether the job does not hold the model's tensor of this name (with `{expert}` for any)."""
        return leaves_out(self.document.leave_out, name)

    def mesh_of(self, rule: int) -> str:
        """Return the mesh name of a tensor rule: its own, or the document's first."""
        return self.document.tensors[rule].mesh or next(iter(self.meshes))


def leaves_out(patterns: Sequence[str], name: str) -> bool:
    """Say whether one of the patterns fits a tensor's name; of experts all or none do, which a layout checks."""
    probe = fill(name, expert=0)
    return any(Pattern(text).matches(probe) for text in patterns)


def leave_out_path(patterns: Sequence[str], name: str) -> KeyPath:
    """Return the key of the pattern of `leave_out` that fits a tensor's name."""
    found = (index for index, text in enumerate(patterns) if leaves_out([text], name))
    index = next(found, None)
    return ("leave_out",) if index is None else ("leave_out", index)


class _Checker:
    """Collects the problems of one document."""

    def __init__(self, document: LayoutDocument, located: Located) -> None:
        self.document = document
        self.located = located
        self.problems: list[Problem] = []
        self.meshes = dict(document.meshes) or {"ranks": {"rank": document.ranks}}

    def add(self, path: KeyPath, message: str) -> None:
        self.problems.append(self.located.problem(path, message))

    def tried(self, path: KeyPath, build: Callable[[str], Parsed], text: str) -> Parsed | None:
        """Return what `build` makes of a text, or None after noting its ValueError at `path`."""
        try:
            return build(text)
        except ValueError as error:
            self.add(path, str(error))
            return None

    def dtype(self, path: KeyPath, name: str | None) -> None:
        if name is not None and name not in ITEM_SIZE:
            self.add(path, f"unknown dtype {name!r}; {dtype_hint(name)}")

    def name(self, path: KeyPath, text: str) -> None:
        """Note a new name that no tensor can have; what patterns put into it comes from names that can."""
        fault = name_fault(re.sub(r"\{\w+\}|\*", "0", text))
        if fault is not None:
            self.add(path, fault)

    def printable(self, path: KeyPath, text: str) -> None:
        """Note a name of anything else, which would break the tables that show it."""
        if not text.isprintable():
            self.add(path, f"{text!r} is no name: it has a character that cannot be printed")

    def mesh_sizes(self) -> None:
        ranks = self.document.ranks
        for name, axes in self.document.meshes.items():
            self.printable(("meshes", name), name)
            for axis in axes:
                self.printable(("meshes", name, axis), axis)
            small = [axis for axis, size in axes.items() if size < 1]
            for axis in small:
                self.add(("meshes", name, axis), f"an axis has at least 1 coordinate, not {axes[axis]}")
            if not axes:
                self.add(("meshes", name), "a mesh names at least one axis, as {tp: 4}")
            elif not small and math.prod(axes.values()) != ranks:
                product = " * ".join(str(size) for size in axes.values())
                self.add(
                    ("meshes", name),
                    f"{product} = {math.prod(axes.values())} is not the job's {ranks} ranks",
                )

    def pipeline(self) -> None:
        pipeline = self.document.pipeline
        if pipeline is None:
            return
        for index, count in enumerate(pipeline.layers or []):
            if count < 0:
                self.add(("pipeline", "layers", index), f"a stage holds 0 or more layers, not {count}")
        for key, patterns in (("first", pipeline.first), ("last", pipeline.last)):
            for index, pattern in enumerate(patterns):
                self.tried(("pipeline", key, index), Pattern, pattern)

    def rule(self, index: int) -> tuple[Pattern | None, dict[str, Placement]]:
        rule = self.document.tensors[index]
        where: KeyPath = ("tensors", index)
        pattern = self.tried((*where, "match"), Pattern, rule.match)
        self.dtype((*where, "dtype"), rule.dtype)
        if rule.cast is not None:
            self.tried((*where, "cast"), parse_cast, rule.cast)
            if rule.dtype is not None:
                self.add((*where, "cast"), "says what `dtype` says; write one of them")
        mesh = rule.mesh if rule.mesh is not None else next(iter(self.meshes))
        axes = self.meshes.get(mesh)
        if axes is None:
            self.add((*where, "mesh"), f"no mesh {mesh!r}; meshes: {', '.join(self.meshes)}")
        placed: dict[str, Placement] = {}
        for axis, text in rule.place.items():
            placement = self.tried((*where, "place", axis), parse_placement, text)
            if axes is None:
                continue
            if axis not in axes:
                self.add(
                    (*where, "place", axis), f"mesh {mesh!r} has no axis {axis!r}; axes: {', '.join(axes)}"
                )
            elif placement is not None:
                self.placement((*where, "place", axis), axes[axis], placement)
                placed[axis] = placement
        stages = [axis for axis, placement in placed.items() if isinstance(placement, Stage)]
        if len(stages) > 1:
            self.add((*where, "place", stages[1]), "two axes are `stage`; a layer has one stage")
        self.padding(where, rule)
        self.blocks(where, rule)
        return pattern, placed

    def placement(self, where: KeyPath, size: int, placement: Placement) -> None:
        if isinstance(placement, Shard) and placement.parts is not None and size % placement.parts:
            self.add(where, f"{placement.parts} parts do not divide the axis of {size} coordinates evenly")
        if isinstance(placement, Stage):
            pipeline = self.document.pipeline
            if pipeline is None:
                self.add(where, "`stage` needs the document's `pipeline`: {layers: [...], first, last}")
            elif pipeline.layers is not None and len(pipeline.layers) != size:
                # told once and where the stages are, not at every rule that has one
                told = f"axis {where[-1]!r} has {size} coordinates, {len(pipeline.layers)} stages are named"
                self.add(("pipeline", "layers"), told)

    def padding(self, where: KeyPath, rule: TensorRule) -> None:
        for dim, multiple in rule.pad.items():
            if not (dim.isascii() and dim.isdigit()):
                self.add((*where, "pad", dim), f"a dim is a whole number from 0, not {dim!r}")
            if not 1 <= multiple <= 1 << 40:
                self.add((*where, "pad", dim), f"a multiple is at least 1 and at most 2**40, not {multiple}")

    def blocks(self, where: KeyPath, rule: TensorRule) -> None:
        for number, (dim, sizes) in enumerate(rule.blocks.items()):
            if not (dim.isascii() and dim.isdigit()):
                self.add((*where, "blocks", dim), f"a dim is a whole number from 0, not {dim!r}")
            if rule.pad:
                self.add((*where, "blocks", dim), "a tensor is cut in blocks or padded, not both")
            if number:
                self.add((*where, "blocks", dim), "only one dim of a tensor is cut in blocks")
            if not sizes or min(sizes) < 1:
                self.add((*where, "blocks", dim), f"blocks have at least 1 row each, not {sizes}")

    def storage(self, index: int) -> None:
        rule = self.document.storage[index]
        where: KeyPath = ("storage", index)
        if "{" in fill(rule.tensor, layer=0, expert=0, local_layer=0, local_expert=0):
            self.add((*where, "tensor"), "its captures are {layer}, {expert}, {local_layer}, {local_expert}")
        self.name((*where, "tensor"), rule.tensor)
        if bool(rule.concat) == (rule.rename is not None):
            self.add(where, "write either `concat` (a list of patterns) or `rename` (one pattern)")
        num_operands = 0
        for position, pattern in enumerate(rule.concat):
            path: KeyPath = (*where, "concat", position)
            choices = self.tried(path, expand_braces, pattern)
            if choices is None:
                return
            num_operands += len(choices)
            for choice in choices:
                if "*" in choice:
                    self.add(path, "an operand is named in full; `*` is not taken here")
                    break
                if self.tried(path, Pattern, choice) is None:
                    break
        if rule.rename is not None:
            read = self.tried((*where, "rename"), Pattern, rule.rename)
            if read is not None and rule.rename.count("*") < rule.tensor.count("*"):
                self.add((*where, "tensor"), "has more `*` than `rename`")
            for key in ("stack", "interleave", "block"):
                if getattr(rule, key) is not None:
                    self.add((*where, key), "goes with `concat`, not with `rename`")
        elif "*" in rule.tensor:
            self.add((*where, "tensor"), "`*` goes with `rename`, not with `concat`")
        if rule.interleave is not None and rule.block is not None:
            self.add((*where, "block"), "`interleave` and `block` cannot both lay out one storage")
        for operand, rows in rule.unzip.items():
            if rule.interleave is None:
                self.add((*where, "unzip"), "goes with `interleave`")
            elif not (operand.isascii() and operand.isdigit()) or int(operand) >= num_operands:
                self.add((*where, "unzip", operand), f"operands are numbered 0 to {num_operands - 1}")
            elif rows < 1:
                self.add((*where, "unzip", operand), f"a run has at least 1 row, not {rows}")
        if rule.stack == "expert" and "{expert}" in rule.tensor:
            self.add(
                (*where, "tensor"), "a stack holds all the rank's experts; leave {expert} out of its name"
            )
        if rule.stack == "expert" and rule.dim == 0 and num_operands > 1:
            self.add((*where, "dim"), "dim 0 of a stack is the expert; concatenate along 1 or more")

    def cast(self, index: int) -> tuple[Pattern, str | Blockwise] | None:
        rule = self.document.casts[index]
        pattern = self.tried(("casts", index, "match"), Pattern, rule.match)
        cast = self.tried(("casts", index, "cast"), parse_cast, rule.cast)
        return None if pattern is None or cast is None else (pattern, cast)

    def piece(self, index: int) -> None:
        piece = self.document.pieces[index]
        where: KeyPath = ("pieces", index)
        if piece.rank >= self.document.ranks:
            self.add((*where, "rank"), f"the job has ranks 0 to {self.document.ranks - 1}, not {piece.rank}")
        for dim, interval in enumerate(piece.box):
            if len(interval) != 2:
                self.add((*where, "box", dim), f"a box has [start, stop] per dim, not {interval}")
            elif not 0 <= interval[0] <= interval[1]:
                self.add((*where, "box", dim), f"[start, stop] needs 0 <= start <= stop, not {interval}")

    def alias(self) -> None:
        for name, target in self.document.alias.items():
            self.name(("alias", name), name)
            if normalise(name) == normalise(target):
                self.add(("alias", name), "a tensor cannot be its own alias")
            elif target in self.document.alias:
                self.add(
                    ("alias", name), f"{target!r} is an alias itself; name the tensor that it stands for"
                )

    def engine(self) -> None:
        for key in ("parallel", "options", "config"):
            if self.document.engine is None and getattr(self.document, key):
                self.add((key,), "goes with `engine`, which this document does not name")

    def rename(self) -> None:
        for pattern, target in self.document.rename.items():
            self.tried(("rename", pattern), Pattern, pattern)
            self.name(("rename", pattern), target)
            if target.count("*") > pattern.count("*"):
                self.add(("rename", pattern), "the new name has more `*` than the pattern")


def read_layout_document(path: Path) -> LoadedLayout:
    """Read and check one layout document. Raises DocumentError with every problem it has.

    A document with an engine is only checked by its schema: what its rules refer to is known with the model.
    """
    document, located, problems = read_document(path, LayoutDocument)
    if document.engine is None or problems:
        return check_layout(document, located, path, problems)
    return LoadedLayout(document, located, path, {}, (), ())


def check_layout(
    document: LayoutDocument, located: Located, path: Path, problems: Sequence[Problem] = ()
) -> LoadedLayout:
    """Return a layout document (without an engine) with its texts parsed.

    Raises DocumentError with the problems found before, and all of its own.
    """
    checker = _Checker(document, located)
    checker.printable(("name",), document.name)
    checker.dtype(("dtype",), document.dtype)
    checker.mesh_sizes()
    checker.pipeline()
    rules = [checker.rule(index) for index in range(len(document.tensors))]
    for index in range(len(document.storage)):
        checker.storage(index)
    casts = [checker.cast(index) for index in range(len(document.casts))]
    for index in range(len(document.pieces)):
        checker.piece(index)
    for index, text in enumerate(document.leave_out):
        checker.tried(("leave_out", index), Pattern, text)
    checker.alias()
    checker.rename()
    checker.engine()
    found = [*problems, *checker.problems]
    if not (document.tensors or document.pieces or document.engine or found):
        checker.add((), "no `tensors` and no `pieces`: nothing says what the ranks hold; or name an `engine`")
        found = checker.problems
    if found:
        raise DocumentError(problems=sorted(set(found), key=lambda problem: problem.line))
    matches = tuple(pattern for pattern, _ in rules if pattern is not None)
    return LoadedLayout(
        document, located, path, checker.meshes, tuple(place for _, place in rules), matches,
        tuple(cast for cast in casts if cast is not None),
    )  # fmt: skip
