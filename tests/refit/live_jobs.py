"""Jobs of real processes for tests of the library: each rank is a process that ends with the block.

They come of a fork server that has torch loaded, as loading it takes longer than most of these tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import reshard_cli as rs
from reshard_cli.refit.library import Session
from tests.refit.live_weights import documents

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", __name__, *(["tests.examples.tp_rollout"] if importlib.util.find_spec("transformers") else [])]
)
SOURCES, DESTINATIONS = 3, 2
TIMEOUT = 20.0  # of the jobs themselves; nothing here waits for longer


@dataclass(frozen=True)
class Place:
    """Which rank of which job a process is, and where the source's gate is."""

    job: str
    rank: int
    size: int
    port: int
    folder: Path
    host: str = "127.0.0.1"

    def join(self, role: Any, source: Any, destination: Any, **options: Any) -> Session:
        """Join the other job as this rank."""
        given: dict[str, Any] = {"timeout": TIMEOUT, "backend": "gloo", **options}
        return rs.join(
            source, destination, role=role, rendezvous=f"{self.host}:{self.port}", token="shared",
            rank=self.rank, world_size=self.size, job=self.job, **given,
        )  # fmt: skip

    def mark(self, name: str) -> None:
        """Tell other processes that something has happened."""
        (self.folder / f"{name}.mark").touch()

    def wait_for(self, name: str, seconds: float = TIMEOUT) -> None:
        """Wait for another process's mark."""
        deadline = time.monotonic() + seconds
        while not (self.folder / f"{name}.mark").exists():
            assert time.monotonic() < deadline, f"{name} did not happen"
            time.sleep(0.01)


@dataclass
class Jobs:
    """The processes of all jobs of a test."""

    folder: Path
    port: int
    running: dict[tuple[str, int], tuple[Any, Connection]] = field(default_factory=dict)

    def start(self, job: str, ranks: int, program: Callable[..., Any], *arguments: Any) -> None:
        """Start a job: `program(place, *arguments)` on each of its ranks."""
        for rank in range(ranks):
            here, there = CONTEXT.Pipe(duplex=False)
            place = Place(job, rank, ranks, self.port, self.folder)
            process = CONTEXT.Process(target=_run, args=(there, program, place, arguments), daemon=True)
            process.start()
            there.close()
            self.running[job, rank] = (process, here)

    def results(self, seconds: float = 90.0) -> dict[tuple[str, int], Any]:
        """Return what each rank's program returned, or raised."""
        found: dict[tuple[str, int], Any] = {}
        deadline = time.monotonic() + seconds
        for who, (process, pipe) in self.running.items():
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                found[who] = TimeoutError(f"{who} has not ended")
                continue
            try:
                found[who] = pipe.recv()
            except EOFError:
                process.join(5)
                found[who] = RuntimeError(f"{who} ended with exit code {process.exitcode}")
        return found

    def all_well(self, seconds: float = 90.0) -> dict[tuple[str, int], Any]:
        """Return what each rank's program returned; fail where one raised."""
        found = self.results(seconds)
        told = [f"{who}: {one}" for who, one in found.items() if isinstance(one, BaseException)]
        assert not told, "\n".join(told)
        return found


@contextlib.contextmanager
def jobs(folder: Path) -> Iterator[Jobs]:
    """Return what starts jobs; all of their processes end with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        started = Jobs(folder, free.getsockname()[1])
    try:
        yield started
    finally:
        for process, pipe in started.running.values():
            process.join(3)
            process.kill()
            process.join(10)
            pipe.close()


def _run(pipe: Connection, program: Callable[..., Any], place: Place, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        told: Any = program(place, *arguments)
    except rs.ReshardError as error:
        told = type(error)(str(error))
    except BaseException:  # noqa: BLE001 - told to the test, which fails of it
        told = AssertionError(traceback.format_exc())
    pipe.send(told)
    pipe.close()


def joined_source(place: Place, **options: Any) -> Session:
    """Join as a rank of the job that cuts dim 0."""
    return place.join("source", place.folder / "train.yaml", None, verify=True, **options)


def joined_destination(place: Place, **options: Any) -> Session:
    """Join as a rank of the job that cuts dim 1."""
    return place.join("destination", None, place.folder / "infer.yaml", verify=True, **options)


def run_both(
    folder: Path, source: Callable[..., Any], destination: Callable[..., Any], *arguments: Any
) -> tuple[list[Any], list[Any]]:
    """Run two programs as jobs; return what their ranks returned or raised."""
    documents(folder, SOURCES, DESTINATIONS)
    with jobs(folder) as started:
        started.start("train", SOURCES, source, *arguments)
        started.start("infer", DESTINATIONS, destination, *arguments)
        found = started.results()
    return (
        [found["train", rank] for rank in range(SOURCES)],
        [found["infer", rank] for rank in range(DESTINATIONS)],
    )


def well(results: list[Any]) -> None:
    """Fail where a rank raised."""
    assert not [one for one in results if isinstance(one, BaseException)], results
