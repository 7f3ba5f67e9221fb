"""Writing a report as JSON to a file or to standard output."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard_cli.errors import DocumentError

__all__ = ["check_files", "write_json", "write_text"]


def check_files(files: Mapping[str, str | None]) -> None:
    """Refuse files, by their flags, that cannot be written, before any work is done. Raises DocumentError."""
    for flag, file in files.items():
        if file not in (None, "-"):
            _check_file(str(file), flag)
    printed = [flag for flag, file in files.items() if file in ("-", "/dev/stdout")]
    if len(printed) > 1:
        raise DocumentError(f"{' and '.join(printed)}: only one of them can have standard output")
    written = [(flag, Path(file)) for flag, file in files.items() if file not in (None, "-")]
    for (flag, path), (other, same) in itertools.combinations(written, 2):
        if _is_one_file(path, same):
            raise DocumentError(f"{flag} and {other}: both would write {path.resolve()}")


def _is_one_file(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)  # not where both are /dev/null
    return path.resolve() == other.resolve()


def _check_file(file: str, flag: str) -> None:
    path = Path(file)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise DocumentError(f"{flag}: {path} cannot be written: its folder must exist, and it must be a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise DocumentError(f"{flag}: {path} cannot be written: permission denied")


def write_json(report: dict[str, Any], json_file: str) -> None:
    """Write the report. Raises DocumentError with the path where that fails."""
    write_text(json.dumps(report, indent=2) + "\n", json_file, "--json")


def write_text(text: str, file: str, flag: str) -> None:
    """Write a text to a file, or to standard output for `-`. Raises DocumentError where that fails."""
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"{flag}: {file} cannot be written: {error.strerror}") from error
