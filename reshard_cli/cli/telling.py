"""What a loop tells while it runs: a JSON line for each refit, and figures as Prometheus reads them from a file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard_cli.cli.output import check_files, write_json, write_text
from reshard_cli.errors import DocumentError
from reshard_cli.report.refit_page import refit_page
from reshard_cli.report.terminal import print_refit

__all__ = ["LINE_SCHEMA", "Telling"]

LINE_SCHEMA = "reshard-cli/refit-line/1"

_HELP = {
    "reshard_refits_total": ("counter", "refits that were committed"),
    "reshard_failures_total": ("counter", "refits that were not"),
    "reshard_version": ("gauge", "the version that is wholly there"),
    "reshard_torn": ("gauge", "1 while the weights are part one version, part another"),
    "reshard_last_refit_seconds": ("gauge", "seconds of the last refit, waiting included"),
    "reshard_network_bytes_total": ("counter", "bytes sent between domains"),
    "reshard_domain_bytes_total": ("counter", "bytes sent inside domains"),
}


@dataclass(slots=True)
class Telling:
    """Where to tell it; used on the first rank of a job."""

    lines: str | None = None
    metrics: Path | None = None
    json_file: str | None = None
    html_file: str | None = None
    _totals: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse files that cannot be written. Raises DocumentError."""
        metrics = None if self.metrics is None else str(self.metrics)
        if metrics == "-":
            raise DocumentError(
                "--metrics: is replaced after each refit, so it has to be a file; --lines takes -"
            )
        if self.metrics is not None and self.metrics.exists() and not self.metrics.is_file():
            raise DocumentError(
                f"--metrics: {self.metrics} is replaced after each refit, so it has to be a regular file"
            )
        check_files({
            "--lines": self.lines, "--metrics": metrics, "--json": self.json_file, "--html": self.html_file,
        })  # fmt: skip

    def refit(self, one: Any) -> None:
        """Tell one refit: a dataclass with role, job, version, committed, torn, seconds, measured and error."""
        values = {key: value for key, value in asdict(one).items() if value is not None}
        measured = values.pop("measured", None) or {}
        line = {"schema": LINE_SCHEMA, **values}
        line |= {key: measured[key] for key in ("phases", "network_bytes", "domain_bytes") if key in measured}
        self._line(json.dumps(line))
        if self.metrics is not None:
            self._count(one.role, one.job, line)
            self._write()

    def report(self, values: dict[str, Any]) -> None:
        """Write the report of the end, and print it where standard output is not for something else."""
        if self.json_file is not None:
            write_json(values, self.json_file)
        if self.html_file is not None:
            write_text(refit_page(values), self.html_file, "--html")
        if "-" not in (self.json_file, self.html_file, self.lines):
            print_refit(values)

    def _line(self, text: str) -> None:
        if self.lines is None:
            return
        try:
            if self.lines == "-":
                print(text, flush=True)
                return
            with Path(self.lines).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise DocumentError(f"--lines: {self.lines} cannot be written: {error.strerror}") from error

    def _count(self, role: str, job: str, line: dict[str, Any]) -> None:
        own = self._totals.setdefault((role, job), dict.fromkeys(_HELP, 0.0))
        own["reshard_torn"] = float(bool(line.get("torn")))
        own["reshard_last_refit_seconds"] = line["seconds"]
        if not line["committed"]:
            own["reshard_failures_total"] += 1
            return
        own["reshard_refits_total"] += 1
        own["reshard_version"] = line["version"]
        own["reshard_network_bytes_total"] += line.get("network_bytes", 0)
        own["reshard_domain_bytes_total"] += line.get("domain_bytes", 0)

    def _write(self) -> None:
        assert self.metrics is not None
        rows = []
        for name, (kind, about) in _HELP.items():
            rows += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            for (role, job), values in self._totals.items():
                label = job.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                rows.append(f'{name}{{role="{role}",job="{label}"}} {values[name]:.17g}')
        hidden = self.metrics.with_name(f".{self.metrics.name}.{os.getpid()}")
        try:
            hidden.write_text("\n".join(rows) + "\n", encoding="utf-8")
            hidden.replace(self.metrics)
        except OSError as error:
            print(f"--metrics: {self.metrics} cannot be written: {error.strerror}", file=sys.stderr)
