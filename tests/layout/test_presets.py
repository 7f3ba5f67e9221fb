"""What each rank of a preset's job holds is what the engine holds, by the engine's own rules.

Tiny models of every family are cut by `engine_rules` (Megatron-core, vLLM, SGLang, FSDP2) or below
(torchtitan, transformers). Every storage of every rank has to be there by the engine's own name, with each
element in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model
from tests.layout.engine_rules import (
    Array,
    Shapes,
    Tiny,
    Weights,
    chunk,
    experts_of,
    fsdp2,
    megatron,
    over_tensor_parallel,
    sglang,
    stage_of,
    stages_of_torchtitan,
    tiny,
    vllm,
    with_prefix,
)
from tests.support import make_jobs, model_document, refit_in_process, write_yaml

# ---------------------------------------------------------------- models

HIDDEN = 4


def in_layer(number: int, shapes: Shapes, start: str = "model") -> Shapes:
    return {f"{start}.layers.{number}.{name}": shape for name, shape in shapes.items()}


def ends(vocab: int, tied: bool = False) -> Shapes:
    head = {} if tied else {"lm_head.weight": (vocab, HIDDEN)}
    return {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,), **head}


def norms() -> Shapes:
    return {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}


def attention(heads: int, groups: int, dim: int, kind: str = "") -> Shapes:
    """`kind`: "norm" with q and k norms, "bias" with biases, "gated" with a gate in q_proj and norms."""
    rows = {"q": heads * dim * (1 + (kind == "gated")), "k": groups * dim, "v": groups * dim}
    found: Shapes = {f"self_attn.{part}_proj.weight": (rows[part], HIDDEN) for part in rows}
    if kind == "bias":
        found |= {f"self_attn.{part}_proj.bias": (rows[part],) for part in rows}
    if kind in ("norm", "gated"):
        found |= {f"self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    return found | {"self_attn.o_proj.weight": (HIDDEN, heads * dim)}


def gated_mlp(base: str, width: int) -> Shapes:
    return {
        f"{base}.gate_proj.weight": (width, HIDDEN),
        f"{base}.up_proj.weight": (width, HIDDEN),
        f"{base}.down_proj.weight": (HIDDEN, width),
    }


def heads_of(heads: int, groups: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim}


def dense(layers: int = 4, kind: str = "norm", tied: bool = False, vocab: int = 130) -> Tiny:
    """Qwen3 ("norm"), Qwen2 ("bias") or Llama (""): 8 heads in 2 groups."""
    shapes = ends(vocab, tied)
    for number in range(layers):
        shapes |= in_layer(number, {**norms(), **attention(8, 2, 2, kind), **gated_mlp("mlp", 16)})
    return tiny(heads_of(8, 2, 2), shapes)


def moe(layers: int = 2, experts: int = 8) -> Tiny:
    """Qwen3-MoE: each expert's projections are tensors of their own."""
    shapes = ends(64)
    for number in range(layers):
        layer: Shapes = {**norms(), **attention(4, 2, 2, "norm"), "mlp.gate.weight": (experts, HIDDEN)}
        for expert in range(experts):
            layer |= gated_mlp(f"mlp.experts.{expert}", 4)
        shapes |= in_layer(number, layer)
    return tiny(heads_of(4, 2, 2), shapes)


def deepseek(layers: int = 3, experts: int = 4) -> Tiny:
    """DeepSeek-V3: multi-head latent attention, one dense layer first, a shared expert, a router bias."""
    heads, nope, rope, value, q_lora, kv_lora = 4, 2, 1, 2, 3, 2
    mla: Shapes = {
        "self_attn.q_a_proj.weight": (q_lora, HIDDEN),
        "self_attn.q_a_layernorm.weight": (q_lora,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_lora),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_lora + rope, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (kv_lora,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_lora),
        "self_attn.o_proj.weight": (HIDDEN, heads * value),
    }
    shapes = ends(70)
    for number in range(layers):
        layer = {**norms(), **mla}
        if number == 0:
            layer |= gated_mlp("mlp", 8)
        else:
            layer |= {"mlp.gate.weight": (experts, HIDDEN), "mlp.gate.e_score_correction_bias": (experts,)}
            for expert in range(experts):
                layer |= gated_mlp(f"mlp.experts.{expert}", 4)
            layer |= gated_mlp("mlp.shared_experts", 4)
        shapes |= in_layer(number, layer)
    return tiny({"num_attention_heads": heads, "num_key_value_heads": heads}, shapes)


