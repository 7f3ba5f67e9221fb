"""Writing a report as JSON to a file or to standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from reshard_cli.errors import DocumentError

__all__ = ["check_json_file", "write_json"]


def check_json_file(json_file: str | None) -> None:
    """Refuse a report file that cannot be written, before any work is done. Raises DocumentError."""
    if json_file in (None, "-"):
        return
    path = Path(str(json_file))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise DocumentError(f"--json: {path} cannot be written: its folder must exist, and it must be a file")


def write_json(report: dict[str, Any], json_file: str) -> None:
    """Write the report. Raises DocumentError with the path where that fails."""
    text = json.dumps(report, indent=2)
    if json_file == "-":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return
    try:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"--json: {json_file} cannot be written: {error.strerror}") from error
