"""Jobs on an emulated cluster of two nodes, the source's and the destination's, one of whose NICs fails: for tests.

A NIC that fails is set down; one that stalls is set up again seconds later, with its address and its route. The
control network between the nodes goes on, so that it is a case of its own whether the gate is behind the NIC.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from reshard_cli.transport.emulated import NIC, _enter
from reshard_cli.transport.emulated_guard import find_tool
from tests.refit.joined_harness import Case, Seam, rank_process

__all__ = ["NetworkCase", "Nic", "cut", "rank_on_node"]


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC that fails: the namespace of its node, and the seconds after which it is back (None: never)."""

    namespace: str
    stall: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCase(Case):
    """A case of joined jobs, whose fault (`what` is "nic") befalls a NIC when a rank comes to the point."""

    nodes: tuple[str, ...]
    nic: Nic


def cut(nic: Nic, marker: Path) -> None:
    """Set a NIC down, and up again if it only stalls; write down when."""
    ip, name = find_tool("ip") or "ip", nic.namespace
    marker.write_text(str(time.time()))
    subprocess.run([ip, "-n", name, "link", "set", NIC, "down"], check=True)
    if nic.stall is not None:
        subprocess.Popen(["sh", "-c", f"sleep {nic.stall}; {ip} -n {name} link set {NIC} up"])


def rank_on_node(case: NetworkCase, job: str, rank: int) -> None:
    """Be a rank of a joined job on its node."""
    nodes = len(case.nodes) // 2
    _enter(case.nodes[(0 if job == "train" else nodes) + rank % nodes])
    os.environ["GLOO_SOCKET_IFNAME"] = NIC
    Seam.befall = lambda seam, fault: cut(case.nic, case.folder / "fault")  # type: ignore[method-assign]
    rank_process(case, job, rank)
