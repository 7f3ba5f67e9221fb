"""What many tests need: documents from values, a whole refit in one process, the command line as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.in_process import run_in_process
from reshard_cli.refit.prepare import Jobs, read_jobs
from reshard_cli.spec.dtypes import item_size
from reshard_cli.weights.windows import Boxed, Corner, StorageWindows

POISON = 0xA5
COMMAND = (sys.executable, "-m", "reshard_cli")


def write_yaml(path: Path, value: Mapping[str, Any]) -> Path:
    """Write a document."""
    path.write_text(yaml.safe_dump(dict(value), sort_keys=False), encoding="utf-8")
    return path


def model_document(tensors: Mapping[str, tuple[Sequence[int], str]], name: str = "model") -> dict[str, Any]:
    """Return a model document with these tensors, (shape, dtype) by concrete name."""
    entries = {key: {"shape": list(shape), "dtype": dtype} for key, (shape, dtype) in tensors.items()}
    return {"name": name, "dtype": "float32", "tensors": entries}


def make_jobs(
    folder: Path, model: Mapping[str, Any], source: Mapping[str, Any], destination: Mapping[str, Any]
) -> Jobs:
    """Write the three documents under `folder` and read them as the command line does."""
    write_yaml(folder / "model.yaml", model)
    one = write_yaml(folder / "source.yaml", {"name": "source", **source})
    other = write_yaml(folder / "destination.yaml", {"name": "destination", **destination})
    return read_jobs(one, other, folder / "model.yaml")


class WholeTensors:
    """A source that has every tensor whole, by logical name; experts are dim 0."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        yield lo, hi, self.tensors[name][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]

    def in_place(self, name: str) -> bool:
        return True


@dataclass
class Result:
    """A refit in one process: its plan, and each destination job rank's storages by name."""

    plan: Plan
    storages: list[dict[str, Tensor]]
    specifications: list[list[RankStorage]]
    moved: int
    peak_staging_bytes: int


def refit_in_process(
    jobs: Jobs,
    tensors: Mapping[str, Tensor],
    *,
    mode: Mode = "reshard",
    staging: int = 64 << 20,
    topology: Topology | None = None,
    colocated: bool = False,
    from_storages: bool = False,
) -> Result:
    """Refit whole tensors (by logical name) into poisoned destination storages.

    With `from_storages` each source rank first gets its own storages, filled by hand from the whole
    tensors, and sends from those; otherwise it reads boxes of the whole tensors, as from a checkpoint.
    """
    topology = topology or jobs.topology(None, colocated)
    plan = build_plan(jobs.source, jobs.destination, topology, mode, staging=staging)
    source_of = {rank: job for job, rank in enumerate(topology.source.tolist())}
    destination_of = {rank: job for job, rank in enumerate(topology.destination.tolist())}
    executors, filled, specifications = {}, {}, {}
    for rank in range(topology.num_ranks):
        source: Any = None
        if rank in source_of:
            source = WholeTensors(tensors)
            if from_storages:
                source = storages_of(jobs, source_of[rank], tensors)
        windows = None
        if rank in destination_of:
            storages = rank_storages(jobs.destination, destination_of[rank])
            buffers = {}
            for one in storages:
                size = one.num_elements * item_size(one.dtype)
                buffers[one.name] = torch.full((size,), POISON, dtype=torch.uint8)
                if one.has_padding and not one.keep_padding:
                    buffers[one.name].zero_()
            windows = StorageWindows()
            windows.add(storages, buffers)
            job = destination_of[rank]
            specifications[job] = storages
            filled[job] = {
                one.name: buffers[one.name].view(getattr(torch, one.dtype)).view(one.shape)
                if one.num_elements
                else torch.empty(one.shape, dtype=getattr(torch, one.dtype))
                for one in storages
            }
        schedule = rank_schedule(plan, rank)
        executors[rank] = RankExecutor(plan, schedule, source, windows, torch.device("cpu"))
    moved = run_in_process(executors)
    jobs_of = range(jobs.destination.num_ranks)
    return Result(
        plan,
        [filled[job] for job in jobs_of],
        [specifications[job] for job in jobs_of],
        moved,
        max(one.peak_staging_bytes for one in executors.values()),
    )


def storages_of(jobs: Jobs, rank: int, tensors: Mapping[str, Tensor]) -> StorageWindows:
    """Return a source rank's storages, their windows filled from whole tensors, the rest poisoned."""
    storages = rank_storages(jobs.source, rank)
    buffers = {
        one.name: torch.full((one.num_elements * item_size(one.dtype),), POISON, dtype=torch.uint8)
        for one in storages
    }
    windows = StorageWindows()
    windows.add(storages, buffers)
    for name, tensor in tensors.items():
        for lo, hi, view in windows.windows(name, (0,) * tensor.dim(), tuple(tensor.shape)):
            view.copy_(tensor[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))])
    return windows


def run_cli(
    *arguments: str | Path, timeout: float = 120, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own group, which ends with this call whatever happens."""
    process = start_cli(*arguments, environment=environment)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end_group(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_module(module: str, *arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests as a process of its own group, which ends with this call."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end_group(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_cli(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command line; the caller ends it with `end_group`."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**clean, **(environment or {})},
    )


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process started by `start_cli` with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
