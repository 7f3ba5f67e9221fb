"""A rank of a Megatron-core model that gets its weights from a refit's file: run under torchrun.

`torch.distributed.run ... -m tests.engines.megatron_rank JOB.json...`: a job names a checkpoint (for its config), the
folder of rank files, the family, the parallel sizes (the same in all jobs), and the folder for what comes out. Each
rank builds its part of the model full of NaN, compares names, shapes and dtypes with its file, takes the values, and
runs forward with the other ranks. The last rank writes the logits.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engines import megatron_stand_ins
from tests.engines.tiny_models import TOKENS

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def parallel_values(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": sizes["etp"],
    }


def common_values(config: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Return what all families' configurations say."""
    return {
        **parallel_values(sizes),
        "num_layers": config.get("num_hidden_layers") or len(config["layers_block_type"]),
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config.get("intermediate_size") or config["moe_intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["v_head_dim"],
        "layernorm_epsilon": config.get("rms_norm_eps") or config["layer_norm_epsilon"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def expert_values(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_moe_experts": next(config[key] for key in EXPERT_COUNTS if key in config),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }


def group_router_values(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": config["n_group"],
        "moe_router_group_topk": config["topk_group"],
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
    }


def family_values(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what one family's configuration says more."""
    if family == "qwen2":
        return {"add_qkv_bias": True}
    if family.startswith("qwen3"):
        values: dict[str, Any] = {"qk_layernorm": True}
        if "moe" in family:
            values |= expert_values(config)
        if family == "qwen3.5-moe":
            values |= {
                "experimental_attention_variant": "gated_delta_net",
                "linear_attention_freq": [int(one == "linear_attention") for one in config["layer_types"]],
                **{key: config[key] for key in config if key.startswith("linear_")},
                "attention_output_gate": True,
                "layernorm_zero_centered_gamma": True,
                "moe_shared_expert_gate": True,
                "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
                "deterministic_mode": True,  # its own gated delta rule, written in torch
                "transformer_impl": "transformer_engine",
            }
        return values
    if family == "deepseek-v3":
        width = config["moe_intermediate_size"] * config["n_shared_experts"]
        dense = config["first_k_dense_replace"]
        return {
            **expert_values(config),
            **group_router_values(config),
            "qk_layernorm": True,
            "q_lora_rank": config["q_lora_rank"],
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "rope_type": "rope",
            "rotary_base": config["rope_parameters"]["rope_theta"],
            "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
            "moe_shared_expert_intermediate_size": width,
        }
    if family == "nemotron-h":
        return {
            **expert_values(config),
            **group_router_values(config),
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
            "moe_latent_size": config["moe_latent_size"],
            "mamba_state_dim": config["ssm_state_size"],
            "mamba_head_dim": config["mamba_head_dim"],
            "mamba_num_groups": config["n_groups"],
            "mamba_num_heads": config["mamba_num_heads"],
            "use_mamba_mem_eff_path": False,
            "is_hybrid_model": True,
        }
    return {}


def build(family: str, config: dict[str, Any], sizes: dict[str, int], more: dict[str, Any]) -> nn.Module:
    """Return this rank's part of the model, by Megatron's own classes and Transformer Engine specs."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import (
        GPTModel,
        experimental_attention_variant_module_specs,
        gpt_layer_specs,
    )
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if family == "deepseek-v3" else TransformerConfig
    values = config_class(**{**common_values(config, sizes), **family_values(family, config), **more})
    multiple = 128 * sizes["tp"]
    shared = {
        "config": values,
        "vocab_size": -(-config["vocab_size"] // multiple) * multiple,
        "max_sequence_length": config["max_position_embeddings"],
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "parallel_output": False,
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }
    if family == "nemotron-h":
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
        pattern = "".join(letters[one] for one in config["layers_block_type"])
        return MambaModel(mamba_stack_spec=mamba_stack_spec, hybrid_override_pattern=pattern, **shared)
    if family == "qwen3.5-moe":
        specs = experimental_attention_variant_module_specs
        spec = specs.get_transformer_block_with_experimental_attention_variant_spec(values)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(values, use_transformer_engine=True)
    rope = config["rope_parameters"]
    return GPTModel(
        transformer_layer_spec=spec,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        **shared,
    )


def take(model: nn.Module, given: dict[str, Tensor], minus_one: list[str]) -> list[str]:
    """Copy a file's tensors into the model, and return what does not fit: nothing is left out or reshaped."""
    own = {name: one for name, one in model.state_dict().items() if not name.endswith("_extra_state")}
    told = [f"{name}: only the file has it" for name in sorted(given.keys() - own.keys())]
    for name, tensor in own.items():
        tensor.fill_(float("nan"))
        if name not in given:
            told.append(f"{name} {list(tensor.shape)}: only Megatron has it")
        elif (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype):
            told.append(
                f"{name}: the file has {given[name].dtype} {list(given[name].shape)}, "
                f"Megatron {tensor.dtype} {list(tensor.shape)}"
            )
        else:
            tensor.copy_(given[name] - 1 if name.endswith(tuple(minus_one)) else given[name])
    return told


def forward(model: nn.Module, sizes: dict[str, int], hidden_size: int) -> Tensor:
    """Run this rank's part: take hidden states from the stage before, hand them to the next one."""
    rank, stage_size = dist.get_rank(), dist.get_world_size() // sizes["pp"]
    stage = rank // stage_size
    batch, length = TOKENS.shape
    if stage:
        hidden = torch.empty(length, batch, hidden_size)
        dist.recv(hidden, rank - stage_size)
        model.set_input_tensor(hidden)
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    out = model(TOKENS, torch.arange(length).expand(batch, length), later)
    if stage < sizes["pp"] - 1:
        dist.send(out.contiguous(), rank + stage_size)
    return out


def run(job: dict[str, Any]) -> None:
    """Build, fill and run this rank's part of one model."""
    config = json.loads((Path(job["checkpoint"]) / "config.json").read_text())
    model = build(job["family"], config, job["parallel"], job["values"]).eval()
    rank, out = dist.get_rank(), Path(job["out"])
    given = load_file(Path(job["files"]) / f"rank-{rank:05d}.safetensors")
    told = take(model, given, job["minus_one"])
    (out / f"rank-{rank:05d}.json").write_text(json.dumps(told))
    wrong = torch.tensor(len(told))
    dist.all_reduce(wrong)
    if wrong:
        return
    logits = forward(model, job["parallel"], config["hidden_size"])
    if rank == dist.get_world_size() - 1:
        real = logits[..., : config["vocab_size"]].contiguous()  # the rest is the padding's
        save_file({"logits": real}, out / "logits.safetensors")


def main() -> None:
    warnings.simplefilter("ignore")
    jobs = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    megatron_stand_ins.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**parallel_values(jobs[0]["parallel"]))
    with torch.no_grad():
        for job in jobs:
            run(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
