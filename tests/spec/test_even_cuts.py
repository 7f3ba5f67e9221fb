"""Engines without short shards: what tensor parallelism does not divide is refused, with the tensor and the rows.

Each case is one that the engine itself refuses when it builds its layers (Megatron-core 0.16's
`ensure_divisibility` and config checks, vLLM 0.32's `divide` and asserts).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import build_layout
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model

SIZES = {
    "heads": 12, "groups": 12, "head_dim": 2, "hidden": 24, "width": 24, "expert_width": 24, "shared_width": 24,
    "experts": 6, "vocab": 192, "keys": 12, "values": 12, "linear_dim": 2,
}  # fmt: skip
TENSORS = """\
tensors:
  model.embed_tokens.weight: [vocab, hidden]
  lm_head.weight: [vocab, hidden]
  "model.layers.0.self_attn.q_proj.weight": [heads * head_dim, hidden]
  "model.layers.0.self_attn.{k,v}_proj.weight": [groups * head_dim, hidden]
  "model.layers.0.self_attn.o_proj.weight": [hidden, heads * head_dim]
  "model.layers.0.mlp.{gate,up}_proj.weight": [width, hidden]
  "model.layers.0.mlp.down_proj.weight": [hidden, width]
  "model.layers.1.mlp.experts.{expert}.{gate,up}_proj.weight": [expert_width, hidden]
  "model.layers.1.mlp.experts.{expert}.down_proj.weight": [hidden, expert_width]
  "model.layers.1.mlp.shared_expert.{gate,up}_proj.weight": [shared_width, hidden]
  "model.layers.1.mlp.shared_expert.down_proj.weight": [hidden, shared_width]
  "model.layers.1.linear_attn.in_proj_qkv.weight": [(2 * keys + values) * linear_dim, hidden]
  "model.layers.1.linear_attn.in_proj_z.weight": [values * linear_dim, hidden]
  "model.layers.1.linear_attn.in_proj_{a,b}.weight": [values, hidden]
  "model.layers.1.linear_attn.conv1d.weight": [(2 * keys + values) * linear_dim, 1, 4]
  "model.layers.1.linear_attn.{A_log,dt_bias}": [values]
  "model.layers.1.linear_attn.out_proj.weight": [hidden, values * linear_dim]
  model.norm.weight: [hidden]
"""
CONFIG = """\
config: {num_attention_heads: heads, num_key_value_heads: groups, head_dim: head_dim, linear_num_key_heads: keys,
         linear_num_value_heads: values, linear_key_head_dim: linear_dim, linear_value_head_dim: linear_dim}
