"""What the executor costs beside a bare exchange, on loopback: `python -m tests.benchmarks.loopback`.

Each comparison runs its sides in turn, in one world of real processes, and prints medians of the slowest rank:

    rows         a refit of 256 MiB over a bare gloo exchange of the same bytes between the same pairs: shards of
                 rows to whole tensors, which lie in one piece on both sides
    columns      the same for shards of rows to shards of columns: every row of a box has to be packed; and the packing
                 and unpacking of a refit alone, without any message
    small        20,000 tensors of 1 KiB over one tensor of their sum, where a rank's storages lie in one allocation, and
                 where each has its own (apart)
    checkpoint   from a checkpoint in the page cache over from memory
    first byte   what a repeated refit does before its first message
    loop         200 refits in one process: seconds, resident memory, open files
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.plan.schedule import rank_schedule, transfers
from reshard_cli.refit.clock import Clock
from reshard_cli.refit.endpoints import Destination, open_source
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.prepare import Jobs, read_jobs
from reshard_cli.refit.ranked import run_ranked
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.spec.dtypes import item_size
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import GlooTransport
from reshard_cli.transport.launcher import World, launch
from reshard_cli.transport.message import Message
from reshard_cli.weights.memory import held_in_memory
from reshard_cli.weights.windows import StorageWindows

LIMIT = 300.0


class Side:
    """One rank of one world: a plan with its executor and the bare exchange of the same bytes."""

    def __init__(self, control: Control, jobs: Jobs, origin: str, *, apart: bool = False) -> None:
        self.control = control
        self.plan = plan_of(jobs)
        rank, sources = control.rank, jobs.source.num_ranks
        source: Any = None
        if rank < sources:
            source, _ = open_source(origin, self.plan, [rank], 1, allow_extra=False)
            if apart:
                source = StorageWindows()
                source.add(*in_pieces(jobs.source, rank))
            elif origin == "synthetic":
                source = held_in_memory(jobs.source, rank, source, torch.device("cpu"))
        self.destination = None
        if rank >= sources and apart:
            pieces = in_pieces(jobs.destination, rank - sources)
            self.destination = Destination.over(self.plan, *pieces, torch.device("cpu"))
        elif rank >= sources:
            self.destination = Destination.create(self.plan, rank - sources, None, 1, torch.device("cpu"))
        windows = None if self.destination is None else self.destination.windows
        schedule = rank_schedule(self.plan, rank)
        self.executor = RankExecutor(self.plan, schedule, source, windows, torch.device("cpu"))
        sent: dict[int, int] = defaultdict(int)
        taken: dict[int, int] = defaultdict(int)
        for blocks in schedule.rounds:
            for phase in (NETWORK, DOMAIN):
                for one in transfers(blocks, rank, phase=phase):
                    (sent if one.origin == rank else taken)[
                        one.target if one.origin == rank else one.origin
                    ] += one.num_bytes
        self.sends = [
            Message(peer, torch.ones(size, dtype=torch.uint8)) for peer, size in sorted(sent.items())
        ]
        self.receives = [
            Message(peer, torch.zeros(size, dtype=torch.uint8)) for peer, size in sorted(taken.items())
        ]

    def refit(self, transport: GlooTransport) -> None:
        run_rounds(self.executor, transport, Clock(self.control).phase)

    def copies(self, _: GlooTransport) -> None:
        for number in range(self.executor.num_rounds):
            self.executor.pack(number)
            self.executor.finish(number)

    def bare(self, transport: GlooTransport) -> None:
        transport.start(self.sends, self.receives).wait()


def in_pieces(layout: JobLayout, rank: int) -> tuple[list[RankStorage], dict[str, Tensor]]:
    """Return a rank's storages with memory for each by itself, as modules hold their parameters."""
    storages = rank_storages(layout, rank)
    sizes = {one.name: one.num_elements * item_size(one.dtype) for one in storages}
    return storages, {name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}


def plan_of(jobs: Jobs) -> Plan:
    """Return the plan in mode reshard."""
    return build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=512 << 20)


def in_a_world(num_ranks: int, work: Callable[[Control, GlooTransport], Any]) -> None:
    """Run `work` on so many ranks; whatever rank 0 prints is the result."""

    def body(control: Control, undo: list[Callable[[], None]]) -> Any:
        transport = GlooTransport(control.store, control.rank, num_ranks, LIMIT)
        work(control, transport)
        return transport.close, lambda: None

    def run(world: World) -> int:
        torch.set_num_threads(1)
        return run_ranked(world, LIMIT, body, debug=True)

    if launch(num_ranks, LIMIT, run):
        raise SystemExit(1)


