"""What the ranks of transformers' own tensor parallelism hold, written as files: run under torchrun.

`torch.distributed.run ... -m tests.engines.transformers_tp FOLDER...`: each folder has a `checkpoint`, and gets
a `held` with a file of each rank: the local parts of the parameters and persistent buffers, by module name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone(memory_format=torch.contiguous_format)


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for folder in map(Path, sys.argv[1:]):
        model = AutoModelForCausalLM.from_pretrained(
            folder / "checkpoint",
            distributed_config=DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()),
        )
        persistent = model.state_dict().keys()
        held = dict(model.named_parameters())  # tied ones are here once
        held |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        (folder / "held").mkdir(exist_ok=True)
        parts = {name: local_part(tensor) for name, tensor in held.items()}
        save_file(parts, folder / "held" / f"rank-{dist.get_rank():05d}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
