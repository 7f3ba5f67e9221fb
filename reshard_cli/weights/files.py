"""Tensor files mapped into memory: reading any byte range without a copy, writing in place.

Mapped pages belong to the file, not to the process's private memory, and come in as they are touched.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from reshard_cli.errors import TransferError, WeightsError
from reshard_cli.layout.storage import RankStorage
from reshard_cli.spec.dtypes import SAFETENSORS_OF_DTYPE, item_size

__all__ = ["MappedFile", "create_tensor_file"]


class MappedFile:
    """A file's bytes as a flat uint8 tensor."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """Map the file. Without `write` nothing ever reaches it. Raises WeightsError naming the path."""
        self.path = path
        try:
            with path.open("r+b" if write else "rb") as file:
                size = os.fstat(file.fileno()).st_size
                # a private mapping is writable for torch, and its untouched pages stay the file's own
                access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
                self._map = mmap.mmap(file.fileno(), size, access=access) if size else None
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path}: cannot be mapped: {error}") from error
        empty = torch.empty(0, dtype=torch.uint8)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8) if self._map is not None else empty

    def bytes_of(self, start: int, num_bytes: int) -> Tensor:
        """Return a byte range, without a copy."""
        return self.data[start : start + num_bytes]

    def flush(self) -> None:
        """Write what was changed to the disk and wait for it."""
        if self._map is not None:
            self._map.flush()


def create_tensor_file(
    path: Path, storages: Sequence[RankStorage], metadata: dict[str, str]
) -> dict[str, int]:
    """Create a safetensors file with room for these tensors; return each one's first byte.

    The disk space is reserved at once, so that a full disk is an error here and not a crash while a
    mapped page is written. Raises TransferError with the path.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    # wide elements first, so that each tensor starts at a multiple of its element's size
    for storage in sorted(storages, key=lambda one: -item_size(one.dtype)):
        size = storage.num_elements * item_size(storage.dtype)
        header[storage.name] = {
            "dtype": SAFETENSORS_OF_DTYPE[storage.dtype],
            "shape": list(storage.shape),
            "data_offsets": [position, position + size],
        }
        starts[storage.name] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    first = 8 + len(text)
    try:
        with path.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            if position:
                os.posix_fallocate(file.fileno(), first, position)
    except OSError as error:
        raise TransferError(
            f"{path}: {first + position} bytes cannot be written: {error.strerror}"
        ) from error
    return {name: first + start for name, start in starts.items()}
