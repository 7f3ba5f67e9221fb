"""Layouts of live models: every rank derives the same document, and it says what torch's own DTensors hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard_cli.errors import WeightsError
from reshard_cli.weights.live_layout import layout_of_state_dict
from tests.support import run_module
from tests.weights.live_ranks import MESHES


@pytest.mark.parametrize("kind", MESHES)
def test_every_rank_derives_the_same_document_and_it_says_what_the_rank_holds(tmp_path, kind):
    done = run_module("tests.weights.live_ranks", kind, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = torch.Size(MESHES[kind].values()).numel()
    for document in ("layout.yaml", "model.yaml"):
        assert len({(tmp_path / str(rank) / document).read_text() for rank in range(ranks)}) == 1
    layout = yaml.safe_load((tmp_path / "0" / "layout.yaml").read_text())
    assert (layout["ranks"], layout["domain"]) == (ranks, 4)
    assert len(layout["tensors"]) <= 4  # not one for each layer


@pytest.fixture
def world():
    """Be rank 0 of four, whose messages go nowhere: layouts need none."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def dtensor(mesh: DeviceMesh, shape: tuple[int, ...], *placements: object) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = torch.zeros(shape)
    local, _ = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    return DTensor.from_local(
        torch.zeros(local), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def document_of(state: dict[str, torch.Tensor], **options: int) -> dict[str, object]:
    return layout_of_state_dict(state, name="job", **options).layout


def test_fsdp_over_tp_is_written_in_the_order_of_the_cuts(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        f"layers.{layer}.{name}.weight": dtensor(mesh, (8, 4), *placements)
        for layer in range(3)
        for name, placements in (
            ("q", (_StridedShard(0, split_factor=2), Shard(0))),
            ("k", (_StridedShard(0, split_factor=2), Shard(0))),
            ("o", (Shard(0), Shard(1))),
            ("norm", (Replicate(), Replicate())),
            ("v", (_StridedShard(0, split_factor=2), Shard(0))),
        )
    }
    state["module._orig_mod.plain"] = torch.zeros(3)
    assert document_of(state, domain=2) == {
        "name": "job", "ranks": 4, "domain": 2, "meshes": {"mesh": {"dp": 2, "tp": 2}},
        "tensors": [
            {"match": "layers.{layer}.o.weight", "place": {"dp": "shard(0)", "tp": "shard(1)"}},
            {"match": "layers.{layer}.norm.weight"},
            {"match": "plain"},
            {"match": "*", "place": {"tp": "shard(0)", "dp": "shard(0)"}},
        ],
    }  # fmt: skip


def test_axes_in_another_order_than_the_ranks_are_written_row_by_row(world):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("inner", "outer"))
    document = document_of({"w": dtensor(mesh, (8,), Shard(0), Shard(0))})
    assert document["meshes"] == {"mesh": {"outer": 2, "inner": 2}}
    assert list(document["tensors"][0]["place"]) == ["inner", "outer"]


def test_what_no_document_says_is_refused_with_the_tensor_and_the_reason(world):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mixed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    cases = [
        (dtensor(mesh, (8,), Partial()), "still to be summed"),
        (dtensor(square, (6,), _StridedShard(0, split_factor=2), Shard(0)), "cut unevenly"),
        (dtensor(stages["dp"], (8,), Shard(0)), "pipeline stage"),
        (dtensor(mixed, (8,), Shard(0), Replicate()), "no regular grid"),
        (dtensor(part, (8,), Shard(0)), "has 2 ranks, the job 4"),
        (torch.zeros(2, dtype=torch.complex128), "dtype complex128"),
    ]
    for value, words in cases:
        with pytest.raises(WeightsError, match=words) as caught:
            document_of({"layers.0.w": value})
        assert "'layers.0.w'" in str(caught.value)
    with pytest.raises(WeightsError, match="two tensors"):
        document_of({"module.w": torch.zeros(1), "w": torch.zeros(1)})
    with pytest.raises(WeightsError, match="no tensor"):
        document_of({"state": 3})


def test_a_model_without_dtensors_is_replicated_on_every_rank():
    assert document_of({"w": torch.zeros(2)}) == {
        "name": "job",
        "ranks": 1,
        "domain": 8,
        "tensors": [{"match": "*"}],
    }