def compared(
    control: Control,
    transport: GlooTransport,
    sides: dict[str, Callable[[GlooTransport], None]],
    repeats: int,
) -> dict[str, float]:
    """Run the sides in turn; return the median seconds of the slowest rank by side, on rank 0."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):
        for name, run in sides.items():
            control.barrier(f"{name}/{repeat}", "measuring")
            began = time.perf_counter()
            run(transport)
            everybody = control.gather(f"{name}/{repeat}/s", time.perf_counter() - began, "measuring")
            if everybody is not None and repeat >= 2:
                found[name].append(max(everybody))
    return {name: float(np.median(values)) for name, values in found.items() if values}


def documents(
    folder: Path, model: dict[str, Any], source: str = "shard(0)", destination: str = "shard(0)"
) -> Jobs:
    """Write two jobs of two ranks that cut this model's tensors so; return them."""
    (folder / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
    rules = {"train": {"tp": source}, "infer": {"tp": destination}}
    for name, place in rules.items():
        job = {"name": name, "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}},
               "tensors": [{"match": "*", "place": place}]}  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    return read_jobs(folder / "train.yaml", folder / "infer.yaml", folder / "model.yaml")


def model_of(tensors: dict[str, list[int]], dtype: str = "float32") -> dict[str, Any]:
    return {"name": "m", "dtype": dtype, "tensors": tensors}


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        _refit(Path(folder), repeats, "rows", "shard(0)", "replicate")
        _refit(Path(folder), repeats, "columns", "shard(0)", "shard(1)")
        _small(Path(folder), repeats)
        _checkpoint(Path(folder), repeats)
        _loop(Path(folder))


def _refit(folder: Path, repeats: int, name: str, source: str, destination: str) -> None:
    jobs = documents(
        folder, model_of({f"layers.{i}.w": [2048, 2048] for i in range(16)}), source, destination
    )

    def work(control: Control, transport: GlooTransport) -> None:
        side = Side(control, jobs, "synthetic")
        sides = {"refit": side.refit, "bare": side.bare, "copies": side.copies}
        found = compared(control, transport, sides, repeats)
        if found:
            bare = found["bare"]
            print(
                f"{name:12} {found['refit']:.3f} s, bare {bare:.3f} s: {found['refit'] / bare:.2f} x; its copies alone "
                f"{found['copies'] / bare:.2f} x"
            )
            seconds = []
            for _ in range(20):
                began = time.perf_counter()
                side.executor.pack(0)
                side.executor.sends(0, NETWORK)
                side.executor.receives(0, NETWORK)
                seconds.append(time.perf_counter() - began)
            print(f"first byte   {1e3 * float(np.median(seconds)):.2f} ms before it in a repeated refit")

    in_a_world(4, work)


def _small(folder: Path, repeats: int) -> None:
    many = documents(folder, model_of({f"layers.{i}.w": [16, 16] for i in range(20_000)}))
    one = documents(folder, model_of({"w": [16 * 20_000, 16]}))

    def work(control: Control, transport: GlooTransport) -> None:
        sides = {
            "small": Side(control, many, "synthetic"),
            "small, apart": Side(control, many, "synthetic", apart=True),
            "one": Side(control, one, "synthetic"),
        }
        found = compared(control, transport, {name: side.refit for name, side in sides.items()}, repeats)
        for name in [*sides][:2] if found else ():
            print(
                f"{name:12} {found[name]:.4f} s, one {found['one']:.4f} s: {found[name] / found['one']:.2f} x"
            )

    in_a_world(4, work)


def _checkpoint(folder: Path, repeats: int) -> None:
    shapes = {f"layers.{i}.w": [2048, 2048] for i in range(16)}
    jobs = documents(folder, model_of(shapes))
    (folder / "checkpoint").mkdir()
    save_file(
        {name: torch.randn(shape) for name, shape in shapes.items()},
        folder / "checkpoint" / "model.safetensors",
    )

    def work(control: Control, transport: GlooTransport) -> None:
        sides = {
            "file": Side(control, jobs, str(folder / "checkpoint")).refit,
            "memory": Side(control, jobs, "synthetic").refit,
        }
        found = compared(control, transport, sides, repeats)
        if found:
            print(
                f"checkpoint   {found['file']:.3f} s, memory {found['memory']:.3f} s: {found['file'] / found['memory']:.2f} x"
            )

    in_a_world(4, work)


def _loop(folder: Path) -> None:
    jobs = documents(folder, model_of({f"layers.{i}.w": [512, 512] for i in range(16)}))

    def work(control: Control, transport: GlooTransport) -> None:
        side = Side(control, jobs, "synthetic")
        seconds, memory, files = [], [], []
        for _ in range(200):
            began = time.perf_counter()
            side.refit(transport)
            seconds.append(time.perf_counter() - began)
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            files.append(len(os.listdir("/proc/self/fd")))
        if control.rank == 0:
            halves = [float(np.median(part)) for part in (seconds[10:100], seconds[100:])]
            print(
                f"loop         refits 11-100 {halves[0]:.4f} s, 101-200 {halves[1]:.4f} s; resident "
                f"{memory[9] / 1e6:.1f} MB after 10, {memory[-1] / 1e6:.1f} MB after 200; files {files[9]}, {files[-1]}"
            )

    in_a_world(4, work)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
