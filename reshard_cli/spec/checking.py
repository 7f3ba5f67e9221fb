"""Turns a located YAML value into a pydantic document, and pydantic's errors into problems with lines."""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from reshard_cli.errors import DocumentError, Problem
from reshard_cli.spec.located import Located, read_yaml

__all__ = ["StrictDocument", "read_document", "told_fault"]


class StrictDocument(BaseModel):
    """The base of every document part: unknown keys are errors, nothing is coerced, nothing changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Document = TypeVar("Document", bound=StrictDocument)

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
}


def read_document(path: Path, kind: type[Document]) -> tuple[Document, Located, list[Problem]]:
    """Read one YAML document and check it against its class.

    Returns what could be understood, with the problems found so far, so that the caller can look for more
    before raising them all. Raises DocumentError where too little is left to go on with.
    """
    located = read_yaml(path)
    value = located.value
    problems: list[Problem] = []
    for _ in range(3):
        try:
            return kind.model_validate(value), located, problems
        except ValidationError as error:
            problems = problems or _problems(error, located, kind)
            value = _without_faults(value, error)
    raise DocumentError(problems=problems)


def _problems(error: ValidationError, located: Located, kind: type[BaseModel]) -> list[Problem]:
    problems: dict[tuple[int, str], Problem] = {}
    for item in _likeliest(error.errors(), located):
        path = tuple(part for part in item["loc"] if not _is_branch(part, located, item["loc"]))
        problem = located.problem(path, _message(dict(item), path, kind))
        problems.setdefault((problem.line, problem.key), problem)
    return list(problems.values())


def _likeliest(errors: Sequence[ErrorDetails], located: Located) -> list[ErrorDetails]:
    """Return the errors without those of a union's branches that the writer did not mean.

    The branch meant is one whose kind (mapping, list, text) the value has, with the fewest errors in it.
    """
    kept: list[ErrorDetails] = []
    unions: dict[tuple[int | str, ...], dict[int | str, list[ErrorDetails]]] = {}
    for item in errors:
        loc = item["loc"]
        at = next((i for i, part in enumerate(loc) if _is_branch(part, located, loc)), None)
        if at is None:
            kept.append(item)
        else:
            unions.setdefault(loc[:at], {}).setdefault(loc[at], []).append(item)
    for union, branches in unions.items():
        kept += min(branches.values(), key=functools.partial(_unlikely, depth=len(union) + 1))
    return kept


def _unlikely(items: Sequence[ErrorDetails], depth: int) -> tuple[bool, int]:
    wrong_kind = any(len(item["loc"]) == depth and item["type"] in _KINDS for item in items)
    return wrong_kind, len(items)


def _without_faults(value: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the document without its unknown and mistyped keys, and with a word for a text that is missing."""
    mended = copy.deepcopy(value)
    for item in error.errors():
        holder: Any = mended
        for part in item["loc"][:-1]:
            if isinstance(holder, dict):
                holder = holder.get(part)
            elif isinstance(holder, list) and isinstance(part, int) and part < len(holder):
                holder = holder[part]
        if isinstance(holder, dict):
            if item["type"] == "missing":
                holder[item["loc"][-1]] = "*" if item["loc"][-1] == "match" else "missing"
            else:
                holder.pop(item["loc"][-1], None)
    return mended


def _is_branch(part: int | str, located: Located, loc: tuple[int | str, ...]) -> bool:
    """Say whether `part` is pydantic's name of a union's branch and not a key of the document."""
    index = loc.index(part)
    if not isinstance(part, str) or loc[: index + 1] in located.lines:
        return False
    return (
        "[" in part
        or part in ("str", "int", "_TensorEntry", "_LayerRange", "_LayerPattern", "list")
        or part == "function-after"
    )


def told_fault(error: ValidationError, kind: type[BaseModel]) -> tuple[tuple[int | str, ...], str]:
    """Return the key path and the message of pydantic's first error, for values that come from no file."""
    item = error.errors()[0]
    return item["loc"], _message(dict(item), item["loc"], kind)


def _message(item: dict[str, Any], path: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    category, context, value = item["type"], item.get("ctx", {}), item.get("input")
    if category == "extra_forbidden":
        known = _known_keys(path, kind)
        close = difflib.get_close_matches(str(path[-1]), known, 1)
        mend = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown key {path[-1]!r}; {mend}"
    if category == "missing":
        return f"key {path[-1]!r} is missing"
    if category in _KINDS:
        return f"must be {_KINDS[category]}, not {_shown(value)}"
    if category == "greater_than":
        return f"must be more than {context['gt']:g}, not {_shown(value)}"
    if category == "greater_than_equal":
        return f"must be at least {context['ge']}, not {_shown(value)}"
    if category == "less_than_equal":
        return f"must be at most {context['le']}, not {_shown(value)}"
    if category == "string_too_short":
        return "must not be empty"
    if category == "literal_error":
        return f"must be {context['expected']}, not {_shown(value)}"
    if category == "too_short":
        return f"must have at least {context['min_length']} item(s)"
    if category == "value_error":
        return str(context["error"])
    return f"{item['msg']}, not {_shown(value)}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(path: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    current: type[BaseModel] = kind
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        inner = None if field is None else _inner_model(field.annotation)
        if inner is not None:
            current = inner
    return [field.alias or name for name, field in current.model_fields.items()]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _inner_model(argument)
        if found is not None:
            return found
    return None
