"""Bytes really sent and taken by this host's network interfaces, as the kernel and the InfiniBand ports count them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["network_counters"]

_NAMED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_INFINIBAND = Path("/sys/class/infiniband")


def network_counters() -> dict[str, tuple[int, int]]:
    """Return (bytes sent, bytes received) so far by interface, headers and retransmissions included.

    Interfaces are those of this process's network namespace but for loopback, or just those that the
    transports' environment variables name; and the ports of InfiniBand adapters.
    """
    named = {part for name in _NAMED for part in os.environ.get(name, "").strip("=^").split(",") if part}
    found = {}
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        interface, _, numbers = line.partition(":")
        interface = interface.strip()
        if interface != "lo" and (not named or interface in named):
            columns = numbers.split()
            found[interface] = (int(columns[8]), int(columns[0]))
    if _INFINIBAND.is_dir():
        for port in sorted(_INFINIBAND.glob("*/ports/*/counters")):
            # counted in words of four bytes
            words = [int((port / f"port_{way}_data").read_text()) for way in ("xmit", "rcv")]
            found[f"{port.parts[-4]}/{port.parts[-2]}"] = (4 * words[0], 4 * words[1])
    return found
