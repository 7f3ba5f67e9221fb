"""The logical tensors of a model: names, global shapes, dtypes. The experts of a projection are one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reshard_cli.errors import WeightsError
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.headers import Stored
from reshard_cli.spec.names import Pattern, fill, name_fault, normalise, substitute, template_of

__all__ = ["LogicalTensor", "Model", "group_experts", "model_of_checkpoint", "rename_model"]

# stands for every expert's number while a pattern is matched: no model has so many
_ANY_EXPERT = "987654321"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical weight.

    `name` is concrete but for `{expert}`, where the experts of one projection are one tensor: then dim 0
    of `shape` counts the experts. `layer` is None for a tensor outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None
    has_experts: bool = False

    @property
    def num_elements(self) -> int:
        """The number of elements, over all experts."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor in its own dtype."""
        return self.num_elements * item_size(self.dtype)

    def names(self) -> list[str]:
        """Return the names under which a checkpoint holds it: one, or one per expert."""
        if not self.has_experts:
            return [self.name]
        return [fill(self.name, expert=expert) for expert in range(self.shape[0])]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's logical tensors, in their order; `origin` says where they were read.

    `config` has whole numbers that shapes alone do not tell, by the names of Hugging Face's config.json.
    """

    name: str
    tensors: tuple[LogicalTensor, ...]
    origin: str = ""
    config: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def num_tensors(self) -> int:
        """The number of tensors as a checkpoint names them: each expert's counts."""
        return sum(tensor.shape[0] if tensor.has_experts else 1 for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors in their own dtypes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def model_of_checkpoint(
    name: str, stored: Mapping[str, Stored], config: Mapping[str, int] | None = None
) -> Model:
    """Return the model that a checkpoint's headers describe, in order of their names.

    Raises WeightsError for a name that is none, and where two stored names become one when normalised.
    """
    seen: dict[str, str] = {}
    tensors = []
    for stored_name, tensor in stored.items():
        plain = normalise(stored_name)
        fault = name_fault(plain)
        if fault is not None:
            raise WeightsError(f"{tensor.file}: {fault}")
        if plain in seen:
            raise WeightsError(
                f"{tensor.file}: {stored_name!r} and {seen[plain]!r} are one tensor, {plain!r}"
            )
        seen[plain] = stored_name
        tensors.append(LogicalTensor(plain, tensor.shape, tensor.dtype))
    grouped = group_experts(tensors)
    ordered = tuple(sorted(grouped, key=lambda tensor: _order(tensor.name)))
    return Model(name, ordered, origin=name, config=config or {})


def group_experts(tensors: Iterable[LogicalTensor]) -> list[LogicalTensor]:
    """Return the tensors with their layers, and the experts of each projection as one tensor.

    Experts that differ in shape or dtype, or whose numbers have gaps, stay tensors of their own.
    """
    found: dict[str, LogicalTensor | dict[int, LogicalTensor]] = {}
    for tensor in tensors:
        template, layer, expert = template_of(tensor.name.replace("{expert}", _ANY_EXPERT))
        if expert is None or tensor.has_experts:
            found[tensor.name] = replace(tensor, layer=layer)
            continue
        experts = found.setdefault(fill(template, layer=layer), {})
        if isinstance(experts, dict) and expert not in experts:
            experts[expert] = replace(tensor, layer=layer)
        else:  # as 00 beside 0: a tensor of its own
            found[tensor.name] = replace(tensor, layer=layer)
    grouped: list[LogicalTensor] = []
    for name, one in found.items():
        if isinstance(one, LogicalTensor):
            grouped.append(one)
            continue
        kinds = {(tensor.shape, tensor.dtype) for tensor in one.values()}
        if len(kinds) == 1 and sorted(one) == list(range(len(one))):
            first = one[0]
            shape = (len(one), *first.shape)
            grouped.append(LogicalTensor(name, shape, first.dtype, first.layer, has_experts=True))
        else:
            grouped.extend(one.values())
    return grouped


def _order(name: str) -> tuple[tuple[int, str], ...]:
    """Order names as people do: numbers by value."""
    return tuple(
        (int(part), "") if part.isascii() and part.isdigit() and len(part) < 19 else (-1, part)
        for part in name.split(".")
    )


def rename_model(model: Model, rules: Mapping[str, str]) -> Model:
    """Return the model with every name normalised and put through the first rename rule that fits.

    Raises WeightsError where two tensors would get one name.
    """
    patterns = [(Pattern(text), target) for text, target in rules.items()]
    tensors = [replace(tensor, name=_renamed(tensor.name, patterns)) for tensor in model.tensors]
    counts: dict[str, LogicalTensor] = {}
    for before, after in zip(model.tensors, tensors, strict=True):
        if after.name in counts:
            raise WeightsError(
                f"{model.origin or model.name}: {before.name!r} and another tensor are both called {after.name!r}"
            )
        counts[after.name] = after
    return replace(model, tensors=tuple(tensors))


def _renamed(name: str, patterns: Iterable[tuple[Pattern, str]]) -> str:
    plain = normalise(name).replace("{expert}", _ANY_EXPERT)
    for pattern, target in patterns:
        groups = pattern.groups(plain)
        if groups is not None:
            plain = substitute(target, pattern, groups)
            break
    return plain.replace(_ANY_EXPERT, "{expert}")
