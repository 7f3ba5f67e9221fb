"""A checkpoint folder as a source: any box of any logical tensor, straight from the mapped files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from reshard_cli.errors import WeightsError, listed
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.headers import Stored, StoredTensor, index_folder
from reshard_cli.spec.model import Model, model_of_checkpoint, rename_model
from reshard_cli.spec.names import fill, normalise
from reshard_cli.weights.files import MappedFile
from reshard_cli.weights.tensors import typed
from reshard_cli.weights.windows import Boxed, Corner, within

__all__ = [
    "CheckpointSource",
    "check_checkpoint",
    "check_tensors",
    "extra_names",
    "logical_names",
    "tied_names",
    "wanted_tensors",
]

_SHOWN = 12
AnyStored = TypeVar("AnyStored", bound=Stored)


class CheckpointSource:
    """Reads boxes of logical tensors from safetensors files. Files are mapped when first touched.

    `ties`: the aliases that are stored beside their tensors, with those tensors' names and shapes.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], layout: JobLayout, extra: list[str]) -> None:
        """`stored` is by the layout's logical names, `extra` what was left out: see `check_checkpoint`."""
        self.extra = extra
        self.ties = {own: (one, stored[one].shape) for own, one in tied_names(stored, layout).items()}
        self._stored = stored
        self._num_experts = {one.logical: one.shape[0] for one in layout.tensors if one.has_experts}
        self._in_place: dict[str, bool] = {}
        self._files: dict[Path, MappedFile] = {}

    def _view(self, name: str) -> Tensor:
        stored = self._stored[name]
        if stored.file not in self._files:
            self._files[stored.file] = MappedFile(stored.file)
        data = self._files[stored.file].bytes_of(stored.start, stored.num_bytes)
        if not _aligned(stored):
            data = data.clone()  # old files may start a tensor at any byte
        return typed(data, stored.dtype).view(stored.shape)

    def in_place(self, name: str) -> bool:
        """Say whether a view into the mapped files shows the tensor (all of its experts).

        A tensor that starts at an odd byte is copied whole each time it is read; who kept a view of it would
        keep the copy.
        """
        if name not in self._in_place:
            experts = self._num_experts.get(name)
            names = [name] if experts is None else [fill(name, expert=one) for one in range(experts)]
            self._in_place[name] = all(_aligned(self._stored[one]) for one in names)
        return self._in_place[name]

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield the box, or its part of each expert."""
        if name not in self._num_experts:
            yield lo, hi, within(self._view(name), (0,) * len(lo), lo, hi)
            return
        for expert in range(lo[0], hi[0]):
            view = self._view(fill(name, expert=expert)).unsqueeze(0)
            part_lo, part_hi = (expert, *lo[1:]), (expert + 1, *hi[1:])
            yield part_lo, part_hi, within(view, (expert,) + (0,) * (len(lo) - 1), part_lo, part_hi)


def _aligned(stored: StoredTensor) -> bool:
    """Say whether the tensor starts at a multiple of its element's size, so that its bytes can be read in place."""
    return stored.start % item_size(stored.dtype) == 0


def check_checkpoint(
    folder: Path, layout: JobLayout, pairs: list[TensorPair], *, allow_extra: bool
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the folder's tensors by the source layout's logical names, checked, and the names left out.

    Raises WeightsError for tensors that are missing, extra, or of another shape or dtype than declared.
    """
    names = logical_names(index_folder(folder), layout)
    wanted = wanted_tensors(pairs)
    wanted |= {own: wanted[one] for own, one in tied_names(names, layout).items() if one in wanted}
    extra = extra_names(names, wanted, layout)
    check_tensors(folder, names, wanted, extra, allow_extra=allow_extra)
    return names, extra


def wanted_tensors(pairs: list[TensorPair]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of what a source must hold, by the layout's names with the experts apart."""
    wanted: dict[str, tuple[tuple[int, ...], str]] = {}
    for pair in pairs:
        if pair.quantised and pair.scale_of is not None:
            continue  # made while its tensor is cast
        if pair.has_experts:
            for expert in range(pair.shape[0]):
                wanted[fill(pair.name, expert=expert)] = (pair.shape[1:], pair.source_dtype)
        else:
            wanted[pair.name] = (pair.shape, pair.source_dtype)
    return wanted


def extra_names(names: Iterable[str], wanted: Collection[str], layout: JobLayout) -> list[str]:
    """Return the names that no document declares."""
    declared = {name for tensor in layout.model.tensors for name in tensor.names()}
    return [name for name in names if name not in wanted and name not in declared]


def check_tensors(
    folder: Path,
    names: Mapping[str, Stored],
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
    extra: list[str],
    *,
    allow_extra: bool,
) -> None:
    """Raise WeightsError for tensors that are missing, extra, or of another shape or dtype than wanted."""
    missing = [name for name in wanted if name not in names]
    lines = []
    if missing:
        lines.append(f"{folder}: lacks {listed(missing)}")
    if extra and (missing or not allow_extra):
        mend = "" if missing else " (--allow-extra leaves them out)"
        lines.append(f"{folder}: holds tensors that no document declares: {listed(extra)}{mend}")
    for name, (shape, dtype) in wanted.items():
        have = names.get(name)
        if have is None or len(lines) > _SHOWN:
            continue
        if have.shape != shape:
            lines.append(f"{have.file}: tensor {name!r} has shape {list(have.shape)}, declared {list(shape)}")
        elif have.dtype != dtype:
            lines.append(
                f"{have.file}: tensor {name!r} is {have.dtype}, the source's document declares {dtype}; "
                f"write dtype: {have.dtype} there, and dtype: {dtype} in the destination's to have it cast"
            )
    if lines:
        raise WeightsError("\n".join(lines))


def logical_names(stored: Mapping[str, AnyStored], layout: JobLayout) -> dict[str, AnyStored]:
    """Return the stored tensors under the names that the layout's documents use.

    An alias is its tensor where that is not stored itself; else it keeps its name.
    """
    plain = {normalise(name): tensor for name, tensor in stored.items()}
    model: Model = model_of_checkpoint(layout.name, stored)
    renamed = rename_model(model, layout.loaded.document.rename)
    names: dict[str, AnyStored] = {}
    for before, after in zip(model.tensors, renamed.tensors, strict=True):
        for old, new in zip(before.names(), after.names(), strict=True):
            names[new] = plain[old]
    for own, logical in _alias_names(layout):
        if own in names and logical not in names:
            names[logical] = names.pop(own)
    return names


def tied_names(names: Collection[str], layout: JobLayout) -> dict[str, str]:
    """Return the aliases that are stored beside the tensors that they stand for, with those tensors' names."""
    return {own: logical for own, logical in _alias_names(layout) if own in names and logical in names}


def _alias_names(layout: JobLayout) -> Iterator[tuple[str, str]]:
    """Yield (name, name of the tensor whose values it has) of each alias, the experts apart."""
    for tensor in layout.tensors:
        if tensor.name == tensor.logical:
            continue
        if tensor.has_experts:
            for expert in range(tensor.shape[0]):
                yield fill(tensor.name, expert=expert), fill(tensor.logical, expert=expert)
        else:
            yield tensor.name, tensor.logical
