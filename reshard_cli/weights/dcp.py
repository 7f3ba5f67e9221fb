"""A DCP folder as a source: any box of any logical tensor, put together from the chunks that were saved.

It does not matter how the tensors were sharded when they were saved. The files are mapped, and only the bytes
of the boxes that are asked for are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reshard_cli.errors import WeightsError, listed
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.spec.dcp import Chunk, ChunkedTensor, DcpIndex, read_dcp
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.names import fill
from reshard_cli.weights.archive import SavedTensor, find_tensor
from reshard_cli.weights.checkpoint import (
    check_tensors,
    extra_names,
    logical_names,
    tied_names,
    wanted_tensors,
)
from reshard_cli.weights.files import MappedFile
from reshard_cli.weights.tensors import torch_dtype
from reshard_cli.weights.windows import Boxed, Corner, intersection, parts_of, within

__all__ = ["CheckedDcp", "DcpSource", "check_dcp"]

_COPIED = 1 << 20  # elements that are copied at a time where their bytes are not aligned


@dataclass(slots=True)
class CheckedDcp:
    """A DCP folder's tensors by the layout's logical names, what is left out, and which state dict was taken."""

    tensors: dict[str, ChunkedTensor]
    extra: list[str]
    prefix: str


class DcpSource:
    """Reads boxes of logical tensors from the chunks of a DCP folder; `ties` as in CheckpointSource."""

    def __init__(self, checked: CheckedDcp, layout: JobLayout) -> None:
        """`checked` is what `check_dcp` returned for this layout."""
        self.extra, self.prefix = checked.extra, checked.prefix
        self._tensors = checked.tensors
        self.ties = {
            own: (one, checked.tensors[one].shape) for own, one in tied_names(checked.tensors, layout).items()
        }
        self._num_experts = {one.logical: one.shape[0] for one in layout.tensors if one.has_experts}
        self._files: dict[Path, MappedFile] = {}
        self._saved: dict[Chunk, SavedTensor] = {}
        self._in_place: dict[str, bool] = {}

    def in_place(self, name: str) -> bool:
        """Say whether views into the mapped files show the tensor: its elements start where their size wants."""
        if name not in self._in_place:
            experts = self._num_experts.get(name)
            names = [name] if experts is None else [fill(name, expert=one) for one in range(experts)]
            self._in_place[name] = all(
                self._aligned(tensor, chunk)
                for tensor in (self._tensors[one] for one in names)
                for chunk in tensor.chunks
            )
        return self._in_place[name]

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield the parts of the box that the chunks (of each expert) hold."""
        if name not in self._num_experts:
            yield from self._windows(self._tensors[name], lo, hi)
            return
        for expert in range(lo[0], hi[0]):
            tensor = self._tensors[fill(name, expert=expert)]
            for part_lo, part_hi, values in self._windows(tensor, lo[1:], hi[1:]):
                yield (expert, *part_lo), (expert + 1, *part_hi), values.unsqueeze(0)

    def _windows(self, tensor: ChunkedTensor, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        for chunk in tensor.chunks:
            shared = intersection(lo, hi, chunk.lo, chunk.hi)
            if shared is None:
                continue
            saved = self._find(tensor, chunk)
            if self._aligned(tensor, chunk):
                yield (*shared, within(self._view(chunk, saved), chunk.lo, *shared))
                continue
            raw = self._bytes_view(chunk, saved)
            for part_lo, part_hi in parts_of(*shared, _COPIED):
                # an element's bytes are one more dim, and lie together
                part = within(raw, (*chunk.lo, 0), (*part_lo, 0), (*part_hi, raw.shape[-1]))
                copied = part.clone(memory_format=torch.contiguous_format)
                yield part_lo, part_hi, copied.view(torch_dtype(saved.dtype)).squeeze(-1)

    def _find(self, tensor: ChunkedTensor, chunk: Chunk) -> SavedTensor:
        """Return where the chunk's elements lie in its file, checked against the metadata."""
        if chunk not in self._saved:
            if chunk.file not in self._files:
                self._files[chunk.file] = MappedFile(chunk.file)
            where = f"{chunk.file}: the chunk of tensor {tensor.name!r} at byte {chunk.start}"
            try:
                saved = find_tensor(self._files[chunk.file].bytes_of(chunk.start, chunk.length))
            except ValueError as error:
                raise WeightsError(f"{where}: {error}") from error
            shape = tuple(b - a for a, b in zip(chunk.lo, chunk.hi, strict=True))
            if (saved.dtype, saved.shape) != (tensor.dtype, shape):
                raise WeightsError(
                    f"{where} is {saved.dtype}{list(saved.shape)}, {tensor.file.name} says {tensor.dtype}{list(shape)}"
                )
            self._saved[chunk] = saved
        return self._saved[chunk]

    def _aligned(self, tensor: ChunkedTensor, chunk: Chunk) -> bool:
        return (chunk.start + self._find(tensor, chunk).start) % item_size(tensor.dtype) == 0

    def _view(self, chunk: Chunk, saved: SavedTensor) -> Tensor:
        size = item_size(saved.dtype)
        data = self._files[chunk.file].bytes_of(chunk.start + saved.start, saved.num_bytes // size * size)
        flat = data.view(torch_dtype(saved.dtype))
        return torch.as_strided(flat, saved.shape, saved.strides, flat.storage_offset())

    def _bytes_view(self, chunk: Chunk, saved: SavedTensor) -> Tensor:
        """Return the chunk with one more dim, for the bytes of an element."""
        size = item_size(saved.dtype)
        data = self._files[chunk.file].bytes_of(chunk.start + saved.start, saved.num_bytes)
        strides = [stride * size for stride in saved.strides]
        return torch.as_strided(data, [*saved.shape, size], [*strides, 1], data.storage_offset())


def check_dcp(
    folder: Path, layout: JobLayout, pairs: list[TensorPair], *, allow_extra: bool, trust: bool
) -> CheckedDcp:
    """Return the folder's tensors by the source layout's logical names, checked.

    The model is the one nested state dict in which (after the document's `rename`) all names are found. What
    other state dicts hold, as an optimizer's, is left out; with `allow_extra` it is listed. Raises WeightsError.
    """
    index = read_dcp(folder, trust=trust)
    wanted = wanted_tensors(pairs)
    prefix, saved = _choose(index, layout, wanted)
    taken = {index.prefixes[saved[name]] for name in wanted}
    beside = [name for name, one in saved.items() if index.prefixes[one] in taken]
    extra = extra_names(beside, wanted, layout)
    wanted |= {own: wanted[one] for own, one in tied_names(saved, layout).items() if one in wanted}
    tensors = index.tensors({name: saved[name] for name in wanted})
    check_tensors(folder, tensors, wanted, extra, allow_extra=allow_extra)
    if allow_extra:
        extra += [one for one, own in index.prefixes.items() if own not in taken]
    return CheckedDcp(tensors, extra, prefix or ", ".join(sorted(taken)))


@dataclass(frozen=True, slots=True)
class _Name:
    """A saved tensor of which only the name is asked."""

    saved: str
    file: Path
    dtype: str = ""
    shape: tuple[int, ...] = ()


def _choose(index: DcpIndex, layout: JobLayout, wanted: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """Return the state dict that is the model, and saved names by logical names."""
    fitting: dict[str, dict[str, str]] = {}
    nearest: dict[str, str] = {}
    sizes = Counter(index.prefixes.values())
    # names as they were saved go first: they are what `rename` may know; then each state dict's own
    for prefix in ["", *sorted(one for one in sizes if one and sizes[one] >= len(wanted))]:
        own = index.under(prefix) if prefix else {name: name for name in index.prefixes}
        named = {name: _Name(saved, index.folder) for name, saved in own.items()}
        names = {name: one.saved for name, one in logical_names(named, layout).items()}
        found = sum(name in names for name in wanted)
        if found == len(wanted):
            fitting[prefix] = names
            if not prefix:
                break
        elif not nearest or found > sum(name in nearest for name in wanted):
            nearest = names
    if len(fitting) > 1:
        raise WeightsError(
            f"{index.folder}: several of its state dicts hold all tensors of the model: "
            f"{', '.join(map(repr, fitting))}; say which with rename in the layout document, as "
            f'rename: {{"{next(iter(fitting))}.*": "*"}}'
        )
    if fitting:
        return next(iter(fitting.items()))
    missing = [name for name in wanted if name not in nearest]
    shown = ", ".join(repr(one) for one in sorted(sizes)[:12])
    raise WeightsError(f"{index.folder}: lacks {listed(missing)} (looked for in its state dicts: {shown})")
