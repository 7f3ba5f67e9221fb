"""How engines lay weights out, by their own rules and names: an oracle for the presets.

Per engine a function that cuts whole tensors as the engine's own model classes and loaders do, one rank at a
time. Nothing here knows of layout documents, placements or pieces. Zeros are padding, which no tensor holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Weights = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tiny:
    """A tiny model: the numbers of its config, and its tensors by their names on disk."""

    config: Mapping[str, int]
    weights: Weights

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return 1 + max(int(name.split(".")[2]) for name in self.weights if ".layers." in name)

    def layer(self, number: int) -> Weights:
        """Return one layer's tensors by what follows `layers.N.` in their names."""
        found = {}
        for name, whole in self.weights.items():
            parts = name.split(".", 3)
            if len(parts) == 4 and parts[1] == "layers" and int(parts[2]) == number:
                found[parts[3]] = whole
        return found


def tiny(config: Mapping[str, int], shapes: Shapes) -> Tiny:
    """Return a model whose elements are 1, 2, 3, ... in the order of the shapes."""
    weights, first = {}, 1
    for name, shape in shapes.items():
        weights[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return Tiny(config, weights)


# ---------------------------------------------------------------- cuts


def even(whole: Array, size: int, here: int, dim: int = 0) -> Array:
    """Return the rank's part of an even cut; engines refuse any other."""
    assert whole.shape[dim] % size == 0, (whole.shape, size)
    return np.split(whole, size, dim)[here]


def chunk(whole: Array, size: int, here: int, dim: int = 0) -> Array:
    """Return what DTensor's Shard(dim) gives: chunks of the rounded-up size, short or empty at the end."""
    rows = -(-whole.shape[dim] // size)
    return np.take(whole, range(here * rows, min((here + 1) * rows, whole.shape[dim])), dim)


def block_by_block(whole: Array, sizes: Sequence[int], size: int, here: int) -> Array:
    """Cut each block of rows by itself; the rank's parts follow each other."""
    assert sum(sizes) == len(whole)
    starts = np.cumsum(sizes)[:-1].tolist()
    return np.concatenate([even(block, size, here) for block in np.split(whole, starts)])


def padded(whole: Array, multiple: int) -> Array:
    """Return the rows with zeros up to a multiple."""
    return np.pad(whole, [(0, -len(whole) % multiple)] + [(0, 0)] * (whole.ndim - 1))


def experts_of(layer: Weights) -> list[tuple[list[Array], Array]]:
    """Return ([gate, up] or [up] where it is not gated, down) of each routed expert."""
    if "mlp.experts.gate_up_proj" in layer:
        pairs = zip(layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"], strict=True)
        return [(np.split(both, 2), down) for both, down in pairs]
    found: list[tuple[list[Array], Array]] = []
    base = "mixer" if any(name.startswith("mixer.experts.") for name in layer) else "mlp"
    while f"{base}.experts.{len(found)}.up_proj.weight" in layer:
        one = f"{base}.experts.{len(found)}"
        ups = [f"{one}.{part}_proj.weight" for part in ("gate", "up")]
        found.append(([layer[up] for up in ups if up in layer], layer[f"{one}.down_proj.weight"]))
    return found


def delta_sizes(config: Mapping[str, int]) -> tuple[int, int]:
    """Return the rows of a gated delta net's keys and of its values."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def mamba_sizes(config: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the blocks of a Mamba-2 mixer's in_proj (z, x, B, C, dt) and conv1d (x, B, C)."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    states = config["n_groups"] * config["ssm_state_size"]
    conv = [inner, states, states]
    return {
        "in_proj.weight": [inner, *conv, config["mamba_num_heads"]],
        "conv1d.weight": conv,
        "conv1d.bias": conv,
    }


def stage_of(counts: Sequence[int], stage: int) -> range:
    """Return the layers of a stage."""
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def with_prefix(prefix: str, named: Mapping[str, Array]) -> Weights:
    return {prefix + name: array for name, array in named.items()}


def interleaved(parts: Sequence[Array], rows: int) -> Array:
    """Let gate and up take turns, `rows` at a time; 0: one after the other."""
    if not rows:
        return np.concatenate(parts)
    return np.concatenate([part[i : i + rows] for i in range(0, len(parts[0]), rows) for part in parts])


def owners(num_items: int, size: int) -> Iterable[range]:
    """Give each of `size` ranks items // size, and the first items % size of them one more."""
    stop = 0
    for rank in range(size):
        start, stop = stop, stop + num_items // size + (rank < num_items % size)
        yield range(start, stop)


# ---------------------------------------------------------------- Megatron-core


def query_groups(config: Mapping[str, int], q: Array, k: Array, v: Array) -> Array:
    """Lay rows out as linear_qkv: per query group its queries, gates where q has them, key and value."""
    groups, dim, tail = config["num_key_value_heads"], config["head_dim"], q.shape[1:]
    per = config["num_attention_heads"] // groups
    each = q.reshape(groups, per, -1, dim, *tail)  # a gated q has each head's query rows, then its gate rows
    parts = [each[:, :, which].reshape(groups, per * dim, *tail) for which in range(each.shape[2])]
    parts += [one.reshape(groups, dim, *tail) for one in (k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *tail)


def megatron_attention(config: Mapping[str, int], w: Weights, tp: int, t: int) -> Weights:
    """Return a layer's self attention: with query groups, multi-head latent, or a gated delta net."""
    at = "mixer" if "mixer.q_proj.weight" in w else "self_attn"
    out: Weights = {}
    if f"{at}.q_proj.weight" in w:
        for kind in ("weight", "bias"):
            if f"{at}.q_proj.{kind}" in w:
                q, k, v = (w[f"{at}.{part}_proj.{kind}"] for part in "qkv")
                out[f"linear_qkv.{kind}"] = even(query_groups(config, q, k, v), tp, t)
        out["linear_qkv.layer_norm_weight"] = w["norm.weight" if at == "mixer" else "input_layernorm.weight"]
        for part in "qk":
            if f"{at}.{part}_norm.weight" in w:
                out[f"{part}_layernorm.weight"] = w[f"{at}.{part}_norm.weight"]
    elif "self_attn.kv_b_proj.weight" in w:
        for part, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
            out[f"linear_{part}_down_proj.weight"] = w[f"self_attn.{down}.weight"]
            out[f"linear_{part}_up_proj.weight"] = even(w[f"self_attn.{part}_b_proj.weight"], tp, t)
            out[f"linear_{part}_up_proj.layer_norm_weight"] = w[f"self_attn.{part}_a_layernorm.weight"]
    else:
        keys, values = delta_sizes(config)
        delta = {name.removeprefix("linear_attn."): one for name, one in w.items() if "linear_attn." in name}
        heads = config["linear_num_value_heads"]
        whole = np.concatenate([delta[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
        blocks = [keys, keys, values, values, heads, heads]
        out["in_proj.weight"] = block_by_block(whole, blocks, tp, t)
        out["in_proj.layer_norm_weight"] = w["input_layernorm.weight"]
        out["conv1d.weight"] = block_by_block(delta["conv1d.weight"], [keys, keys, values], tp, t)
        out |= {name: even(delta[name], tp, t) for name in ("A_log", "dt_bias")}
        # not out_norm: of it and the other norms one has to change, as one option centers all or none at zero
        out["out_proj.weight"] = even(delta["out_proj.weight"], tp, t, dim=1)
    if f"{at}.o_proj.weight" in w:
        out["linear_proj.weight"] = even(w[f"{at}.o_proj.weight"], tp, t, dim=1)
    return with_prefix("self_attention.", out)


def megatron_experts(w: Weights, ep: int, e: int, etp: int, et: int, glu: int) -> Weights:
    """Return the rank's experts: a contiguous block of them, each cut by expert tensor parallelism."""
    experts = experts_of(w)
    assert len(experts) % ep == 0
    count = len(experts) // ep
    mine = experts[e * count : (e + 1) * count]
    ups = [interleaved([even(part, etp, et) for part in parts], glu) for parts, _ in mine]
    downs = [even(down, etp, et, dim=1) for _, down in mine]
    if "mlp.experts.gate_up_proj" in w:  # on disk one tensor, here too
        return {"experts.linear_fc1.weight": np.stack(ups), "experts.linear_fc2.weight": np.stack(downs)}
    found = {f"experts.linear_fc1.weight{number}": up for number, up in enumerate(ups)}
    return found | {f"experts.linear_fc2.weight{number}": down for number, down in enumerate(downs)}


def megatron_mlp(w: Weights, tp: int, t: int, experts: Weights) -> Weights:
    """Return a dense or routed feed-forward part, without its norm."""
    out = dict(experts)
    for base, name in (
        ("mlp", ""),
        ("mlp.shared_experts", "shared_experts."),
        ("mlp.shared_expert", "shared_experts."),
    ):
        if f"{base}.gate_proj.weight" in w:
            parts = [even(w[f"{base}.{part}_proj.weight"], tp, t) for part in ("gate", "up")]
            out[f"{name}linear_fc1.weight"] = np.concatenate(parts)
            out[f"{name}linear_fc2.weight"] = even(w[f"{base}.down_proj.weight"], tp, t, dim=1)
    renamed = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.expert_bias"}
    renamed |= {"shared_expert_gate.weight": "shared_experts.gate_weight"}
    renamed |= {f"{part}_latent_proj.weight": f"{part}_latent_proj.weight" for part in ("fc1", "fc2")}
    for name, new in renamed.items():
        for base in ("mlp", "mixer"):
            if f"{base}.{name}" in w:
                out[new] = w[f"{base}.{name}"]
    if "mixer.shared_experts.up_proj.weight" in w:
        out["shared_experts.linear_fc1.weight"] = even(w["mixer.shared_experts.up_proj.weight"], tp, t)
        down = w["mixer.shared_experts.down_proj.weight"]
        out["shared_experts.linear_fc2.weight"] = even(down, tp, t, dim=1)
    return with_prefix("mlp.", out)


def megatron_mamba(config: Mapping[str, int], w: Weights, tp: int, t: int) -> Weights:
    """Return a Mamba-2 mixer with the norm that its in_proj has taken in."""
    out = {f"mixer.{name}": block_by_block(w[f"mixer.{name}"], sizes, tp, t)
           for name, sizes in mamba_sizes(config).items()}  # fmt: skip
    out |= {
        f"mixer.{name}": even(w[f"mixer.{name}"], tp, t) for name in ("A_log", "D", "dt_bias", "norm.weight")
    }
    out["mixer.out_proj.weight"] = even(w["mixer.out_proj.weight"], tp, t, dim=1)
    return out | {"mixer.in_proj.layer_norm_weight": w["norm.weight"]}


def megatron(
    model: Tiny, rank: int, ranks: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 0,
    stages: Sequence[int] = (), divisor: int = 128, glu: int = 0,
) -> Weights:  # fmt: skip
    """Rank order, fastest first: tp, cp, dp, pp; for experts etp, ep, edp, pp. etp is tp if not said."""
    assert ranks % (tp * cp * pp) == 0
    etp = etp or tp
    t, stage = rank % tp, rank // (ranks // pp)
    et, e = rank % etp, rank // etp % ep
    counts = stages or [model.num_layers // pp] * pp
    out: Weights = {}
    w = model.weights
    embedding = next(
        w[name] for name in ("model.embed_tokens.weight", "backbone.embeddings.weight") if name in w
    )
    if stage == 0:
        out["embedding.word_embeddings.weight"] = even(padded(embedding, divisor * tp), tp, t)
    if stage == pp - 1:
        if "backbone.norm_f.weight" in w:
            out["decoder.final_norm.weight"] = w["backbone.norm_f.weight"]
        else:
            out["decoder.final_layernorm.weight"] = w["model.norm.weight"]
        if (
            "lm_head.weight" in w or pp > 1
        ):  # a tied head is a copy of its own where the embedding is elsewhere
            out["output_layer.weight"] = even(padded(w.get("lm_head.weight", embedding), divisor * tp), tp, t)
    for local, number in enumerate(stage_of(counts, stage)):
        layer = model.layer(number)
        experts = megatron_experts(layer, ep, e, etp, et, glu) if experts_of(layer) else {}
        here: Weights = {}
        if "mixer.in_proj.weight" in layer:
            here = megatron_mamba(model.config, layer, tp, t)
        elif "norm.weight" not in layer or "mixer.q_proj.weight" in layer:
            here = megatron_attention(model.config, layer, tp, t)
        here |= megatron_mlp(layer, tp, t, experts)
        if "self_attn.kv_b_proj.weight" in layer:
            here["input_layernorm.weight"] = layer["input_layernorm.weight"]
        if "mixer.gate.weight" in layer:
            here["pre_mlp_layernorm.weight"] = layer["norm.weight"]
        elif "post_attention_layernorm.weight" in layer:
            name = "pre_mlp_layernorm.weight" if experts else "mlp.linear_fc1.layer_norm_weight"
            here[name] = layer["post_attention_layernorm.weight"]
        out |= with_prefix(f"decoder.layers.{local}.", here)
    return out


# ---------------------------------------------------------------- vLLM and SGLang


def serving_attention(config: Mapping[str, int], w: Weights, tp: int, t: int, fused_a: str) -> Weights:
    """Return a layer's attention: qkv in one, KV heads repeated if tp is larger, MLA's a-parts whole."""
    out: Weights = {}
    groups = config["num_key_value_heads"]
    for at in ("self_attn", "mixer"):
        for kind in ("weight", "bias"):
            if f"{at}.q_proj.{kind}" in w:
                parts = [even(w[f"{at}.q_proj.{kind}"], tp, t)]
                for name in (f"{at}.k_proj.{kind}", f"{at}.v_proj.{kind}"):
                    each = even(w[name], min(tp, groups), t // max(1, tp // groups))
                    assert len(each) == max(1, groups // tp) * config["head_dim"]
                    parts.append(each)
                out[f"{at}.qkv_proj.{kind}"] = np.concatenate(parts)
        if f"{at}.o_proj.weight" in w:
            out[f"{at}.o_proj.weight"] = even(w[f"{at}.o_proj.weight"], tp, t, dim=1)
    out |= {f"self_attn.{part}_norm.weight": w[f"self_attn.{part}_norm.weight"] for part in ("q", "k", "q_a")
            if f"self_attn.{part}_norm.weight" in w}  # fmt: skip
    if "self_attn.kv_b_proj.weight" in w:
        down = [w["self_attn.q_a_proj.weight"], w["self_attn.kv_a_proj_with_mqa.weight"]]
        out[f"self_attn.{fused_a}.weight"] = np.concatenate(down)
        for part in ("q", "kv"):
            out[f"self_attn.{part}_a_layernorm.weight"] = w[f"self_attn.{part}_a_layernorm.weight"]
            out[f"self_attn.{part}_b_proj.weight"] = even(w[f"self_attn.{part}_b_proj.weight"], tp, t)
    return out


def serving_delta(config: Mapping[str, int], w: Weights, tp: int, t: int) -> Weights:
    """Return a gated delta net: q, k, v, z in one and b, a in another, each block cut by itself."""
    keys, values = delta_sizes(config)
    heads = config["linear_num_value_heads"]
    delta = {name.removeprefix("linear_attn."): one for name, one in w.items() if "linear_attn." in name}
    qkvz = np.concatenate([delta["in_proj_qkv.weight"], delta["in_proj_z.weight"]])
    ba = np.concatenate([delta["in_proj_b.weight"], delta["in_proj_a.weight"]])
    out = {
        "in_proj_qkvz.weight": block_by_block(qkvz, [keys, keys, values, values], tp, t),
        "in_proj_ba.weight": block_by_block(ba, [heads, heads], tp, t),
        "conv1d.weight": block_by_block(delta["conv1d.weight"], [keys, keys, values], tp, t),
        "norm.weight": delta["norm.weight"],
        "out_proj.weight": even(delta["out_proj.weight"], tp, t, dim=1),
        **{name: even(delta[name], tp, t) for name in ("A_log", "dt_bias")},
    }
    return with_prefix("linear_attn.", out)


def serving_mlp(
    w: Weights, tp: int, t: int, mine: range, etp: int, et: int, experts_name: str, *, whole_shared: bool
) -> Weights:
    """Return a dense or routed feed-forward part: gate_up in one, experts stacked as w13 and w2."""
    out: Weights = {}
    dense, place = tp, t
    for base in ("mlp", "mlp.shared_experts", "mlp.shared_expert", "mixer.shared_experts"):
        tp, t = (1, 0) if whole_shared and base != "mlp" else (dense, place)
        if f"{base}.gate_proj.weight" in w:
            parts = [even(w[f"{base}.{part}_proj.weight"], tp, t) for part in ("gate", "up")]
            out[f"{base}.gate_up_proj.weight"] = np.concatenate(parts)
        elif f"{base}.up_proj.weight" in w:
            out[f"{base}.up_proj.weight"] = even(w[f"{base}.up_proj.weight"], tp, t)
        if f"{base}.down_proj.weight" in w:
            out[f"{base}.down_proj.weight"] = even(w[f"{base}.down_proj.weight"], tp, t, dim=1)
    whole = ["gate.weight", "gate.e_score_correction_bias", "shared_expert_gate.weight"]
    whole += ["fc1_latent_proj.weight", "fc2_latent_proj.weight"]
    out |= {f"{base}.{name}": w[f"{base}.{name}"] for base in ("mlp", "mixer") for name in whole
            if f"{base}.{name}" in w}  # fmt: skip
    experts = experts_of(w)
    if experts:
        base = "mixer" if "mixer.gate.weight" in w else "mlp"
        w13 = [np.concatenate([even(part, etp, et) for part in experts[one][0]]) for one in mine]
        w2 = [even(experts[one][1], etp, et, dim=1) for one in mine]
        out[f"{base}.{experts_name}.w13_weight"] = np.stack(w13)
        out[f"{base}.{experts_name}.w2_weight"] = np.stack(w2)
    return out


def serving_mamba(config: Mapping[str, int], w: Weights, tp: int, t: int) -> Weights:
    """Return a Mamba-2 mixer but for A_log, whose values the engine changes (A = -exp(A_log))."""
    assert config["n_groups"] % tp == 0
    out = {f"mixer.{name}": block_by_block(w[f"mixer.{name}"], sizes, tp, t)
           for name, sizes in mamba_sizes(config).items()}  # fmt: skip
    out |= {f"mixer.{name}": even(w[f"mixer.{name}"], tp, t) for name in ("D", "dt_bias", "norm.weight")}
    return out | {"mixer.out_proj.weight": even(w["mixer.out_proj.weight"], tp, t, dim=1)}


def stages_of_vllm(layers: int, pp: int) -> list[int]:
    """Uneven layers: one more each on the stages before the last, from the back."""
    counts = [layers // pp] * pp
    for back in range(2, layers % pp + 2):
        counts[-back] += 1
    return counts


def stages_of_sglang(layers: int, pp: int) -> list[int]:
    """Uneven layers: one more each on the last stages."""
    return [layers // pp + (stage >= pp - layers % pp) for stage in range(pp)]


def serving(
    model: Tiny, rank: int, tp: int, pp: int, *, experts: tuple[range, int, int], counts: Sequence[int],
    names: tuple[str, str], tied_head: str, whole_shared: bool = False,
) -> Weights:  # fmt: skip
    """Return what a rank of either engine holds: layers keep their numbers. Ranks: dp, pp, tp, tp fastest."""
    t, stage = rank % tp, rank // tp % pp
    w, out = model.weights, {}
    embedding = next(
        w[name] for name in ("model.embed_tokens.weight", "backbone.embeddings.weight") if name in w
    )
    if stage == 0:
        out["model.embed_tokens.weight"] = even(padded(embedding, 64), tp, t)
    if stage == pp - 1:
        for name, new in (("model.norm", "model.norm"), ("backbone.norm_f", "model.norm_f")):
            if f"{name}.weight" in w:
                out[f"{new}.weight"] = w[f"{name}.weight"]
        if "lm_head.weight" in w:
            out["lm_head.weight"] = even(padded(w["lm_head.weight"], 64), tp, t)
        elif pp > 1:
            out[tied_head] = even(padded(embedding, 64), tp, t)
    for number in stage_of(counts, stage):
        layer = model.layer(number)
        here = serving_attention(model.config, layer, tp, t, names[1])
        here |= serving_mlp(layer, tp, t, *experts, names[0], whole_shared=whole_shared)
        if "linear_attn.A_log" in layer:
            here |= serving_delta(model.config, layer, tp, t)
        if "mixer.in_proj.weight" in layer:
            here |= serving_mamba(model.config, layer, tp, t)
        ours = ("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight")
        out |= with_prefix(
            f"model.layers.{number}.", here | {name: layer[name] for name in ours if name in layer}
        )
    return out


def vllm(
    model: Tiny, rank: int, ranks: int, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 0
) -> Weights:
    """With expert parallelism the ranks of an engine (dp and tp) share the experts out and cut none of them.

    Without, all of them cut every expert: etp is dp times tp, where the engine has data parallelism inside.
    """
    num_experts = max((len(experts_of(model.layer(n))) for n in range(model.num_layers)), default=0)
    mine = (range(num_experts), etp or tp, rank % (etp or tp))
    if ep > 1:
        assert pp == 1 or ep == tp
        mine = (list(owners(num_experts, ep))[rank % ep], 1, 0)
    counts, names = stages_of_vllm(model.num_layers, pp), ("experts.routed_experts", "fused_qkv_a_proj")
    tied_head = "model.embed_tokens.weight"  # the last stage has the embedding once more
    # with experts over the ranks of several engines of tp, each engine rank has other tokens: nothing to share
    return serving(
        model, rank, tp, pp, experts=mine, counts=counts, names=names, tied_head=tied_head,
        whole_shared=tp > 1 and ep > tp,
    )  # fmt: skip


def sglang(model: Tiny, rank: int, ranks: int, *, tp: int = 1, pp: int = 1, ep: int = 1) -> Weights:
    """Experts are cut by ep, and each of them by the tp // ep neighbouring ranks that share it."""
    num_experts = max((len(experts_of(model.layer(n))) for n in range(model.num_layers)), default=0)
    assert num_experts % ep == 0
    assert tp % ep == 0
    etp = tp // ep
    mine = (list(owners(num_experts, ep))[rank % tp // etp], etp, rank % etp)
    counts, names = stages_of_sglang(model.num_layers, pp), ("experts", "fused_qkv_a_proj_with_mqa")
    return serving(model, rank, tp, pp, experts=mine, counts=counts, names=names, tied_head="lm_head.weight")


# ---------------------------------------------------------------- FSDP2, and torchtitan's stages


COLUMNS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "embed_tokens",
    "lm_head",
)
ROWS = ("o_proj", "down_proj")


def over_tensor_parallel(name: str, whole: Array, tp: int, t: int) -> Array:
    """Return the DTensor shard of a module by its tensor parallel style: columns, rows, or replicated."""
    module = name.split(".")[-2]
    if module in COLUMNS:
        return chunk(whole, tp, t)
    return chunk(whole, tp, t, dim=1) if module in ROWS else whole


def fsdp2(
    model: Tiny, rank: int, ranks: int, *, tp: int = 1, replicate: int = 1, grouped: bool = False
) -> Weights:
    """fully_shard over the tensor parallel shards: chunks of dim 0; buffers stay whole. tp is fastest."""
    fsdp = ranks // (tp * replicate)
    here, t = rank // tp % fsdp, rank % tp
    weights = dict(model.weights)
    if grouped:
        for number in range(model.num_layers):
            experts = experts_of(model.layer(number))
            weights = {
                name: one for name, one in weights.items() if f"layers.{number}.mlp.experts." not in name
            }
            base = f"model.layers.{number}.mlp.experts"
            weights[f"{base}.gate_up_proj"] = np.stack([np.concatenate(parts) for parts, _ in experts])
            weights[f"{base}.down_proj"] = np.stack([down for _, down in experts])
    return {
        name: one if name.endswith("e_score_correction_bias")
        else chunk(over_tensor_parallel(name, one, tp, t), fsdp, here)
        for name, one in weights.items()
    }  # fmt: skip


def stages_of_torchtitan(layers: int, pp: int) -> list[int]:
    """Embedding and head count as a layer each; the first stages get what does not divide evenly."""
    if pp == 1:
        return [layers]
    counts = [(layers + 2) // pp + (stage < (layers + 2) % pp) for stage in range(pp)]
    return [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
