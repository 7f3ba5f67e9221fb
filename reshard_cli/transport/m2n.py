"""Calls NCCL M2N (`nccl.m2n`, package nccl-extensions), which moves one tensor between two meshes of GPUs.

Every rank of the communicator makes every call, in one order, also for tensors in which it has no part. Written from
the package's 0.1.0 sources and tested with a module that stands for it; it was never run on GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reshard_cli.errors import DocumentError, PeerLostError, first_line
from reshard_cli.plan.m2n import M2nClass
from reshard_cli.transport.nccl import wait_until

__all__ = ["M2n", "m2n_arguments", "m2n_fault"]

_MODULE = "nccl.m2n"
_OLDEST_NCCL = (2, 30, 5)  # nccl_m2n.h, NCCL_M2N_MIN_NCCL_VERSION_CODE


def m2n_fault() -> str | None:
    """Say what this process lacks to use NCCL M2N, or None."""
    try:
        importlib.import_module(_MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return f"the package nccl-extensions is not installed, or does not load ({first_line(error)})"
    if torch.cuda.is_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < _OLDEST_NCCL:
            shown, oldest = (".".join(map(str, one)) for one in (version, _OLDEST_NCCL))
            return f"NCCL M2N needs NCCL {oldest}, torch has {shown}"
    return None


def m2n_arguments(one: M2nClass, module: Any) -> dict[str, Any]:
    """Return the keyword arguments of `nccl.m2n.reshard` for a tensor, but for its handle; the same on every rank.

    Shapes and dtypes are given for both sides, as a rank that has no part in a side cannot tell them by a buffer.
    """
    found: dict[str, Any] = {}
    for name, side in (("src", one.source), ("dst", one.destination)):
        cut, whole = module.Shard(side.dim), module.Replicate()
        found[f"{name}_mesh"] = module.Mesh(side.mesh, start_rank=side.start)
        found[f"{name}_placements"] = [cut if axis == side.axis else whole for axis in range(2)]
        found[f"{name}_local_shape"] = side.local_shape(one.shape)
        found[f"{name}_dtype"] = one.dtype
    return found


class M2n:
    """NCCL M2N on one communicator of all ranks, from this rank's current stream of its device."""

    def __init__(
        self, communicator: Any, device: torch.device, timeout: float, check: Callable[[], None]
    ) -> None:
        """`communicator`: NCCL's own handle. `check` raises another rank's failure; timeout in seconds.

        Raises DocumentError where the library does not start.
        """
        self._communicator, self._device = communicator, device
        self._timeout, self._check = timeout, check
        self._module: Any = importlib.import_module(_MODULE)
        try:
            self._handle: Any = self._module.init()
        except Exception as error:
            raise DocumentError(f"--m2n: NCCL M2N does not start: {first_line(error)}") from error

    def reshard(self, name: str, one: M2nClass, source: Tensor | None, destination: Tensor | None) -> None:
        """Start to move one tensor: this rank's contiguous shards, None where it has no part in a side.

        On a GPU it comes after what the current stream was given, and what that is given next comes after it.
        Raises PeerLostError where the library fails, as that may be the echo of a rank that was lost.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        try:
            self._module.reshard(
                source, destination, self._communicator, stream,
                **m2n_arguments(one, self._module), handle=self._handle,
            )  # fmt: skip
        except Exception as error:  # its own errors are a kind of nothing else
            raise PeerLostError(f"tensor {name!r}: NCCL M2N: {first_line(error)}") from error

    def wait(self) -> None:
        """Wait on the host until all that was started is done. Raises PeerLostError where it is not in time."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        try:
            in_time = wait_until(done.query, self._timeout, self._check)
        except RuntimeError as error:
            raise PeerLostError(f"NCCL M2N: {first_line(error)}") from error
        if not in_time:
            raise PeerLostError(f"NCCL M2N: not done in {self._timeout:g} s")

    def close(self) -> None:
        """Let go of the library's buffers; nothing may be in flight."""
        self._handle.destroy()
