"""Engine presets: from `engine`, `parallel` and a model to a layout document written out by hand.

A preset is a YAML file in `presets/`. Its rules are those of a layout document, with expressions `$(…)` of
the job's sizes and the model's config, and with conditions:

    when: EXPRESSION        the rule is there only where this is not 0
    most_dims: NUMBER       a tensor rule for just the tensors of at most so many dims
    layers_from: EXPRESSION what is left out: all layers from this one on (nothing where the config lacks it)
    layers_of: PATTERN      a storage rule for just the layers that have such a tensor
    cuts_evenly: AXES       of the whole preset: what these axes do not divide evenly is refused
    uneven: true            a tensor rule that is not held to that: its tensors are cut as parts of another

Rules that fit no tensor of the model are dropped before their expressions are looked at, so a model needs no
config but for the tensors that it has. What comes out knows no engine any more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from reshard_cli.errors import DocumentError, Problem
from reshard_cli.spec.casts import weight_of_scale
from reshard_cli.spec.checking import told_fault
from reshard_cli.spec.even_cuts import uneven_cut
from reshard_cli.spec.expressions import Function, evaluate
from reshard_cli.spec.layout_document import (
    LayoutDocument,
    LoadedLayout,
    check_layout,
    leave_out_path,
    leaves_out,
)
from reshard_cli.spec.located import KeyPath, Located, key_text
from reshard_cli.spec.model import LogicalTensor, Model
from reshard_cli.spec.names import Pattern, expand_braces, fill, template_of
from reshard_cli.spec.preset_files import PRESET_SECTIONS, preset_names, read_preset
from reshard_cli.spec.stages import stage_layers

__all__ = ["PresetError", "expanded", "told_left_out", "with_preset"]

_SIZE = re.compile(r"\$\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


class PresetError(ValueError):
    """A preset cannot be filled in. `path` is the document's key that would have to change."""

    def __init__(self, key: str | KeyPath, message: str) -> None:
        self.path: KeyPath = (key,) if isinstance(key, str) else key
        super().__init__(message)


class _Sizes(Mapping[str, int]):
    """The names that a preset's expressions know, each worked out when it is first asked for."""

    def __init__(self, known: Mapping[str, int], config: Mapping[str, int], let: Mapping[str, Any]) -> None:
        self.known = dict(known)
        self.config = config
        self.let = let
        self.functions: Mapping[str, Function] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.let or name in self.config

    def __getitem__(self, name: str) -> int:
        if name not in self.known:
            if name in self.let:
                self.known[name] = evaluate(self.let[name], self, self.functions)
            else:
                self.known[name] = self.config[name]
        return self.known[name]

    def __iter__(self) -> Any:
        return iter([*self.known, *self.config])

    def __len__(self) -> int:
        return len(self.known) + len(self.config)


