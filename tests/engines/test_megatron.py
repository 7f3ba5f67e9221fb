"""Megatron-core takes the rank files of `engine: megatron` as they are, and computes the checkpoint's logits.

Each rank's part of a model is built by Megatron-core from its own Transformer Engine specs, on CPUs with gloo. Its
parameters have to be just those of the rank's file, by name, shape and dtype, and the forward over all ranks has to
give the logits of transformers for the same checkpoint: rows in a wrong order would change them.

Needs: pip install torch==2.13.0 transformers==5.24.0 einops && pip install --no-deps megatron-core==0.16.1
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engines.tiny_models import engine_document, logits_of, random_model, refit
from tests.support import run_module

NEEDED = ("transformers", "megatron", "einops")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

PARALLEL = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},  # more ranks than the 2 query groups: a cut goes through a group
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-ep2-pp2": {"tp": 2, "ep": 2, "pp": 2},
}


def ranks_and_sizes(parallel: str) -> tuple[int, dict[str, int]]:
    """Return the number of ranks and all sizes; etp is 1 unless it is said."""
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, **PARALLEL[parallel]}
    return max(sizes["tp"], sizes["ep"] * sizes["etp"]) * sizes["pp"], sizes


def run_megatron(
    work: Path, family: str, checkpoint: Path, files: Path, parallel: str, **more: Any
) -> Tensor:
    """Return Megatron-core's logits with these rank files; fail where they do not fit its parameters."""
    ranks, sizes = ranks_and_sizes(parallel)
    out = work / f"out-{len(list(work.iterdir()))}"
    out.mkdir()
    job = {"family": family, "checkpoint": str(checkpoint), "files": str(files), "out": str(out)}
    job |= {"parallel": sizes, "minus_one": [], **more}
    (out / "job.json").write_text(json.dumps(job))
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
        "tests.engines.megatron_rank", out / "job.json", timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))}
    wrong = [f"{rank}: {one}" for rank, lines in told.items() for one in lines]
    if wrong:
        pytest.fail("\n".join(wrong))
    return load_file(out / "logits.safetensors")["logits"]


def refitted(work: Path, family: str, parallel: str, **config: Any) -> tuple[Path, Path, Tensor]:
    """Return a checkpoint, its refit for Megatron, and the logits of transformers."""
    model = random_model(family, **config)
    checkpoint = work / "checkpoint"
    model.save_pretrained(checkpoint)
    ranks, sizes = ranks_and_sizes(parallel)
    source = engine_document("source", "fsdp2", 1, checkpoint)
    destination = engine_document("megatron", "megatron", ranks, checkpoint, parallel=sizes)
    return checkpoint, refit(work, source, destination, checkpoint, "files"), logits_of(model)


def check(family: str, parallel: str, work: Path, **more: Any) -> None:
    checkpoint, files, expected = refitted(work, family, parallel)
    logits = run_megatron(work, family, checkpoint, files, parallel, **more)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parallel", ["tp1", "tp2", "tp4", "tp2-pp2"])
def test_qwen3_has_the_logits_of_its_checkpoint(tmp_path, parallel):
    check("qwen3", parallel, tmp_path)