def qwen35(layers: int = 4, every: int = 4, experts: int = 4) -> Tiny:
    """Qwen3.5: gated delta nets, every so many layers full attention with a gated query, grouped experts."""
    key_heads, value_heads, dim = 4, 8, 2
    keys, values = key_heads * dim, value_heads * dim
    delta: Shapes = {
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, HIDDEN),
        "linear_attn.in_proj_z.weight": (values, HIDDEN),
        "linear_attn.in_proj_b.weight": (value_heads, HIDDEN),
        "linear_attn.in_proj_a.weight": (value_heads, HIDDEN),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, 2),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.norm.weight": (dim,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }
    shapes = ends(64)
    for number in range(layers):
        layer = {**norms(), **(attention(8, 2, 2, "gated") if (number + 1) % every == 0 else delta)}
        layer |= {
            "mlp.gate.weight": (experts, HIDDEN),
            "mlp.experts.gate_up_proj": (experts, 8, HIDDEN),
            "mlp.experts.down_proj": (experts, HIDDEN, 4),
            **gated_mlp("mlp.shared_expert", 8),
            "mlp.shared_expert_gate.weight": (1, HIDDEN),
        }
        shapes |= in_layer(number, layer)
    more = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    dims = {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    return tiny({**heads_of(8, 2, 2), **more, **dims}, shapes)


def nemotron(pattern: str = "ME*EME", groups: int = 2) -> Tiny:
    """Nemotron hybrid: Mamba-2 (M), experts in a latent space (E), attention (*); one mixer a layer."""
    heads, dim, state, latent, experts = 8, 2, 2, 3, 4
    inner, states = heads * dim, groups * state
    mixers: dict[str, Shapes] = {
        "M": {
            "in_proj.weight": (2 * inner + 2 * states + heads, HIDDEN),
            "conv1d.weight": (inner + 2 * states, 1, 2),
            "conv1d.bias": (inner + 2 * states,),
            "A_log": (heads,),
            "D": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (HIDDEN, inner),
        },
        "E": {
            "gate.weight": (experts, HIDDEN),
            "gate.e_score_correction_bias": (experts,),
            **{f"experts.{expert}.up_proj.weight": (4, latent) for expert in range(experts)},
            **{f"experts.{expert}.down_proj.weight": (latent, 4) for expert in range(experts)},
            "shared_experts.up_proj.weight": (8, HIDDEN),
            "shared_experts.down_proj.weight": (HIDDEN, 8),
            "fc1_latent_proj.weight": (latent, HIDDEN),
            "fc2_latent_proj.weight": (HIDDEN, latent),
        },
        "*": {name.removeprefix("self_attn."): shape for name, shape in attention(8, 2, 2).items()},
    }
    shapes: Shapes = {"backbone.embeddings.weight": (64, HIDDEN)}
    for number, letter in enumerate(pattern):
        mixer = {f"mixer.{name}": shape for name, shape in mixers[letter].items()}
        shapes |= in_layer(number, {"norm.weight": (HIDDEN,), **mixer}, "backbone")
    shapes |= {"backbone.norm_f.weight": (HIDDEN,), "lm_head.weight": (64, HIDDEN)}
    sizes = {"mamba_num_heads": heads, "mamba_head_dim": dim, "n_groups": groups, "ssm_state_size": state}
    return tiny({**heads_of(8, 2, 2), **sizes}, shapes)


# ---------------------------------------------------------------- torchtitan and transformers

TITAN = {
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b", "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm", "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.q_proj": "attention.qkv_linear.wq", "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv", "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "moe.router.gate", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
}  # fmt: skip


def torchtitan(
    model: Tiny, rank: int, ranks: int, *, tp: int = 1, pp: int = 1, ep: int = 1, replicate: int = 1
) -> Weights:
    """FSDP over TP for dense weights; experts over EP, then FSDP: dim 1 where its ranks outnumber them."""
    fsdp = ranks // (pp * tp * replicate)
    here, t, stage = rank // tp % fsdp, rank % tp, rank // (ranks // pp)
    etp = tp if ep == 1 else 1
    efsdp = fsdp * tp // (ep * etp)
    et, e, ef = rank % etp, rank // etp % ep, rank // (etp * ep) % efsdp

    def cut(name: str, whole: Array) -> Array:
        return chunk(over_tensor_parallel(name, whole, tp, t), fsdp, here)

    outside = {"model.embed_tokens.weight": "tok_embeddings.weight"} if stage == 0 else {}
    if stage == pp - 1:
        outside |= {"model.norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
    out = {new: cut(name, model.weights[name]) for name, new in outside.items() if name in model.weights}
    for number in stage_of(stages_of_torchtitan(model.num_layers, pp), stage):
        layer, renamed = model.layer(number), {}
        for name, whole in layer.items():
            module, _, kind = name.rpartition(".")
            if module in TITAN and kind in ("weight", "bias"):
                renamed[f"{TITAN[module]}.{kind}"] = cut(name, whole)
        if "mlp.gate.e_score_correction_bias" in layer:
            renamed["moe.expert_bias_E"] = layer["mlp.gate.e_score_correction_bias"]
        experts = experts_of(layer)
        w = {"w1_EFD": [gate for (gate, _), _ in experts], "w3_EFD": [up for (_, up), _ in experts]}
        w["w2_EDF"] = [down for _, down in experts]
        for name, parts in w.items() if experts else ():
            shard = chunk(chunk(np.stack(parts), ep, e), etp, et, dim=2 if name == "w2_EDF" else 1)
            shard = chunk(shard, efsdp, ef, dim=1 if efsdp * ep > len(experts) else 0)
            renamed[f"moe.routed_experts.inner_experts.{name}"] = shard
        out |= with_prefix(f"layers.{number}.", renamed)
    return out


def transformers(model: Tiny, rank: int, ranks: int, *, tp: int = 1) -> Weights:
    """Whole tensors; with tp, its plans: latent attention whole, the experts of a layer one tensor each."""
    if tp == 1:
        return model.weights
    t, out = rank % tp, {}
    latent = any("kv_b_proj" in name for name in model.weights)
    for name, whole in model.weights.items():
        module = name.split(".")[-2]
        if ".mlp.experts." in name or (latent and "self_attn" in name):
            out[name] = whole
        elif module == "embed_tokens":
            out[name] = chunk(whole, tp, t)  # transformers adds embedding_rowwise to every plan
        elif "linear_attn" in name and (module.startswith("in_proj") or module == "out_proj"):
            out[name] = chunk(whole, tp, t)  # colwise, its output gathered
        else:
            out[name] = over_tensor_parallel(name, whole, tp, t)
    for number in range(model.num_layers):
        base = f"model.layers.{number}.mlp.experts"
        experts = experts_of(model.layer(number))
        if experts:
            out = {name: one for name, one in out.items() if not name.startswith(base)}
            halves = (np.stack([parts[half] for parts, _ in experts]) for half in (0, 1))
            out[f"{base}.gate_up_proj"] = np.concatenate([chunk(one, tp, t, dim=1) for one in halves], axis=1)
            out[f"{base}.down_proj"] = chunk(np.stack([down for _, down in experts]), tp, t, dim=2)
    return out


# ---------------------------------------------------------------- what a layout holds


def layout_of(folder: Path, model: Tiny, engine: str, ranks: int, **more: Any) -> JobLayout:
    """Return the layout of a job of this engine; int64 in all, so that every value can be told."""
    tensors = {name: (whole.shape, "int64") for name, whole in model.weights.items()}
    model_path = write_yaml(folder / "model.yaml", {**model_document(tensors), "config": dict(model.config)})
    document = {"name": "job", "ranks": ranks, "engine": engine, **more}
    loaded = read_layout_document(write_yaml(folder / "job.yaml", document))
    return build_layout(loaded, read_model(model_path))


def logical(weights: Weights) -> Weights:
    """Return the tensors by the names that windows use: the experts of a projection are one tensor."""
    found: dict[str, list[Array]] = {}
    for name, whole in weights.items():
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name), []).append(whole)
    return {name: np.stack(parts) if "{expert}" in name else parts[0] for name, parts in found.items()}


