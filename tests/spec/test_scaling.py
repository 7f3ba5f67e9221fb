"""`--scale`: what is left of a pair still plans, keeps its shape, and everything that changed is told."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import build_layout
from reshard_cli.plan.build import build_plan
from reshard_cli.refit.bench_scale import read_scaled_jobs
from reshard_cli.refit.prepare import Jobs
from reshard_cli.spec.checking import read_document
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import ModelDocument, model_of_document
from reshard_cli.spec.preset import expanded
from reshard_cli.spec.scaling import Room, scaled_pair
from reshard_cli.spec.scaling_model import Cuts, ModelScaler, apportioned, layers_by_kind
from reshard_cli.spec.scaling_ranks import divisors, scaled_place
from tests.support import write_yaml

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
ROWS = sorted(path.name for path in (LAYOUTS / "published").iterdir())
FACTORS = st.floats(-6, -0.31).map(lambda power: 10**power)
ROOMS = st.sampled_from([None, Room(8, 2), Room(8, 1), Room(16, 4), Room(12, 2)])


@cache
def documents(row):
    loaded = [
        read_layout_document(LAYOUTS / "published" / row / f"{name}.yaml") for name in ("train", "infer")
    ]
    path = (loaded[0].path.parent / loaded[0].document.model).resolve()
    document, located, _ = read_document(path, ModelDocument)
    return *loaded, document, located, str(path)


@cache
def full_model(row):
    return model_of_document(*documents(row)[2:])


def meshes_of(loaded, model):
    return expanded(loaded.document, model).meshes


def change_of(pair, where, what):
    found = [one for one in pair.changes if (one.where, one.what) == (where, what)]
    return found[0] if found else None


@settings(max_examples=60, deadline=None)
@given(row=st.sampled_from(ROWS), factor=FACTORS, room=ROOMS)
def test_a_scaled_published_pair_keeps_its_shape_or_says_what_is_lost(row, factor, room):
    source, destination, document, located, origin = documents(row)
    full = full_model(row)
    pair = scaled_pair(source, destination, document, located, origin, factor, room)
    ranks = [one.document.ranks for one in (pair.source, pair.destination)]
    if room is not None:
        assert sum(ranks) <= room.ranks
        assert all(one % room.per_node == 0 for one in ranks)
    for before, after in ((source, pair.source), (destination, pair.destination)):
        name = before.document.name
        old, new = meshes_of(before, full), meshes_of(after, pair.model)
        assert before.document.ranks % after.document.ranks == 0
        assert after.document.domain <= after.document.ranks
        for mesh, axes in old.items():
            assert math.prod(new[mesh].values()) == after.document.ranks
            for axis in {**axes, **new[mesh]}:
                sizes = axes.get(axis, 1), new[mesh].get(axis, 1)
                told = [one for one in pair.changes if (one.where, one.what) == (name, f"axis {axis}")]
                assert sizes[0] == sizes[1] or sizes in [(one.before, one.after) for one in told]
                if (sizes[0] > 1) != (sizes[1] > 1):
                    assert any(one.note for one in told if (one.before, one.after) == sizes)
        domains = [-(-one.document.ranks // one.document.domain) for one in (before, after)]
        told = change_of(pair, name, "domains")
        assert (domains[0] == domains[1]) == (told is None)
        if told is not None:
            assert [told.before, told.after] == domains
            assert bool(told.note) == ((domains[0] > 1) != (domains[1] > 1))
    size = change_of(pair, "model", "bytes")
    assert (size.before, size.after) == (full.num_bytes, pair.model.num_bytes)
    assert size.after <= factor * size.before or size.note
    # as many kinds of layers as before; of experts and tensors of each kind none is gone
    assert len(layers_by_kind(pair.model.tensors)) == len(layers_by_kind(full.tensors))


@settings(max_examples=25, deadline=None)
@given(row=st.sampled_from(ROWS), factor=st.floats(-6, -3.5).map(lambda power: 10**power), room=ROOMS)
def test_a_scaled_published_pair_plans_and_reaches_the_bound(row, factor, room):
    pair = scaled_pair(*documents(row), factor, room)
    jobs = Jobs(build_layout(pair.source, pair.model), build_layout(pair.destination, pair.model))
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=512 << 20)
    assert plan.network_bytes == plan.entries.needed_bytes


@pytest.mark.parametrize("row", ROWS)
def test_without_a_room_no_published_row_loses_an_axis_nor_its_domains(row):
    pair = scaled_pair(*documents(row), 1e-4)
    assert [one for one in pair.changes if one.note and one.what != "bytes"] == []


def test_the_row_of_the_help_text_fits_a_small_machine():
    pair = scaled_pair(*documents("qwen3-235b-h100"), 1e-4)
    assert (pair.source.document.ranks, pair.destination.document.ranks) == (8, 4)
    assert pair.source.document.parallel == {"tp": 2, "pp": 2, "ep": 4}
    assert pair.destination.document.parallel == {"tp": 2}
    assert pair.source.document.domain == pair.destination.document.domain == 2
    assert pair.source.document.pipeline.layers == [4, 4]
    assert pair.model.num_bytes <= 47_018_726


@pytest.mark.parametrize("factor", [0, 1, -0.5, 2, math.nan])
def test_factors_that_shrink_nothing_are_refused(factor):
    with pytest.raises(DocumentError, match="between 0 and 1"):
        scaled_pair(*documents("qwen3-4b-h100"), factor)


def test_a_cluster_without_room_is_refused_with_what_it_would_take():
    with pytest.raises(DocumentError, match=r"nodes of 3.*can have 1, 2, 4, 8 ranks"):
        scaled_pair(*documents("qwen3-4b-h100"), 0.01, Room(12, 3))


def test_layers_of_every_kind_stay_in_their_order():
    _, _, document, located, origin = documents("nemotron-ultra-gb200")
    scaler = ModelScaler(document, located, origin, Cuts(()))
    small = scaler.shrunk(0.1)
    letters = document.sets["mamba"].pattern
    assert list(small.kept) == sorted(set(small.kept))
    assert {letters[layer] for layer in small.kept} == {"M", "E", "*"}
    for number, layer in enumerate(small.kept):
        mamba = any(t.layer == number and t.name.endswith("mixer.A_log") for t in small.model.tensors)
        assert mamba == (letters[layer] == "M")


def test_a_smaller_model_is_never_larger_in_any_size():
    _, _, document, located, origin = documents("deepseek-v3-h100")
    scaler = ModelScaler(document, located, origin, Cuts(((16, 2), (32, 4)), 2))
    sizes = [scaler.shrunk(by).model.num_bytes for by in (1, 0.7, 0.5, 0.25, 0.1, 0.01, 1e-6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == full_model("deepseek-v3-h100").num_bytes


def test_a_size_that_the_config_repeats_as_a_number_stays(tmp_path):
    model = {
        "name": "m", "dtype": "bfloat16", "sizes": {"hidden": 1024, "head_dim": 128}, "config": {"head_dim": 128},
        "tensors": {"q_proj.weight": ["8 * head_dim", "hidden"]},
    }  # fmt: skip
    document, located, _ = read_document(write_yaml(tmp_path / "m.yaml", model), ModelDocument)
    assert ModelScaler(document, located, "m", Cuts(())).shrunk(0.1).sizes == (("hidden", 1024, 96),)


def test_draft_layers_behind_the_models_own_stay_behind(tmp_path):
    model = {
        "name": "m", "dtype": "bfloat16", "sizes": {"hidden": 256, "own": 20, "layers": 21},
        "config": {"num_hidden_layers": "own"}, "ranges": {"layer": "layers"},
        "tensors": {"model.layers.{layer}.input_layernorm.weight": ["hidden"],
                    "model.layers.{layer}.eh_proj.weight": {"shape": ["hidden", "hidden"], "layers": [20]}},
    }  # fmt: skip
    document, located, _ = read_document(write_yaml(tmp_path / "m.yaml", model), ModelDocument)
    small = ModelScaler(document, located, "m", Cuts(())).shrunk(0.25)
    assert small.kept[-1] == 20
    assert small.model.config["num_hidden_layers"] == len(small.kept) - 1
    assert {t.layer for t in small.model.tensors if "eh_proj" in t.name} == {len(small.kept) - 1}


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any),
    part=st.floats(0, 1),
)
def test_apportioning_gives_everybody_some_and_nobody_more_than_its_own(weights, part):
    least = sum(weight > 0 for weight in weights)
    total = least + round(part * (sum(weights) - least))
    found = apportioned(weights, total)
    assert sum(found) == total
    assert all((one > 0) == (weight > 0) for one, weight in zip(found, weights, strict=True))
    assert all(one <= weight for one, weight in zip(found, weights, strict=True))


@given(
    size=st.integers(1, 1 << 20),
    before=st.integers(1, 64),
    nth=st.integers(0, 6),
    block=st.sampled_from([None, 128]),
)
def test_a_size_stays_divisible_by_what_cuts_it(size, before, nth, block):
    after = divisors(before)[nth % len(divisors(before))]
    unit = Cuts(((before, after),), block=block).unit(size)
    if size % before == 0:
        assert unit % after == 0
    if block is not None and size % (block * before) == 0:
        assert unit % (block * after) == 0
    assert size % unit == 0


MODEL = {
    "name": "small", "dtype": "bfloat16", "sizes": {"hidden": 1024, "layers": 16, "heads": 16, "experts": 32, "width": 512},
    "ranges": {"layer": "layers", "expert": "experts"},
    "tensors": {
        "model.layers.{layer}.self_attn.q_proj.weight": ["heads * 64", "hidden"],
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": ["width", "hidden"],
        "model.norm.weight": ["hidden"],
    },
}  # fmt: skip
TRAIN = {
    "name": "train", "model": "model.yaml", "ranks": 64, "domain": 8,
    "meshes": {"dense": {"pp": 4, "dp": 2, "tp": 8}, "expert": {"pp": 4, "ep": 16}},
    "pipeline": {"layers": [3, 5, 5, 3], "last": ["model.norm.weight"]},
    "tensors": [
        {"match": "*.experts.{expert}.*", "mesh": "expert", "place": {"pp": "stage", "ep": "expert"}},
        {"match": "*.q_proj.weight", "place": {"pp": "stage", "tp": "shard(0, parts=4)"}},
        {"match": "*", "place": {"pp": "stage"}},
    ],
}  # fmt: skip
INFER = {
    "name": "infer", "model": "model.yaml", "ranks": 16, "domain": 8, "meshes": {"all": {"dp": 2, "tp": 8}},
    "tensors": [{"match": "*.q_proj.weight", "place": {"tp": "shard(0)"}}, {"match": "*"}],
}  # fmt: skip


def by_hand(folder, *, train=TRAIN, infer=INFER, model=MODEL, factor=0.001, room=None):
    write_yaml(folder / "model.yaml", model)
    paths = [write_yaml(folder / f"{one['name']}.yaml", one) for one in (train, infer)]
    return read_scaled_jobs(*paths, None, factor, room)


def test_documents_written_by_hand_are_scaled_by_their_meshes(tmp_path):
    jobs, changes = by_hand(tmp_path)
    source = jobs.source.loaded.document
    assert source.meshes == {"dense": {"pp": 2, "dp": 2, "tp": 2}, "expert": {"pp": 2, "ep": 4}}
    assert source.ranks == 8
    assert source.tensors[1].place["tp"] == "shard(0, parts=2)"
    assert sum(source.pipeline.layers) == jobs.source.stages.bounds[-1]
    assert jobs.destination.loaded.document.meshes == {"all": {"dp": 2, "tp": 2}}
    assert jobs.source.model.num_bytes <= 0.001 * 16 * (32 * 512 + 1024) * 1024 * 2 + 2048
    assert [one for one in changes if one.note] == []
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)
    assert plan.network_bytes == plan.entries.needed_bytes


def test_an_axis_that_finds_no_room_is_named(tmp_path):
    jobs, changes = by_hand(tmp_path, room=Room(4, 1))
    assert jobs.num_ranks(False) == 4
    lost = {(one.where, one.what) for one in changes if one.note == "no room for this axis"}
    assert lost
    for job, values in ((jobs.source, TRAIN), (jobs.destination, INFER)):
        for mesh, axes in values["meshes"].items():
            for axis, size in axes.items():
                if size > 1 and job.loaded.document.meshes[mesh][axis] == 1:
                    assert (job.name, f"axis {axis}") in lost


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pieces": [{"tensor": "model.norm.weight", "rank": 0, "box": [[0, 1024]]}]}, "explicit boxes"),
        ({"tensors": [{"match": "*", "blocks": {"0": [512, 512]}}]}, "`blocks`"),
        (
            {"engine": "hf", "parallel": {}, "tensors": [], "meshes": {}, "config": {"head_dim": 64}},
            "`config`",
        ),
        ({"engine": "hf", "tensors": []}, "meshes of its own"),
        ({"tensors": [{"match": "model.layers.0.*"}, {"match": "*"}]}, "by number"),
    ],
)
def test_documents_with_sizes_of_their_own_are_refused_with_the_way_out(tmp_path, change, told):
    with pytest.raises(DocumentError, match=told) as caught:
        by_hand(tmp_path, infer={**INFER, **change})
    assert "by hand, or let an engine preset" in str(caught.value)


def test_models_without_named_sizes_are_refused_with_the_way_out(tmp_path):
    plain = {"name": "m", "dtype": "bfloat16", "tensors": {"model.norm.weight": [1024]}}
    job = {"ranks": 4, "meshes": {"m": {"tp": 4}}, "tensors": [{"match": "*", "place": {"tp": "shard(0)"}}]}
    with pytest.raises(DocumentError, match="as expressions of `sizes`"):
        by_hand(
            tmp_path, model=plain, train={**job, "name": "train", "model": "model.yaml"},
            infer={**job, "name": "infer"},
        )  # fmt: skip
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(DocumentError, match="is a checkpoint"):
        read_scaled_jobs(tmp_path / "train.yaml", tmp_path / "infer.yaml", tmp_path / "checkpoint", 0.1, None)


def test_parts_follow_their_axis():
    axes = {"tp": 16, "dp": 4}
    assert scaled_place({"tp": "shard(0, parts=4)"}, axes, {"tp": 4, "dp": 2}) == {"tp": "shard(0, parts=4)"}
    assert scaled_place({"tp": "shard(0, parts=4)"}, axes, {"tp": 2, "dp": 2}) == {"tp": "shard(0, parts=2)"}
    assert scaled_place({"dp": "shard(1)"}, axes, {"tp": 2, "dp": 2}) == {"dp": "shard(1)"}


def test_the_model_itself_is_left_alone():
    before = full_model("qwen3-4b-h100")
    kept = replace(before)
    scaled_pair(*documents("qwen3-4b-h100"), 0.001)
    assert before == kept
