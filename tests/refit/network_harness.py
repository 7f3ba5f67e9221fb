"""Jobs on an emulated cluster, the source's nodes and the destination's, one of whose NICs fails: for tests.

A NIC that fails is set down; one that stalls is set up again seconds later, and has its address and its route again.
The control network between the nodes goes on: whether the gate (or the store) is behind the NICs is a case of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard_cli.cli.main import main as command_line
from reshard_cli.transport.emulated import NIC, EmulatedCluster, _enter
from reshard_cli.transport.emulated_guard import find_tool
from tests.refit.joined_harness import CONTEXT, Case, Fault, Outcome, Seam, rank_process, run_case
from tests.support import model_document, write_yaml

__all__ = ["CONTROL", "DATA", "NetworkCase", "Programs", "listening", "programs", "run_on_nodes"]

CONTROL, DATA = "10.78.0.1", "10.77.0.1"  # the first node, by the control network and by its NIC
WITHIN = 5.0  # seconds beyond the timeout in which everybody has ended
IP = find_tool("ip") or "ip"
NAMED = re.compile(r"(train|infer) \d.*\(last: ")


# ---- joined jobs through the library --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCase(Case):
    """A case of joined jobs whose fault befalls a NIC, the one of the namespace `down`."""

    nodes: tuple[str, ...]
    down: str


def rank_on_node(case: NetworkCase, job: str, rank: int) -> None:
    """Be a rank of a joined job on its node: the source has the first half of the nodes."""
    half = len(case.nodes) // 2
    _enter(case.nodes[(0 if job == "train" else half) + rank % half])
    os.environ["GLOO_SOCKET_IFNAME"] = NIC

    def befall(seam: Seam, fault: Fault) -> None:
        set_nic(case.down, "down")
        (case.folder / "fault").write_text(str(time.time()))

    Seam.befall = befall  # type: ignore[method-assign]
    rank_process(case, job, rank)


def run_on_nodes(case: NetworkCase) -> Outcome:
    """Run both jobs on their nodes; hold the promises against what came of it."""
    outcome = run_case(case, WITHIN, rank_on_node, left_on_nodes)
    for name, told in outcome.ranks.items():
        if told is None or outcome.fault_at is None:
            continue
        if told["error"] and not NAMED.search(told["error"]) and "train 0 has closed" not in told["error"]:
            outcome.problems.append(f"{name} names nobody with a phase: {told['error']}")
        if told["ended"] - outcome.fault_at > case.timeout + WITHIN:
            outcome.problems.append(f"{name} closed after {told['ended'] - outcome.fault_at:.1f} s")
    return outcome


def left_on_nodes(case: NetworkCase) -> list[str]:
    """Return what still runs or listens on the nodes when everybody has to have ended."""
    marker = case.folder / "fault"
    since = float(marker.read_text()) if marker.exists() else time.time()
    return wait_for_nothing(case.nodes, since + case.timeout + WITHIN - time.time())


def wait_for_nothing(nodes: tuple[str, ...], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while True:
        running = [pid for name in nodes for pid in _told("netns", "pids", name).split()]
        left = [f"process {pid} runs still" for pid in running] + listening(nodes)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def listening(nodes: tuple[str, ...]) -> list[str]:
    """Return who listens in these namespaces."""
    found = []
    for name in nodes:
        lines = _told("netns", "exec", name, "cat", "/proc/net/tcp").splitlines()[1:]
        found += [f"{name} listens at {line.split()[1]}" for line in lines if line.split()[3] == "0A"]
    return found


def _told(*arguments: str) -> str:
    return subprocess.run([IP, *arguments], capture_output=True, text=True, check=True).stdout


def set_nic(namespace: str, state: str) -> None:
    subprocess.run([IP, "-n", namespace, "link", "set", NIC, state], check=True)


# ---- programs on the command line -----------------------------------------------------------------


def program(arguments: list[str], namespace: str, environment: dict[str, str], errors: Path) -> None:
    """Be the command line on a node, in a process group of its own."""
    os.setsid()
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    _enter(namespace)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = ["reshard-cli", *arguments]
    command_line()


@dataclass(slots=True)
class Programs:
    """What runs on a cluster, by name; and when a NIC was set down."""

    cluster: EmulatedCluster
    folder: Path
    running: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0

    def start(self, name: str, node: int, *flags: object, environment: dict[str, str] | None = None) -> None:
        """Start a refit on a node."""
        documents = (self.folder / "train.yaml", self.folder / "infer.yaml")
        arguments = ["refit", *map(str, (*documents, *flags))]
        variables = self.cluster.environment(node) | (environment or {})
        place = self.cluster.nodes[node].name
        # forked from a process that has torch: several that start at once would be long at it
        self.running[name] = CONTEXT.Process(
            target=program, args=(arguments, place, variables, self.folder / f"{name}.errors")
        )
        self.running[name].start()

    def start_jobs(self, gate: str, timeout: float, source: tuple[object, ...] = ()) -> None:
        """Start two jobs that join, on a node each."""
        (self.folder / "token").write_text("a secret\n")
        common = ("--token-file", self.folder / "token", "--timeout", timeout, "--verify")
        for node, role, more in ((0, "source", source), (1, "destination", ())):
            lines = ("--lines", self.folder / f"{role}.lines")
            self.start(role, node, "--join", f"{gate}:29600", "--role", role, *common, *lines, *more)

    def start_world(self, store: str, timeout: float, *flags: object) -> None:
        """Start one refit of four ranks as torchrun does, two on each node."""
        for rank in range(4):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2),
                "MASTER_ADDR": store, "MASTER_PORT": "29500",
            }  # fmt: skip
            lines = ("--lines", self.folder / "source.lines", "--timeout", timeout, "--verify")
            self.start(f"rank {rank}", rank // 2, *lines, *flags, environment=environment)

    def cut(self, node: int, *, after: int = 2, stall: float | None = None) -> None:
        """Set a node's NIC down in the middle of a refit when some were done; and up again after a stall."""
        deadline = time.monotonic() + 60
        while len(self.lines("source")) < after and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.lines("source")) >= after, "the refits did not begin"
        time.sleep(0.3)
        name = self.cluster.nodes[node].name
        set_nic(name, "down")
        self.since = time.monotonic()
        if stall is not None:
            time.sleep(stall)
            set_nic(name, "up")

    def lines(self, role: str) -> list[dict[str, object]]:
        """Return what a job's first rank told of its refits."""
        path = self.folder / f"{role}.lines"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in whole]

    def ended(self, seconds: float) -> dict[str, tuple[int, str]]:
        """Return the exit code and the errors of each, when all have ended; those that did not are not in it."""
        deadline = self.since + seconds
        for one in self.running.values():
            one.join(max(0.0, deadline - time.monotonic()))
        ended = {name: one.exitcode for name, one in self.running.items() if not one.is_alive()}
        return {name: (code, (self.folder / f"{name}.errors").read_text()) for name, code in ended.items()}

    def left(self, seconds: float) -> list[str]:
        """Return what runs or listens so many seconds after the cut."""
        names = tuple(node.name for node in self.cluster.nodes)
        return wait_for_nothing(names, self.since + seconds - time.monotonic())


@contextlib.contextmanager
def programs(cluster: EmulatedCluster, folder: Path) -> Iterator[Programs]:
    """Write documents of two jobs of two ranks, whose refit takes a second; end all that was started."""
    tensors = {f"{number}.weight": ((1024, 1024), "float32") for number in range(4)}
    write_yaml(folder / "model.yaml", model_document(tensors))
    job = {"model": "model.yaml", "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}}}
    for name, dim in (("train", 0), ("infer", 1)):
        rules = [{"match": "*", "place": {"tp": f"shard({dim})"}}]
        write_yaml(folder / f"{name}.yaml", {"name": name, **job, "tensors": rules})
    started = Programs(cluster, folder)
    try:
        yield started
    finally:
        for one in started.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.kill()  # where it was not a group of its own yet
            one.join()
