"""Tensors that a checkpoint has under two names that its document ties (alias): compared when a refit is verified."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support import model_document, run_cli, write_yaml

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

PLAIN = {"embed.weight": (8, 6), "head.weight": (8, 6), "norm": (6,)}
ALIAS = {"head.weight": "embed.weight"}
NUM_EXPERTS = 4
EXPERTS = {"a.{expert}.w": (6, 2), "b.{expert}.w": (6, 2), "norm": (6,)}
EXPERTS_ALIAS = {"b.{expert}.w": "a.{expert}.w"}


def documents(folder: Path, tensors: dict[str, Any], alias: dict[str, str]) -> list[Path]:
    model = model_document({name: (shape, "float32") for name, shape in tensors.items()})
    if any("{expert}" in name for name in tensors):
        model["ranges"] = {"expert": NUM_EXPERTS}
    write_yaml(folder / "model.yaml", model)
    paths = []
    for name, ranks in (("train", 2), ("infer", 3)):
        job = {
            "name": name, "model": "model.yaml", "ranks": ranks, "alias": alias,
            "tensors": [{"match": "*.w*", "place": {"rank": "shard(0)"}}, {"match": "*"}],
        }  # fmt: skip
        paths.append(write_yaml(folder / f"{name}.yaml", job))
    return paths


def values(tensors: dict[str, Any], alias: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds, each expert by itself; tied tensors are equal."""
    seed = torch.Generator().manual_seed(7)
    found: dict[str, torch.Tensor] = {}
    for name, shape in tensors.items():
        if "{expert}" in name:
            for expert in range(NUM_EXPERTS):
                found[name.format(expert=expert)] = torch.randn(shape, generator=seed)
        else:
            found[name] = torch.randn(shape, generator=seed)
    for other, one in alias.items():
        for expert in range(NUM_EXPERTS if "{expert}" in one else 1):
            found[other.format(expert=expert)] = found[one.format(expert=expert)].clone()
    return found


def save(kind: str, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "checkpoint"
    if kind == "dcp":
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    else:
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
    return path


def refit(folder: Path, paths: list[Path], checkpoint: Path, *more: str) -> Any:
    return run_cli(
        "refit",
        *paths,
        "--from",
        checkpoint,
        "--to",
        folder / "out",
        "--trust-checkpoint",
        "--json",
        "-",
        *more,
    )


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize(
    ("tensors", "alias", "spoilt"),
    [(PLAIN, ALIAS, "head.weight"), (EXPERTS, EXPERTS_ALIAS, "b.2.w")],
    ids=["plain", "experts"],
)
def test_tied_tensors_that_differ_end_a_verified_refit_before_its_commit(
    tmp_path, kind, tensors, alias, spoilt
):
    paths = documents(tmp_path, tensors, alias)
    stored = values(tensors, alias)
    checkpoint = save(kind, tmp_path, stored)
    done = refit(tmp_path, paths, checkpoint, "--verify")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["extra"] == []
    first = load_file(tmp_path / "out" / "rank-00000.safetensors")
    for name in (name for other in alias for name in first if fnmatch(name, other.replace("{expert}", "*"))):
        assert torch.equal(first[name], stored[name][: len(first[name])])  # both names are filled
    before = sorted((tmp_path / "out").iterdir()), (tmp_path / "out" / "rank-00000.safetensors").read_bytes()

    stored[spoilt][5, 1] = -stored[spoilt][5, 1]
    (tmp_path / "second").mkdir()
    checkpoint = save(kind, tmp_path / "second", stored)
    done = refit(tmp_path, paths, checkpoint, "--verify")
    assert done.returncode == 5, done.stderr
    one = {"head.weight": "embed.weight", "b.2.w": "a.2.w"}[spoilt]
    said = " ".join(done.stderr.split())
    assert f"element [5, 1] of {spoilt!r} differs from that of {one!r}" in said, done.stderr
    assert "train.yaml" in said
    assert "nothing was committed" in said
    assert before == (
        sorted((tmp_path / "out").iterdir()), (tmp_path / "out" / "rank-00000.safetensors").read_bytes()
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize(
    ("held", "told"), [(torch.zeros(9, 6), "[9, 6]"), (torch.zeros(8, 6, dtype=torch.float16), "float16")]
)
def test_a_tied_tensor_of_another_shape_or_dtype_is_refused_by_its_own_name(tmp_path, kind, held, told):
    paths = documents(tmp_path, PLAIN, ALIAS)
    checkpoint = save(kind, tmp_path, {**values(PLAIN, ALIAS), "head.weight": held})
    done = refit(tmp_path, paths, checkpoint)
    assert done.returncode == 3, done.stderr
    assert "head.weight" in done.stderr
    assert told in done.stderr


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_checkpoint_may_have_either_of_two_tied_tensors(tmp_path, kind, kept):
    paths = documents(tmp_path, PLAIN, ALIAS)
    stored = values(PLAIN, ALIAS)
    tied = ("embed.weight", "head.weight")
    checkpoint = save(
        kind, tmp_path, {name: one for name, one in stored.items() if name == kept or name not in tied}
    )
    done = refit(tmp_path, paths, checkpoint, "--verify")
    assert done.returncode == 0, done.stderr
    for rank, rows in enumerate(torch.chunk(stored[kept], 3)):
        have = load_file(tmp_path / "out" / f"rank-0000{rank}.safetensors")
        assert torch.equal(have["embed.weight"], rows)
        assert torch.equal(have["head.weight"], rows)
