"""The README's table of published rows: `python -m tests.benchmarks.published` prints it anew; `--fit` the constant in it.

Published seconds are other people's measurements of their own systems; everything else is computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from reshard_cli.refit.prepare import read_jobs
from reshard_cli.report.plan_report import plan_report
from reshard_cli.spec.hardware_profile import read_hardware

__all__ = ["PUBLISHED", "ROWS", "fitted_seconds_of_a_tensor", "report_of", "table_row"]

ROWS = Path(__file__).parent.parent.parent / "layouts" / "published"
# gather and broadcast (or direct point-to-point), hybrid
PUBLISHED = {
    "qwen3-4b-h100": ("", "0.21–0.34"),
    "qwen3-30b-h100": ("", "0.74–1.00"),
    "qwen3-30b-fp8-h100": ("", "2.90–4.00"),
    "qwen3-235b-h100": ("6.4", "1.9"),
    "deepseek-v3-h100": ("14.9", "2.6"),
    "deepseek-v3-gb200": ("6.1", "2.3"),
    "nemotron-ultra-gb200": ("8.2", "2.3"),
    "qwen3.5-397b-h100": ("", "1.97–2.17"),
    "qwen3.8-2.4t": ("", "4.3"),
    "m2n-deepseek-v3-gb200": ("3.838, point-to-point", "1.447"),
    "m2n-qwen3-235b-gb200": ("2.175, point-to-point", "0.989"),
    "kimi-k2": ("", "1.3, one-sided writes"),
}


def report_of(row: str, mode: str) -> dict[str, Any]:
    """Return the plan's report of a row in a mode, on the hardware that its domains tell."""
    jobs = read_jobs(ROWS / row / "train.yaml", ROWS / row / "infer.yaml")
    topology = jobs.topology(None, False)
    hardware = read_hardware(None, int(np.bincount(topology.domain).max()))
    return plan_report(jobs, topology, mode, hardware, staging=512 << 20)[0]  # type: ignore[arg-type]


def table_row(row: str, report: dict[str, Any]) -> str:
    """Return the table's line of a row."""
    seconds = [one["predicted_seconds"] for one in report["compare"]]
    figures = [*PUBLISHED[row], *(f"{one:.3f}" for one in (report["limit_seconds"], *seconds))]
    return f"| {row} | " + " | ".join(figures) + " |"


def fitted_seconds_of_a_tensor() -> float:
    """Return the seconds of each tensor's gather that fit the published gather-and-broadcast times best.

    Least squares of the relative errors, over the rows whose first column is of such a system.
    """
    over, under = 0.0, 0.0
    for row, (published, _) in PUBLISHED.items():
        if not published or "," in published:
            continue
        report = report_of(row, "broadcast")
        parts = report["predicted"]["parts"]
        rest = (parts["gather"] + parts["broadcast"]) / float(published)
        share = report["model"]["tensors"] / float(published)
        over += share * (1 - rest)
        under += share * share
    return over / under


def main() -> None:
    """Print the table, or the constant."""
    if "--fit" in sys.argv[1:]:
        print(f"{1e6 * fitted_seconds_of_a_tensor():.0f} µs a tensor")
        return
    print("| row | gather + broadcast, published s | hybrid, published s | limit s "
          "| predicted: broadcast | hybrid-ffn | reshard | hybrid |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in PUBLISHED:
        print(table_row(row, report_of(row, "hybrid")))


if __name__ == "__main__":
    main()
