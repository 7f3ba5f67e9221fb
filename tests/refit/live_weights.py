"""Values of every kind for tests of live ranks: a model, its tensors of a version, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reshard_cli.weights.tensors import raw
from tests.support import model_document, write_yaml

TENSORS: dict[str, tuple[tuple[int, ...], str]] = {
    "a.weight": ((24, 18), "float32"),
    "c.weight": ((24, 18), "float32"),
    "uneven.weight": ((7, 5), "float32"),
    "few.weight": ((2, 3), "bfloat16"),  # of three ranks one holds none of it
    "deep.weight": ((5, 3, 2, 2), "float16"),
    "bytes.weight": ((9, 4), "uint8"),
    "flags.weight": ((6, 4), "bool"),
    "eight.weight": ((8, 12), "float8_e4m3fn"),
    "head.weight": ((10, 4), "float32"),
    "scalar": ((), "float32"),
    "bias": ((5,), "float32"),
}
TIED = {"embed.weight": "head.weight"}


def documents(
    folder: Path, source_ranks: int = 3, destination_ranks: int = 2, **more: Any
) -> tuple[Path, Path]:
    """Write the layouts of a job that cuts dim 0 and of one that cuts dim 1, of one model; return their paths."""
    model = model_document({**TENSORS, **{name: TENSORS[of] for name, of in TIED.items()}})
    write_yaml(folder / "model.yaml", model)
    paths = []
    for name, ranks, dim in (("train", source_ranks, 0), ("infer", destination_ranks, 1)):
        paths.append(write_yaml(folder / f"{name}.yaml", layout(name, ranks, dim, **more)))
    return paths[0], paths[1]


def layout(name: str, ranks: int, dim: int, **more: Any) -> dict[str, Any]:
    """Return the layout document of a job that cuts one dim."""
    rules = [{"match": "*.weight", "place": {"tp": f"shard({dim})"}}, {"match": "*"}]
    base = {
        "name": name,
        "model": "model.yaml",
        "ranks": ranks,
        "domain": 1,
        "meshes": {"all": {"tp": ranks}},
    }
    return {**base, "tensors": rules, "alias": TIED, **more}


def whole(version: int) -> dict[str, Tensor]:
    """Return all tensors of a version: any bits there are, NaN among them."""
    generator = torch.Generator().manual_seed(version)
    found = {}
    for name, (shape, kind) in TENSORS.items():
        dtype = getattr(torch, kind)
        high = 2 if dtype == torch.bool else 256
        count = torch.Size(shape).numel() * dtype.itemsize
        found[name] = (
            torch.randint(high, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
        )
    found.update({name: found[of].clone() for name, of in TIED.items()})
    return found


def held(tensors: dict[str, Tensor], dim: int, ranks: int, rank: int) -> dict[str, Tensor]:
    """Return what a rank of a job that cuts `dim` holds."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            step = -(-tensor.shape[dim] // ranks)
            start = min(rank * step, tensor.shape[dim])
            tensor = tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))
        found[name] = tensor.clone(memory_format=torch.contiguous_format)
    return found


def strided(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return equal tensors that do not lie in one piece: dims turned round, or every second element of more."""
    found = {}
    for turn, (name, tensor) in enumerate(tensors.items()):
        turned = tuple(reversed(range(tensor.dim())))
        if turn % 2 and tensor.dim():
            room = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
            found[name] = room[..., 1::2]
        else:
            found[name] = torch.empty([tensor.shape[dim] for dim in turned], dtype=tensor.dtype).permute(
                turned
            )
        raw(found[name]).copy_(raw(tensor))
    return found


def poisoned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of these shapes, with bits that no version has everywhere."""
    return {
        name: torch.full_like(one, 1)
        if one.dtype == torch.bool
        else torch.full(one.shape, 0xA5, dtype=torch.uint8).to(one.dtype)
        for name, one in tensors.items()
    }


def differing(live: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[str]:
    """Yield the names of tensors that are not equal bit for bit."""
    for name, tensor in wanted.items():
        if live[name].shape != tensor.shape or not torch.equal(raw(live[name]), raw(tensor)):
            yield name
