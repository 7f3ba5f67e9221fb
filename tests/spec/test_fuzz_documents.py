"""Documents that were damaged at random: each is read, or refused with a message and exit code 2 or 3.

A seed gives one damaged document, so a failure can be run again: RESHARD_FUZZ_START=SEED RESHARD_FUZZ=1. More
seeds than the few hundred of every run: RESHARD_FUZZ=10000.
"""

from __future__ import annotations

import copy
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard_cli.errors import DocumentError, ReshardError
from reshard_cli.layout.job import build_layout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
COUNT = int(os.environ.get("RESHARD_FUZZ", "400"))
START = int(os.environ.get("RESHARD_FUZZ_START", "0"))
CHUNK = 50
MOST_BYTES = 1 << 30

MODEL = {
    "name": "small", "dtype": "bfloat16",
    "sizes": {"hidden": 16, "heads": 4, "kv": 2, "dim": 4, "width": 8, "experts": 4, "vocab": 96},
    "config": {"num_attention_heads": "heads", "num_key_value_heads": "kv", "head_dim": "dim"},
    "ranges": {"layer": 4, "expert": "experts"}, "sets": {"dense": [0], "routed": {"from": 1}},
    "tensors": {
        "model.embed_tokens.weight": ["vocab", "hidden"],
        "model.layers.{layer}.input_layernorm.weight": ["hidden"],
        "model.layers.{layer}.self_attn.q_proj.weight": ["heads * dim", "hidden"],
        "model.layers.{layer}.self_attn.{k,v}_proj.weight": ["kv * dim", "hidden"],
        "model.layers.{layer}.self_attn.{q,k}_norm.weight": ["dim"],
        "model.layers.{layer}.self_attn.o_proj.weight": ["hidden", "heads * dim"],
        "model.layers.{layer}.mlp.{gate,up}_proj.weight": {"shape": ["width", "hidden"], "layers": "dense"},
        "model.layers.{layer}.mlp.down_proj.weight": {"shape": ["hidden", "width"], "layers": "dense"},
        "model.layers.{layer}.mlp.gate.weight": {"shape": ["experts", "hidden"], "layers": "routed", "dtype": "float32"},
        "model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight": {"shape": ["width", "hidden"], "layers": "routed"},
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": {"shape": ["hidden", "width"], "layers": "routed"},
        "model.norm.weight": ["hidden"],
        "lm_head.weight": ["vocab", "hidden"],
    },
}  # fmt: skip
# every key of a layout document, without an engine
WRITTEN_OUT = {
    "name": "written", "ranks": 4, "domain": 2, "dtype": "bfloat16",
    "meshes": {"m": {"pp": 2, "tp": 2}, "e": {"pp": 2, "ep": 2}},
    "pipeline": {"layers": [2, 2], "first": ["*embed*", "tied.*"], "last": ["model.norm.weight", "lm_head.weight"]},
    "tensors": [
        {"match": "*.{expert}.{gate,up,down}_proj.weight", "mesh": "e", "place": {"pp": "stage", "ep": "expert"}},
        {"match": "*.{k,v}_proj.weight", "place": {"pp": "stage", "tp": "shard(0, parts=2)"}},
        {"match": "*.q_proj.weight", "place": {"pp": "stage", "tp": "shard(0)"}},
        {"match": "*.o_proj.weight", "place": {"pp": "stage", "tp": "shard(1)"}, "cast": "blockwise(float8_e4m3fn, 8)"},
        {"match": "*.mlp.gate_proj.weight", "place": {"pp": "stage", "tp": "shard(0)"}, "blocks": {"0": [4, 4]}},
        {"match": "lm_head.weight", "place": {"pp": "stage", "tp": "shard(0)"}, "pad": {"0": 64}, "padding": "keep"},
        {"match": "*.mlp.gate.weight", "place": {"pp": "stage"}, "dtype": "float32", "route": "broadcast", "why": "so"},
        {"match": "*", "place": {"pp": "stage"}},
    ],
    "storage": [
        {"tensor": "l.{layer}.qkv", "concat": ["model.layers.{layer}.self_attn.{q,k,v}_proj.weight"], "interleave": 2},
        {"tensor": "l.{local_layer}.w13", "stack": "expert", "dim": 1, "block": 2, "layers": [1, 2, 3],
         "concat": ["model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight"]},
        {"tensor": "*.o", "rename": "*.o_proj.weight", "transpose": True},
    ],
    "casts": [{"match": "*.down_proj.weight", "cast": "float32"}],
    "pieces": [{"tensor": "model.norm.weight", "rank": 3, "box": [[0, 16]]}],
    "leave_out": ["*.k_norm.weight"], "alias": {"tied.weight": "model.embed_tokens.weight"},
    "rename": {"model.layers.{layer}.input_layernorm.*": "model.layers.{layer}.input_layernorm.*"},
}  # fmt: skip
HOSTILE = [
    None, True, False, 0, -1, 1, 3, 1.5, float("inf"), float("nan"), 2**31, 2**63, 10**30, -(10**30), "", " ", "*", "**",
    "{", "}", "{a,b}", "{layer}", "{expert}", "{local_layer}", "shard(0)", "shard(-1)", "shard(99999999999999999999)",
    "shard(0, parts=0)", "expert(round_robin)", "stage", "replicate", "blockwise(float8_e4m3fn)", "blockwise(float8_e4m3fn, 1)",
    "float8_e4m3fn", "uint8", "9" * 5000, "²", "٣", "a\x00b", "a\nb", "\u202e", "\x1b[2J", "hidden ** 9", "hidden // 0",
    "hidden * " * 40 + "hidden", "(" * 300 + "1" + ")" * 300, "megatron", "vllm", "nowhere", "../..", "x" * 10000, "{a,b}" * 60,
    "*a" * 30, [], {}, [[]], [{}], {"": ""}, {"0": 0}, [0] * 500, {"a": {"a": {"a": {"a": {}}}}},
]  # fmt: skip


