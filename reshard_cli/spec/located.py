"""Reads a YAML file into plain values and remembers the line of every key and item.

Only mappings with string keys, sequences and scalars are taken: no tags, no anchors (an alias can blow a
small file up to any size), no second document. A duplicate key is an error, as it silently hides a line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reshard_cli.errors import DocumentError, Problem

__all__ = ["KeyPath", "Located", "key_text", "read_yaml"]

KeyPath = tuple[str | int, ...]
_MAX_BYTES = 8 << 20
_MAX_DEPTH = 32
_MOST_TOLD = 12  # mistakes of one kind
_DEEP = f"nested more than {_MAX_DEPTH} deep; no document needs so much"
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}


@dataclass(slots=True)
class Located:
    """A YAML document's plain value, its file, and the line of each key path."""

    file: str
    value: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its nearest ancestor that has one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem that points at `path` in this document."""
        return Problem(self.file, self.line(path), key_text(path), message)


def key_text(path: KeyPath) -> str:
    """Return a key path as people write it: `tensors[1].place.tp`."""
    text = ""
    for part in path:
        shown = str(part) if str(part).isprintable() else repr(part)[1:-1]
        text += f"[{part}]" if isinstance(part, int) else (f".{shown}" if text else shown)
    return text


def read_yaml(path: Path) -> Located:
    """Read one YAML mapping. Raises DocumentError with file and line for anything else."""
    file = str(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DocumentError(f"{file}: larger than {_MAX_BYTES >> 20} MiB; this is no layout document")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(problems=[Problem(file, 1, "", f"not UTF-8 text: {error.reason}")]) from error
    except OSError as error:
        raise DocumentError(f"{file}: cannot be read: {error.strerror}") from error
    problems: list[Problem] = []
    located = Located(file, {})
    loader = None
    try:
        _check_events(file, text)
        loader = yaml.CSafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            where = node.start_mark.line + 1 if node is not None else 1
            raise DocumentError(problems=[Problem(file, where, "", "a document is a mapping (key: value)")])
        located.lines[()] = node.start_mark.line + 1
        located.value = _plain(loader, node, (), located, problems)
    except yaml.MarkedYAMLError as error:
        marks = [error.problem_mark, error.context_mark]
        if error.problem_mark is not None and error.problem_mark.line >= len(text.splitlines()):
            marks.reverse()  # what was never closed is of more use than where the file ends
        line = next((mark.line + 1 for mark in marks if mark is not None), 1)
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        message = _DEEP if "nesting depth" in what else f"not YAML: {what}"  # libyaml has a bound of its own
        raise DocumentError(problems=[Problem(file, line, "", message)]) from error
    except yaml.YAMLError as error:
        wrong = yaml.reader.Reader.NON_PRINTABLE.search(text)
        line = 1 if wrong is None else 1 + text.count("\n", 0, wrong.start())
        what = str(error).splitlines()[0]
        raise DocumentError(problems=[Problem(file, line, "", f"not YAML: {what}")]) from error
    finally:
        if loader is not None:
            loader.dispose()
    if problems:
        raise DocumentError(problems=problems)
    return located


def _check_events(file: str, text: str) -> None:
    """Refuse aliases and deep nesting, before anything is built of the text.

    libyaml reads the events: the scanner in Python takes time that grows with the square of the depth.
    """
    depth = 0
    aliases: list[int] = []
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        elif not isinstance(event, yaml.AliasEvent):
            continue
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if depth > _MAX_DEPTH:
            raise DocumentError(problems=[Problem(file, line, "", _DEEP)])
        if isinstance(event, yaml.AliasEvent) and line not in aliases[-1:]:
            aliases.append(line)
    if aliases:
        message = "anchors and aliases are not taken; write the value out"
        raise DocumentError(problems=[Problem(file, line, "", message) for line in aliases[:_MOST_TOLD]])


def _plain(
    loader: yaml.CSafeLoader,
    node: yaml.Node,
    path: KeyPath,
    located: Located,
    problems: list[Problem],
) -> Any:
    line = node.start_mark.line + 1
    located.lines.setdefault(path, line)
    if node.tag not in _TAGS:
        kind = node.tag.rpartition(":")[2]
        message = f"a value of kind {kind!r} is not taken here; quote it if it is text"
        problems.append(Problem(located.file, line, key_text(path), message))
        return None
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(Problem(located.file, key_line, key_text(path), "a key must be plain text"))
                continue
            # `layer: {0: 64}` has a whole number as its key; every key is kept as its text
            key = str(key_node.value)
            if key in mapping:
                message = f"key {key!r} stands twice; the second would hide the first"
                problems.append(Problem(located.file, key_line, key_text((*path, key)), message))
                continue
            located.lines[(*path, key)] = key_line
            mapping[key] = _plain(loader, value_node, (*path, key), located, problems)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [
            _plain(loader, item, (*path, index), located, problems) for index, item in enumerate(node.value)
        ]
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError) as error:  # a tag written out (`!!bool maybe`) looks its text up
        problems.append(Problem(located.file, line, key_text(path), f"not a value: {error}"))
        return None
