"""The dtypes that a tensor can have: torch's name, bytes per element, and the safetensors code."""

from __future__ import annotations

import difflib

__all__ = ["DTYPE_OF_SAFETENSORS", "ITEM_SIZE", "SAFETENSORS_OF_DTYPE", "dtype_hint", "item_size"]

# torch name -> (bytes per element, code in a safetensors header)
_TABLE: dict[str, tuple[int, str]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "complex64": (8, "C64"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT |= {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn", "double": "float64", "f32": "float32"}

ITEM_SIZE: dict[str, int] = {name: size for name, (size, _) in _TABLE.items()}
SAFETENSORS_OF_DTYPE: dict[str, str] = {name: code for name, (_, code) in _TABLE.items()}
DTYPE_OF_SAFETENSORS: dict[str, str] = {code: name for name, (_, code) in _TABLE.items()}


def item_size(dtype: str) -> int:
    """Return the bytes of one element of `dtype` (a torch name such as `bfloat16`)."""
    return ITEM_SIZE[dtype]


def dtype_hint(name: str) -> str:
    """Return what to write instead of an unknown dtype name."""
    known = _SHORT.get(name.removeprefix("torch.").lower())
    close = [known] if known else difflib.get_close_matches(name.removeprefix("torch."), ITEM_SIZE, 1)
    return f"write {close[0]!r}" if close else f"one of {', '.join(ITEM_SIZE)}"
