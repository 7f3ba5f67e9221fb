"""Tensor names: normalising, patterns with braces and captures, and where the layer and expert stand.

The layer of a name is its first component that is a whole number, the expert the whole number after a
component `experts` (or `expert`). A name with these replaced by `{layer}` and `{expert}` is a template.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

__all__ = [
    "Pattern",
    "expand_braces",
    "fill",
    "has_digit",
    "name_fault",
    "normalise",
    "substitute",
    "template_of",
]

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_CAPTURES = ("{layer}", "{expert}", "{local_layer}", "{local_expert}")
_TOKEN = re.compile(r"\{layer\}|\{expert\}|\{[^{}]*\}|\*")
# more than any model's names need, and few enough that no name takes long to compare
_MOST_STARS, _MOST_CHOICES, _MOST_DIGITS = 4, 4096, 9


def normalise(name: str) -> str:
    """Return the name without what compile, FSDP, activation checkpointing and DDP put into it.

    `module.` is only a wrapper where it leads the name; inside a name it may be a real module's.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def name_fault(name: str) -> str | None:
    """Return why a text cannot be a tensor's name, or None where it can.

    Line ends, escapes and the like would break every message and table; braces and stars are those of patterns.
    """
    if not name:
        return "a tensor's name is not empty"
    if not name.isprintable():
        return f"{name!r} is no tensor's name: it has a character that cannot be printed"
    if any(character in name for character in "{}*"):
        return f"{name!r} is no tensor's name: braces and * stand for others in patterns"
    return None


@functools.lru_cache(maxsize=65536)
def template_of(name: str) -> tuple[str, int | None, int | None]:
    """Return (template, layer, expert) of a concrete name; None where the name has no such number."""
    parts = name.split(".")
    layer = expert = None
    for index, part in enumerate(parts):
        if not (part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS):
            continue
        if index and parts[index - 1] in ("experts", "expert"):
            if expert is None:
                expert, parts[index] = int(part), "{expert}"
        elif layer is None:
            layer, parts[index] = int(part), "{layer}"
    return ".".join(parts), layer, expert


def has_digit(text: str) -> bool:
    """Say whether a text has a digit: patterns without one treat all layers and experts alike."""
    return any(character.isdigit() for character in text)


def fill(template: str, **numbers: int | None) -> str:
    """Return the template with `{layer}`, `{expert}`, … replaced by the numbers that are not None."""
    for key, number in numbers.items():
        if number is not None:
            template = template.replace(f"{{{key}}}", str(number))
    return template


def expand_braces(pattern: str) -> list[str]:
    """Return the pattern once per choice of its `{a,b}` groups, in the order written; captures stay.

    Raises ValueError where that would be more than anyone writes out.
    """
    parts: list[list[str]] = []
    position = 0
    for token in re.finditer(r"\{([^{}]*)\}", pattern):
        parts.append([pattern[position : token.start()]])
        whole = token.group(0)
        parts.append([whole] if whole in _CAPTURES else token.group(1).split(","))
        position = token.end()
    parts.append([pattern[position:]])
    choices = math.prod(map(len, parts))
    if choices > _MOST_CHOICES:
        raise ValueError(f"stands for {choices} names; at most {_MOST_CHOICES}, write several patterns")
    return ["".join(choice) for choice in itertools.product(*parts)]


def substitute(target: str, pattern: Pattern, groups: tuple[str, ...]) -> str:
    """Return `target` with each `*`, `{layer}` and `{expert}` replaced by what the pattern's own took of a name.

    Each kind is filled in the order in which it stands; one that the pattern has fewer of becomes nothing.
    """
    kinds = [token.group(0) for token in _TOKEN.finditer(pattern.text) if _takes(token.group(0))]
    taken: dict[str, list[str]] = {"*": [], "{layer}": [], "{expert}": []}
    for kind, text in zip(kinds, groups, strict=True):
        taken[kind].append(text)
    remaining = {kind: iter(texts) for kind, texts in taken.items()}
    return re.sub(r"\*|\{layer\}|\{expert\}", lambda found: next(remaining[found.group(0)], ""), target)


def _takes(token: str) -> bool:
    return token in ("*", "{layer}", "{expert}")


class Pattern:
    """A name pattern: `*` any run of characters, `{a,b}` either, `{layer}` `{expert}` a whole number."""

    __slots__ = ("_regex", "text")

    def __init__(self, text: str) -> None:
        """Compile the pattern. Raises ValueError with the mend for a brace that is open or empty."""
        self.text = text
        self._regex = _compile(text)

    def matches(self, name: str) -> bool:
        """Say whether the whole name fits the pattern."""
        return self._regex.fullmatch(name) is not None

    def groups(self, name: str) -> tuple[str, ...] | None:
        """Return what each `*` and capture took of the name, in order, or None where it does not fit."""
        match = self._regex.fullmatch(name)
        return None if match is None else match.groups()


@functools.lru_cache(maxsize=4096)
def _compile(text: str) -> re.Pattern[str]:
    if not text:
        raise ValueError("an empty pattern matches nothing; write '*' for every name")
    if text.count("*") > _MOST_STARS:
        raise ValueError(f"has {text.count('*')} `*`; a pattern takes at most {_MOST_STARS}")
    regex = ""
    position = 0
    for token in _TOKEN.finditer(text):
        regex += _literal(text[position : token.start()])
        word = token.group(0)
        if word == "*":
            regex += "(.*)"
        elif word in ("{layer}", "{expert}"):
            regex += "([0-9]+)"
        else:
            choices = word[1:-1].split(",")
            if len(choices) < 2 or not all(choices):
                raise ValueError(
                    f"{word!r} is neither a choice like {{q,k}} nor a capture ({{layer}}, {{expert}})"
                )
            regex += "(?:" + "|".join(re.escape(choice) for choice in choices) + ")"
        position = token.end()
    return re.compile(regex + _literal(text[position:]), re.DOTALL)


def _literal(text: str) -> str:
    if "{" in text or "}" in text:
        raise ValueError("a brace is open: write a choice as {a,b}, a capture as {layer} or {expert}")
    return re.escape(text)
