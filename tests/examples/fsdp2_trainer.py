"""A trainer with FSDP2 that sends every step's weights to whoever generates. With the library, as a program:

    torchrun --nproc-per-node 2 -m tests.examples.fsdp2_trainer 127.0.0.1:29600 TOKEN STEPS

or as what the command line calls (`--from live:tests.examples.fsdp2_trainer:trainer`).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard_cli as rs
from tests.examples.tiny_qwen3 import VOCABULARY, start_own_group, tiny_qwen3


class Trainer:
    """A training job's rank: the model cut by FSDP2, AdamW, and random data."""

    def __init__(self, seed: int = 0) -> None:
        start_own_group()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        self.model = tiny_qwen3(seed)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(1000 + dist.get_rank())

    def state_dict(self) -> dict[str, Tensor]:
        """Name the tensors as they are now: DTensors, which know how they are cut."""
        return self.model.state_dict()

    def step(self) -> None:
        """Train one step."""
        tokens = torch.randint(VOCABULARY, (2, 16), generator=self.data)
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """End the job's own group."""
        dist.destroy_process_group()


def trainer() -> Trainer:
    """Return the object behind `--from live:tests.examples.fsdp2_trainer:trainer`."""
    return Trainer()


def main() -> None:
    rendezvous, token, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    training = Trainer()
    layout = rs.Layout.of(training.state_dict(), name="train", domain=2)
    with rs.join(layout, None, role="source", rendezvous=rendezvous, token=token) as session:
        session.bind(training.state_dict)
        for step in range(1, steps + 1):
            training.step()
            session.refit(version=step)
    training.close()


if __name__ == "__main__":
    main()
