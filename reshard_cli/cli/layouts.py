"""`reshard-cli layouts`: the presets and documents that come along, and what a preset says in full."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import yaml

from reshard_cli.errors import DocumentError
from reshard_cli.report.terminal import print_listing
from reshard_cli.spec.hardware_profile import hardware_names, hardware_text
from reshard_cli.spec.layout_document import LoadedLayout, read_layout_document
from reshard_cli.spec.model import rename_model
from reshard_cli.spec.model_document import read_model
from reshard_cli.spec.preset import with_preset
from reshard_cli.spec.preset_files import preset_about, preset_names, preset_text
from reshard_cli.spec.shipped import shipped_document, shipped_documents, shipped_folder

__all__ = ["run_layouts"]


def run_layouts(
    name: str | None, *, expand: bool, model: Path | None, ranks: int | None, parallel: str
) -> None:
    """List, show or expand. Raises DocumentError."""
    if name is None:
        if expand:
            raise DocumentError("--expand: name a preset or a layout document")
        _list()
    elif expand:
        print(_expanded(name, model, ranks, parallel), end="")
    elif name in preset_names():
        print(preset_text(name), end="")
    elif name in hardware_names():
        print(hardware_text(name), end="")
    else:
        print(_document(name).read_text(encoding="utf-8"), end="")


def _list() -> None:
    print_listing("engine presets, for `engine:`", [(name, preset_about(name)) for name in preset_names()])
    print_listing("hardware profiles, for `--hardware`", [(name, "") for name in hardware_names()])
    rows = []
    for path in shipped_documents():
        first = (shipped_folder() / path).read_text(encoding="utf-8").splitlines()[0]
        rows.append((str(path.with_suffix("")), first.removeprefix("# ") if first.startswith("#") else ""))
    print_listing(f"documents, in {shipped_folder()}", rows)


def _document(name: str) -> Path:
    return Path(name) if Path(name).is_file() else shipped_document(name)


def _expanded(name: str, model: Path | None, ranks: int | None, parallel: str) -> str:
    """Return a layout as a document without an engine."""
    if name not in preset_names():
        if ranks is not None or parallel:
            raise DocumentError("--ranks, --parallel: go with a preset; a document has its own")
        return _written(read_layout_document(_document(name)), model)
    if model is None or ranks is None:
        raise DocumentError(f"--expand of the preset {name!r} needs --model and --ranks")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        values = {
            "name": name, "model": str(_model(model)), "ranks": ranks, "engine": name, "parallel": _sizes(parallel),
        }  # fmt: skip
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        try:
            return _written(read_layout_document(path), model)
        except DocumentError as error:
            if not error.problems:
                raise
            # the document is of our making: what is wrong came from the flags
            flags = {"parallel": "--parallel", "ranks": "--ranks"}
            told = [f"{flags.get(one.key, name)}: {one.message}" for one in error.problems]
            raise DocumentError("\n".join(told)) from error


def _model(path: Path) -> Path:
    return path.resolve() if path.exists() else shipped_document(str(path))


def _sizes(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part)
        if match is None:
            raise DocumentError(f"--parallel: {part!r} is not like tp=4; write tp=4,pp=8")
        found[match[1]] = int(match[2])
    return found


def _written(loaded: LoadedLayout, model: Path | None) -> str:
    own = loaded.document.model
    path = _model(model) if model is not None else (loaded.path.parent / own if own else None)
    if path is None:
        raise DocumentError(f"{loaded.path}: names no `model`; give --model")
    read = rename_model(read_model(path), loaded.document.rename)
    document = with_preset(loaded, read).document
    values = document.model_dump(exclude_defaults=True, by_alias=True)
    values["domain"] = document.domain
    return yaml.safe_dump(values, sort_keys=False, width=120, default_flow_style=None)
