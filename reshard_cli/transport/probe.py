"""A hardware profile measured on the spot: this machine's memory and its loopback network, in a second.

What is measured is copies in memory and plain TCP between two threads: what CPU ranks on one machine cannot
beat. It is no measurement of a refit.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time

import numpy as np

from reshard_cli.spec.hardware_profile import Hardware

__all__ = ["measured_cpu"]

_COPIED = 64 << 20
_SENT = 128 << 20
_CHUNK = 1 << 20
_PINGS = 200
_TIMEOUT = 20.0


def measured_cpu() -> Hardware:
    """Return the profile `cpu`: rates of this machine as they are now. Takes about a second."""
    network, latency = _loopback()
    return Hardware(
        name="cpu",
        nic=network,
        nic_achieved=network,
        nvlink=network,
        memory=_memory(),
        launch=latency,
        message=latency,
        tensor=latency,
    )


def _memory() -> float:
    """Return the bytes per second of a copy, reads and writes together: the median of five."""
    origin, target = np.ones(_COPIED, np.uint8), np.zeros(_COPIED, np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, origin)
        seconds.append(time.perf_counter() - began)
    return 2 * _COPIED / statistics.median(seconds)


def _loopback() -> tuple[float, float]:
    """Return (bytes per second, seconds of one way) of TCP between two threads of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT)
        echo = threading.Thread(target=_echo, args=(server,), daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname()[:2], timeout=_TIMEOUT) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(_PINGS):
                began = time.perf_counter()
                peer.sendall(b"p")
                peer.recv(1)
                trips.append(time.perf_counter() - began)
            chunk = memoryview(bytearray(_CHUNK))
            rates = []
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(_SENT // _CHUNK // 3):
                    peer.sendall(chunk)
                peer.recv(1)
                rates.append(_SENT // _CHUNK // 3 * _CHUNK / (time.perf_counter() - began))
        echo.join(_TIMEOUT)
    return statistics.median(rates), statistics.median(trips) / 2


def _echo(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        peer.settimeout(_TIMEOUT)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            peer.recv(1)
            peer.sendall(b"p")
        buffer = memoryview(bytearray(_CHUNK))
        for _ in range(3):
            left = _SENT // _CHUNK // 3 * _CHUNK
            while left:
                left -= peer.recv_into(buffer, min(left, _CHUNK))
            peer.sendall(b"p")
