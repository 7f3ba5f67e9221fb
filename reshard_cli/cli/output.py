"""Writing a report as JSON to a file or to standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from reshard_cli.errors import DocumentError

__all__ = ["check_file", "write_json", "write_text"]


def check_file(file: str | None, flag: str) -> None:
    """Refuse a report file that cannot be written, before any work is done. Raises DocumentError."""
    if file in (None, "-"):
        return
    path = Path(str(file))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise DocumentError(f"{flag}: {path} cannot be written: its folder must exist, and it must be a file")


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
