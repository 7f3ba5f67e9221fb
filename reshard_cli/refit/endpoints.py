"""The two ends of a refit on one rank: where its values are read, and where they are put."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reshard_cli.errors import DocumentError, WeightsError
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import Plan
from reshard_cli.spec.dcp import is_dcp_folder
from reshard_cli.spec.headers import is_rank_folder
from reshard_cli.weights.checkpoint import CheckpointSource, check_checkpoint
from reshard_cli.weights.dcp import DcpSource, check_dcp
from reshard_cli.weights.files import MappedFile
from reshard_cli.weights.landing import Landing
from reshard_cli.weights.memory import zeroed
from reshard_cli.weights.quantise import QuantisingSource, made_of
from reshard_cli.weights.rank_folder import PendingFolder, rank_folder_source
from reshard_cli.weights.synthetic import SyntheticSource
from reshard_cli.weights.tensors import copy_exact, typed
from reshard_cli.weights.windows import Source, StorageWindows

__all__ = ["Destination", "check_target", "open_source", "state_dict_of"]


def open_source(
    origin: str,
    plan: Plan,
    ranks: list[int],
    version: int,
    *,
    allow_extra: bool,
    trust: bool = False,
    casts: Sequence[str] = ("sender",),
) -> tuple[Source, list[str]]:
    """Return the source named by `--from`, and the names of what it holds beyond the documents.

    `ranks`: whose rank files are read, where it is a rank folder. `casts`: the block-wise casts of these
    sides are made while it is read. `trust`: the metadata of a DCP folder may be read. Raises WeightsError
    where it does not hold what the documents say, DocumentError for an unknown form.
    """
    base = _open(origin, plan, ranks, version, allow_extra=allow_extra, trust=trust)
    extra = base.extra if isinstance(base, (CheckpointSource, DcpSource)) else []
    made = made_of(plan.pairs, at=casts)
    return (QuantisingSource(base, made) if made else base), extra


def state_dict_of(source: Source) -> str:
    """Return which nested state dict of a DCP folder is read, or nothing."""
    base = source.base if isinstance(source, QuantisingSource) else source
    return base.prefix if isinstance(base, DcpSource) else ""


def _open(
    origin: str, plan: Plan, ranks: list[int], version: int, *, allow_extra: bool, trust: bool
) -> Source:
    if origin == "synthetic":
        own = [pair for pair in plan.pairs if not (pair.quantised and pair.scale_of)]
        return SyntheticSource({pair.name: (pair.shape, pair.source_dtype) for pair in own}, version)
    if origin.startswith("live:"):
        raise DocumentError(
            f"--from: {origin!r}: live sources are not in this version; give a folder or 'synthetic'"
        )
    folder = Path(origin)
    if not folder.is_dir():
        raise WeightsError(f"--from: {folder}: no such folder (or write 'synthetic')")
    if is_rank_folder(folder):
        return rank_folder_source(folder, plan.source, ranks)
    if is_dcp_folder(folder):
        checked = check_dcp(folder, plan.source, plan.pairs, allow_extra=allow_extra, trust=trust)
        return DcpSource(checked, plan.source)
    stored, extra = check_checkpoint(folder, plan.source, plan.pairs, allow_extra=allow_extra)
    return CheckpointSource(stored, plan.source, extra)


def check_target(target: str, token: str) -> PendingFolder | None:
    """Return the folder that `--to` names, or None for memory. Raises DocumentError where a folder cannot be made."""
    if target == "memory":
        return None
    folder = PendingFolder(Path(target).absolute(), token)
    folder.check()
    return folder


@dataclass(slots=True)
class Destination:
    """One rank's storages: their bytes, and the windows into them."""

    storages: list[RankStorage]
    buffers: dict[str, Tensor]
    windows: StorageWindows
    mapped: MappedFile | None
    landing: Landing | None

    @classmethod
    def create(
        cls, plan: Plan, rank: int, folder: PendingFolder | None, version: int, device: torch.device
    ) -> Destination:
        """Make a rank's storages, zeroed: in memory, or in place in its file of the folder."""
        storages = rank_storages(plan.destination, rank)
        mapped = None
        if folder is not None:
            buffers, mapped = folder.create(rank, storages, version)
        else:
            buffers = zeroed(storages, device)
        return cls.over(plan, storages, buffers, device, mapped)

    @classmethod
    def over(
        cls,
        plan: Plan,
        storages: list[RankStorage],
        buffers: dict[str, Tensor],
        device: torch.device,
        mapped: MappedFile | None = None,
    ) -> Destination:
        """Return a rank's storages over memory that is there, as bytes or as tensors of their shapes."""
        landing = Landing.of(plan, storages, device)
        windows = StorageWindows()
        windows.add(storages if landing is None else landing.others(storages), buffers)
        if landing is not None:
            windows.add(landing.storages, landing.buffers)
        return cls(storages, buffers, windows, mapped, landing)

    def typed(self, storage: RankStorage) -> Tensor:
        """Return a storage as a tensor of its dtype and shape, without a copy."""
        buffer = self.buffers[storage.name]
        if tuple(buffer.shape) == storage.shape and str(buffer.dtype) == f"torch.{storage.dtype}":
            return buffer
        return typed(buffer, storage.dtype).view(storage.shape)

    def keep_padding_of(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what will not be written: rows that belong to no tensor, and that the document keeps."""
        for storage in self.storages:
            if storage.has_padding and storage.keep_padding:
                copy_exact(self.typed(storage), tensors[storage.name])

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every storage into a tensor of its name, shape and dtype."""
        for storage in self.storages:
            copy_exact(tensors[storage.name], self.typed(storage))

    def cast(self) -> None:
        """Make what this side casts, when all of its values have landed."""
        if self.landing is not None:
            self.landing.cast(self.storages, self.buffers)

    def zero_padding(self) -> None:
        """Zero the storages whose padding the document wants zeroed, before they are filled again."""
        for storage in self.storages:
            if storage.has_padding and not storage.keep_padding:
                self.buffers[storage.name].zero_()
