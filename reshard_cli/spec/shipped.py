"""The documents that come with the package: models, the quickstart, published layouts."""

from __future__ import annotations

from pathlib import Path

from reshard_cli.errors import DocumentError

__all__ = ["shipped_document", "shipped_documents", "shipped_folder"]


def shipped_folder() -> Path:
    """Return the folder of the shipped documents. Raises DocumentError where they were not installed."""
    package = Path(__file__).parent.parent
    for folder in (package / "shipped_layouts", package.parent / "layouts"):
        if (folder / "models").is_dir():
            return folder
    raise DocumentError("the shipped layout documents are not beside the package; install it again")


def shipped_documents() -> list[Path]:
    """Return the shipped documents, relative to their folder, in order."""
    folder = shipped_folder()
    return sorted(path.relative_to(folder) for path in folder.rglob("*.yaml"))


def shipped_document(name: str) -> Path:
    """Return the path of a shipped document by its path in the folder, with or without .yaml.

    Raises DocumentError for a name that is none.
    """
    for path in shipped_documents():
        if name in (str(path), str(path.with_suffix(""))):
            return shipped_folder() / path
    raise DocumentError(f"{name!r} is neither a file, an engine preset nor a shipped document; see `layouts`")