class _Expander:
    """Fills one preset in for one document and model."""

    def __init__(self, document: LayoutDocument, model: Model, left_out: Sequence[str] = ()) -> None:
        """`left_out`: patterns of tensors of the model that the job does not hold."""
        assert document.engine is not None
        self.document = document
        self.preset = read_preset(document.engine)
        # one tensor of each kind is enough to know which rules fit; kinds differ in more than the layer
        kinds: dict[str, LogicalTensor] = {}
        self.layers: dict[str, list[int]] = {}
        names = {tensor.name for tensor in model.tensors}
        self.out: list[LogicalTensor] = []
        for tensor in model.tensors:
            if leaves_out(left_out, tensor.name):
                self.out.append(tensor)
                continue
            if weight_of_scale(tensor.name) in names:
                continue  # block scales are cut and stored as their tensor is
            template = template_of(tensor.name.replace("{expert}", "0"))[0]
            kinds.setdefault(template, tensor)
            if tensor.layer is not None:
                self.layers.setdefault(template, []).append(tensor.layer)
        self.tensors = {fill(tensor.name, expert=0): tensor for tensor in kinds.values()}
        self.templates = {fill(tensor.name, expert=0): template for template, tensor in kinds.items()}
        self.fitting: dict[str, list[str]] = {}
        config = {**model.config, **document.config}
        experts = [
            tensor.shape[0]
            for name, tensor in self.tensors.items()
            if tensor.shape and (tensor.has_experts or ".experts." in name)
        ]
        known = {"ranks": document.ranks, "num_experts": max(experts, default=0)}
        self.sizes = _Sizes(known, config, self.preset.get("let", {}))
        self.functions: dict[str, Function] = {"has": self.has, "dim": self.dim, "known": self.known}
        self.sizes.functions = self.functions
        self.numbers("parallel", document.parallel)
        self.numbers("options", document.options)

    def numbers(self, section: str, given: Mapping[str, int]) -> None:
        """Take the document's numbers over the preset's defaults, which may use those before them."""
        defaults: dict[str, Any] = self.preset.get(section, {})
        for key, number in given.items():
            if key not in defaults:
                known = ", ".join(defaults) or "none"
                raise PresetError(section, f"engine {self.document.engine!r} has no {key!r}; known: {known}")
            least = 1 if section == "parallel" else 0
            if number < least:
                raise PresetError(section, f"{key} must be at least {least}, not {number}")
            self.sizes.known[key] = number
        for key, expression in defaults.items():
            if key not in self.sizes.known:
                value = self.number(expression, section)
                if section == "parallel" and value < 1:
                    product = ", ".join(f"{name} {size}" for name, size in given.items())
                    raise PresetError(
                        section,
                        f"{product} do not fit the job's {self.document.ranks} ranks ({key} is {value})",
                    )
                self.sizes.known[key] = value

    def has(self, pattern: str) -> int:
        """Say (1 or 0) whether the model has a tensor of this name."""
        return int(bool(self.fits(pattern)))

    def known(self, name: str) -> int:
        """Say (1 or 0) whether the model's config or the job's sizes have this number."""
        return int(name in self.sizes)

    def dim(self, pattern: str, dim: int) -> int:
        """Return a size of the first tensor of this name, without its experts."""
        compiled = Pattern(pattern)
        fitting = [self.tensors[name] for name in self.fits(pattern)] or [
            one for one in self.out if compiled.matches(fill(one.name, expert=0))
        ]
        if not fitting:
            raise ValueError(f"the model has no tensor {pattern!r}")
        return fitting[0].shape[dim + fitting[0].has_experts]

    def fits(self, pattern: str) -> list[str]:
        """Return the kinds of tensors that a pattern takes, by the name of one of each."""
        if pattern not in self.fitting:
            compiled = Pattern(pattern)
            self.fitting[pattern] = [name for name in self.tensors if compiled.matches(name)]
        return self.fitting[pattern]

    def number(self, expression: str | int, what: str) -> int:
        try:
            return evaluate(expression, self.sizes, self.functions)
        except ValueError as error:
            missing = re.search(r"no size is named '(\w+)'", str(error))
            if missing:
                raise PresetError(
                    "engine",
                    f"the preset needs {missing[1]} of the model for {what}; write it in the model's "
                    f"config.json or `config`, or here: config: {{{missing[1]}: ...}}",
                ) from error
            raise PresetError("engine", f"the preset's {what}: {error}") from error

    def filled(self, value: Any, what: str) -> Any:
        """Return a value with its expressions worked out."""
        if isinstance(value, dict):
            return {str(key): self.filled(one, what) for key, one in value.items()}
        if isinstance(value, list):
            return [self.filled(one, what) for one in value]
        if not isinstance(value, str) or "$(" not in value:
            return value
        whole = _SIZE.fullmatch(value)
        if whole:
            return self.number(whole[1], what)
        return _SIZE.sub(lambda found: str(self.number(found[1], what)), value)

    def wanted(self, rule: Mapping[str, Any], what: str) -> bool:
        return "when" not in rule or bool(self.number(rule["when"], what))

    def require(self) -> None:
        for one in self.preset.get("require", []):
            if not self.number(one["that"], "requirements"):
                raise PresetError("parallel", self.filled(one["else"], "requirements"))

    def meshes(self) -> dict[str, dict[str, int]]:
        """Return the meshes without axes of one coordinate; equal ones stay apart, as rules name them."""
        found = {}
        for name, axes in self.preset["meshes"].items():
            sizes = {axis: self.number(size, f"mesh {name}") for axis, size in axes.items()}
            product = math.prod(sizes.values())
            if name not in self.document.meshes and product != self.document.ranks:
                told = " * ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
                message = f"{told} make {product}, not the job's {self.document.ranks} ranks"
                raise PresetError("parallel", message)
            kept = {axis: size for axis, size in sizes.items() if size != 1}
            found[name] = kept or {next(reversed(sizes)): 1}
        return found

    def tensor_rules(self, meshes: Mapping[str, Mapping[str, int]], default: str) -> list[dict[str, Any]]:
        found = []
        taken: set[str] = set()
        own = [Pattern(one.match) for one in self.document.tensors]
        for rule in self.preset["tensors"]:
            names = set(self.fits(rule["match"])) - taken
            if "most_dims" in rule:
                names = {name for name in names if self.num_dims(name) <= rule["most_dims"]}
            if not names or not self.wanted(rule, rule["match"]):
                continue
            taken |= names
            mesh = rule.get("mesh", default)
            # what an axis of one coordinate would do is left out before its expressions ask for config
            kept = {key: one for key, one in rule.items() if key not in ("when", "most_dims", "uneven")}
            kept["place"] = {axis: text for axis, text in rule["place"].items() if axis in meshes[mesh]}
            if not any(text.startswith(("shard", "expert")) for text in kept["place"].values()):
                kept.pop("blocks", None)
            found.append({**self.filled(kept, rule["match"]), "mesh": mesh})
            if not rule.get("uneven"):
                mine = [name for name in sorted(names) if not any(one.matches(name) for one in own)]
                self.check_even(found[-1], mine, meshes[mesh])
        unknown = [
            name for name in self.tensors if name not in taken and not any(one.matches(name) for one in own)
        ]
        if unknown:
            more = f", nor for {len(unknown) - 1} other kinds" if len(unknown) > 1 else ""
            raise PresetError(
                "engine",
                f"the preset has no rule for tensor {unknown[0]!r}{more}: it does not know this family of "
                "models; write rules for them under `tensors`",
            )
        return found

    def check_even(self, rule: Mapping[str, Any], names: Sequence[str], axes: Mapping[str, int]) -> None:
        """Refuse shards of several sizes where the engine has none."""
        for name in names:
            told = uneven_cut(rule, self.tensors[name], axes, self.preset.get("cuts_evenly", ()))
            if told is not None:
                raise PresetError("parallel", f"{told}, and {self.document.engine} has no short shards")

    def left_out(self) -> list[str]:
        """Return the patterns of tensors that the engine does not hold, and forget those tensors."""
        found = []
        for rule in self.preset.get("leave_out", []):
            if "match" in rule:
                found += [rule["match"]] if self.fits(rule["match"]) else []
            elif self.known(rule["layers_from"]):
                first = self.number(rule["layers_from"], "leave_out")
                behind = {layer for layers in self.layers.values() for layer in layers if layer >= first}
                found += [f"*layers.{layer}.*" for layer in sorted(behind)]
        return found

    def num_dims(self, name: str) -> int:
        tensor = self.tensors[name]
        return len(tensor.shape) - tensor.has_experts

    def cast_rules(self) -> list[dict[str, Any]]:
        return [
            {"match": rule["match"], "cast": rule["cast"]}
            for rule in self.preset.get("casts", [])
            if self.fits(rule["match"]) and self.wanted(rule, rule["match"])
        ]

    def storage_rules(self) -> list[dict[str, Any]]:
        found = []
        for rule in self.preset.get("storage", []):
            patterns = [one for text in rule.get("concat", []) for one in expand_braces(text)]
            patterns += [rule["rename"]] if "rename" in rule else []
            torn = self.torn(patterns)
            if not (all(self.fits(pattern) for pattern in patterns) or torn):
                continue
            if not self.wanted(rule, rule["tensor"]):
                continue
            if torn:
                where = leave_out_path(self.document.leave_out, torn[0])
                raise PresetError(where, told_left_out(*torn, rule["tensor"]))
            filled = self.filled(
                {key: one for key, one in rule.items() if key not in ("when", "layers_of")}, rule["tensor"]
            )
            if filled.get("block") == 0:
                del filled["block"]
            if "layers_of" in rule:
                layers = sorted(
                    {
                        layer
                        for name in self.fits(rule["layers_of"])
                        for layer in self.layers[self.templates[name]]
                    }
                )
                if not layers:
                    continue
                everywhere = {
                    layer for name in self.fits(patterns[0]) for layer in self.layers[self.templates[name]]
                }
                if set(layers) != everywhere:
                    filled["layers"] = layers
            found.append(filled)
        return found

    def torn(self, patterns: Sequence[str]) -> tuple[str, str] | None:
        """Return an operand of a storage that is left out, and one of the same layer that is not."""
        kept = [(name, layer) for text in patterns for name in self.fits(text) for layer in self.at(name)]
        for pattern in [Pattern(text) for text in patterns if not self.fits(text)] if kept else []:
            for one in self.out:
                beside = next((name for name, layer in kept if layer == one.layer), None)
                if beside is not None and pattern.matches(fill(one.name, expert=0)):
                    return one.name, fill(self.templates[beside], layer=one.layer)
        return None

    def at(self, name: str) -> list[int] | list[None]:
        """Return the layers that have a tensor of this kind."""
        return self.layers.get(self.templates[name]) or [None]

    def pipeline(self) -> dict[str, Any] | None:
        """Return the stages' layers and the patterns of both ends; None without pipeline parallelism."""
        given = self.preset.get("pipeline")
        num_stages = self.sizes.known.get("pp", 1)
        own = self.document.pipeline
        named = 0 if own is None or own.layers is None else len(own.layers)
        if given is not None and named and named != num_stages and not self.document.meshes:
            message = f"`layers` names {named} stages, but pp is {num_stages} (`parallel: {{pp: ...}}`)"
            raise PresetError("pipeline", message)
        if given is None or num_stages == 1:
            return None
        found: dict[str, Any] = {}
        for key in ("first", "last"):
            found[key] = []
            for one in given[key]:
                pattern = one if isinstance(one, str) else one["match"]
                if self.fits(pattern) and (isinstance(one, str) or self.wanted(one, pattern)):
                    found[key].append(pattern)
        num_layers = 1 + max((layer for layers in self.layers.values() for layer in layers), default=-1)
        if not named:
            ends = [self.sizes.known.get(key, 0) for key in ("first_layers", "last_layers")]
            try:
                found["layers"] = stage_layers(given["rest"], num_layers, num_stages, *ends)
            except ValueError as error:
                raise PresetError("parallel", str(error)) from error
        return found

    def aliases(self) -> dict[str, str]:
        return {
            one["name"]: one["of"]
            for one in self.preset.get("alias", [])
            if self.fits(one["of"]) and self.wanted(one, one["name"])
        }

    def document_values(self) -> dict[str, Any]:
        """Return the values of the document that says the same without an engine."""
        self.require()
        aliases = self.aliases()
        for name, target in aliases.items():
            original = self.tensors[self.fits(target)[0]]
            self.tensors[name] = LogicalTensor(name, original.shape, original.dtype)
            self.templates[name] = name
        self.fitting.clear()
        meshes = {**self.document.meshes, **self.meshes(), **self.document.meshes}
        pipeline = self.pipeline()
        values = self.document.model_dump(
            exclude_defaults=True, exclude={"engine", "parallel", "options", "config"}
        )
        values["meshes"] = meshes
        if pipeline is not None or "pipeline" in values:
            values["pipeline"] = {**(pipeline or {}), **values.get("pipeline", {})}
        default = next(iter(self.preset["meshes"]))
        values["tensors"] = values.get("tensors", []) + self.tensor_rules(meshes, default)
        values["storage"] = values.get("storage", []) + self.storage_rules()
        casts = values.get("casts", []) + self.cast_rules()
        if casts:
            values["casts"] = casts
        if aliases:
            values["alias"] = {**aliases, **values.get("alias", {})}
        return values


