"""What a job does not hold counts for nothing: draft layers and stages; and aliases of experts."""

from __future__ import annotations

import pytest
import torch

from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import build_layout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model
from tests.support import make_jobs, refit_in_process, write_yaml

# four layers, and behind them a draft layer for the prediction of several tokens
DRAFTED = {
    "name": "drafted", "dtype": "bfloat16", "ranges": {"layer": 5},
    "config": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    "tensors": {
        "model.embed_tokens.weight": [64, 32],
        "model.layers.{layer}.input_layernorm.weight": [32],
        "model.layers.{layer}.self_attn.{q,k,v}_proj.weight": [32, 32],
        "model.layers.{layer}.self_attn.o_proj.weight": [32, 32],
        "model.layers.{layer}.mlp.{gate,up}_proj.weight": [64, 32],
        "model.layers.{layer}.mlp.down_proj.weight": [32, 64],
        "model.layers.4.enorm.weight": [32],
        "model.layers.4.eh_proj.weight": [32, 64],
        "model.norm.weight": [32],
        "lm_head.weight": [64, 32],
    },
}  # fmt: skip


def layout_of(folder, model, **document):
    path = write_yaml(folder / "job.yaml", {"name": "job", **document})
    return build_layout(read_layout_document(path), read_model(write_yaml(folder / "model.yaml", model)))


def layers_of(layout):
    """Return the layers that each rank has a tensor of."""
    found = [set() for _ in range(layout.num_ranks)]
    for tensor in layout.tensors:
        for rank in layout.geometries[tensor.geometry].rank.tolist():
            found[rank] |= {tensor.layer} - {None}
    return found


@pytest.mark.parametrize("engine", ["megatron", "vllm", "sglang"])
def test_draft_layers_that_an_engine_leaves_out_have_no_stage(tmp_path, engine):
    layout = layout_of(tmp_path, DRAFTED, ranks=2, engine=engine, parallel={"pp": 2})
    assert layers_of(layout) == [{0, 1}, {2, 3}]
    assert not any("eh_proj" in tensor.name for tensor in layout.tensors)


def test_stages_named_in_the_document_count_the_engines_layers_only(tmp_path):
    job = {"ranks": 2, "engine": "vllm", "parallel": {"pp": 2}}
    assert layers_of(layout_of(tmp_path, DRAFTED, **job, pipeline={"layers": [3, 1]})) == [{0, 1, 2}, {3}]
    with pytest.raises(DocumentError, match="the stages hold 5 layers in all, the model has 4"):
        layout_of(tmp_path, DRAFTED, **job, pipeline={"layers": [3, 2]})


@pytest.mark.parametrize("layers", [None, [1, 3]])
def test_layers_that_a_document_leaves_out_have_no_stage(tmp_path, layers):
    pipeline = {"first": ["*embed*"], "last": ["model.norm.weight", "lm_head.weight"]}
    job = {
        "ranks": 2, "meshes": {"m": {"pp": 2}}, "tensors": [{"match": "*", "place": {"pp": "stage"}}],
        "pipeline": pipeline | ({"layers": layers} if layers else {}), "leave_out": ["model.layers.4.*"],
    }  # fmt: skip
    split = [{0}, {1, 2, 3}] if layers else [{0, 1}, {2, 3}]
    assert layers_of(layout_of(tmp_path, DRAFTED, **job)) == split


EXPERTS = {
    "name": "m", "dtype": "float32", "ranges": {"expert": 4}, "tensors": {"experts.{expert}.w": [6, 2], "head": [6, 2]},
}  # fmt: skip


def test_an_alias_of_experts_is_filled_with_them(tmp_path):
    rules = [{"match": "*.{expert}.*", "place": {"ep": "expert"}}, {"match": "*"}]
    job = {
        "ranks": 2,
        "meshes": {"m": {"ep": 2}},
        "tensors": rules,
        "alias": {"twin.experts.{expert}.w": "experts.{expert}.w"},
    }
    jobs = make_jobs(tmp_path, EXPERTS, {"ranks": 1, "tensors": [{"match": "*"}]}, job)
    names = [{one.name for one in rank_storages(jobs.destination, rank)} for rank in range(2)]
    assert names == [
        {"head", *(f"{prefix}experts.{expert}.w" for expert in mine for prefix in ("", "twin."))}
        for mine in ((0, 1), (2, 3))
    ]
    values = {"experts.{expert}.w": torch.randn(4, 6, 2), "head": torch.randn(6, 2)}
    for rank, held in enumerate(refit_in_process(jobs, values, staging=1 << 20).storages):
        for expert in (2 * rank, 2 * rank + 1):
            for prefix in ("", "twin."):
                whole = values["experts.{expert}.w"][expert]
                assert torch.equal(held[f"{prefix}experts.{expert}.w"].view(6, 2), whole)


@pytest.mark.parametrize(
    "alias", [{"twin": "experts.{expert}.w"}, {"twin.experts.{expert}.w": "head"}], ids=str
)
def test_an_alias_of_experts_and_one_of_no_experts_are_not_mixed(tmp_path, alias):
    with pytest.raises(DocumentError, match=r"both names have \{expert\} or none"):
        layout_of(tmp_path, EXPERTS, ranks=1, tensors=[{"match": "*"}], alias=alias)
