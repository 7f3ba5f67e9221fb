"""An emulated cluster on one machine: for measuring a refit where there is no network to measure it on.

A network namespace is a node, a veth pair its NIC, a bridge in a namespace of its own the switch, and
loopback inside a namespace NVLink. Both ends of a veth pair are shaped (`tc tbf`): the node's limits what it
sends, the switch's what it receives. A second, unshaped pair per node carries the job's store, as a
management network does, so that the NICs carry and count the ranks' data and nothing else. It needs Linux,
root and iproute2. `launch_emulated` is the launcher whose ranks sit on such nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from reshard_cli.errors import DocumentError
from reshard_cli.transport import emulated_guard
from reshard_cli.transport.emulated_guard import NAMESPACES, find_tool, namespace_names, remove_namespaces
from reshard_cli.transport.launcher import World, launch

__all__ = [
    "EmulatedCluster",
    "Node",
    "launch_emulated",
    "parse_cluster",
    "parse_rate",
    "remove_leftovers",
    "why_unavailable",
]

NIC = "nic0"
_MTU = 9000  # jumbo frames, as training clusters have: headers take 0.7 % of the rate
_BURST_SECONDS = 0.002  # how much of the rate a NIC may make up for after it was idle
_QUEUE_SECONDS = 0.1  # deep enough that no flow loses packets, as InfiniBand's flow control sees to
_MIN_QUEUE = 1 << 20
_MAX_NODES = 250
_STORE_HOST = "10.78.255.254"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE_LIMITS = (125_000, 12_500_000_000)  # 1mbit to 100gbit
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
_SERIAL = itertools.count()
_OWNED = re.compile(r"rsh(\d+)\.\d+-")  # how a cluster's namespaces start: with its maker's process id


def parse_cluster(text: str) -> tuple[int, int]:
    """Return (nodes, ranks per node) of a text as `4x2`. Raises DocumentError."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text.strip().lower())
    if found is None:
        raise DocumentError(
            f"emulated cluster {text!r}: write NODESxRANKS, as 4x2 for 4 nodes of 2 ranks each"
        )
    num_nodes, ranks_per_node = int(found[1]), int(found[2])
    _check_nodes(num_nodes, ranks_per_node)
    return num_nodes, ranks_per_node


def parse_rate(text: str) -> int:
    """Return the bytes per second of a rate as `100mbit`, `1gbit` or `2.5gbit`. Raises DocumentError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if found is None:
        raise DocumentError(
            f"rate {text!r}: write a number and kbit, mbit or gbit (a second), as 100mbit, 1gbit or 2.5gbit"
        )
    rate = round(float(found[1]) * _UNITS[found[2]] / 8)
    _check_rate(rate, text)
    return rate


def _check_nodes(num_nodes: int, ranks_per_node: int) -> None:
    if not 1 <= num_nodes <= _MAX_NODES or ranks_per_node < 1:
        raise DocumentError(
            f"emulated cluster {num_nodes}x{ranks_per_node}: it can have 1 to {_MAX_NODES} nodes, "
            "each of at least 1 rank"
        )


def _check_rate(rate: float, text: str) -> None:
    if not _RATE_LIMITS[0] <= rate <= _RATE_LIMITS[1]:
        raise DocumentError(f"rate {text!r}: a NIC can be emulated from 1mbit to 100gbit")


def why_unavailable() -> str | None:
    """Return what this machine or process lacks for an emulated cluster, or None if nothing is known to."""
    if sys.platform != "linux":
        return "it needs Linux network namespaces"
    lacking = [name for name in ("ip", "tc") if find_tool(name) is None]
    if lacking:
        return f"it needs iproute2 (no {' and no '.join(lacking)} found): apt-get install iproute2"
    if os.geteuid() != 0:
        return "it needs root (network namespaces and traffic shaping): use sudo"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    missing = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return f"this root lacks {' and '.join(missing)}: start the container with --privileged"
    return None


def remove_leftovers() -> list[str]:
    """Remove the clusters whose makers are dead; return the names of the namespaces removed."""
    makers = {match[0]: int(match[1]) for name in namespace_names("rsh") if (match := _OWNED.match(name))}
    removed = []
    for prefix, maker in makers.items():
        if not Path(f"/proc/{maker}").exists():
            removed += namespace_names(prefix)
            remove_namespaces(prefix)
    return removed


@dataclass(frozen=True, slots=True)
class Node:
    """A node: the name of its network namespace (and host), its NIC's address and interface in there."""

    name: str
    address: str
    interface: str


