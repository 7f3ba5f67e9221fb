"""Published layouts, scaled down, on an emulated cluster: `python -m tests.benchmarks.scaled` (root, iproute2).

For each row one `reshard-cli bench --scale F --emulate NxM` measures all modes in turn; the jobs keep the published
axes, stages and kinds of layers as far as the cluster has ranks for them. Prints a table for the README with the exact
command of each row; --pages FOLDER keeps each row's page and JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYOUTS = Path("layouts") / "published"
# row: how far its model is scaled down, to some 200 MB
ROWS = {
    "qwen3-235b-h100": 0.0005,
    "deepseek-v3-h100": 0.00015,
    "nemotron-ultra-gb200": 0.0002,
    "qwen3-30b-h100": 0.0035,
}
HEAD = "| row | jobs | model | mode | median s | 95 % | of limit | counted | speed-up |\n|---|---|---|---|---:|---:|---:|---:|---:|"


def command(row: str, scale: float, flags: argparse.Namespace) -> list[str]:
    """Return the command that measures a row, without where its reports go."""
    return [
        "bench", str(LAYOUTS / row / "train.yaml"), str(LAYOUTS / row / "infer.yaml"), "--scale", f"{scale:g}",
        "--emulate", flags.cluster, "--nic", flags.nic, "--repeats", str(flags.repeats), "--verify",
    ]  # fmt: skip


def measured(row: str, scale: float, flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one row's bench; return its report."""
    reports = ["--json", folder / f"{row}.json", "--html", folder / f"{row}.html"]
    done = subprocess.run(
        [sys.executable, "-m", "reshard_cli", *command(row, scale, flags), *map(str, reports)],
        capture_output=True, text=True, check=False, timeout=flags.timeout,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{row}: {done.stderr}")
    found: dict[str, Any] = json.loads((folder / f"{row}.json").read_text(encoding="utf-8"))
    return found


def lines(row: str, report: dict[str, Any]) -> list[str]:
    """Return the table's lines of one row; the axes that found no room are named beside the jobs."""
    world, changes = report["world"], report["scaled"]["changes"]
    lost = [
        f"{one['where']} {one['what'].removeprefix('axis ')}"
        for one in changes
        if one["note"] == "no room for this axis"
    ]
    jobs = f"{world['source']['ranks']} → {world['destination']['ranks']} ranks"
    jobs += f", without {', '.join(lost)}" if lost else ""
    found = []
    for one in report["modes"]:
        low, high = one["ci95"]
        counted, planned = one["network_bytes_measured"], one["network_bytes_planned"]
        more = "" if counted is None else f"{counted / planned - 1:+.2%}"
        speed = "" if one["speedup_over_broadcast"] is None else f"{one['speedup_over_broadcast']:.2f}"
        found.append(
            f"| {row} | {jobs} | {report['model_bytes'] / 1e6:.0f} MB | {one['mode']} | {one['median']:.3f} "
            f"| {low:.3f}–{high:.3f} | {one['ratio_to_limit']:.3f} | {more} | {speed} |"
        )
    return found


def main() -> None:
    """Run the rows and print the table and its commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cluster", default="4x2")
    parser.add_argument("--nic", default="1gbit")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument(
        "--smaller", type=float, default=1.0, help="times the rows' own scale, for a quick look"
    )
    parser.add_argument("--pages", type=Path, help="a folder that keeps each row's page and JSON")
    parser.add_argument("--timeout", type=float, default=1800)
    flags = parser.parse_args()
    commands = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.pages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for row, scale in ROWS.items():
            if flags.rows in row:
                commands.append(" ".join(["reshard-cli", *command(row, scale * flags.smaller, flags)]))
                print("\n".join(lines(row, measured(row, scale * flags.smaller, flags, folder))), flush=True)
    print("\n```sh\n" + "\n".join(commands) + "\n```")


if __name__ == "__main__":
    main()