def told_left_out(name: str, other: str, storage: str) -> str:
    """Return what is wrong where a job leaves out one operand of a storage and holds another."""
    return (
        f"{name!r} is left out and {other!r} is not, but both lie in the storage {storage!r}; "
        "leave out all of its operands, or none"
    )


def expanded(document: LayoutDocument, model: Model) -> LayoutDocument:
    """Return the document without an engine that says the same. `model`: with the document's own names.

    Raises PresetError where the numbers do not fit each other, or the model lacks a number.
    """
    if document.engine not in preset_names():
        known = ", ".join(preset_names())
        raise PresetError("engine", f"no engine preset is named {document.engine!r}; there are: {known}")
    try:
        for text in document.leave_out:
            Pattern(text)
    except ValueError as error:
        raise PresetError("leave_out", str(error)) from error
    left_out = [*document.leave_out, *_Expander(document, model).left_out()]
    values = _Expander(document, model, left_out).document_values()
    if left_out:
        values["leave_out"] = left_out
    order = [
        "name",
        "model",
        "ranks",
        "domain",
        "dtype",
        "rename",
        "meshes",
        "pipeline",
        "tensors",
        "storage",
    ]
    ordered = {key: values[key] for key in [*order, *values] if key in values}
    try:
        return LayoutDocument.model_validate(ordered)
    except ValidationError as error:
        # the document was checked before: a size of the model's config makes a rule that cannot be
        path, message = told_fault(error, LayoutDocument)
        told = _rule_text(ordered, path)
        raise PresetError(
            "engine", f"{told}: {message}; the sizes of the model's config are wrong"
        ) from error


