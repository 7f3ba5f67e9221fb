"""Sweeps the size of one tensor, as nccl-tests do: rows over the source's ranks, columns over the destination's.

Of the two documents only ranks and domains count. Within a size, modes take turns repeat by repeat. A small refit is
too short for a clock and for the barrier before it, so several run back to back in one measurement.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.plan.bound import domain_bound
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.bench_result import BenchOptions, ModeResult, SweepSize
from reshard_cli.refit.bench_side import BenchSide, Together, busiest_bytes
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.layout_document import LayoutDocument, check_layout
from reshard_cli.spec.located import Located
from reshard_cli.spec.model import LogicalTensor, Model
from reshard_cli.transport.control import Control

__all__ = ["SWEPT", "SWEPT_DTYPE", "MemoryNeed", "Sweep", "lacking", "refits_of", "sweep_jobs", "sweep_shape"]

SWEPT = "swept.weight"
SWEPT_DTYPE = "bfloat16"
_LEAST_SECONDS = 0.1  # of one measurement
_MOST_REFITS = 200  # in one measurement
_SHARE = 0.8  # of the free memory that a size may take


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a rank needs for a size, and what is free on the machine or GPU that it shares with others of its name."""

    machine: str
    needed: int
    free: int


def sweep_shape(num_bytes: int, destination_ranks: int) -> tuple[int, int]:
    """Return [rows, columns] of about so many bytes, nearly square, the columns a multiple of the ranks'."""
    elements = max(1, num_bytes // item_size(SWEPT_DTYPE))
    each = max(1, math.isqrt(elements) // destination_ranks)
    columns = destination_ranks << (each.bit_length() - 1)
    return max(1, elements // columns), columns


def sweep_jobs(jobs: Jobs, shape: tuple[int, int]) -> Jobs:
    """Return two jobs of the same ranks and domains that hold one tensor, cut by rows and by columns."""
    model = Model("sweep", (LogicalTensor(SWEPT, shape, SWEPT_DTYPE),))
    return Jobs(_cut(jobs.source, model, 0), _cut(jobs.destination, model, 1))


def _cut(job: JobLayout, model: Model, dim: int) -> JobLayout:
    values: dict[str, Any] = {
        "name": job.name, "ranks": job.num_ranks, "domain": job.loaded.document.domain,
        "meshes": {"all": {"rank": job.num_ranks}},
        "tensors": [{"match": "*", "place": {"rank": f"shard({dim})"}}],
    }  # fmt: skip
    document = LayoutDocument.model_validate(values)
    return build_layout(check_layout(document, Located("sweep", values), Path("sweep")), model)


def lacking(needs: Sequence[MemoryNeed]) -> str | None:
    """Return why so much does not fit into the machines' memory, or None where it does."""
    by_machine: dict[str, list[MemoryNeed]] = defaultdict(list)
    for one in needs:
        by_machine[one.machine].append(one)
    for ranks in by_machine.values():
        needed, free = sum(one.needed for one in ranks), min(one.free for one in ranks)
        if needed > _SHARE * free:
            return f"its {len(ranks)} rank(s) on one machine need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
    return None


def _need(num_bytes: int, staging: int, device: torch.device) -> MemoryNeed:
    """Return what a rank that holds so many bytes needs: its weights, as much while they are made, and staging."""
    needed = 2 * num_bytes + min(staging, 2 * num_bytes)
    if device.type == "cuda":
        return MemoryNeed(f"{_machine()} {device}", needed, torch.cuda.mem_get_info(device)[0])
    return MemoryNeed(_machine(), needed, _free())


def _machine() -> str:
    """Return what tells machines apart: emulated nodes have names of their own, but share a memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _free() -> int:
    """Return the bytes that this machine, or the container, can still give."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text) - int(used.read_text()))
    return free


class Sweep:
    """Measures every size on all ranks."""

    def __init__(
        self, control: Control, topology: Topology, options: RefitOptions, bench: BenchOptions,
        device: torch.device, jobs: Jobs,
    ) -> None:  # fmt: skip
        self.control, self.topology, self.options, self.bench = control, topology, options, bench
        self.device, self.jobs = device, jobs

    def run(self, together: Together, progress: Callable[[str], None]) -> list[SweepSize]:
        """Return what was measured, on rank 0; elsewhere the same sizes without results."""
        found: list[SweepSize] = []
        for number, wanted in enumerate(self.bench.sweep or ()):
            shape = sweep_shape(wanted, self.jobs.destination.num_ranks)
            size = SweepSize(math.prod(shape) * item_size(SWEPT_DTYPE), shape, SWEPT_DTYPE)
            found.append(size)
            size.skipped = self._why_not(number, size.num_bytes)
            if size.skipped is None:
                self._measure(size, f"sweep/{number}/", together, progress)
        return found

    def _why_not(self, number: int, num_bytes: int) -> str | None:
        """Return why a size is left out, the same on every rank."""
        own = max(
            -(-num_bytes // len(ranks)) if self.control.rank in ranks else 0
            for ranks in (self.topology.source.tolist(), self.topology.destination.tolist())
        )
        need = _need(own, self.options.staging, self.device)
        everybody = self.control.gather(
            f"sweep/{number}/memory", [need.machine, need.needed, need.free], "looking at the memory"
        )
        why = None if everybody is None else lacking([MemoryNeed(*one) for one in everybody])
        told: str | None = self.control.share(f"sweep/{number}/fits", why, "looking at the memory")
        return told

    def _measure(
        self, size: SweepSize, key: str, together: Together, progress: Callable[[str], None]
    ) -> None:
        jobs = sweep_jobs(self.jobs, size.shape)
        side = BenchSide(self.control, jobs, self.topology, self.options, self.bench.modes, self.device, key)
        side.prepare()
        size.bound = domain_bound(next(iter(side.plans.values())))
        results = size.results = [
            ModeResult(mode, plan.digest, plan.network_bytes, busiest_bytes(plan), plan.num_rounds)
            for mode, plan in side.plans.items()
        ]
        for result in results:
            progress(f"{size.num_bytes} bytes: warming up {result.mode}")
            warm = [self._warm(side, result, nth, together) for nth in range(max(1, self.bench.warmup))]
            if self.options.verify:
                result.verified = side.verified(result.mode)
            seconds = self.control.share(f"{key}{result.mode}/refits", min(warm), "measuring")
            result.refits = refits_of(seconds)
        for repeat in range(self.bench.repeats):
            turn = repeat % len(results)
            for place, result in enumerate(results[turn:] + results[:turn]):
                progress(
                    f"{size.num_bytes} bytes: repeat {repeat + 1} of {self.bench.repeats}: {result.mode}"
                )
                one = side.measure(result.mode, f"{repeat}", together, result.refits)
                if one is not None:
                    result.add(one, repeat * len(results) + place)

    def _warm(self, side: BenchSide, result: ModeResult, nth: int, together: Together) -> float:
        side.poison()
        one = side.measure(result.mode, f"warm-up {nth}", together)
        return 0.0 if one is None else one.seconds


def refits_of(seconds: float) -> int:
    """Return how many refits of so many seconds make a measurement that a clock can tell apart."""
    return max(1, min(_MOST_REFITS, math.ceil(_LEAST_SECONDS / max(seconds, 1e-9))))
