"""The report of a refit: schema reshard-cli/refit/1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from reshard_cli.refit.session import RefitReport

__all__ = ["REFIT_SCHEMA", "refit_report"]

REFIT_SCHEMA = "reshard-cli/refit/1"


def refit_report(report: RefitReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {"schema": REFIT_SCHEMA, **asdict(report)}
