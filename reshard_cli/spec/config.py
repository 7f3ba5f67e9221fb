"""The whole numbers of a checkpoint's config.json: heads, groups and states, which shapes alone do not tell."""

from __future__ import annotations

import json
from pathlib import Path

from reshard_cli.errors import WeightsError

__all__ = ["read_config"]

_MOST_BYTES = 1 << 20


def read_config(folder: Path) -> dict[str, int]:
    """Return the whole numbers and truth values (1 or 0) of config.json; empty where there is none.

    Those of a `text_config` (models of text and images) go first. Raises WeightsError for a file that
    cannot be read as JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise WeightsError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; this is no model's config")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not JSON: {error}") from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds no mapping of names to values")
    inner = value.get("text_config")
    found: dict[str, int] = {}
    for part in (value, inner if isinstance(inner, dict) else {}):
        found |= {
            str(key): int(one) for key, one in part.items() if isinstance(one, int) and 0 <= one < 2**53
        }
    return found
