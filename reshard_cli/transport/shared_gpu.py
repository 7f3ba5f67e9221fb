"""Whether ranks that share a GPU can: NCCL refuses it before 2.30, and later unless a variable allows it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from reshard_cli.errors import DocumentError
from reshard_cli.transport.store import Store

__all__ = ["check_shared_gpu", "sharing_fault"]

_ENABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST = (2, 30)


def sharing_fault(version: tuple[int, ...], environment: Mapping[str, str]) -> str | None:
    """Say why several ranks cannot share a GPU with this NCCL, or None where they can."""
    if version[:2] < _FIRST:
        shown = ".".join(str(part) for part in version)
        return f"NCCL {shown} cannot (2.30 can); give each rank a GPU of its own, or --backend gloo"
    if environment.get(_ENABLE) != "1":
        return f"NCCL does so only with {_ENABLE}=1 in the environment of every rank"
    return None


def check_shared_gpu(store: Store, rank: int) -> None:
    """Raise DocumentError where this rank shares its GPU with another and NCCL cannot.

    Each rank claims its GPU in the store; a GPU that another rank has claimed is shared.
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    first = int(store.compare_set(f"gpu/{gpu}", "", str(rank)).decode())
    if first == rank:
        return
    fault = sharing_fault(torch.cuda.nccl.version(), os.environ)  # type: ignore[no-untyped-call]
    if fault is not None:
        raise DocumentError(f"ranks {first} and {rank} share GPU {gpu}: {fault}")
