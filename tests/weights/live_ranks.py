"""Holds derived layouts of live models against their DTensors: `python -m tests.weights.live_ranks KIND FOLDER`.

Each of the gloo ranks derives the document, reads it back as the command line would, and compares its boxes with
the offsets that torch computes and with the values of its local shards. FOLDER gets each rank's documents.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard_cli.layout.job import build_layout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model
from reshard_cli.weights.live_layout import layout_of_state_dict

MESHES = {
    "fsdp": {"dp": 4},
    "tp": {"tp": 4},
    "hsdp": {"replicate": 2, "shard": 2},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "hsdp-tp": {"replicate": 2, "shard": 2, "tp": 2},
    "flattened": {"dp": 2, "cp": 2, "tp": 2},
}


def block() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            up=nn.Linear(8, 16), norm=nn.RMSNorm(16), down=nn.Linear(16, 8, bias=False), odd=nn.Linear(8, 3)
        )
    )


def build(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model sharded in this way, and its whole tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(block(), block())))
    whole = {name: one.detach().clone() for name, one in model.state_dict().items()}
    axes = MESHES[kind]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "flattened":
        data = mesh["dp", "cp"]._flatten("dp_cp")
    elif len(axes) == 1:
        data = None if "tp" in axes else mesh
    else:
        data = mesh[tuple(one for one in axes if one != "tp")]
    if data is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model, whole


def compare(kind: str, folder: Path, rank: int) -> None:
    model, whole = build(kind)
    state = model.state_dict()
    live = layout_of_state_dict(state, name=kind, domain=4)
    own = folder / f"{rank}"
    own.mkdir()
    (own / "layout.yaml").write_text(live.layout_text())
    (own / "model.yaml").write_text(live.model_text())
    layout = build_layout(read_layout_document(own / "layout.yaml"), read_model(own / "model.yaml"))
    held = {storage.name: storage for storage in rank_storages(layout, rank)}
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        windows = held[name].windows if name in held else ()
        if not local.numel():
            assert not windows or held[name].num_elements == 0, name
            continue
        (window,) = windows
        assert tuple(b - a for a, b in zip(window.lo, window.hi, strict=True)) == tuple(local.shape), name
        if isinstance(value, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            assert (tuple(shape), tuple(offset)) == (tuple(local.shape), window.lo), name
        part = whole[name][tuple(slice(a, b) for a, b in zip(window.lo, window.hi, strict=True))]
        assert torch.equal(part, local), name


def run(kind: str, folder: Path, rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    compare(kind, folder, rank)
    dist.destroy_process_group()


def main() -> int:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    num_ranks = torch.Size(MESHES[kind].values()).numel()
    children = []
    for rank in range(1, num_ranks):
        child = os.fork()
        if child == 0:
            run(kind, folder, rank, num_ranks)
            os._exit(0)
        children.append(child)
    run(kind, folder, 0, num_ranks)
    return 1 if any(os.waitpid(child, 0)[1] for child in children) else 0


if __name__ == "__main__":
    sys.exit(main())