def held(layout: JobLayout, rank: int, whole: Weights) -> Weights:
    """Return a rank's storages, filled from whole tensors by their windows; 0 where there is none."""
    found = {}
    for storage in rank_storages(layout, rank):
        if not all(window.tensor in whole for window in storage.windows):
            continue  # left out by the caller
        flat = np.zeros(storage.num_elements, np.int64)
        for window in storage.windows:
            box = whole[window.tensor][tuple(map(slice, window.lo, window.hi))]
            grid = np.meshgrid(*map(np.arange, box.shape), indexing="ij") if box.ndim else []
            at = window.offset + sum(step * index for step, index in zip(window.strides, grid, strict=True))
            assert not flat[at].any(), f"{storage.name}: two pieces in one place"
            flat[at] = box
        found[storage.name] = flat.reshape(storage.shape)
    return found


def assert_same(one: Weights, other: Weights, rank: int) -> None:
    """Compare names, shapes and every element; what is empty need not be there."""
    one, other = ({name: part for name, part in side.items() if part.size} for side in (one, other))
    assert sorted(one) == sorted(other), f"rank {rank}"
    for name, part in one.items():
        assert part.shape == other[name].shape, f"rank {rank}: {name}"
        assert np.array_equal(part, other[name]), f"rank {rank}: {name}\n{part}\nexpected\n{other[name]}"


