"""`reshard-cli inspect`: a model's tensors, and its model document."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from reshard_cli.cli.output import check_files, write_json
from reshard_cli.errors import DocumentError
from reshard_cli.report.terminal import bytes_text, print_model
from reshard_cli.spec.model import LogicalTensor
from reshard_cli.spec.model_document import model_document_text, read_model
from reshard_cli.spec.names import template_of

__all__ = ["run_inspect"]


def run_inspect(
    folder: Path, *, write: Path | None, name: str | None, json_file: str | None, trust: bool
) -> None:
    """Print the tensors, those of all layers as one line. Raises DocumentError or WeightsError."""
    check_files({"--json": json_file})
    model = read_model(folder, trust=trust)
    families: dict[tuple[str, tuple[int, ...], str], list[LogicalTensor]] = defaultdict(list)
    for tensor in model.tensors:
        template = template_of(tensor.name.replace("{expert}", "0"))[0]
        families[template, tensor.shape, tensor.dtype].append(tensor)
    if json_file is not None:
        report = {
            "schema": "reshard-cli/inspect/1",
            "model": {
                "name": name or model.name, "tensors": model.num_tensors,
                "parameters": model.num_parameters, "bytes": model.num_bytes,
            },
            "tensors": [
                {"name": one.name, "shape": list(one.shape), "dtype": one.dtype} for one in model.tensors
            ],
        }  # fmt: skip
        write_json(report, json_file)
    if json_file != "-":
        rows = []
        for (template, shape, dtype), tensors in families.items():
            shown = tensors[0].name if len(tensors) == 1 and not tensors[0].has_experts else template
            rows.append((shown, str(list(shape)), dtype, len(tensors), sum(t.num_bytes for t in tensors)))
        print_model(
            rows,
            f"{model.num_tensors} tensors, {model.num_parameters:,} parameters, {bytes_text(model.num_bytes)}",
        )
    if write is not None:
        try:
            write.write_text(model_document_text(model, name or folder.resolve().name), encoding="utf-8")
        except OSError as error:
            raise DocumentError(f"--write: {write} cannot be written: {error.strerror}") from error
