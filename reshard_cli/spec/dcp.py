"""Reads the metadata of a torch.distributed.checkpoint (DCP) folder: which box of which tensor lies where.

`.metadata` is a pickle. It is read as data (see `spec/pickled.py`), nothing in it is run, and still only where
the user said that the checkpoint is to be trusted. What it claims is checked against the files: each tensor's
chunks tile it without a hole or an overlap, and every chunk's bytes lie inside its file.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reshard_cli.errors import WeightsError
from reshard_cli.spec.dtypes import ITEM_SIZE
from reshard_cli.spec.headers import is_file_name
from reshard_cli.spec.pickled import Made, Named, Pairs, read_pickle

__all__ = ["Chunk", "ChunkedTensor", "DcpIndex", "is_dcp_folder", "model_prefix", "read_dcp"]

_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CLASSES = (
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
# what torch 2.6 to 2.13 write into the metadata, dtypes that are not read here among them
_ALLOWED = frozenset(
    [_METADATA + name for name in _CLASSES]
    + [f"torch.{name}" for name in (*ITEM_SIZE, "complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz")]
    + [_STORAGE_INFO, "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"]
    + ["pathlib.PosixPath", "pathlib._local.PosixPath"]
)  # fmt: skip
_MOST = 1 << 56  # elements or bytes, so that no product of two counts is out of hand
_MOST_DIMS = 64
Corner = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved box lo..hi of a tensor, and the slice of a file that holds it as an archive of torch.save."""

    lo: Corner
    hi: Corner
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """One tensor of a DCP folder: name as saved, dtype (torch's name), global shape, chunks that tile it."""

    file: Path
    name: str
    dtype: str
    shape: Corner
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class DcpIndex:
    """A folder's metadata, parsed; tensors are checked when they are asked for.

    `prefixes`: by the name of each saved tensor, the nested state dict in which it was (`app.model`), or ''.
    """

    folder: Path
    prefixes: dict[str, str]
    _entries: dict[str, dict[str, Any]]
    _storage: dict[str, dict[Corner, Made]]

    def under(self, prefix: str) -> dict[str, str]:
        """Return the saved names of the tensors in one nested state dict, by their names in it."""
        length = len(prefix) + 1 if prefix else 0
        return {name[length:]: name for name, own in self.prefixes.items() if own == prefix}

    def tensors(self, names: Mapping[str, str]) -> dict[str, ChunkedTensor]:
        """Return these tensors (saved name by any name), checked.

        Raises WeightsError for chunks that leave a hole, overlap or lie outside the tensor or their file.
        """
        sizes: dict[Path, int] = {}
        found = {}
        for name, saved in names.items():
            try:
                found[name] = self._tensor(saved, sizes)
            except ValueError as error:
                raise WeightsError(f"{self.folder / _NAME}: tensor {saved!r}: {error}") from error
        _check_slices(found.values())
        return found

    def _tensor(self, name: str, sizes: dict[Path, int]) -> ChunkedTensor:
        entry = self._entries[name]
        properties = entry.get("properties")
        state = properties.state if isinstance(properties, Made) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, Named) or dtype.name.removeprefix("torch.") not in ITEM_SIZE:
            raise ValueError(f"dtype {dtype.name if isinstance(dtype, Named) else '?'} is not known here")
        shape = _corner(entry.get("size"))
        listed = entry.get("chunks")
        if type(listed) is not list:
            raise ValueError("has no list of chunks")
        storage = dict(self._storage.get(name, {}))
        chunks = []
        for one in listed:
            fields = _fields(one, _METADATA + "ChunkStorageMetadata")
            offsets, counts = _corner(fields.get("offsets")), _corner(fields.get("sizes"))
            if len(offsets) != len(shape) or len(counts) != len(shape):
                raise ValueError(f"a chunk has {len(offsets)} dims, the tensor {len(shape)}")
            if not math.prod(counts):
                continue  # a rank with an empty shard
            if offsets not in storage:
                raise ValueError(f"its chunk at {list(offsets)} is listed twice, or lies in no file")
            hi = tuple(a + b for a, b in zip(offsets, counts, strict=True))
            chunks.append(self._chunk(offsets, hi, storage.pop(offsets), sizes))
        fault = _tiling_fault(shape, tuple((one.lo, one.hi) for one in chunks))
        if fault is not None:
            where = f"; {chunks[fault[1]].file}" if fault[1] >= 0 else ""
            raise ValueError(f"{fault[0]}{where}")
        return ChunkedTensor(
            self.folder / _NAME, name, dtype.name.removeprefix("torch."), shape, tuple(chunks)
        )

    def _chunk(self, lo: Corner, hi: Corner, info: Made, sizes: dict[Path, int]) -> Chunk:
        fields = _fields(info, _STORAGE_INFO)
        name, start, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if not isinstance(name, str) or not is_file_name(name):
            raise ValueError("a chunk is in no file of this folder")
        if not (isinstance(start, int) and isinstance(length, int) and _whole(start) and _whole(length)):
            raise ValueError(f"a chunk has no range of bytes in {name}")
        if fields.get("transform_descriptors"):
            raise ValueError(f"{name} was written through an extension (compressed?), which is not read here")
        file = self.folder / name
        if file not in sizes:
            sizes[file] = file.stat().st_size if file.is_file() else -1
        if sizes[file] < 0:
            raise ValueError(f"is in {name}, which is not in {self.folder}")
        if start + length > sizes[file]:
            raise ValueError(f"{file} is truncated: a chunk ends at {start + length} of {sizes[file]} bytes")
        return Chunk(lo, hi, file, start, length)


