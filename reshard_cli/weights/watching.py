"""Finds new complete checkpoints under a folder, as a trainer writes them one after the other."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from reshard_cli.errors import ReshardError
from reshard_cli.spec.headers import index_folder

__all__ = ["Checkpoint", "Watched", "is_complete"]

_WEIGHTS = (".safetensors", ".distcp")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its folder, and its version, the last number of the folder's name."""

    path: Path
    version: int


class Watched:
    """The checkpoints under a folder; each is given out once, those of lower versions first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given: set[tuple[str | int, ...]] = set()
        self._count = 0

    def next(self) -> Checkpoint | None:
        """Return a complete checkpoint that was not given out yet, or None where there is none now."""
        if not self._folder.is_dir():
            return None
        found = []
        for path in self._folder.iterdir():
            keys = () if path.name.startswith(".") or not path.is_dir() else _keys(path)
            if keys and self._given.isdisjoint(keys):
                numbers = re.findall(r"\d+", path.name)
                found.append((int(numbers[-1]) if numbers else None, path.name, path, keys))
        for number, _, path, keys in sorted(found, key=lambda one: (one[0] is None, one[0] or 0, one[1])):
            if is_complete(path) and _keys(path) == keys:  # else it changes still, and comes when it does not
                self._given.update(keys)
                self._count += 1
                return Checkpoint(path, self._count if number is None else number)
        return None


def _keys(folder: Path) -> tuple[tuple[str | int, ...], ...]:
    """Return two names of what a folder holds, each of which says that it was given out.

    Under its own name, when its weights were written: a folder that is made anew may have an earlier one's number. Under
    any name, as it may be renamed or linked to: when the kernel saw them change, as writers may set the other times.
    None where it is taken away meanwhile.
    """
    try:
        number = folder.stat().st_ino
        names = sorted(one for one in folder.iterdir() if one.name == ".metadata" or one.suffix in _WEIGHTS)
        files = [one.stat() for one in names]
    except FileNotFoundError:
        return ()
    return (
        (folder.name, number, *(one.st_mtime_ns for one in files)),
        (number, *(one.st_ctime_ns for one in files)),
    )


def is_complete(folder: Path) -> bool:
    """Say whether a folder is a checkpoint whose writer is done: all files of its index, all of their bytes.

    A DCP folder is complete when its `.metadata` is there, which its writer makes last.
    """
    if (folder / ".metadata").is_file():
        return True
    files = list(folder.glob("*.safetensors"))
    if not files:
        return False
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
        if not named <= {file.name for file in files}:
            return False
    # `model-00001-of-00003.safetensors` says itself how many there are
    for file in files:
        counted = re.search(r"-of-(\d+)\.safetensors$", file.name)
        if counted and not (list(folder.glob("*.index.json")) and len(files) >= int(counted[1])):
            return False
    try:
        index_folder(folder)
    except ReshardError:
        return False  # a file that is still being written is shorter than its header says
    return True