class EmulatedCluster:
    """Nodes that exist from construction until `remove`, the end of the `with` block, or of this process.

    `hub` is the namespace of the switch; programs in it and on the nodes reach it as `store_host`.
    """

    store_host = _STORE_HOST

    def __init__(self, num_nodes: int, ranks_per_node: int, rate_bytes_per_second: float) -> None:
        """Make the namespaces and NICs; the rate is each NIC's, in each direction, on Ethernet's level.

        Raises DocumentError where a number is out of range or this machine cannot do it.
        """
        _check_nodes(num_nodes, ranks_per_node)
        _check_rate(rate_bytes_per_second, f"{rate_bytes_per_second * 8 / 1e6:g}mbit")
        reason = why_unavailable()
        if reason is not None:
            raise DocumentError(f"an emulated cluster cannot be made here: {reason}")
        remove_leftovers()
        self.ranks_per_node = ranks_per_node
        self.rate = round(rate_bytes_per_second)
        self._maker = os.getpid()
        self._prefix = f"rsh{self._maker}.{next(_SERIAL)}-"
        self.hub = f"{self._prefix}hub"
        self.nodes = tuple(
            Node(f"{self._prefix}{node}", f"10.77.0.{node + 1}", NIC) for node in range(num_nodes)
        )
        self._counters: list[int] = []  # /proc/net/dev of each node, opened in there
        self._guard = subprocess.Popen(
            [sys.executable, "-I", emulated_guard.__file__, self._prefix, str(self._maker)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._build()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _build(self) -> None:
        _make_namespace(self.hub)
        bridge = "type bridge forward_delay 0 mcast_snooping 0"
        _batch("ip", self.hub, [
            f"link add switch mtu {_MTU} {bridge}", "link set switch up",
            f"link add control {bridge}", f"address add {_STORE_HOST}/16 dev control", "link set control up",
        ])  # fmt: skip
        for number, node in enumerate(self.nodes):
            _make_namespace(node.name)
            _batch("ip", self.hub, [
                f"link add node{number} mtu {_MTU} type veth peer name {NIC} mtu {_MTU} netns {node.name}",
                f"link set node{number} master switch up",
                f"link add control{number} type veth peer name control netns {node.name}",
                f"link set control{number} master control up",
            ])  # fmt: skip
            _batch("ip", node.name, [
                f"address add {node.address}/16 dev {NIC}", f"link set {NIC} up",
                f"address add 10.78.0.{number + 1}/16 dev control", "link set control up",
            ])  # fmt: skip
            _batch("tc", self.hub, [f"qdisc add dev node{number} root {self._shaper()}"])
            _batch("tc", node.name, [f"qdisc add dev {NIC} root {self._shaper()}"])
            with _inside(node.name):
                self._counters.append(os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC))

    def _shaper(self) -> str:
        burst = max(round(self.rate * _BURST_SECONDS), 2 * _MTU)
        queue = max(round(self.rate * _QUEUE_SECONDS), _MIN_QUEUE)
        return f"tbf rate {8 * self.rate}bit burst {burst} limit {queue}"

    def command(self, node: int) -> list[str]:
        """Return the words to put before a command so that it runs on this node (by number)."""
        return [find_tool("ip") or "ip", "netns", "exec", self.nodes[node].name]

    def environment(self, node: int) -> dict[str, str]:
        """Return the variables that a program on this node needs: which interface is the NIC."""
        return {"GLOO_SOCKET_IFNAME": self.nodes[node].interface}

    def inside(self, node: int | None) -> contextlib.AbstractContextManager[None]:
        """Put the calling thread on this node, or in the hub (None): sockets that it makes belong there."""
        return _inside(self.hub if node is None else self.nodes[node].name)

    def counters(self) -> dict[str, tuple[int, int]]:
        """Return (bytes sent, bytes received) so far by each node's NIC, by the node's name.

        These are the kernel's own counts, headers and retransmissions included; what ranks of one node send
        each other is not in them. Ranks may ask too. It costs one read of an open file per node.
        """
        return {
            node.name: _read_counters(opened, node.interface)
            for node, opened in zip(self.nodes, self._counters, strict=True)
        }

    def remove(self) -> None:
        """End what still runs on the nodes, and remove them. Does nothing in another process or twice.

        Raises OSError where a namespace cannot be removed.
        """
        if os.getpid() != self._maker or self._guard.stdin is None or self._guard.stdin.closed:
            return
        while self._counters:
            os.close(self._counters.pop())
        remove_namespaces(self._prefix, [self._maker])
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the guard: nothing is left for it
            self._guard.stdin.write(b"!")
            self._guard.stdin.close()
        self._guard.wait()


def launch_emulated(
    cluster: EmulatedCluster, num_ranks: int, timeout: float, run: Callable[[World], int]
) -> int:
    """As `launch`, with rank r on node r // ranks per node, under that node's host name and environment.

    Raises DocumentError where the cluster has too few ranks.
    """
    room = len(cluster.nodes) * cluster.ranks_per_node
    if num_ranks > room:
        raise DocumentError(
            f"emulated cluster {len(cluster.nodes)}x{cluster.ranks_per_node}: it has {room} ranks, "
            f"the documents need {num_ranks}"
        )

    def enter(rank: int) -> None:
        node = rank // cluster.ranks_per_node
        _enter(cluster.nodes[node].name)
        _call("unshare", _CLONE_NEWUTS)
        socket.sethostname(cluster.nodes[node].name)
        os.environ.update(cluster.environment(node))

    with cluster.inside(None):
        return launch(num_ranks, timeout, run, host=cluster.store_host, enter=enter)


def _run(tool: str, arguments: list[str], commands: Sequence[str] = ()) -> None:
    """Run `ip` or `tc`, with commands on its standard input. Raises DocumentError with what it says."""
    done = subprocess.run(
        [find_tool(tool) or tool, *arguments],
        input="".join(f"{command}\n" for command in commands),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise DocumentError(
            f"an emulated cluster cannot be made here: {tool} {'; '.join(commands) or ' '.join(arguments)}: "
            f"{reason}\n"
            "It needs network namespaces, and veth, bridge and tbf in the kernel."
        )


def _batch(tool: str, namespace: str, commands: Sequence[str]) -> None:
    _run(tool, ["-n", namespace, "-batch", "-"], commands)


def _make_namespace(name: str) -> None:
    """Make a namespace in which nobody talks unasked, and no transfer remembers how the last one went."""
    _run("ip", ["netns", "add", name])
    with _inside(name):
        Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1", encoding="ascii")
        for kind in ("all", "default"):
            ipv6 = Path(f"/proc/sys/net/ipv6/conf/{kind}/disable_ipv6")
            if ipv6.exists():
                ipv6.write_text("1", encoding="ascii")
    _batch("ip", name, ["link set lo up"])


def _call(function: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not offer. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _enter(namespace: str) -> None:
    """Move the calling thread, and threads and processes that it starts, into a network namespace."""
    opened = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", opened, _CLONE_NEWNET)
    finally:
        os.close(opened)


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Move the calling thread into a network namespace, and back."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(namespace)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


def _read_counters(opened: int, interface: str) -> tuple[int, int]:
    parts = []
    offset = 0
    while part := os.pread(opened, 1 << 16, offset):
        parts.append(part)
        offset += len(part)
    for line in b"".join(parts).decode("ascii").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            received, sent = int(values.split()[0]), int(values.split()[8])
            return sent, received
    raise OSError(f"no interface {interface} on its node any more")
