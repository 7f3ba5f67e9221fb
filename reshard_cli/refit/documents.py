"""A job's layout, read from its document or its program, and as it travels to a job that has neither."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.refit.prepare import model_path
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import model_document_text, read_model
from reshard_cli.weights.live_layout import Layout

__all__ = ["Described", "described", "of_note"]


@dataclass(frozen=True, slots=True)
class Described:
    """A job's layout, and the note (JSON values) from which `of_note` makes the same one elsewhere."""

    layout: JobLayout
    note: dict[str, Any]


def described(
    given: str | Path | Layout,
    model: Path | None = None,
    fallback: Path | None = None,
    *,
    trust: bool = False,
) -> Described:
    """Return the layout of a job. Raises DocumentError.

    Its model is `model`, else what the document names, else `fallback`; `trust`: it may be a DCP folder.
    """
    if isinstance(given, Layout):
        document = {key: value for key, value in given.layout.items() if key != "model"}
        note = {"layout": document, "model": given.model_text()}
        try:
            return Described(_built(note), note)
        except DocumentError as error:
            raise DocumentError(f"the Layout of {document['name']!r}: {error}") from error
    if not isinstance(given, (str, Path)):
        raise DocumentError(
            f"a layout is a document's path or a Layout, not {type(given).__name__}: {given!r:.60}"
        )
    loaded = read_layout_document(Path(given))
    path = model_path(loaded, model) or fallback
    if path is None:
        raise DocumentError(f"{given}: names no `model`; add one, or give --model")
    known = read_model(path, trust=trust)
    document = loaded.document.model_dump(exclude_defaults=True)
    document.pop("model", None)
    return Described(
        build_layout(loaded, known), {"layout": document, "model": model_document_text(known, "model")}
    )


def of_note(note: dict[str, Any], who: str, digest: str | None = None) -> JobLayout:
    """Return the layout of a note. Raises TransferError where it is none, or not the one of this digest."""
    try:
        layout = _built(note)
    except (KeyError, TypeError, ValueError, yaml.YAMLError, DocumentError) as error:
        raise TransferError(f"the layout that {who} sent cannot be read: {error}") from error
    if digest is not None and layout.digest != digest:
        raise TransferError(f"the layout that {who} sent is not the one that it has")
    return layout


def _built(note: dict[str, Any]) -> JobLayout:
    with tempfile.TemporaryDirectory(prefix="reshard-cli-") as folder:
        path = Path(folder) / "layout.yaml"  # a job's name may be a path, and comes from the network
        model = Path(folder) / "model.yaml"
        path.write_text(yaml.safe_dump(note["layout"], sort_keys=False), encoding="utf-8")
        model.write_text(note["model"], encoding="utf-8")
        return build_layout(read_layout_document(path), read_model(model))