def is_dcp_folder(folder: Path) -> bool:
    """Say whether the folder holds a DCP checkpoint (and no safetensors files, which go first)."""
    return (folder / _NAME).is_file() and next(folder.glob("*.safetensors"), None) is None


def read_dcp(folder: Path, *, trust: bool) -> DcpIndex:
    """Return the parsed metadata of a DCP folder. Raises WeightsError, and where it is not to be trusted."""
    path = folder / _NAME
    if not trust:
        raise WeightsError(
            f"{path}: a DCP checkpoint says what it holds in a pickle, a format that can carry code; give "
            "--trust-checkpoint if you know who wrote it (it is read as data, and nothing in it is run)"
        )
    try:
        status = os.stat(path)
        return _read(folder, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{path}: is no metadata of a DCP checkpoint: {error}") from error


@functools.lru_cache(maxsize=2)
def _read(folder: Path, _mtime: int, _size: int) -> DcpIndex:
    """Parse the metadata once for each state of the file: every rank asks for it several times."""
    metadata = _fields(read_pickle((folder / _NAME).read_bytes(), _ALLOWED), _METADATA + "Metadata")
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in _pairs(metadata.get("state_dict_metadata"), "tensors"):
        if not isinstance(name, str) or not isinstance(entry, Made):
            raise ValueError("its list of tensors is damaged")
        if entry.name == _METADATA + "TensorStorageMetadata":
            if name in entries:
                raise ValueError(f"it names {name!r} twice")
            entries[name] = _fields(entry, _METADATA + "TensorStorageMetadata")
    storage: dict[str, dict[Corner, Made]] = defaultdict(dict)
    for key, info in _pairs(metadata.get("storage_data"), "chunks"):
        fields = _fields(key, _METADATA + "MetadataIndex")
        name, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(name, str) or name not in entries:
            continue  # an object that is no tensor
        if not isinstance(info, Made) or info.name != _STORAGE_INFO:
            raise ValueError(f"it does not say where in a file {name!r} lies")
        corner = _corner(offset)
        if corner in storage[name]:
            raise ValueError(f"it says twice where the chunk of {name!r} at {list(corner)} lies")
        storage[name][corner] = info
    return DcpIndex(folder, _prefixes(metadata.get("planner_data"), entries), entries, dict(storage))


def _prefixes(planner_data: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """Return the nested state dict of each name, as the planner wrote it down: fqn -> path of keys."""
    prefixes = dict.fromkeys(names, "")
    if isinstance(planner_data, Pairs):
        for name, path in planner_data:
            if isinstance(name, str) and name in prefixes and isinstance(path, tuple) and len(path) > 1:
                last = path[-1]
                if isinstance(last, (str, int)) and not isinstance(last, bool) and name.endswith(f".{last}"):
                    prefixes[name] = name.removesuffix(f".{last}")
    return prefixes


def model_prefix(index: DcpIndex) -> str:
    """Return which nested state dict is the model: the one called `model`, else the outermost one, else the only.

    Raises WeightsError naming them where that does not tell.
    """
    prefixes = sorted(set(index.prefixes.values()))
    models = [one for one in prefixes if one.rpartition(".")[2] == "model"]
    for chosen in (models, [one for one in prefixes if not one], prefixes):
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            break
    shown = ", ".join(repr(one) for one in prefixes[:12]) or "none"
    raise WeightsError(
        f"{index.folder}: which of its state dicts is the model cannot be told ({shown}); give a model document"
    )


def _check_slices(tensors: Any) -> None:
    """Two chunks that share bytes cannot both be right."""
    slices = sorted(
        ((one.file, one.start, one.length, tensor.name) for tensor in tensors for one in tensor.chunks),
        key=lambda one: one[:3],
    )
    for (file, start, length, name), (next_file, next_start, _, next_name) in itertools.pairwise(slices):
        if file == next_file and next_start < start + length:
            raise WeightsError(
                f"{file}: chunks of tensors {name!r} and {next_name!r} share bytes from {next_start} on"
            )


@functools.lru_cache(maxsize=4096)
def _tiling_fault(shape: Corner, boxes: Sequence[tuple[Corner, Corner]]) -> tuple[str, int] | None:
    """Return why boxes do not tile a tensor, and the number of the guilty one (or -1); None where they do."""
    dims, count = len(shape), len(boxes)
    for number, (lo, hi) in enumerate(boxes):
        if any(b > size for b, size in zip(hi, shape, strict=True)):
            return f"a chunk {_text(lo, hi)} lies outside its shape {list(shape)}", number
    if count > 1:
        lows = np.array([lo for lo, _ in boxes], np.int64).reshape(count, dims)
        highs = np.array([hi for _, hi in boxes], np.int64).reshape(count, dims)
        # in the order of the dim that is cut finest, few boxes come near each other
        dim = max(range(dims), key=lambda one: len(np.unique(lows[:, one])), default=0)
        order = np.argsort(lows[:, dim], kind="stable") if dims else np.arange(count)
        lows, highs = lows[order], highs[order]
        near = np.searchsorted(lows[:, dim], highs[:, dim]) if dims else np.full(count, count)
        for one in range(count - 1):
            others = slice(one + 1, int(near[one]))
            shared = ((lows[others] < highs[one]) & (lows[one] < highs[others])).all(axis=1)
            if shared.any():
                first, second = int(order[one]), int(order[one + 1 + int(shared.argmax())])
                return f"chunks {_text(*boxes[first])} and {_text(*boxes[second])} overlap", second
    have = sum(math.prod(b - a for a, b in zip(lo, hi, strict=True)) for lo, hi in boxes)
    if have != math.prod(shape):
        return f"its chunks leave a hole: {have} of {math.prod(shape)} elements", -1
    return None


def _text(lo: Corner, hi: Corner) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True)) + "]"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _corner(value: Any) -> Corner:
    """Return a shape or an offset. Raises ValueError where it is none."""
    if not isinstance(value, tuple) or len(value) > _MOST_DIMS or not all(map(_whole, value)):
        raise ValueError("a shape or an offset is no tuple of whole numbers")
    if math.prod(value) >= _MOST:
        raise ValueError("a shape has more than 2**56 elements")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass that the pickle holds."""
    if not isinstance(value, Made) or value.name != name or not isinstance(value.state, Pairs):
        raise ValueError(f"something stands where a {name.rpartition('.')[2]} should")
    return {key: item for key, item in value.state if isinstance(key, str)}


def _pairs(value: Any, what: str) -> Pairs:
    if not isinstance(value, Pairs):
        raise ValueError(f"it has no list of {what}")
    return value
