"""What refits cost a training loop, and whether a long loop grows: `python -m tests.benchmarks.live [MIB] [REFITS]`.

    step         seconds of a training step of 2 ranks alone, and with a refit of one destination job of 2 ranks that is
                 blocking, or beside it after a snapshot, or beside it until it is packed; in turn, medians
    loop         REFITS refits of small tensors, each version checked: memory, open files, threads, seconds per refit

All ranks share this machine's cores, so that the destination's work slows the trainer too: on machines of their
own what is beside the training costs less than here.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.refit.live_jobs import Place, jobs
from tests.refit.live_weights import differing, documents, held, poisoned, whole
from tests.refit.test_library_jobs import grown
from tests.support import model_document, write_yaml

KINDS = ("alone", "blocking", "snapshot", "packed")
ROUNDS = 9
ROWS = 1024


def weights(mib: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the whole model: square layers of 4 MiB."""
    return {f"layers.{index}.weight": ((ROWS, ROWS), "float32") for index in range(max(2, mib // 4))}


def train(place: Place, mib: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of step: forward, backward and update, and what a refit adds to it."""
    rows = ROWS // place.size
    live = {name: torch.randn(rows, ROWS) * 0.01 for name in weights(mib)}
    data = torch.randn(64, ROWS)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    version = 0

    def step() -> None:
        for tensor in live.values():
            tensor.requires_grad_()
            (data @ tensor.T).square().mean().backward()

    def update() -> None:
        with torch.no_grad():
            for tensor in live.values():
                tensor -= 0.01 * tensor.grad
                tensor.grad = None

    with place.join("source", place.folder / "train.yaml", None, timeout=60) as session:
        session.bind(live)
        for turn in range(ROUNDS + 2):
            for kind in KINDS:
                began = time.perf_counter()
                handle = None
                if kind == "blocking":
                    session.refit(version := version + 1)
                elif kind != "alone":
                    handle = session.refit_async(version := version + 1, until=kind)
                step()
                if handle is not None:
                    handle.wait_released()
                update()
                if turn >= 2:
                    seconds[kind].append(time.perf_counter() - began)
                if handle is not None:
                    handle.wait()
    return seconds


def take(place: Place, mib: int) -> None:
    """Take every version."""
    live = {name: torch.zeros(ROWS, ROWS // place.size) for name in weights(mib)}
    with place.join("destination", None, place.folder / "infer.yaml", timeout=60) as session:
        session.bind(live)
        while session.refit() is not None:
            pass


def steps(mib: int) -> None:
    """Measure the step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_yaml(folder / "model.yaml", model_document(weights(mib)))
        for job, dim in (("train", 0), ("infer", 1)):
            rules = [{"match": "*", "place": {"tp": f"shard({dim})"}}]
            own = {"name": job, "model": "model.yaml", "ranks": 2, "domain": 2, "meshes": {"all": {"tp": 2}}}
            write_yaml(folder / f"{job}.yaml", {**own, "tensors": rules})
        with jobs(folder) as started:
            started.start("train", 2, train, mib)
            started.start("infer", 2, take, mib)
            found = started.all_well(240)
    print(
        f"{mib} MiB, 2 + 2 ranks on {os.cpu_count()} cores, medians of {ROUNDS} (least to most), slower rank"
    )
    for kind in KINDS:
        slower = [max(pair) for pair in zip(found["train", 0][kind], found["train", 1][kind], strict=True)]
        median = statistics.median(slower)
        print(f"  step {kind:9} {median:.4f} s ({min(slower):.4f} to {max(slower):.4f})", flush=True)


def send_in_a_loop(place: Place, count: int, looks: list[int]) -> list[dict[str, float]]:
    live = held(whole(0), 0, place.size, place.rank)
    seen = []
    with place.join("source", place.folder / "train.yaml", None, verify=True) as session:
        session.bind(live)
        recent: list[float] = []
        for version in range(1, count + 1):
            live.update(held(whole(version), 0, place.size, place.rank))
            began = time.perf_counter()
            session.refit(version)
            recent = [*recent[-29:], time.perf_counter() - began]
            if version in looks:
                seen.append({**grown(), "seconds": statistics.median(recent)})
    return seen


def take_in_a_loop(place: Place, count: int, looks: list[int]) -> list[dict[str, float]]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    seen: list[dict[str, float]] = []
    with place.join("destination", None, place.folder / "infer.yaml", verify=True) as session:
        session.bind(live)
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            if version in looks:
                seen.append(dict(grown()))
    assert session.version == count
    return seen


def loop(count: int) -> None:
    """Measure the long loop."""
    looks = [50, count]
    with tempfile.TemporaryDirectory() as name:
        documents(Path(name), 2, 2)
        with jobs(Path(name)) as started:
            started.start("train", 2, send_in_a_loop, count, looks)
            started.start("infer", 2, take_in_a_loop, count, looks)
            found = started.all_well(300)
    for (job, rank), seen in found.items():
        for look, values in zip(looks, seen, strict=True):
            shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            print(f"  {job} {rank} at refit {look}: {shown}", flush=True)


def main() -> None:
    given = [int(one) for one in sys.argv[1:]]
    mib, count = [*given, *(64, 500)[len(given) :]]
    steps(mib)
    loop(count)


if __name__ == "__main__":
    main()
