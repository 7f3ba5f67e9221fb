"""The two ends of a refit on one rank: where its values are read, and where they are put."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reshard_cli.errors import DocumentError, WeightsError
from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import Plan
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.headers import is_rank_folder
from reshard_cli.weights.checkpoint import CheckpointSource, check_checkpoint
from reshard_cli.weights.files import MappedFile
from reshard_cli.weights.rank_folder import PendingFolder, rank_folder_source
from reshard_cli.weights.synthetic import SyntheticSource
from reshard_cli.weights.windows import Source, StorageWindows

__all__ = ["Destination", "check_target", "open_source"]


def open_source(origin: str, plan: Plan, ranks: list[int], version: int, *, allow_extra: bool) -> Source:
    """Return the source named by `--from`. `ranks`: whose rank files are read, where it is a rank folder.

    Raises WeightsError where it does not hold what the documents say, DocumentError for an unknown form.
    """
    if origin == "synthetic":
        return SyntheticSource({pair.name: (pair.shape, pair.source_dtype) for pair in plan.pairs}, version)
    if origin.startswith("live:"):
        raise DocumentError(
            f"--from: {origin!r}: live sources are not in this version; give a folder or 'synthetic'"
        )
    folder = Path(origin)
    if not folder.is_dir():
        raise WeightsError(f"--from: {folder}: no such folder (or write 'synthetic')")
    if is_rank_folder(folder):
        return rank_folder_source(folder, plan.source, ranks)
    stored, extra = check_checkpoint(folder, plan.source, plan.pairs, allow_extra=allow_extra)
    return CheckpointSource(stored, plan.source, extra)


def check_target(target: str, token: str) -> PendingFolder | None:
    """Return the folder that `--to` names, or None for memory. Raises DocumentError for anything else."""
    if target == "memory":
        return None
    if target.startswith("live:"):
        raise DocumentError(
            f"--to: {target!r}: live targets are not in this version; give a folder or 'memory'"
        )
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

    @classmethod
    def create(
        cls, layout: JobLayout, rank: int, folder: PendingFolder | None, version: int, device: torch.device
    ) -> Destination:
        """Make a rank's storages, zeroed: in memory, or in place in its file of the folder."""
        storages = rank_storages(layout, rank)
        mapped = None
        if folder is not None:
            buffers, mapped = folder.create(rank, storages, version)
        else:
            buffers = {
                one.name: torch.zeros(
                    one.num_elements * item_size(one.dtype), dtype=torch.uint8, device=device
                )
                for one in storages
            }
        windows = StorageWindows()
        windows.add(storages, buffers)
        return cls(storages, buffers, windows, mapped)

    def zero_padding(self) -> None:
        """Zero the storages whose padding the document wants zeroed, before they are filled again."""
        for storage in self.storages:
            if storage.has_padding and not storage.keep_padding:
                self.buffers[storage.name].zero_()
