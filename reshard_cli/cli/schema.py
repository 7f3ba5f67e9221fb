"""`reshard-cli schema`: the JSON Schema of the documents."""

from __future__ import annotations

import json

from reshard_cli.spec.checking import StrictDocument
from reshard_cli.spec.hardware_profile import Hardware
from reshard_cli.spec.layout_document import LayoutDocument
from reshard_cli.spec.model_document import ModelDocument

__all__ = ["run_schema"]


def run_schema(kind: str) -> None:
    """Print the schema of the layout, the model, or the hardware document."""
    kinds: dict[str, type[StrictDocument]] = {
        "layout": LayoutDocument,
        "model": ModelDocument,
        "hardware": Hardware,
    }
    document = kinds[kind]
    schema = document.model_json_schema(by_alias=True)
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))
