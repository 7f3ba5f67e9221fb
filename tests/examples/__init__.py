"""Worked examples to copy: an FSDP2 trainer and a tensor-parallel rollout job of one tiny Qwen3 of transformers."""
