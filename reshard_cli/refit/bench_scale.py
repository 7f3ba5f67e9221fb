"""Reads two layout documents and shrinks them, with their model, to what this machine can hold: for `bench --scale`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import build_layout
from reshard_cli.refit.prepare import Jobs
from reshard_cli.spec.checking import read_document
from reshard_cli.spec.layout_document import LoadedLayout, read_layout_document
from reshard_cli.spec.model_document import ModelDocument
from reshard_cli.spec.scaling import Change, Room, scaled_pair

__all__ = ["changes_report", "read_scaled_jobs"]


def read_scaled_jobs(
    source: Path, destination: Path, model: Path | None, factor: float, room: Room | None
) -> tuple[Jobs, tuple[Change, ...]]:
    """Return the smaller jobs' layouts and what was changed.

    Raises DocumentError for wrong documents, and with what to do for those that cannot be scaled.
    """
    loaded = read_layout_document(source), read_layout_document(destination)
    path = model or _one_model(loaded)
    if path.is_dir() or path.suffix == ".safetensors":
        raise DocumentError(
            f"--scale: {path} is a checkpoint, whose tensors have the shapes they have; give a model document with named "
            "sizes by --model, as those under layouts/models/"
        )
    if not path.exists():
        raise DocumentError(f"{path}: no such model document")
    document, located, problems = read_document(path, ModelDocument)
    if problems:
        raise DocumentError(problems=problems)
    pair = scaled_pair(loaded[0], loaded[1], document, located, str(path), factor, room)
    jobs = Jobs(build_layout(pair.source, pair.model), build_layout(pair.destination, pair.model))
    return jobs, pair.changes


def _one_model(loaded: Sequence[LoadedLayout]) -> Path:
    """Return the model document that both name (or one of them). Raises DocumentError for two or none."""
    found = {
        (one.path.parent / one.document.model).resolve() for one in loaded if one.document.model is not None
    }
    if len(found) != 1:
        told = "name two models" if found else "name no `model`"
        raise DocumentError(f"--scale: the documents {told}; give one for both by --model")
    return found.pop()


def changes_report(factor: float, changes: tuple[Change, ...]) -> dict[str, Any]:
    """Return what `--scale` changed, for the JSON report."""
    return {
        "factor": factor,
        "changes": [
            {
                "where": one.where,
                "what": one.what,
                "original": one.before,
                "scaled": one.after,
                "note": one.note,
            }
            for one in changes
        ],
    }
