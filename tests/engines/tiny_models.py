"""Tiny random models of transformers, one of each family that the presets know, their checkpoints and logits.

The values are random everywhere (norms, biases and buffers too), and large enough for a misplaced row to
change the logits. transformers is imported where it is used, so that modules skip where it is missing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import run_cli, write_yaml

VOCABULARY = 200  # no multiple of any engine's padding
TOKENS = torch.tensor([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64], [199, *range(11)]])

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
# family: the config's class, the model's class, the config's values
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, **_HEADS}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_SIZES, **_HEADS}),  # biases of q, k and v
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_SIZES, **_HEADS, "tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3Config", "Qwen3ForCausalLM", {**_SIZES, **_HEADS, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_SIZES, **_HEADS, **_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_SIZES, **_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 4,
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            **_SIZES, **_HEADS, **_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "full_attention_interval": 2,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_SIZES, **_HEADS, **_EXPERTS, "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"], "mamba_num_heads": 4,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "n_group": 2, "topk_group": 1,
            "moe_latent_size": 24,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_SIZES, "num_attention_heads": 4}),
}  # fmt: skip


def model_of(family: str, **config: Any) -> nn.Module:
    """Return an untouched model of this family. Skips the test where transformers does not have it."""
    import pytest
    import transformers

    config_class, model_class, values = FAMILIES[family]
    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {model_class}")
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**values, **config}))
    return model.eval()


def random_model(family: str, **config: Any) -> nn.Module:
    """Return a model with random values in every parameter and persistent buffer."""
    model = model_of(family, **config)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
            elif name.endswith("dt_bias"):
                tensor.copy_(noise)  # far from where transformers, but not Megatron, cuts time steps off
            else:
                # near what they are made as: norms near 1 or 0, A_log where it decays
                tensor.add_(0.2 * noise)
    return model


def logits_of(model: nn.Module) -> Tensor:
    """Return the model's logits for the fixed input."""
    with torch.no_grad():
        return model(TOKENS).logits


def engine_document(name: str, engine: str, ranks: int, checkpoint: Path, **more: Any) -> dict[str, Any]:
    """Return a layout document that is one engine's preset."""
    return {"name": name, "model": str(checkpoint), "engine": engine, "ranks": ranks, "domain": 2, **more}


def refit(work: Path, source: dict[str, Any], destination: dict[str, Any], origin: Path, folder: str) -> Path:
    """Run the command line's refit with `--verify`; return the folder of the destination ranks' files."""
    done = run_cli(
        "refit", write_yaml(work / f"{source['name']}.yaml", source),
        write_yaml(work / f"{destination['name']}.yaml", destination),
        "--from", origin, "--to", work / folder, "--verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [f"rank-{i:05d}.safetensors" for i in range(destination["ranks"])]
    assert sorted(path.name for path in (work / folder).iterdir()) == names
    return work / folder
