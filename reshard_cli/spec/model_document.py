"""The model document: a thousand tensors in a few dozen lines of YAML, read and written.

    name: small-moe
    dtype: bfloat16
    sizes: {hidden: 256, layers: 4, experts: 8, width: 64}
    ranges: {layer: layers, expert: experts}
    sets: {routed: {from: 1}}
    config: {head_dim: 64}
    tensors:
      model.embed_tokens.weight: [1000, hidden]
      "model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight": [width, hidden]
      "model.layers.{layer}.mlp.gate.bias": {shape: [experts], dtype: float32, layers: routed}

Shapes and ranges are whole-number expressions of the sizes. `{layer}` and `{expert}` run over their
ranges, `{a,b}` over the choices; `layers` restricts an entry to some layers: {from, to, step}, a list, or a
named set, which may also be {pattern, letter}. `config` has what engine presets ask for beside the shapes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from reshard_cli.errors import DocumentError, Problem
from reshard_cli.spec.checking import StrictDocument, read_document
from reshard_cli.spec.config import read_config
from reshard_cli.spec.dcp import is_dcp_folder, model_prefix, read_dcp
from reshard_cli.spec.dtypes import ITEM_SIZE, dtype_hint
from reshard_cli.spec.expressions import evaluate
from reshard_cli.spec.headers import index_folder
from reshard_cli.spec.located import KeyPath, Located
from reshard_cli.spec.model import LogicalTensor, Model, group_experts, model_of_checkpoint
from reshard_cli.spec.names import Pattern, expand_braces, fill, name_fault, normalise, template_of

__all__ = ["ModelDocument", "model_document_text", "model_of_document", "read_model"]

_MAX_TENSORS = 2_000_000
_MAX_ELEMENTS = 1 << 56  # so that no count of bytes over all experts leaves 64 bits
Expression = Annotated[str | int, Field(description="a whole number, or an expression of the sizes")]


class _LayerRange(StrictDocument):
    """Some of the layers: from, from+step, … below to."""

    start: Expression = Field(0, alias="from")
    to: Expression | None = None
    step: Expression = 1


class _LayerPattern(StrictDocument):
    """The layers at which a string, one character per layer, has a letter: hybrids write themselves so."""

    pattern: str
    letter: str = Field(min_length=1, max_length=1)


class _TensorEntry(StrictDocument):
    """One entry with more than a shape. `layers` may name one of the document's sets."""

    shape: list[Expression]
    dtype: str | None = None
    layers: _LayerRange | list[int] | str | None = None
    experts: Expression | None = None


class _Ranges(StrictDocument):
    """How far `{layer}` and `{expert}` run."""

    layer: Expression | None = None
    expert: Expression | None = None


class ModelDocument(StrictDocument):
    """A model's tensors by name, as expressions of named sizes."""

    name: str
    dtype: str
    sizes: dict[str, Expression] = Field({})
    ranges: _Ranges = _Ranges()
    sets: dict[str, _LayerRange | _LayerPattern | list[int]] = Field({}, description="named sets of layers")
    config: dict[str, Expression] = Field(
        {}, description="numbers that engine presets ask for, by the names of Hugging Face's config.json"
    )
    tensors: dict[str, list[Expression] | _TensorEntry] = Field(min_length=1)


