"""A folder with one safetensors file per rank, storage names inside: where refits go, and may come from.

A folder is written under a hidden name beside its own and renamed when every rank's file is complete, so
that whoever sees it under its name sees all of it. Where a file system cannot let two folders change names (NFS
and some other shared ones), the earlier refit's folder is moved away first, and the name is gone for a moment.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from reshard_cli.errors import DocumentError, TransferError, WeightsError
from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.headers import rank_file_name, read_header
from reshard_cli.weights.files import MappedFile, create_tensor_file
from reshard_cli.weights.windows import StorageWindows

__all__ = ["PendingFolder", "rank_folder_source"]

_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def rank_folder_source(folder: Path, layout: JobLayout, ranks: Sequence[int]) -> StorageWindows:
    """Return what the files of these ranks hold, found by the layout's storages.

    Raises WeightsError where a file does not hold exactly the storages that the layout says.
    """
    files = sorted(folder.glob("rank-*.safetensors"))
    if len(files) != layout.num_ranks:
        raise WeightsError(
            f"{folder}: holds {len(files)} rank files, job {layout.name!r} has {layout.num_ranks}"
        )
    windows = StorageWindows()
    for rank in ranks:
        path = folder / rank_file_name(rank)
        header = read_header(path)
        storages = rank_storages(layout, rank)
        _check(path, {name: (one.shape, one.dtype) for name, one in header.items()}, storages)
        mapped = MappedFile(path)
        buffers: dict[str, Tensor] = {}
        for storage in storages:
            entry = header[storage.name]
            data = mapped.bytes_of(entry.start, entry.num_bytes)
            aligned = entry.start % item_size(entry.dtype) == 0
            buffers[storage.name] = data if aligned else data.clone()
        windows.add(storages, buffers)
    return windows


def _check(path: Path, have: dict[str, tuple[tuple[int, ...], str]], storages: list[RankStorage]) -> None:
    lines = []
    for storage in storages:
        if storage.name not in have:
            lines.append(f"{path}: lacks tensor {storage.name!r}")
        elif have[storage.name] != (storage.shape, storage.dtype):
            shape, dtype = have[storage.name]
            lines.append(
                f"{path}: tensor {storage.name!r} is {dtype}{list(shape)}, "
                f"the document says {storage.dtype}{list(storage.shape)}"
            )
    extra = sorted(set(have) - {storage.name for storage in storages})
    if extra:
        lines.append(f"{path}: tensor {extra[0]!r} is not the document's ({len(extra)} extra)")
    if lines:
        raise WeightsError("\n".join(lines[:12]))


class PendingFolder:
    """A rank folder that is being written: each rank makes its file, one rank publishes them all."""

    def __init__(self, target: Path, token: str) -> None:
        """`token` is the refit's own, the same on all ranks, so that two refits never meet."""
        self.target = target
        self.hidden = target.parent / f".{target.name}.{token}"
        self.replaced = target.parent / f".{target.name}.{token}.replaced"

    def check(self) -> None:
        """Refuse a target that is something else than an earlier refit's folder."""
        if not self.target.parent.is_dir():
            raise DocumentError(f"--to: {self.target.parent} is no folder; make it first")
        if not os.access(self.target.parent, os.W_OK | os.X_OK):
            raise DocumentError(
                f"--to: nothing can be written into {self.target.parent}; name another folder"
            )
        if self.target.exists() and not (self.target.is_dir() and self._replaceable()):
            raise DocumentError(f"--to: {self.target} exists and is not a refit's folder; name another one")

    def _replaceable(self) -> bool:
        names = [path.name for path in self.target.iterdir()]
        return all(name.startswith("rank-") and name.endswith(".safetensors") for name in names)

    def create(
        self, rank: int, storages: Sequence[RankStorage], version: int
    ) -> tuple[dict[str, Tensor], MappedFile]:
        """Make this rank's file and return its storages as bytes in place. Raises TransferError."""
        try:
            self.hidden.mkdir(exist_ok=True)
        except OSError as error:
            raise TransferError(f"{self.hidden}: cannot be made: {error.strerror}") from error
        path = self.hidden / rank_file_name(rank)
        path.unlink(missing_ok=True)
        starts = create_tensor_file(path, storages, {"format": "pt", "version": str(version)})
        mapped = MappedFile(path, write=True)
        buffers = {
            one.name: mapped.bytes_of(starts[one.name], one.num_elements * item_size(one.dtype))
            for one in storages
        }
        return buffers, mapped

    def publish(self) -> None:
        """Give the complete folder its name, in place of an earlier refit's."""
        try:
            _sync(self.hidden)
            if self.target.exists():
                self._replace()
            else:
                os.rename(self.hidden, self.target)
            _sync(self.target.parent)
        except OSError as error:
            raise TransferError(f"{self.target}: cannot be published: {error.strerror}") from error
        self.discard()  # after an exchange, the hidden name is the earlier refit's

    def _replace(self) -> None:
        try:
            _exchange(self.hidden, self.target)
        except OSError as error:
            if error.errno not in _CANNOT_EXCHANGE:
                raise
        else:
            return
        os.rename(self.target, self.replaced)
        try:
            os.rename(self.hidden, self.target)
        except OSError:
            os.rename(self.replaced, self.target)
            raise

    def discard(self) -> None:
        """Remove what was written of a refit that failed, and what a later one has replaced."""
        for folder in (self.hidden, self.replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names in one step, so that a reader finds the old one or the new one whole.

    Linux's renameat2 with RENAME_EXCHANGE. Raises OSError, also where the file system cannot do it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    if library.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
