"""Finds the bytes of one tensor in an archive that torch.save wrote, without running or copying any of it.

The archive is a zip whose entries are stored as they are; `data.pkl` says dtype, shape and strides, and
`data/0` is the tensor's storage. Everything is checked against the archive's length before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reshard_cli.spec.dtypes import ITEM_SIZE, item_size
from reshard_cli.spec.pickled import Made, Named, read_pickle

__all__ = ["SavedTensor", "find_tensor"]

_DTYPE_OF_STORAGE = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64",
}  # fmt: skip
_REBUILD = {2: "torch._utils._rebuild_tensor_v2", 3: "torch._utils._rebuild_tensor_v3"}
_PARAMETER = "torch._utils._rebuild_parameter"
_UNTYPED = "torch.storage.UntypedStorage"
_ALLOWED = frozenset(
    [f"torch.{name}Storage" for name in _DTYPE_OF_STORAGE]
    + [f"torch.{name}" for name in ITEM_SIZE]
    + [*_REBUILD.values(), _PARAMETER, _UNTYPED, "collections.OrderedDict"]
)
_MOST_ENTRIES = 64  # of one tensor there are seven
_MOST_PICKLE = 1 << 16
_ALL_16, _ALL_32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor's dtype, shape, strides (in elements), and its storage's byte range, seen from the archive."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    num_bytes: int


def find_tensor(data: Tensor) -> SavedTensor:
    """Return where in an archive (flat, uint8) its one tensor lies. Raises ValueError for anything else."""
    try:
        entries = _directory(data)
        described = _described(_content(data, entries, "data.pkl"))
    except (struct.error, IndexError) as error:
        raise ValueError("it is cut off or damaged") from error
    if "byteorder" in entries and _content(data, entries, "byteorder") != b"little":
        raise ValueError("its bytes are not little-endian")
    dtype, key, offset, shape, strides = described
    if f"data/{key}" not in entries:
        raise ValueError("its storage is not in it")
    start, num_bytes = entries[f"data/{key}"]
    size = item_size(dtype)
    last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if all(shape) and (last + 1) * size > num_bytes:
        raise ValueError(f"its storage has {num_bytes} bytes, the tensor needs {(last + 1) * size}")
    first = offset * size if all(shape) else 0
    return SavedTensor(dtype, shape, strides, start + first, num_bytes - first)


def _directory(data: Tensor) -> dict[str, tuple[int, int]]:
    """Return first byte and length of each entry, by its name without the archive's own."""
    size = data.numel()
    end = _bytes(data, size - 22, 22)
    if end[:4] != b"PK\5\6" or _bytes(data, 0, 4) != b"PK\3\4":
        raise ValueError("it is no archive of torch.save (a zip)")
    count, _, at = struct.unpack("<HII", end[10:20])
    if count == _ALL_16 or at == _ALL_32:
        locator = _bytes(data, size - 42, 20)
        record = _bytes(data, struct.unpack("<Q", locator[8:16])[0], 56)
        if locator[:4] != b"PK\6\7" or record[:4] != b"PK\6\6":
            raise ValueError("its directory is damaged")
        count, _, at = struct.unpack("<QQQ", record[32:56])
    if count > _MOST_ENTRIES:
        raise ValueError(f"it has {count} entries, more than one tensor takes")
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        name, local, length, at = _entry(data, at)
        if name in entries:
            raise ValueError(f"its directory names {name!r} twice")
        head = _bytes(data, local, 30)
        if head[:4] != b"PK\3\4":
            raise ValueError(f"its entry {name!r} is not where the directory says")
        name_length, extra_length = struct.unpack("<HH", head[26:30])
        start = local + 30 + name_length + extra_length
        if start + length > size:
            raise ValueError(f"its entry {name!r} ends behind the archive")
        entries[name] = (start, length)
    return entries


def _entry(data: Tensor, at: int) -> tuple[str, int, int, int]:
    """Return name, local header, length, and where the next entry of the directory starts."""
    head = _bytes(data, at, 46)
    if head[:4] != b"PK\1\2":
        raise ValueError("its directory is damaged")
    flags, method = struct.unpack("<HH", head[8:12])
    packed, length, name_length, extra_length, note = struct.unpack("<IIHHH", head[20:34])
    (local,) = struct.unpack("<I", head[42:46])
    name = _bytes(data, at + 46, name_length).decode("utf-8").partition("/")[2]
    extra = _bytes(data, at + 46 + name_length, extra_length)
    if _ALL_32 in (packed, length, local):
        packed, length, local = _wide(extra, packed, length, local)
    if method != 0 or flags & 1 or packed != length:
        raise ValueError(f"its entry {name!r} is compressed, which torch.save never does")
    return name, local, length, at + 46 + name_length + extra_length + note


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return the values with those that did not fit 32 bits taken from the zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            return tuple(wide.pop(0) if one == _ALL_32 else one for one in values)
        at += 4 + length
    return values


def _content(data: Tensor, entries: dict[str, tuple[int, int]], name: str) -> bytes:
    if name not in entries:
        raise ValueError(f"it has no {name}")
    start, length = entries[name]
    if length > _MOST_PICKLE:
        raise ValueError(f"its {name} has {length} bytes, more than one tensor takes")
    return _bytes(data, start, length)


def _bytes(data: Tensor, start: int, length: int) -> bytes:
    if not 0 <= start <= start + length <= data.numel():
        raise IndexError
    return data[start : start + length].numpy().tobytes()


def _described(pickle: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, key of the storage, offset, shape and strides (in elements) of the pickled tensor."""
    made = read_pickle(pickle, _ALLOWED)
    if isinstance(made, Made) and made.name == _PARAMETER and made.arguments:
        made = made.arguments[0]
    if not isinstance(made, Made) or made.name not in _REBUILD.values() or len(made.arguments) < 6:
        raise ValueError("it does not hold a plain dense tensor")
    persistent, offset, shape, strides = made.arguments[:4]
    inner = (
        persistent.arguments[0] if isinstance(persistent, Made) and persistent.name == "persistent" else None
    )
    if not isinstance(inner, tuple) or len(inner) != 5 or inner[0] != "storage":
        raise ValueError("its tensor has no storage")
    kind, key = inner[1:3]
    if not isinstance(kind, Named) or not isinstance(key, str) or not key.isdigit():
        raise ValueError("its tensor has no storage")
    if made.name == _REBUILD[3]:
        last = made.arguments[6] if len(made.arguments) > 6 else None
        dtype = last.name.removeprefix("torch.") if isinstance(last, Named) else ""
    else:
        dtype = _DTYPE_OF_STORAGE.get(kind.name.removeprefix("torch.").removesuffix("Storage"), "")
    if dtype not in ITEM_SIZE:
        raise ValueError("its tensor has a dtype that is not known here")
    if any(made.arguments[7 if made.name == _REBUILD[3] else 6 :]):
        raise ValueError("its tensor has pending operations (conjugate or negative)")
    if not _wholes((offset,)) or not _wholes(shape) or not _wholes(strides) or len(shape) != len(strides):
        raise ValueError("its tensor's shape or strides are damaged")
    return dtype, key, offset, shape, strides


def _wholes(values: Any) -> bool:
    return isinstance(values, tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 56 for one in values
    )