"""
ALL = ("vllm", "sglang", "megatron")
GATE = "model.layers.0.mlp.gate_proj.weight"
# engines; the sizes that differ; parallel; what the message says
REFUSED = {
    "width of the feed-forward part": (
        ALL, {"width": 22}, {"tp": 3}, f"tp 3 does not divide tensor '{GATE}' evenly: 22 rows in dim 0"),
    "width of the experts": (
        ("vllm", "sglang"), {"expert_width": 22}, {"tp": 3},
        "etp 3 does not divide tensor 'model.layers.1.mlp.experts.{expert}.gate_proj.weight' evenly: 22 rows"),
    "width of the experts, megatron": (
        ("megatron",), {"expert_width": 22}, {"tp": 3, "etp": 3}, "etp 3 does not divide tensor 'model.layers.1.mlp"),
    "width of the shared expert": (
        ALL, {"shared_width": 22}, {"tp": 3}, "shared_expert.gate_proj.weight' evenly: 22 rows in dim 0"),
    "vocabulary with its padding": (
        ("vllm", "sglang"), {"vocab": 200}, {"tp": 3},
        "tensor 'lm_head.weight' evenly: 256 rows in dim 0, padding included"),
    "value heads": (ALL, {"values": 14}, {"tp": 3}, "does not divide tensor 'model.layers.1.linear_attn."),
    "attention heads": (ALL, {"heads": 10}, {"tp": 3}, "10 heads do not divide evenly over tp 3"),
    "key heads of gated delta nets": (
        ALL, {"keys": 4}, {"tp": 6}, "4 key heads of the gated delta nets do not divide evenly over tp 6"),
    "query groups, with fewer ranks": (
        ("megatron",), {"heads": 6, "groups": 2}, {"tp": 3}, "2 query groups do not divide evenly over tp 3, nor tp over"),
    "query groups, with more ranks": (
        ("megatron",), {"groups": 4}, {"tp": 6}, "4 query groups do not divide evenly over tp 6, nor tp over them"),
    "query groups whose fused rows do not divide": (
        ("megatron",), {"groups": 1}, {"tp": 12}, "28 rows of linear_qkv do not divide evenly over tp 12"),
    "experts": (("megatron",), {}, {"ep": 4}, "6 experts do not divide evenly over ep 4"),
}  # fmt: skip


def layout_of(folder: Path, engine: str, sizes: dict[str, int], parallel: dict[str, int], more: str = ""):
    (folder / "model.yaml").write_text(
        f"name: m\ndtype: bfloat16\nsizes: {SIZES | sizes}\nranges: {{expert: experts}}\n".replace("'", "")
        + CONFIG
        + TENSORS
    )
    text = f"name: job\nranks: 24\nengine: {engine}\nparallel: {parallel}\n".replace("'", "") + more
    (folder / "job.yaml").write_text(text)
    return build_layout(read_layout_document(folder / "job.yaml"), read_model(folder / "model.yaml"))


def told(folder: Path, *case) -> str:
    with pytest.raises(DocumentError) as caught:
        layout_of(folder, *case)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{folder}/job.yaml:4: parallel: ")
    return message


@pytest.mark.parametrize(
    ("engine", "what"), [(engine, what) for what, case in REFUSED.items() for engine in case[0]]
)
def test_what_the_engine_does_not_cut_evenly_is_refused_in_one_message(tmp_path, engine, what):
    _, sizes, parallel, words = REFUSED[what]
    assert words in told(tmp_path, engine, sizes, parallel)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12])
def test_what_is_even_is_taken(tmp_path, engine, tp):
    assert layout_of(tmp_path, engine, {}, {"tp": tp}).num_ranks == 24


@pytest.mark.parametrize(("groups", "tp"), [(3, 6), (6, 12), (1, 2), (6, 2)])
def test_megatron_cuts_through_query_groups_where_tp_is_a_multiple_of_them(tmp_path, groups, tp):
    layout = layout_of(tmp_path, "megatron", {"groups": groups}, {"tp": tp})
    rows = {}
    for one in layout.tensors:
        if ".self_attn." in one.name and "o_proj" not in one.name:
            holdings = layout.geometries[one.geometry]
            for rank, low, high in zip(holdings.rank, holdings.lo, holdings.hi, strict=True):
                rows[int(rank)] = rows.get(int(rank), 0) + int(high[0] - low[0])
    assert set(rows.values()) == {(12 + 2 * groups) * 2 // tp}


def test_a_rule_of_the_document_cuts_as_it_says(tmp_path):
    own = "tensors:\n  - {match: '*.mlp.{gate,up,down}_proj.weight', place: {tp: shard(0)}}\n"
    own += "storage:\n  - {tensor: 'gate.{layer}', rename: 'model.layers.{layer}.mlp.gate_proj.weight'}\n"
    own += "  - {tensor: 'up.{layer}', rename: 'model.layers.{layer}.mlp.up_proj.weight'}\n"
    layout = layout_of(tmp_path, "vllm", {"width": 22}, {"tp": 3}, own)
    (gate,) = [one for one in layout.tensors if one.name == GATE]
    assert layout.geometries[gate.geometry].local_shape[:3, 0].tolist() == [8, 8, 6]


@pytest.mark.parametrize("engine", ["fsdp2", "hf"])
def test_engines_with_short_shards_take_them(tmp_path, engine):
    sizes = {"width": 22, "vocab": 200, "shared_width": 22}
    assert layout_of(tmp_path, engine, sizes, {"tp": 3}).num_ranks == 24
