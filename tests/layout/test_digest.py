"""One digest for all documents that say the same of every rank, another one as soon as a byte would lie elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model
from tests.support import model_document, write_yaml

TENSORS = {
    "layers.0.q.weight": ((8, 6), "bfloat16"),
    "layers.0.k.weight": ((4, 6), "bfloat16"),
    "layers.1.q.weight": ((8, 6), "bfloat16"),
    "layers.1.k.weight": ((4, 6), "bfloat16"),
    "layers.0.o.weight": ((6, 8), "bfloat16"),
    "layers.1.o.weight": ((6, 8), "bfloat16"),
    "layers.0.experts.0.up.weight": ((3, 6), "bfloat16"),
    "layers.0.experts.1.up.weight": ((3, 6), "bfloat16"),
    "norm.weight": ((5,), "float32"),
}
DOCUMENT: dict[str, Any] = {
    "name": "job", "ranks": 4, "domain": 2, "meshes": {"m": {"dp": 2, "tp": 2}},
    "tensors": [
        {"match": "layers.{layer}.experts.{expert}.up.weight", "place": {"tp": "expert"}},
        {"match": "layers.{layer}.{q,k}.weight", "place": {"tp": "shard(0)", "dp": "shard(0)"}},
        {"match": "*.o.weight", "place": {"tp": "shard(1)"}},
        {"match": "*"},
    ],
    "storage": [
        {"tensor": "layers.{layer}.qk.weight", "concat": ["layers.{layer}.{q,k}.weight"]},
        {"tensor": "layers.{layer}.w", "stack": "expert", "concat": ["layers.{layer}.experts.{expert}.up.weight"]},
    ],
}  # fmt: skip


@pytest.fixture
def layout_of(tmp_path):
    def layout(document: dict[str, Any], tensors: dict[str, Any] = TENSORS) -> JobLayout:
        model = read_model(write_yaml(tmp_path / "model.yaml", model_document(tensors)))
        return build_layout(read_layout_document(write_yaml(tmp_path / "job.yaml", document)), model)

    return layout


def test_the_same_said_otherwise_is_the_same(layout_of):
    other = {
        "name": "another", "ranks": 4, "domain": 2, "meshes": {"all": {"replica": 2, "tensor": 2}, "flat": {"x": 4}},
        "tensors": [
            {"match": "layers.*.k.weight", "place": {"tensor": "shard(0)", "replica": "shard(0)"}},
            {"match": "norm.weight", "mesh": "flat"},
            {"match": "layers.0.q.weight", "place": {"tensor": "shard(0)", "replica": "shard(0)"}},
            {"match": "layers.1.q.weight", "place": {"tensor": "shard(0)", "replica": "shard(0)"}},
            {"match": "layers.{layer}.o.weight", "place": {"tensor": "shard(1)"}},
            {"match": "*.experts.{expert}.*", "place": {"tensor": "expert"}},
        ],
        "storage": [
            {"tensor": "layers.{layer}.w", "stack": "expert", "concat": ["layers.{layer}.experts.{expert}.up.weight"]},
            {"tensor": "layers.{layer}.qk.weight", "concat": ["layers.{layer}.q.weight", "layers.{layer}.k.weight"]},
        ],
    }  # fmt: skip
    turned = dict(reversed(TENSORS.items()))
    assert layout_of(DOCUMENT).digest == layout_of(other).digest == layout_of(other, turned).digest


def changed(*path: Any) -> dict[str, Any]:
    """Return the document with the value at this path replaced by the path's last item."""
    document = copy.deepcopy(DOCUMENT)
    at: Any = document
    for key in path[:-2]:
        at = at[key]
    at[path[-2]] = path[-1]
    return document


@pytest.mark.parametrize(
    "path",
    [
        ("domain", 4),
        ("meshes", "m", {"tp": 2, "dp": 2}),
        ("tensors", 0, "place", {"tp": "expert(round_robin)"}),
        ("tensors", 0, "place", {"dp": "expert"}),
        ("tensors", 1, "place", {"dp": "shard(0)", "tp": "shard(0)"}),
        ("tensors", 2, "place", {"tp": "shard(0)"}),
        ("tensors", 2, "dtype", "float32"),
        ("tensors", 2, "route", "broadcast"),
        ("tensors", 2, "pad", {1: 5}),
        ("storage", 0, "concat", ["layers.{layer}.{k,q}.weight"]),
        ("storage", 0, "interleave", 4),
        ("storage", 0, "tensor", "layers.{layer}.kq.weight"),
        ("storage", 1, "transpose", True),
        ("storage", []),
        ("alias", {"layers.1.o.weight": "layers.0.o.weight"}),
        ("leave_out", ["norm.weight"]),
        ("pieces", [{"tensor": "norm.weight", "rank": rank, "box": [[0, 5]]} for rank in range(3)]),
    ],
    ids=lambda path: "-".join(str(key) for key in path)[:60],
)
def test_whatever_moves_a_byte_changes_it(layout_of, path):
    assert layout_of(changed(*path)).digest != layout_of(DOCUMENT).digest


def test_another_shape_or_dtype_of_the_model_changes_it(layout_of):
    for other in (((6,), "float32"), ((5,), "float16")):
        assert layout_of(DOCUMENT, TENSORS | {"norm.weight": other}).digest != layout_of(DOCUMENT).digest
