"""A rollout job with tensor parallelism that generates with every version that a trainer sends. As a program:

    torchrun --nproc-per-node 2 -m tests.examples.tp_rollout 127.0.0.1:29600 TOKEN

or as what the command line calls (`--to live:tests.examples.tp_rollout:rollout`).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard_cli as rs
from tests.examples.tiny_qwen3 import start_own_group, tiny_qwen3

PROMPT = torch.tensor([[3, 141, 59, 26, 53, 58, 97, 93]])
PLAN = {
    **{f"model.layers.*.self_attn.{one}_proj": ColwiseParallel() for one in "qkv"},
    **{f"model.layers.*.mlp.{one}_proj": ColwiseParallel() for one in ("gate", "up")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


class Rollout:
    """A rollout job's rank: the model cut by heads and rows, and what it has generated."""

    def __init__(self, seed: int = 1) -> None:
        start_own_group()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        self.model = parallelize_module(tiny_qwen3(seed).eval().requires_grad_(False), mesh, PLAN)
        self.paused = False
        self.version: int | None = None
        self.text: list[int] = []

    def state_dict(self) -> dict[str, Tensor]:
        """Name the tensors that a refit writes into."""
        return self.model.state_dict()

    def before(self, version: int) -> None:
        """Stop generating: the weights are about to be written."""
        self.paused = True

    def after(self, version: int) -> None:
        """Go on: every rank has the whole version. What was computed with the old weights is dropped here."""
        self.paused, self.version = False, version

    def step(self) -> None:
        """Generate with the version that is there."""
        assert not self.paused
        self.text = self.model.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
        if dist.get_rank() == 0:
            print(f"version {self.version}: {self.text}", flush=True)

    def close(self) -> None:
        """End the job's own group."""
        dist.destroy_process_group()


def rollout() -> Rollout:
    """Return the object behind `--to live:tests.examples.tp_rollout:rollout`."""
    return Rollout()


def main() -> None:
    rendezvous, token = sys.argv[1:]
    engine = Rollout()
    layout = rs.Layout.of(engine.state_dict(), name="rollout", domain=2)
    with rs.join(None, layout, role="destination", rendezvous=rendezvous, token=token) as session:
        session.bind(engine.state_dict, before=engine.before, after=engine.after)
        while session.refit() is not None:
            engine.step()
    engine.close()


if __name__ == "__main__":
    main()
