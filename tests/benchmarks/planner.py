"""Benchmark of the planner: `python -m tests.benchmarks.planner` prints seconds and memory, and how they grow.

Every figure is the median of `--repeats` fresh processes, the cases interleaved, from the command to the
prompt. It is no test: nothing here has a limit, so that a slow machine only prints larger numbers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
START = """
import sys, time
from pathlib import Path
began = time.perf_counter()
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.schedule import pair_digests, rank_schedule
from reshard_cli.refit.prepare import read_jobs
jobs = read_jobs(Path(sys.argv[1]), Path(sys.argv[2]))
plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=512 << 20)
plan.digest, pair_digests(rank_schedule(plan, int(sys.argv[3])))
print(time.perf_counter() - began)
"""


@dataclass(slots=True)
class Case:
    """A command, what it is called, and what its runs took. `inner`: the time is what the command prints."""

    name: str
    command: list[str]
    inner: bool = False
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Run it once."""
        began = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{self.name}: exit code {process.returncode}")
        self.seconds.append(float(printed) if self.inner else took)
        self.megabytes.append(usage.ru_maxrss * 1024 / 1e6)


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        cases = _cases(Path(folder))
        for turn in range(repeats + 1):
            for case in cases:
                case.run()
                if turn == 0:  # files come from the disk for the first time
                    case.seconds.clear()
                    case.megabytes.clear()
    print(f"{'':44}{'median s':>10}{'least':>8}{'most':>8}{'peak MB':>9}")
    for case in cases:
        print(
            f"{case.name:44}{statistics.median(case.seconds):10.2f}{min(case.seconds):8.2f}"
            f"{max(case.seconds):8.2f}{max(case.megabytes):9.0f}"
        )


def _cases(folder: Path) -> list[Case]:
    tool = [sys.executable, "-m", "reshard_cli"]
    cases = [Case("--help", [*tool, "--help"]), Case("schema layout", [*tool, "schema", "layout"])]

    def plan(name: str, source: Path, destination: Path) -> None:
        cases.append(Case(name, [*tool, "plan", str(source), str(destination)]))

    for row in ("deepseek-v3-h100", "qwen3.8-2.4t"):
        plan(f"plan {row} (256+256)", *_published(row))
    start = _published("deepseek-v3-h100")
    cases.append(
        Case(
            "one rank's start, deepseek-v3-h100", [sys.executable, "-c", START, *map(str, start), "300"], True
        )
    )
    for ranks in (256, 1024, 4096):
        plan(f"plan deepseek-v3, {ranks}+{ranks} ranks", *_deepseek(folder, ranks, 61))
    for layers in (117, 229):
        plan(f"plan deepseek-v3 of {layers} layers, 256+256", *_deepseek(folder, 256, layers))
    return cases


def _published(row: str) -> tuple[Path, Path]:
    return LAYOUTS / "published" / row / "train.yaml", LAYOUTS / "published" / row / "infer.yaml"


def _deepseek(folder: Path, ranks: int, layers: int) -> tuple[Path, Path]:
    """Write DeepSeek-V3 with so many layers, on so many ranks of each job; return both layout documents."""
    model = (LAYOUTS / "models" / "deepseek-v3.yaml").read_text(encoding="utf-8")
    model = model.replace("layers: 61,", f"layers: {layers},")
    (folder / f"model-{layers}.yaml").write_text(model, encoding="utf-8")
    paths = []
    for name in ("train", "infer"):
        text = (LAYOUTS / "published" / "deepseek-v3-h100" / f"{name}.yaml").read_text(encoding="utf-8")
        document = yaml.safe_load(text)
        document |= {"ranks": ranks, "model": f"model-{layers}.yaml"}  # more ranks are more replicas
        paths.append(folder / f"{name}-{ranks}-{layers}.yaml")
        paths[-1].write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return paths[0], paths[1]


if __name__ == "__main__":
    main()
