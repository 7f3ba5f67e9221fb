"""Several destination jobs on one source, at once and one after the other: `python -m tests.benchmarks.several [JOBS]`.

Each rank is a node of its own on an emulated cluster (root, iproute2): four of the source, and JOBS jobs of one rank,
an engine each, that take the whole model. The two ways take turns in one run, on the same connections.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from reshard_cli.transport.emulated import NIC, EmulatedCluster, _enter, parse_rate
from tests.refit.live_jobs import Place, jobs
from tests.refit.network_harness import CONTROL
from tests.support import model_document, write_yaml

SOURCES = 4
RATE = "200mbit"
MIB, ROWS = 32, 1024
ROUNDS = 7
WAYS = {"one after the other": 1, "at once": 8}


def weights() -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the whole model: square layers of 4 MiB."""
    return {f"layers.{index}.weight": ((ROWS, ROWS), "float32") for index in range(MIB // 4)}


def on_node(place: Place, name: str) -> Place:
    """Go to a node, and use its NIC; return where the gate is from there."""
    _enter(name)
    os.environ["GLOO_SOCKET_IFNAME"] = NIC
    return replace(place, host=CONTROL)


def send(place: Place, nodes: list[str], count: int) -> dict[str, list[float]]:
    """Return the seconds of a refit of all jobs, each way."""
    place = on_node(place, nodes[place.rank])
    live = {name: torch.randn(ROWS // place.size, ROWS) for name in weights()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with place.join("source", place.folder / "train.yaml", None, timeout=60) as session:
        session.bind(live)
        for number in range(count):
            place.wait_for(f"here-{number}", 60)
        version = 0
        for turn in range(ROUNDS + 1):
            for way, most in WAYS.items():
                assert session._source is not None
                session._source._lanes._most = most
                began = time.perf_counter()
                session.refit(version := version + 1)
                if turn:
                    seconds[way].append(time.perf_counter() - began)
                assert turn == 0 or len(session._source.sessions) == count
    return seconds


def take(place: Place, nodes: list[str], number: int) -> int:
    """Take every version."""
    place = on_node(place, nodes[SOURCES + number])
    live = {name: torch.zeros(ROWS, ROWS) for name in weights()}
    with place.join("destination", None, place.folder / "infer.yaml", timeout=60) as session:
        session.bind(live)
        place.mark(f"here-{number}")
        while session.refit() is not None:
            pass
        return session.version or 0


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    rate = parse_rate(RATE)
    with tempfile.TemporaryDirectory() as name, EmulatedCluster(SOURCES + count, 1, rate) as cluster:
        folder = Path(name)
        write_yaml(folder / "model.yaml", model_document(weights()))
        for job, ranks in (("train", SOURCES), ("infer", 1)):
            rules = [{"match": "*", "place": {"tp": "shard(0)"}}]
            own = {
                "name": job,
                "model": "model.yaml",
                "ranks": ranks,
                "domain": 1,
                "meshes": {"all": {"tp": ranks}},
            }
            write_yaml(folder / f"{job}.yaml", {**own, "tensors": rules})
        nodes = [node.name for node in cluster.nodes]
        with jobs(folder) as started:
            started.start("train", SOURCES, send, nodes, count)
            for number in range(count):
                started.start(f"infer-{number}", 1, take, nodes, number)
            found = started.all_well(400)
    limit = max(1.0, count / SOURCES) * (MIB << 20) / rate
    print(
        f"{SOURCES} source ranks to {count} jobs of one rank, {MIB} MiB each, NICs of {RATE}, medians of {ROUNDS}"
    )
    print(f"  limit               {limit:.3f} s (bound over the NICs' rate)")
    for way in WAYS:
        slowest = [
            max(each) for each in zip(*(found["train", rank][way] for rank in range(SOURCES)), strict=True)
        ]
        median = statistics.median(slowest)
        print(f"  {way:19} {median:.3f} s ({min(slowest):.3f} to {max(slowest):.3f})", flush=True)


if __name__ == "__main__":
    main()