def shipped() -> list[dict[str, Any]]:
    """Return the layouts to damage: one written out, and all shipped ones, with few enough ranks to be quick."""
    found = [WRITTEN_OUT]
    for path in sorted(LAYOUTS.rglob("*.yaml")):
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "ranks" in value and value["ranks"] <= 256:
            found.append({key: one for key, one in value.items() if key != "model"})
    for engine in ("vllm", "sglang", "megatron", "fsdp2", "torchtitan", "hf"):
        parallel = {"tp": 2} if engine != "torchtitan" else {"tp": 2, "ep": 2}
        found.append(
            {
                "name": engine,
                "ranks": 4,
                "engine": engine,
                "parallel": parallel,
                "options": {},
                "config": {"head_dim": 4},
            }
        )
    return found


BASES = shipped()
READABLE = [one for one in BASES if one["ranks"] == 4]  # with the small model; the others are refused late


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside a document."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


def damaged(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with one to four of its parts left out, doubled, moved, renamed or replaced."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = places(value)
        if not at:
            return value
        holder, key = rng.choice(at)
        act = rng.choice(["replace", "replace", "drop", "double", "swap", "key", "number", "text"])
        if act == "drop":
            del holder[key]
        elif act == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif act == "key" and isinstance(holder, dict):
            holder[str(rng.choice(HOSTILE))] = holder.pop(key)
        elif act == "swap":
            other, its_key = rng.choice(at)
            holder[key] = (
                copy.deepcopy(other[its_key]) if its_key in other or isinstance(other, list) else None
            )
        elif act == "number" and isinstance(holder[key], int):
            holder[key] = rng.choice(
                [holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2, 0, rng.getrandbits(70)]
            )
        elif act == "text" and isinstance(holder[key], str):
            text = holder[key]
            cut = rng.randrange(len(text) + 1)
            holder[key] = (
                text[:cut]
                + rng.choice(["*", "{", "}", ",", "0", "{layer}", "\x07", "é", "(", ")", ""])
                + text[cut + rng.randint(0, 2) :]
            )
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def broken_text(rng: random.Random, text: str) -> bytes:
    """Return the text with characters or whole runs put in, left out or doubled; sometimes no text at all."""
    data = bytearray(text, "utf-8")
    for _ in range(rng.randint(1, 5)):
        at, run = rng.randrange(len(data) + 1), rng.randint(1, 30)
        act = rng.randrange(4)
        if act == 0:
            piece = rng.choice(
                [
                    b"[",
                    b"{",
                    b"]",
                    b": ",
                    b"\n- ",
                    b"&a ",
                    b"*a ",
                    b"!!python/name:os.system ",
                    b"\t",
                    b"\x00",
                    b"\xff",
                    b"#",
                    b"'",
                    b'"',
                    b"|",
                    b"? ",
                    b"%YAML 9\n",
                    b"---\n",
                ]
            )
            data[at:at] = piece * rng.choice([1, 1, 2, 50, 3000])
        elif act == 1:
            del data[at : at + run]
        elif act == 2:
            data[at:at] = data[at : at + run] * rng.randint(1, 20)
        else:
            data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def read_all(layout: Path, model: Path) -> None:
    """Read both documents as far as a plan does, and lay out the first and the last rank."""
    built = build_layout(read_layout_document(layout), read_model(model))
    for rank in {0, built.num_ranks - 1}:
        rank_storages(built, rank)


def outcome(folder: Path, seed: int) -> str:
    """Return `read`, or the exit code that the documents of this seed are refused with. Anything else raises."""
    rng = random.Random(seed)
    layout: Any = rng.choice(READABLE if rng.random() < 0.7 else BASES)
    model: Any = MODEL
    if rng.random() < 0.3:
        model = damaged(rng, MODEL)
    if rng.random() < 0.8 or model is MODEL:
        layout = damaged(rng, layout)
    unicode = rng.random() < 0.5
    dumped = [yaml.safe_dump(one, sort_keys=False, allow_unicode=unicode) for one in (layout, model)]
    texts = [one.encode("utf-8", "surrogatepass") for one in dumped]
    if rng.random() < 0.25:
        which = rng.randrange(2)
        texts[which] = broken_text(rng, texts[which].decode("utf-8"))
    paths = [folder / "layout.yaml", folder / "model.yaml"]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    try:
        read_all(*paths)
    except ReshardError as error:
        assert error.exit_code in (2, 3), f"exit code {error.exit_code}"
        assert str(error).strip(), "an empty message"
        assert str(error).replace("\n", "").isprintable(), f"a message that steers the terminal: {error!a}"
        if isinstance(error, DocumentError):
            assert all(problem.line >= 1 for problem in error.problems)
        return str(error.exit_code)
    return "read"


@pytest.mark.parametrize("first", range(START, START + COUNT, CHUNK))
def test_a_damaged_document_is_read_or_refused(tmp_path, first):
    found: dict[str, int] = {}
    for seed in range(first, min(first + CHUNK, START + COUNT)):
        tracemalloc.start()
        try:
            told = outcome(tmp_path, seed)
            peak = tracemalloc.get_traced_memory()[1]
        except Exception as error:
            error.add_note(f"RESHARD_FUZZ_START={seed} RESHARD_FUZZ=1")
            raise
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES, f"seed {seed}: {peak >> 20} MiB"
        found[told] = found.get(told, 0) + 1
    if COUNT >= CHUNK:
        assert found.get("2", 0) > CHUNK // 4, f"hardly anything is damaged: {found}"


@pytest.mark.parametrize("base", READABLE, ids=lambda one: one["name"])
def test_the_documents_before_their_damage_are_read(tmp_path, base):
    paths = [tmp_path / "layout.yaml", tmp_path / "model.yaml"]
    for path, value in zip(paths, (base, MODEL), strict=True):
        path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    read_all(*paths)
