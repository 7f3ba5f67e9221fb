"""A world of vLLM ranks: each fills its parameters with NaN, has the model load a checkpoint, and saves them.

Run as `python -m tests.engines.vllm_loader FOLDER WORLD`; it imports vLLM once and forks the ranks.
FOLDER/world-WORLD.json lists the cases: name, checkpoint, architecture, tp, pp, dp, ep. A rank writes
FOLDER/NAME/truth-RANK.safetensors, its parameters by their first names, and truth-RANK.json: the further
names of the same parameters, the names that the loader says it loaded, and the buffers. What vLLM does after
loading (packing for the CPU's kernels) is left out: it changes the layout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing import start_processes


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            yield name, file.get_tensor(name)


def load(case: dict, meeting: Path, world: int, rank: int) -> tuple[nn.Module, set[str]]:
    """Return this rank's model of the case, loaded, and the names that the loader reports."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=case["checkpoint"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
        tensor_parallel_size=case["tp"],
        pipeline_parallel_size=case["pp"],
        data_parallel_size=case["dp"],
        enable_expert_parallel=case["ep"] > 1,
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"file://{meeting}", local_rank=rank, backend="gloo")
        initialize_model_parallel(case["tp"], case["pp"])
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model, model.load_weights(tensors_of(Path(case["checkpoint"])))


def save(model: nn.Module, loaded: set[str], folder: Path, rank: int) -> None:
    """Write the truth of one rank."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}
    facts = {
        "aliases": {name: other for name, other in names.items() if name != other},
        "loaded": sorted(loaded),
        "buffers": [name for name, _ in model.named_buffers()],
    }
    (folder / f"truth-{rank}.json").write_text(json.dumps(facts))
    tensors = {name: one.detach().clone().contiguous() for name, one in model.named_parameters()}
    save_file(tensors, folder / f"truth-{rank}.safetensors")


def run_rank(rank: int, folder: Path, world: int) -> None:
    """Load and save all cases of a world on one rank."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    # ranks of different names talk over gloo, and leave no shared memory behind
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "VLLM_DIST_IDENT": f"rank-{rank}"}
    for case in json.loads((folder / f"world-{world}.json").read_text()):
        if rank == 0:
            print("loading", case["name"], flush=True)
        model, loaded = load(case, folder / f"meeting-{world}", world, rank)
        save(model, loaded, folder / case["name"], rank)
        del model
        destroy_model_parallel()
    destroy_distributed_environment()


def main() -> None:
    import vllm.engine.arg_utils  # noqa: F401 (imported before the fork, once for all ranks)
    from vllm.model_executor.models.registry import ModelRegistry

    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    cases = json.loads((folder / f"world-{world}.json").read_text())
    for name in sorted({case["architecture"] for case in cases}):
        # the same class as vLLM's; once it is known, no process is started to look at it
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    torch.set_num_threads(1)
    start_processes(run_rank, (folder, world), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
