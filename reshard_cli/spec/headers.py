"""Reads safetensors headers: names, dtypes, shapes and byte ranges, and never the data.

Written here and not taken from the safetensors package because a refit needs each tensor's byte range in
the file (fragments are sent from the mapped file without a copy), which that package does not tell. Every
claim of a header is checked against the file's size before anything is allocated.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reshard_cli.errors import WeightsError
from reshard_cli.spec.dtypes import DTYPE_OF_SAFETENSORS, item_size

__all__ = [
    "Stored",
    "StoredTensor",
    "index_folder",
    "is_file_name",
    "is_rank_folder",
    "rank_file_name",
    "read_header",
]

_MAX_HEADER = 100_000_000  # the format's own limit
_LONGEST_NAME = 255  # bytes, of a file system
INDEX_NAME = "model.safetensors.index.json"


class Stored(Protocol):
    """A tensor of a checkpoint, whatever the format: the file that describes it, its dtype and shape."""

    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file: name as stored, dtype (torch's name), shape, and byte range."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file. Raises WeightsError naming the file and the fault."""
    try:
        size = os.stat(path).st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise WeightsError(f"{path}: {size} bytes are too few for a safetensors file (truncated?)")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER):
                raise WeightsError(f"{path}: its header claims {length} bytes, the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(path, text)
    data_start = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise WeightsError(f"{path}: the name {name!r} is no valid text")
        if name != "__metadata__":
            tensors[name] = _entry(path, name, entry, data_start, size)
    _check_ranges(path, tensors, data_start, size)
    return tensors


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise WeightsError(f"{path}: its header names {twice!r} twice")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: its header is not JSON ({error}); is this a safetensors file?"
        ) from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: its header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise WeightsError(f"{path}: tensor {name!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPE_OF_SAFETENSORS:
        raise WeightsError(f"{path}: tensor {name!r} has dtype {code!r}, which is not known here")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(whole, shape)):
        raise WeightsError(f"{path}: tensor {name!r} has no valid shape: {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)):
        raise WeightsError(f"{path}: tensor {name!r} has no valid data_offsets: {str(offsets)[:80]}")
    dtype = DTYPE_OF_SAFETENSORS[code]
    start, stop = data_start + offsets[0], data_start + offsets[1]
    num_bytes = math.prod(shape) * item_size(dtype)
    if stop - start != num_bytes:
        raise WeightsError(
            f"{path}: tensor {name!r} {dtype}{shape} needs {num_bytes} bytes, its range has {stop - start}"
        )
    if stop > size:
        raise WeightsError(f"{path}: truncated: tensor {name!r} ends at byte {stop}, the file at {size}")
    return StoredTensor(path, name, dtype, tuple(shape), start, num_bytes)


def _check_ranges(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """The format wants the ranges to fill the file without a hole or an overlap."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != position:
            word = "overlaps the one before" if tensor.start < position else "leaves a hole before it"
            raise WeightsError(f"{path}: tensor {tensor.name!r} {word} (byte {tensor.start}, not {position})")
        position += tensor.num_bytes
    if position != size:
        raise WeightsError(f"{path}: {size - position} bytes lie behind the last tensor")


def index_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint folder, from its index or from all its safetensors files.

    Raises WeightsError for a folder without weights, an index that does not agree with the files, and a
    tensor that two files hold.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    index = folder / INDEX_NAME
    if index.exists():
        return _from_index(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: holds no *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise WeightsError(f"{file}: tensor {name!r} is also in {tensors[name].file}")
            tensors[name] = tensor
    return tensors


def _from_index(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        if index.stat().st_size > _MAX_HEADER:
            raise WeightsError(f"{index}: larger than any index")
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{index}: cannot be read as JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: has no `weight_map` of tensor names to file names")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not is_file_name(file):
            raise WeightsError(f"{index}: {file!r} is not a file name in this folder")
        if not (folder / file).is_file():
            raise WeightsError(f"{index}: names {file}, which is not in {folder}")
        headers[file] = read_header(folder / file)
    tensors: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise WeightsError(f"{index}: says that {name!r} is in {file}, which does not hold it")
        tensors[name] = headers[file][name]
    return tensors


def is_file_name(text: str) -> bool:
    """Say whether a text from a file is the plain name of a file beside it, and nothing else."""
    whole = Path(text).name == text and "\0" not in text and text not in ("", ".", "..")
    return whole and len(text.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME


def rank_file_name(rank: int) -> str:
    """Return the file name of one rank's tensors in a rank folder."""
    return f"rank-{rank:05d}.safetensors"


def is_rank_folder(folder: Path) -> bool:
    """Say whether the folder holds one file per rank and not a checkpoint."""
    return (folder / rank_file_name(0)).is_file()
