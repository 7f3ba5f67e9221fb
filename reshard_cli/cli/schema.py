"""`reshard-cli schema`: the JSON Schema of the documents."""

from __future__ import annotations

import json

from reshard_cli.spec.layout_document import LayoutDocument
from reshard_cli.spec.model_document import ModelDocument

__all__ = ["run_schema"]


def run_schema(kind: str) -> None:
    """Print the schema of the layout or the model document."""
    document = LayoutDocument if kind == "layout" else ModelDocument
    schema = document.model_json_schema(by_alias=True)
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))
