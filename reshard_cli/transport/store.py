"""The job's key-value store: torch's TCPStore, by the few calls that are used here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from reshard_cli.errors import TransferError

__all__ = ["Store", "connect_store", "prefixed", "serve_store"]


class Store(Protocol):
    """What is asked of a store. Values come back as bytes."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...


def connect_store(host: str, port: int, timeout: float, *, serve: bool = False) -> Store:
    """Return a client of the job's store (or its server). Raises TransferError where nobody answers."""
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=serve, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise TransferError(
            f"no store at {host}:{port} within {timeout:g} s (is rank 0's host up?)"
        ) from error
    return store


def serve_store(listening: int, port: int, timeout: float) -> Store:
    """Serve a store on this machine over a socket that already listens (its file descriptor)."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False,
        master_listen_fd=listening,
    )  # fmt: skip
    return store


def prefixed(prefix: str, store: Store) -> Any:
    """Return torch's view of the store with all keys under a prefix, for a process group."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined,arg-type]