class _Reader:
    """Expands one model document and collects its problems."""

    def __init__(self, document: ModelDocument, located: Located) -> None:
        self.document = document
        self.located = located
        self.problems: list[Problem] = []
        self.sizes: dict[str, int] = {}
        self.tensors: dict[str, LogicalTensor] = {}
        self.config: dict[str, int] = {}

    def add(self, path: KeyPath, message: str) -> None:
        self.problems.append(self.located.problem(path, message))

    def number(self, path: KeyPath, expression: str | int, least: int, most: int | None = None) -> int:
        try:
            value = evaluate(expression, self.sizes)
        except ValueError as error:
            self.add(path, str(error))
            return least
        if value < least:
            self.add(path, f"{expression!r} is {value}; it must be at least {least}")
            return least
        if most is not None and value > most:
            self.add(path, f"{expression!r} is {value}; it must be at most {most}")
            return least
        return value

    def run(self) -> None:
        for name, expression in self.document.sizes.items():
            self.sizes[name] = self.number(("sizes", name), expression, 0)
        for name, expression in self.document.config.items():
            self.config[name] = self.number(("config", name), expression, 0)
        if not self.document.name.isprintable():
            self.add(
                ("name",), f"{self.document.name!r} is no name: it has a character that cannot be printed"
            )
        if self.document.dtype not in ITEM_SIZE:
            self.add(("dtype",), f"unknown dtype {self.document.dtype!r}; {dtype_hint(self.document.dtype)}")
        for pattern, entry in self.document.tensors.items():
            self.entry(pattern, entry)
            if len(self.tensors) > _MAX_TENSORS:
                self.add(("tensors", pattern), f"more than {_MAX_TENSORS} tensors")
                return

    def range_of(self, word: str, path: KeyPath) -> int:
        expression = getattr(self.document.ranges, word)
        if expression is None:
            self.add(path, f"{{{word}}} needs `ranges: {{{word}: ...}}`")
            return 0
        return self.number(("ranges", word), expression, 1, _MAX_TENSORS)

    def entry(self, pattern: str, entry: list[str | int] | _TensorEntry) -> None:
        where: KeyPath = ("tensors", pattern)
        if isinstance(entry, _TensorEntry):
            shape_path, expressions, dtype = (*where, "shape"), entry.shape, entry.dtype
        else:
            shape_path, expressions, dtype = where, entry, None
        shape = tuple(self.number((*shape_path, i), value, 0) for i, value in enumerate(expressions))
        if math.prod(shape) > _MAX_ELEMENTS:
            self.add(shape_path, f"{list(shape)} has more than 2**56 elements")
            return
        if dtype is not None and dtype not in ITEM_SIZE:
            self.add((*where, "dtype"), f"unknown dtype {dtype!r}; {dtype_hint(dtype)}")
        if "*" in pattern:
            self.add(where, "a model names its tensors in full; `*` is not taken here")
            return
        try:
            Pattern(pattern)
            fault = next(filter(None, map(name_fault, map(_filled, expand_braces(pattern)))), None)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            self.add(where, fault)
            return
        has_layer, has_expert = "{layer}" in pattern, "{expert}" in pattern
        experts = self.experts(where, entry) if has_expert else 0
        layers: list[int | None] = [None]
        if has_layer:
            layers = list(self.layers(where, entry))
        elif isinstance(entry, _TensorEntry) and entry.layers is not None:
            self.add((*where, "layers"), "the name has no {layer}")
        for template in expand_braces(pattern):
            for layer in layers:
                self.tensor(where, template, layer, shape, dtype or self.document.dtype, experts)
            if len(self.tensors) > _MAX_TENSORS:
                return

    def experts(self, where: KeyPath, entry: list[str | int] | _TensorEntry) -> int:
        if isinstance(entry, _TensorEntry) and entry.experts is not None:
            return self.number((*where, "experts"), entry.experts, 1, _MAX_TENSORS)
        return self.range_of("expert", where)

    def layers(self, where: KeyPath, entry: list[str | int] | _TensorEntry) -> list[int]:
        count = self.range_of("layer", where)
        named = entry.layers if isinstance(entry, _TensorEntry) else None
        path: KeyPath = (*where, "layers")
        if named is None:
            return list(range(count))
        chosen: _LayerRange | _LayerPattern | list[int]
        if isinstance(named, str):
            if named not in self.document.sets:
                known = ", ".join(self.document.sets) or "none"
                self.add(path, f"no set of layers is named {named!r} (sets: {known})")
                return []
            chosen, path = self.document.sets[named], ("sets", named)
        else:
            chosen = named
        if isinstance(chosen, _LayerPattern):
            chosen = [layer for layer, letter in enumerate(chosen.pattern) if letter == chosen.letter]
        if isinstance(chosen, _LayerRange):
            start = self.number((*path, "from"), chosen.start, 0, _MAX_TENSORS)
            stop = count if chosen.to is None else self.number((*path, "to"), chosen.to, 0, _MAX_TENSORS)
            chosen = list(range(start, stop, self.number((*path, "step"), chosen.step, 1)))
        outside = [layer for layer in chosen if not 0 <= layer < count]
        if outside:
            self.add(path, f"layer {outside[0]} is not among the model's layers 0 to {count - 1}")
        if len(set(chosen)) != len(chosen):
            self.add(path, "a layer stands twice")
        return [layer for layer in chosen if 0 <= layer < count]

    def tensor(
        self,
        where: KeyPath,
        template: str,
        layer: int | None,
        shape: tuple[int, ...],
        dtype: str,
        experts: int,
    ) -> None:
        name = normalise(fill(template, layer=layer))
        if name in self.tensors:
            if len(self.problems) < 100:
                self.add(where, f"tensor {name!r} is named by two entries")
            return
        whole = (experts, *shape) if experts else shape
        self.tensors[name] = LogicalTensor(name, whole, dtype, has_experts=bool(experts))


