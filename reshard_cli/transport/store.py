"""The job's key-value store, by the few calls that are used here: torch's TCPStore, or a gate's (see `gate_client`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from reshard_cli.errors import TransferError

__all__ = ["Prefixed", "Store", "TorchStore", "connect_store", "serve_store"]

_POLL = 0.01


class Store(Protocol):
    """What is asked of a store. Values come back as bytes."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...

    def wait_keys(self, keys: Sequence[str], unless: Sequence[str], seconds: float) -> list[str]:
        """Wait until all keys are there, one of `unless` is, or so many seconds passed; return those that lack."""
        ...

    def for_groups(self, prefix: str) -> Any:
        """Return torch's view of the store with all keys under a prefix, for a process group."""
        ...


class TorchStore:
    """A store of torch's own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return bytes(self._inner.compare_set(key, expected, value))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def wait_keys(self, keys: Sequence[str], unless: Sequence[str], seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        pause = 0.0002
        lacking = list(keys)
        while True:
            lacking = [key for key in lacking if not self.check([key])]
            if not lacking or any(self.check([key]) for key in unless) or time.monotonic() > deadline:
                return lacking
            time.sleep(pause)
            pause = min(_POLL, pause * 2)

    def for_groups(self, prefix: str) -> Any:
        return dist.PrefixStore(prefix, self._inner)  # type: ignore[attr-defined]


class Prefixed:
    """A store's keys under a prefix, as a store."""

    def __init__(self, inner: Store, prefix: str) -> None:
        self._inner = inner
        self.prefix = prefix

    def set(self, key: str, value: str) -> None:
        self._inner.set(self.prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self.prefix + key)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self.prefix + key for key in keys])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._inner.compare_set(self.prefix + key, expected, value)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(self.prefix + key)

    def wait_keys(self, keys: Sequence[str], unless: Sequence[str], seconds: float) -> list[str]:
        names = [self.prefix + key for key in keys]
        lacking = self._inner.wait_keys(names, [self.prefix + key for key in unless], seconds)
        return [key.removeprefix(self.prefix) for key in lacking]

    def for_groups(self, prefix: str) -> Any:
        return self._inner.for_groups(self.prefix + prefix)


def connect_store(host: str, port: int, timeout: float, *, serve: bool = False) -> Store:
    """Return a client of the job's store (or its server). Raises TransferError where nobody answers."""
    try:
        inner = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=serve, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise TransferError(
            f"no store at {host}:{port} within {timeout:g} s (is rank 0's host up?)"
        ) from error
    return TorchStore(inner)


def serve_store(listening: int, port: int, timeout: float) -> Store:
    """Serve a store on this machine over a socket that already listens (its file descriptor)."""

    def served(**more: Any) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False,
            master_listen_fd=listening, **more,
        )  # fmt: skip

    try:
        return TorchStore(served())
    except RuntimeError:  # the libuv server of torch 2.6 takes no socket that listens already
        return TorchStore(served(use_libuv=False))
