"""The tiny Qwen3 that both examples use, and the ranks of an example's own job."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 160


def tiny_qwen3(seed: int) -> Qwen3ForCausalLM:
    """Return a model of 82,304 parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def start_own_group() -> None:
    """Make the job's own default process group from torchrun's environment; a refit leaves it alone."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
