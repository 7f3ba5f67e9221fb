"""A loop of two joined jobs that refits without end, for tests of what must not stop it.

Two source ranks and two destination ranks, each a process. Both destination ranks hold every version against what it
has to be, bit for bit. Every rank writes a line for each refit: its version, its seconds, its error.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reshard_cli.errors import ReshardError, TransferError
from tests.refit.joined_harness import (
    RANKS,
    Case,
    cut,
    free_port,
    join,
    left_behind,
    opened,
    same,
    start,
    write_documents,
)

PAUSE = 0.02  # seconds between refits, as if somebody trained


def source_of_loop(case: Case, job: str, rank: int) -> None:
    """Refit version after version until there is a file that says which one is the last."""
    torch.set_num_threads(1)
    if rank == 0:
        opened(case)
    session = join(case, job, rank, timeout=case.timeout)
    live: dict[str, torch.Tensor] = {}
    session.bind(live)
    version, last = 0, case.folder / "last"
    with lines_of(case, job, rank) as tell:
        while not last.exists() or version < int(last.read_text()):
            version += 1
            live.update(cut(version, job, rank))
            began, error = time.perf_counter(), None
            try:
                session.refit(version=version)
            except TransferError as told:
                error = str(told)  # of a job that failed: the others have their version
            tell(version, time.perf_counter() - began, error)
            time.sleep(PAUSE)
    session.close()


def destination_of_loop(case: Case, job: str, rank: int) -> None:
    torch.set_num_threads(1)
    live = {name: torch.full_like(one, float("nan")) for name, one in cut(0, job, rank).items()}
    session = join(case, job, rank, timeout=case.timeout)
    session.bind(live)
    with lines_of(case, job, rank) as tell:
        try:
            began = time.perf_counter()
            while (version := session.refit()) is not None:
                exact = same(live, cut(version, job, rank))
                tell(version, time.perf_counter() - began, None if exact else "not what it should be")
                began = time.perf_counter()
        except ReshardError as error:
            tell(-1, 0.0, str(error))
            raise
    session.close()


@contextlib.contextmanager
def lines_of(case: Case, job: str, rank: int) -> Iterator[Any]:
    with (case.folder / f"{job}-{rank}.lines").open("w") as file:

        def tell(version: int, seconds: float, error: str | None) -> None:
            line = {"version": version, "seconds": seconds, "error": error}
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield tell


@dataclass(slots=True)
class RunningLoop:
    """The processes of the loop, and what they wrote."""

    case: Case
    processes: dict[str, Any] = field(default_factory=dict)

    def lines(self, job: str, rank: int) -> list[dict[str, Any]]:
        path = self.case.folder / f"{job}-{rank}.lines"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def version(self) -> int:
        """The version that every destination rank has taken."""
        taken = [self.lines("infer", rank) for rank in range(RANKS)]
        return min(one[-1]["version"] if one else 0 for one in taken)

    def goes_on(self, refits: int = 2, seconds: float = 60.0) -> None:
        """Wait for some more refits from now on; fail where a rank has ended, or came to something else."""
        wanted = self.version + refits
        limit = time.monotonic() + seconds
        while True:
            ended = {name: one.exitcode for name, one in self.processes.items() if not one.is_alive()}
            assert not ended, f"{ended}: {self.told()}"
            if self.version >= wanted:
                break
            assert time.monotonic() < limit, f"no refit came: {self.told()}"
            time.sleep(0.01)
        self.check()

    def told(self) -> list[Any]:
        """Return the last thing that each rank wrote."""
        return [self.lines(job, rank)[-1:] for job in ("train", "infer") for rank in range(RANKS)]

    def check(self) -> None:
        """Fail where the pair of the loop itself missed a version, or took a wrong one."""
        for rank in range(RANKS):
            lines = self.lines("infer", rank)
            assert [one["error"] for one in lines if one["error"]] == []
            assert [one["version"] for one in lines] == list(range(1, len(lines) + 1))
            for one in self.lines("train", rank):
                assert one["error"] is None or "; it is on infer" in one["error"], one

    def end(self) -> None:
        """Ask for the end; it has to come in good order on every rank."""
        last = self.case.folder / "last.new"
        last.write_text(str(self.lines("train", 0)[-1]["version"] + 3))
        os.replace(last, self.case.folder / "last")
        for one in self.processes.values():
            one.join(30)
        assert {name: one.exitcode for name, one in self.processes.items()} == dict.fromkeys(
            self.processes, 0
        )
        self.check()
        versions = {self.lines(job, rank)[-1]["version"] for job in ("train", "infer") for rank in range(2)}
        assert len(versions) == 1
        assert left_behind(self.case) == []


@contextlib.contextmanager
def running_loop(folder: Path, timeout: float) -> Iterator[RunningLoop]:
    """Start the loop; its processes end with the block, however it went."""
    write_documents(folder)
    loop = RunningLoop(Case(folder, free_port(), timeout=timeout))
    try:
        for job, run in (("train", source_of_loop), ("infer", destination_of_loop)):
            for rank in range(RANKS):
                loop.processes[f"{job} {rank}"] = start(loop.case, job, rank, run)
        yield loop
    finally:
        for one in loop.processes.values():
            one.kill()
            one.join()
