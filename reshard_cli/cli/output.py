"""Writing a report as JSON to a file or to standard output."""

from __future__ import annotations

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
    printed = [flag for flag, file in files.items() if file == "-"]
    if len(printed) > 1:
        raise DocumentError(f"{' and '.join(printed)}: only one of them can have standard output")
    by_path: dict[str, list[str]] = {}
    for flag, file in files.items():
        if file not in (None, "-") and not _is_device(str(file)):
            by_path.setdefault(os.path.realpath(str(file)), []).append(flag)
    for path, flags in by_path.items():
        if len(flags) > 1:
            raise DocumentError(f"{' and '.join(flags)}: both would write {path}")


def _is_device(file: str) -> bool:
    path = Path(file)
    return path.exists() and not path.is_file()


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
