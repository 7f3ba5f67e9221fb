"""Whether the axes of a mesh divide a tensor evenly, as engines want that have no short shards.

vLLM, SGLang and Megatron-core refuse to build a layer whose width, heads or padded vocabulary their tensor
parallelism does not divide; DTensor (FSDP2, torchtitan) leaves the last shards short instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from reshard_cli.spec.model import LogicalTensor
from reshard_cli.spec.placement import Shard, parse_placement

__all__ = ["uneven_cut"]


def uneven_cut(
    rule: Mapping[str, Any], tensor: LogicalTensor, axes: Mapping[str, int], even: Collection[str]
) -> str | None:
    """Return in words what an axis of `even` does not divide of the tensor, by this rule; None if all is even.

    rule: a tensor rule whose expressions are worked out, as values; axes: the sizes of its mesh.
    """
    for axis, text in rule["place"].items():
        placement = parse_placement(text)
        if axis not in even or not isinstance(placement, Shard):
            continue
        dim = placement.dim + tensor.has_experts
        if not 0 <= dim < len(tensor.shape):
            continue
        parts, key = placement.parts or axes[axis], str(placement.dim)
        multiple = max(1, rule.get("pad", {}).get(key, 1))
        size = -(-tensor.shape[dim] // multiple) * multiple
        for length in rule.get("blocks", {}).get(key, [size]):
            if length % parts:
                padded = ", padding included" if size != tensor.shape[dim] else ""
                block = f"a block of {length} in" if length != size else f"{length} rows in"
                return f"{axis} {parts} does not divide tensor {tensor.name!r} evenly: {block} dim {placement.dim}{padded}"
    return None
