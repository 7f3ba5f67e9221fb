"""A job's layout as it travels to a job that has no file of it, and the layout of a job that only a program describes."""

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
from reshard_cli.spec.model import Model
from reshard_cli.spec.model_document import model_document_text, read_model

__all__ = ["Described", "Layout", "described", "of_note"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout document and the model it is of, without files: what a program knows about its own job."""

    document: dict[str, Any]
    model: Model

    @classmethod
    def of(cls, state_dict: dict[str, Any], *, name: str = "train", domain: int = 8) -> Layout:
        """Return the layout of a live FSDP2, tensor-parallel or torchtitan model, from its DTensors.

        Every rank of the job gets the same one, without asking the others. `domain`: ranks per NVLink domain.
        Raises WeightsError where placements have no layout.
        """
        from reshard_cli.weights.live_layout import layout_of_state_dict

        live = layout_of_state_dict(state_dict, name=name, domain=domain)
        return cls({key: value for key, value in live.layout.items() if key != "model"}, live.model)

    def to_yaml(self) -> str:
        """Return the layout document as text."""
        return yaml.safe_dump(self.document, sort_keys=False, width=110)


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
        note = {"layout": given.document, "model": model_document_text(given.model, "model")}
        return Described(of_note(note, str(given.document.get("name", "layout"))), note)
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


def of_note(note: dict[str, Any], who: str) -> JobLayout:
    """Return the layout of a note. Raises TransferError where it is none."""
    with tempfile.TemporaryDirectory(prefix="reshard-cli-") as folder:
        path = Path(folder) / f"{who}.yaml"
        model = Path(folder) / "model.yaml"
        try:
            path.write_text(yaml.safe_dump(note["layout"], sort_keys=False))
            model.write_text(note["model"])
            return build_layout(read_layout_document(path), read_model(model))
        except (KeyError, TypeError, yaml.YAMLError, DocumentError) as error:
            raise TransferError(f"the layout that {who} sent cannot be read: {error}") from error
