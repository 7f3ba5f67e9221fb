"""A digest of everything that decides which bytes of which tensors lie where in a job.

Two documents have the same digest when they say the same of every rank, however they say it: as rules, by a preset,
or derived from a live model. The job's name and the order of its tensors do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.holdings import Holdings
from reshard_cli.layout.pipeline import Stages
from reshard_cli.layout.storage_groups import StorageGroup, storage_name
from reshard_cli.spec.layout_document import LayoutDocument, StorageRule

__all__ = ["layout_digest"]

_RESOLVED = {"tensor", "concat", "rename", "layers"}  # of a storage rule: what names and operands say already


def layout_digest(
    document: LayoutDocument,
    tensors: Sequence[HeldTensor],
    geometries: Sequence[Holdings],
    groups: Sequence[StorageGroup],
    stages: Stages,
) -> str:
    """Return the digest of a job's layout, as hexadecimal text."""
    hasher = hashlib.sha256()
    hasher.update(repr((document.ranks, document.domain, sorted(document.leave_out))).encode())
    cuts = [_of_holdings(one) for one in geometries]
    numbers = [_of_arrays(one.first, one.step) for one in geometries]
    lines = []
    for one in tensors:
        experts = numbers[one.geometry] if one.has_experts else None
        what = (one.name, one.logical, one.shape, one.dtype, cuts[one.geometry], experts)
        how = (one.dtype_asked, one.padding, one.route, one.block, one.scale_of)
        lines.append(repr((what, how)))
    rules: dict[int | None, str] = {None: ""}
    for group in groups:
        if group.index not in rules:
            rules[group.index] = _of_rule(group.rule)
        names = [tensors[position].name for position in group.operands]
        lines.append(repr((storage_name(group, stages), names, rules[group.index])))
    for line in sorted(lines):
        hasher.update(line.encode())
    return hasher.hexdigest()


def _of_rule(rule: StorageRule | None) -> str:
    return "" if rule is None else json.dumps(rule.model_dump(exclude=_RESOLVED), sort_keys=True)


def _of_holdings(holdings: Holdings) -> str:
    """Return a digest of which rank holds which boxes, and where in its local tensor."""
    full = (holdings.hi > holdings.lo).all(axis=1)
    columns = [
        holdings.rank[full, None], holdings.lo[full], holdings.hi[full], holdings.local_lo[full],
    ]  # fmt: skip
    rows = np.concatenate(columns, axis=1).astype(np.int64)
    rows = rows[np.lexsort(rows.T[::-1])]
    return _of_arrays(rows, holdings.local_shape, holdings.present, np.array(holdings.explicit))


def _of_arrays(*arrays: np.ndarray[Any, Any]) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(repr(array.shape).encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
