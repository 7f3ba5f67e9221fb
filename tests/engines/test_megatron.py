"""Megatron-core takes the rank files of `engine: megatron` as they are, and computes the checkpoint's logits.

Each rank's part of a model is built by Megatron-core from its own Transformer Engine specs, on CPUs with gloo. Its
parameters have to be just those of the rank's file, by name, shape and dtype, and the forward over all ranks has to
give the logits of transformers for the same checkpoint: rows in a wrong order would change them.

Needs: pip install torch==2.13.0 transformers==5.24.0 einops && pip install --no-deps megatron-core==0.16.1
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.tiny_models import engine_document, logits_of, random_model, refit
from tests.support import run_cli, run_module, write_yaml

NEEDED = ("transformers", "megatron", "einops")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

PARALLEL = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},  # more ranks than the 2 query groups: a cut goes through a group
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-ep2-etp2": {"tp": 2, "ep": 2, "etp": 2},  # two dense replicas, and experts cut both ways
    "tp2-ep2-pp2": {"tp": 2, "ep": 2, "pp": 2},
}
# the one value that Megatron keeps otherwise: its norms are zero-centred, this one of transformers is not
GATED_NORM = "self_attention.out_norm.weight"


def ranks_and_sizes(parallel: str) -> tuple[int, dict[str, int]]:
    """Return the number of ranks and all sizes; etp is 1 unless it is said."""
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, **PARALLEL[parallel]}
    return max(sizes["tp"], sizes["ep"] * sizes["etp"]) * sizes["pp"], sizes


@dataclass
class Refitted:
    """A checkpoint, its refit for Megatron, and the logits that transformers computes with it."""

    family: str
    parallel: str
    checkpoint: Path
    files: Path
    logits: Tensor


def refitted(work: Path, family: str, parallel: str, **more: Any) -> Refitted:
    """Refit a random model's checkpoint; `more` goes into Megatron's layout document."""
    model = random_model(family)
    checkpoint = work / "checkpoint"
    model.save_pretrained(checkpoint)
    ranks, sizes = ranks_and_sizes(parallel)
    source = engine_document("source", "fsdp2", 1, checkpoint)
    destination = engine_document("megatron", "megatron", ranks, checkpoint, parallel=sizes, **more)
    files = refit(work, source, destination, checkpoint, "files")
    return Refitted(family, parallel, checkpoint, files, logits_of(model))


def run_megatron(work: Path, one: Refitted, *folders: Path, **more: Any) -> list[Tensor]:
    """Return Megatron-core's logits for each folder of rank files; fail where they do not fit its parameters."""
    ranks, sizes = ranks_and_sizes(one.parallel)
    jobs = []
    for number, files in enumerate(folders):
        out = work / f"megatron-{number}"
        out.mkdir()
        job = {"family": one.family, "checkpoint": str(one.checkpoint), "files": str(files), "out": str(out)}
        job |= {"parallel": sizes, "minus_one": [], "values": {}, **more}
        (out / "job.json").write_text(json.dumps(job))
        jobs.append(out / "job.json")
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
        "tests.engines.megatron_rank", *jobs, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [
        f"{path.stem}: {line}"
        for job in jobs
        for path in sorted(job.parent.glob("rank-*.json"))
        for line in json.loads(path.read_text())
    ]
    if told:
        pytest.fail("\n".join(told))
    return [load_file(job.parent / "logits.safetensors")["logits"] for job in jobs]


def check(work: Path, one: Refitted, **more: Any) -> None:
    (logits,) = run_megatron(work, one, one.files, **more)
    assert one.logits.std() > 0.1
    torch.testing.assert_close(logits, one.logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", "tp2"),
        ("qwen3", "tp4"),
        ("qwen2", "tp2"),
        ("qwen3-moe", "tp2-ep2"),
        ("qwen3-moe", "tp2-ep2-etp2"),
        ("deepseek-v3", "tp2-ep2-pp2"),
        ("nemotron-h", "tp2-ep2-pp2"),
    ],
)
def test_megatron_has_the_logits_of_the_checkpoint(tmp_path, family, parallel):
    check(tmp_path, refitted(tmp_path, family, parallel))


def test_tied_weights_and_a_short_first_stage_have_the_logits_of_the_checkpoint(tmp_path):
    one = refitted(tmp_path, "qwen3-tied", "tp2-pp2", options={"first_layers": 1})
    check(tmp_path, one, values={"num_layers_in_first_pipeline_stage": 1})


def test_gated_delta_nets_have_the_logits_of_the_checkpoint_but_for_one_norm(tmp_path):
    check(tmp_path, refitted(tmp_path, "qwen3.5-moe", "tp2-ep2"), minus_one=[GATED_NORM])


def test_the_norm_of_gated_delta_nets_is_no_copy_and_the_plan_says_so(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    random_model("qwen3.5-moe").save_pretrained(checkpoint)
    whole = write_yaml(tmp_path / "whole.yaml", engine_document("whole", "hf", 1, checkpoint))
    sizes = {"tp": 2, "ep": 2}
    trained = write_yaml(
        tmp_path / "train.yaml", engine_document("train", "megatron", 2, checkpoint, parallel=sizes)
    )
    done = run_cli("plan", whole, trained, "--tensor", "model.layers.0.linear_attn.norm.weight")
    assert done.returncode == 0, done.stderr
    # as for vLLM's A_log: only the engine's own loader can make the values
    assert "route broadcast" in done.stdout


def by_kind(rows: Tensor) -> Tensor:
    """Reorder the rows of linear_qkv: all q heads, all k heads, all v heads, as most engines have them."""
    groups = rows.view(2, 4, 8, -1)  # 2 groups of 2 q heads, a k head and a v head, of 8 rows
    return torch.cat([groups[:, :2].flatten(0, 2), groups[:, 2].flatten(0, 1), groups[:, 3].flatten(0, 1)])


def up_first(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2)
    return torch.cat([up, gate])


def test_rows_in_a_wrong_order_change_the_logits(tmp_path):
    one = refitted(tmp_path, "qwen3", "tp1")
    right = load_file(one.files / "rank-00000.safetensors")
    folders = [one.files]
    for name, reorder in (("linear_qkv.weight", by_kind), ("linear_fc1.weight", up_first)):
        folder = tmp_path / name
        folder.mkdir()
        wrong = {key: reorder(rows) if key.endswith(name) else rows for key, rows in right.items()}
        assert wrong.keys() == right.keys()
        assert any(not torch.equal(wrong[key], right[key]) for key in right)
        save_file(wrong, folder / "rank-00000.safetensors")
        folders.append(folder)
    first, *others = run_megatron(tmp_path, one, *folders)
    torch.testing.assert_close(first, one.logits, rtol=0, atol=1e-3)
    for logits in others:
        assert (logits - one.logits).abs().max() > 0.1