# ---------------------------------------------------------------- cases

MODELS: dict[str, Callable[[], Tiny]] = {
    "qwen3": dense,
    "qwen3-tied": lambda: dense(tied=True),
    "qwen3-6-layers": lambda: dense(6),
    "qwen3-6-layers-tied": lambda: dense(6, tied=True),
    "qwen3-8-layers": lambda: dense(8),
    "qwen2": lambda: dense(kind="bias"),
    "llama": lambda: dense(kind=""),
    "qwen3-moe": moe,
    "qwen3-moe-6-experts": lambda: moe(experts=6),
    "deepseek": deepseek,
    "qwen3.5": qwen35,
    "qwen3.5-full": lambda: qwen35(2, every=1),
    "nemotron": nemotron,
}
OPTIONS = {"divisor": "vocab_divisor", "glu": "glu_interleave", "grouped": "grouped"}

# model, ranks, sizes; `stages`: layers of each stage, which the document says by its first and last
MEGATRON = [
    ("qwen3", 1, {}), ("qwen3", 2, {"tp": 2}), ("qwen3", 8, {"tp": 4}), ("qwen3", 8, {"tp": 8}),
    ("qwen3", 8, {"tp": 2, "cp": 2, "pp": 2}), ("qwen3", 2, {"tp": 2, "divisor": 3}),
    ("qwen2", 2, {"tp": 2}), ("qwen2", 4, {"tp": 4}), ("llama", 4, {"tp": 2, "pp": 2}),
    ("qwen3-tied", 2, {"tp": 2}), ("qwen3-tied", 4, {"tp": 2, "pp": 2}),
    ("qwen3-6-layers-tied", 4, {"pp": 4, "stages": [1, 2, 2, 1]}),
    ("qwen3-6-layers", 8, {"tp": 2, "pp": 4, "stages": [1, 2, 2, 1]}),
    ("qwen3-6-layers", 3, {"pp": 3, "stages": [4, 1, 1]}),
    ("qwen3-6-layers", 2, {"pp": 2, "stages": [2, 4]}), ("qwen3-moe", 4, {"ep": 4}),
    ("qwen3-moe", 4, {"tp": 2, "ep": 2}), ("qwen3-moe", 8, {"tp": 2, "ep": 2}),
    ("qwen3-moe", 8, {"tp": 2, "ep": 4, "etp": 1}), ("qwen3-moe", 8, {"tp": 4, "ep": 2, "etp": 2}),
    ("qwen3-moe", 8, {"tp": 1, "ep": 2, "etp": 4}),
    ("qwen3-moe", 16, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
    ("qwen3-moe", 8, {"tp": 2, "cp": 2, "ep": 8, "etp": 1}),
    ("qwen3-moe", 4, {"tp": 2, "ep": 2, "glu": 1}), ("qwen3-moe", 2, {"ep": 2, "glu": 2}),
    ("deepseek", 4, {"tp": 4}), ("deepseek", 8, {"tp": 2, "ep": 4, "etp": 1}),
    ("deepseek", 12, {"tp": 2, "pp": 3, "ep": 2}), ("deepseek", 4, {"pp": 2, "ep": 2, "stages": [1, 2]}),
    ("qwen3.5", 2, {"tp": 2}), ("qwen3.5", 4, {"tp": 4}),
    ("qwen3.5", 8, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}), ("qwen3.5", 4, {"tp": 4, "ep": 4, "etp": 1}),
    ("qwen3.5", 4, {"pp": 4}), ("nemotron", 2, {"tp": 2}),
    ("nemotron", 8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}),
    ("nemotron", 4, {"pp": 2, "ep": 2, "stages": [2, 4]}),
]  # fmt: skip
VLLM = [
    ("qwen3", 1, {}), ("qwen3", 2, {"tp": 2}), ("qwen3", 4, {"tp": 4}), ("qwen3", 8, {"tp": 8}),
    ("qwen3", 4, {"tp": 2}), ("qwen3", 8, {"tp": 2, "pp": 2}), ("qwen3", 3, {"pp": 3}),
    ("qwen3-6-layers", 8, {"tp": 2, "pp": 4}), ("qwen3-tied", 2, {"tp": 2}),
    ("qwen3-tied", 4, {"tp": 2, "pp": 2}), ("qwen2", 4, {"tp": 4}), ("llama", 8, {"tp": 4}),
    ("qwen3-moe", 4, {"tp": 4}), ("qwen3-moe", 4, {"tp": 4, "ep": 4}),
    ("qwen3-moe", 8, {"tp": 2, "ep": 8}), ("qwen3-moe", 8, {"tp": 2, "ep": 2}),
    ("qwen3-moe", 4, {"ep": 4}), ("qwen3-moe", 8, {"tp": 2, "etp": 4}),
    ("qwen3-moe-6-experts", 4, {"tp": 4, "ep": 4}), ("deepseek", 4, {"tp": 4}),
    ("deepseek", 4, {"tp": 2, "ep": 4}), ("deepseek", 6, {"tp": 2, "pp": 3, "ep": 2}), ("qwen3.5", 1, {}),
    ("qwen3.5", 2, {"tp": 2}), ("qwen3.5", 4, {"tp": 4}), ("qwen3.5", 4, {"tp": 4, "ep": 4}),
    ("nemotron", 1, {}), ("nemotron", 2, {"tp": 2}), ("nemotron", 4, {"tp": 2, "ep": 4}),
]  # fmt: skip
SGLANG = [
    ("qwen3", 1, {}), ("qwen3", 4, {"tp": 4}), ("qwen3", 8, {"tp": 2, "pp": 2}), ("qwen3", 3, {"pp": 3}),
    ("qwen3-6-layers", 4, {"pp": 4}), ("qwen3-tied", 2, {"tp": 2}), ("qwen3-tied", 4, {"tp": 2, "pp": 2}),
    ("qwen2", 4, {"tp": 4}), ("llama", 4, {"tp": 2}), ("qwen3-moe", 4, {"tp": 4}),
    ("qwen3-moe", 4, {"tp": 4, "ep": 2}), ("qwen3-moe", 8, {"tp": 4, "ep": 4}),
    ("deepseek", 4, {"tp": 4, "ep": 2}), ("qwen3.5", 4, {"tp": 4, "ep": 2}), ("qwen3.5", 2, {"tp": 2}),
    ("nemotron", 2, {"tp": 2}), ("nemotron", 4, {"tp": 2, "ep": 2}),
]  # fmt: skip
FSDP2 = [
    ("qwen3", 1, {}), ("qwen3", 3, {}), ("qwen3", 4, {"tp": 2}), ("qwen3", 6, {"tp": 2}),
    ("qwen3-tied", 8, {"replicate": 2}), ("qwen2", 6, {"tp": 2, "replicate": 1}), ("llama", 8, {"tp": 4}),
    ("qwen3-moe", 4, {}), ("qwen3-moe", 6, {"tp": 2}), ("qwen3-moe", 4, {"grouped": 1}),
    ("deepseek", 3, {}), ("deepseek", 8, {"tp": 2, "replicate": 2}), ("qwen3.5", 4, {}),
    ("qwen3.5", 3, {}), ("nemotron", 5, {}),
]  # fmt: skip
TORCHTITAN = [
    ("qwen3", 1, {}), ("qwen3", 3, {}), ("qwen3", 4, {"tp": 2}), ("qwen3", 8, {"tp": 2, "pp": 2}),
    ("qwen3-tied", 4, {"tp": 2}), ("qwen3-6-layers", 4, {"pp": 4}), ("qwen3-8-layers", 4, {"pp": 4}),
    ("qwen3-moe", 2, {}), ("qwen3-moe", 4, {"tp": 2}), ("qwen3-moe", 4, {"tp": 2, "ep": 4}),
    ("qwen3-moe", 8, {"ep": 2}), ("qwen3-moe", 16, {"ep": 8}),
    ("qwen3-moe", 16, {"replicate": 2, "ep": 4}), ("qwen3-moe", 16, {"ep": 1}),
    ("deepseek", 4, {"tp": 2, "ep": 2}), ("deepseek", 8, {"ep": 4}),
]  # fmt: skip
TRANSFORMERS = [
    *((name, 2, {}) for name in MODELS), ("qwen3", 4, {"tp": 2}), ("qwen3-moe", 2, {"tp": 2}),
    ("deepseek", 2, {"tp": 2}), ("qwen3.5-full", 2, {"tp": 2}), ("qwen3.5", 2, {"tp": 2}),
]  # fmt: skip
ENGINES: dict[str, tuple[Callable[..., Weights], list[tuple[str, int, dict[str, Any]]]]] = {
    "megatron": (megatron, MEGATRON),
    "vllm": (vllm, VLLM),
    "sglang": (sglang, SGLANG),
    "fsdp2": (fsdp2, FSDP2),
    "torchtitan": (torchtitan, TORCHTITAN),
    "hf": (transformers, TRANSFORMERS),
}
CASES = [(engine, *case) for engine, (_, cases) in ENGINES.items() for case in cases]
# values that an engine changes, so that its own loader has to make them: no copy can be right
CHANGED = {"vllm": ".mixer.A_log", "sglang": ".mixer.A_log", "megatron": ".linear_attn.norm.weight"}