def _filled(template: str) -> str:
    return fill(template, layer=0, expert=0)


def read_model(path: Path, *, trust: bool = False) -> Model:
    """Return the model of a YAML document, or of a checkpoint folder (safetensors, or DCP where `trust` is given).

    Raises DocumentError for a wrong document, WeightsError for a corrupt checkpoint.
    """
    if path.is_dir() and is_dcp_folder(path):
        index = read_dcp(path, trust=trust)
        saved = index.tensors(index.under(model_prefix(index)))
        return model_of_checkpoint(str(path), saved, read_config(path))
    if path.is_dir():
        return model_of_checkpoint(str(path), index_folder(path), read_config(path))
    if not path.exists():
        raise DocumentError(f"{path}: no such model document or checkpoint folder")
    document, located, problems = read_document(path, ModelDocument)
    return model_of_document(document, located, str(path), problems)


def model_of_document(
    document: ModelDocument, located: Located, origin: str, problems: Sequence[Problem] = ()
) -> Model:
    """Return the model that a document describes. Raises DocumentError with `problems` and all of its own."""
    reader = _Reader(document, located)
    reader.run()
    found = {*problems, *reader.problems}
    if found:
        raise DocumentError(problems=sorted(found, key=lambda problem: problem.line))
    tensors = tuple(group_experts(reader.tensors.values()))
    return Model(document.name, tensors, origin=origin, config=reader.config)


def model_document_text(model: Model, name: str) -> str:
    """Return a model document that describes exactly these tensors; entries of all layers are merged."""
    families: dict[tuple[str, tuple[int, ...], str, int], list[LogicalTensor]] = defaultdict(list)
    for tensor in model.tensors:
        template, layer = tensor.name, tensor.layer
        if layer is not None:
            template = template_of(tensor.name.replace("{expert}", "0"))[0]
        experts = tensor.shape[0] if tensor.has_experts else 0
        families[template, tensor.shape, tensor.dtype, experts].append(tensor)
    num_layers = max((t.layer + 1 for t in model.tensors if t.layer is not None), default=0)
    expert_counts = {experts for _, _, _, experts in families if experts}
    num_experts = max(expert_counts, default=0)
    dtypes = [tensor.dtype for tensor in model.tensors]
    dtype = max(sorted(set(dtypes)), key=dtypes.count) if dtypes else "float32"
    entries: dict[str, object] = {}
    for (template, shape, own_dtype, experts), tensors in families.items():
        layers = [tensor.layer for tensor in tensors if tensor.layer is not None]
        merged = bool(layers) and template not in entries
        for key, chosen in [(template, layers)] if merged else [(t.name, []) for t in tensors]:
            inner = list(shape[1:]) if experts else list(shape)
            entry: dict[str, object] = {"shape": inner}
            if own_dtype != dtype:
                entry["dtype"] = own_dtype
            if experts not in (0, num_experts):
                entry["experts"] = experts
            if merged and (len(chosen) != num_layers or any(a != b for a, b in enumerate(chosen))):
                entry["layers"] = chosen
            entries[key] = entry if len(entry) > 1 else inner
    ranges = {key: count for key, count in (("layer", num_layers), ("expert", num_experts)) if count}
    document = {"name": name, "dtype": dtype, "ranges": ranges, "tensors": entries}
    if model.config:
        document["config"] = dict(model.config)
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