def _rule_text(values: Mapping[str, Any], path: KeyPath) -> str:
    """Return which of a preset's rules a path is in, and where in it, as people would say it."""
    where = key_text(path[2:])
    name = str(path[1])
    if isinstance(path[1], int):
        rule = values[str(path[0])][path[1]]
        name = repr(rule.get("match") or rule.get("tensor"))
    return f"the preset's {path[0]} {name}{f' ({where})' if where else ''}"


class _PresetLocated(Located):
    """Points at the line of `engine` for everything that a preset wrote."""

    def problem(self, path: KeyPath, message: str) -> Problem:
        if (
            len(path) > 1
            and path[0] in ("meshes", "pipeline", *PRESET_SECTIONS)
            and path[:2] not in self.lines
        ):
            told = f"{_rule_text(self.value, path)}: {message}"
            return Problem(self.file, self.line(("engine",)), "engine", told)
        return Located.problem(self, path, message)


def with_preset(loaded: LoadedLayout, model: Model) -> LoadedLayout:
    """Return a checked layout whose engine preset is written out; one without an engine comes back as it is.

    Raises DocumentError with the document's line for everything that does not fit.
    """
    if loaded.document.engine is None:
        return loaded
    try:
        document = expanded(loaded.document, model)
    except PresetError as error:
        raise DocumentError(problems=[loaded.located.problem(error.path, str(error))]) from error
    located = _PresetLocated(loaded.located.file, document.model_dump(), loaded.located.lines)
    return check_layout(document, located, loaded.path)
