"""The engine presets' files: which there are, what they say, and what one says with the one that it extends."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from reshard_cli.errors import DocumentError

__all__ = ["PRESET_SECTIONS", "preset_about", "preset_names", "preset_text", "read_preset"]

# lists of rules, of which a preset's own go before those of the preset that it extends
PRESET_SECTIONS = ("tensors", "storage", "casts")


def preset_names() -> list[str]:
    """Return the names of the presets."""
    folder = resources.files("reshard_cli.spec") / "presets"
    return sorted(one.name.removesuffix(".yaml") for one in folder.iterdir() if one.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """Return a preset's file. Raises DocumentError for a name that is none."""
    if name not in preset_names():
        raise DocumentError(f"no engine preset is named {name!r}; there are: {', '.join(preset_names())}")
    return (resources.files("reshard_cli.spec") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def preset_about(name: str) -> str:
    """Return what a preset says of itself in a line."""
    return str(read_preset(name)["about"])


@lru_cache(maxsize=16)
def read_preset(name: str) -> dict[str, Any]:
    """Return a preset with what it extends: its own rules go first, its other sections replace."""
    own: dict[str, Any] = yaml.load(preset_text(name), Loader=yaml.CSafeLoader)
    if "extends" not in own:
        return own
    base = read_preset(own["extends"])
    merged = {**base, **own}
    for section in PRESET_SECTIONS:
        merged[section] = own.get(section, []) + base.get(section, [])
    for section in ("let", "options"):
        merged[section] = {**base.get(section, {}), **own.get(section, {})}
    return merged
