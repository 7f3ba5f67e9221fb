"""Writes DCP folders as training jobs do, as processes of its own: `python -m tests.weights.dcp_writer KIND FOLDER`.

FOLDER/dcp is the checkpoint, FOLDER/whole.safetensors the whole tensors that went into it. KIND: `single`, `fsdp`
(fully_shard over two ranks), `fsdp-tp` (fully_shard over tensor parallel modules, two by two).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = {"single": 1, "fsdp": 2, "fsdp-tp": 4}


def whole_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of many dtypes; `up`, `down` and `norm` are modules of a model."""
    seed = torch.Generator().manual_seed(0)
    return {
        "up.weight": torch.randn(16, 8, generator=seed),
        "down.weight": torch.randn(8, 16, generator=seed),
        "norm.weight": torch.randn(5, generator=seed),
        "thin.weight": torch.randn(1, 6, generator=seed),  # fewer rows than ranks
        "half": torch.randn(7, 3, generator=seed).bfloat16(),
        "eighth": torch.randn(9, 4, generator=seed).to(torch.float8_e4m3fn),
        "counts": torch.arange(6, dtype=torch.int32),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "steps": torch.tensor(7),
        "turned": torch.randn(4, 6, generator=seed).t(),
        "nothing": torch.empty(0, 4),
    }


def build(kind: str, whole: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return the model's state dict, sharded: modules by FSDP2 (and tensor parallel), the rest by hand."""
    if kind == "single":
        return dict(whole)
    model = nn.Sequential(
        OrderedDict(
            {
                "up": nn.Linear(8, 16, bias=False),
                "down": nn.Linear(16, 8, bias=False),
                "norm": nn.RMSNorm(5),
                "thin": nn.Linear(6, 1, bias=False),
            }
        )
    )
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    sizes, names = ((2, 2), ("dp", "tp")) if kind == "fsdp-tp" else ((2,), ("dp",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if kind == "fsdp-tp":
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state: dict[str, object] = dict(model.state_dict())
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for name in set(whole) - set(state):
        value = whole[name]
        if value.dim() == 2:  # uneven shards
            rows = -(-len(value) // size)
            local = value[rank * rows : (rank + 1) * rows].clone()
            state[name] = DTensor.from_local(
                local, mesh["dp"], [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
            )
        else:
            state[name] = value
    return state


def write(kind: str, folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_ranks = RANKS[kind]
    if num_ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    whole = whole_tensors()
    model = build(kind, whole)
    if rank == 0:
        save_file({name: one.contiguous() for name, one in whole.items()}, folder / "whole.safetensors")
    optimizer = {"state": {name: {"exp_avg": torch.ones(2)} for name in model}, "groups": [{"lr": 0.1}]}
    dcp.save({"app": {"model": model, "optim": optimizer}, "step": 3}, checkpoint_id=folder / "dcp")
    if num_ranks > 1:
        dist.destroy_process_group()


def main() -> int:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    children = []
    for rank in range(1, RANKS[kind]):
        child = os.fork()
        if child == 0:
            write(kind, folder, rank)
            os._exit(0)
        children.append(child)
    write(kind, folder, 0)
    return max((os.waitpid(child, 0)[1] for child in children), default=0)


if __name__ == "__main__":
    sys.exit(main())