def written(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a document that say these sizes."""
    options = {OPTIONS[key]: int(size) for key, size in sizes.items() if key in OPTIONS}
    if "stages" in sizes:
        first, *_, last = sizes["stages"]
        options |= {"first_layers": first} | ({"last_layers": last} if len(sizes["stages"]) != 3 else {})
    parallel = {key: size for key, size in sizes.items() if key not in (*OPTIONS, "stages")}
    return {"parallel": parallel, **({"options": options} if options else {})}


def named(case: tuple[str, str, int, Mapping[str, Any]]) -> str:
    engine, model, ranks, sizes = case
    return f"{engine}-{model}-{ranks}-" + ",".join(f"{key}={size}" for key, size in sizes.items())


def without(weights: Weights, *endings: str) -> Weights:
    return {name: whole for name, whole in weights.items() if not name.endswith(endings)}


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_rank_holds_what_the_engine_holds(tmp_path, case):
    engine, name, ranks, sizes = case
    model = MODELS[name]()
    layout = layout_of(tmp_path, model, engine, ranks, **written(sizes))
    whole = logical(without(model.weights, CHANGED.get(engine, "nothing")))
    for rank in range(ranks):
        assert_same(held(layout, rank, whole), ENGINES[engine][0](model, rank, ranks, **sizes), rank)


LOADED_BY_ENGINES = {
    "vllm A_log": ("vllm", nemotron, {"tp": 2}, "mixer.A_log"),
    "sglang A_log": ("sglang", nemotron, {"tp": 2}, "mixer.A_log"),
    "vllm one group": ("vllm", lambda: nemotron(groups=1), {"tp": 2}, "mixer.in_proj.weight"),
    "sglang one group": ("sglang", lambda: nemotron(groups=1), {"tp": 2}, "mixer.conv1d.bias"),
    "megatron norm around 0": ("megatron", qwen35, {"tp": 2}, "linear_attn.norm.weight"),
    "torchtitan rotary q": ("torchtitan", lambda: dense(kind=""), {"tp": 2}, "self_attn.q_proj.weight"),
    "torchtitan rotary k": ("torchtitan", lambda: dense(kind=""), {"tp": 2}, "self_attn.k_proj.weight"),
}


@pytest.mark.parametrize("what", LOADED_BY_ENGINES)
def test_what_no_copy_can_make_right_travels_whole_to_the_engines_loader(tmp_path, what):
    engine, model, parallel, ending = LOADED_BY_ENGINES[what]
    layout = layout_of(tmp_path, model(), engine, 2, parallel=parallel)
    chosen = [one for one in layout.tensors if one.name.endswith(ending)]
    assert chosen
    assert {one.route for one in chosen} == {"broadcast"}
    for one in chosen:
        for rank in range(2):
            (storage,) = rank_storages(layout, rank, one.logical)
            assert storage.shape == one.shape


def test_torchtitans_llama_but_for_its_rotary_rows(tmp_path):
    model = dense(kind="")
    layout = layout_of(tmp_path, model, "torchtitan", 4, parallel={"tp": 2})
    for rank in range(4):
        expected = without(torchtitan(model, rank, 4, tp=2), "wq.weight", "wk.weight")
        whole = logical(without(model.weights, ".q_proj.weight", ".k_proj.weight"))
        assert_same(held(layout, rank, whole), expected, rank)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2", "qwen3-moe", "deepseek", "qwen3.5"])
def test_a_refit_of_megatron_to_vllm_gives_what_vllm_loads(tmp_path, name):
    model = MODELS[name]()
    tensors = {key: (whole.shape, "int64") for key, whole in model.weights.items()}
    document = {**model_document(tensors), "config": dict(model.config)}
    experts = {} if name.startswith("qwen2") or "tied" in name else {"ep": 2, "etp": 1}
    source = {"ranks": 4, "engine": "megatron", "parallel": {"tp": 2, **experts}}
    destination = {"ranks": 4, "engine": "vllm", "parallel": {"tp": 4}, "domain": 2}
    whole = {key: torch.from_numpy(one) for key, one in logical(model.weights).items()}
    result = refit_in_process(make_jobs(tmp_path, document, source, destination), whole, from_storages=True)
    for rank, storages in enumerate(result.storages):
        assert_same({key: one.numpy() for key, one in storages.items()}, vllm(model, rank, 4, tp=4), rank)


def test_megatrons_experts_are_cut_over_tp_where_etp_is_not_said(tmp_path):
    layout = layout_of(tmp_path, moe(), "megatron", 4, parallel={"tp": 2, "ep": 2})
    assert layout.loaded.document.meshes["expert"] == {"ep": 2, "etp": 2}
