"""Float8 with block scales: pairs travel together, casts are exact wherever they are made, cut blocks refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reshard_cli.errors import DocumentError, WeightsError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.schedule import rank_schedule
from reshard_cli.refit.endpoints import Destination
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.in_process import run_in_process
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.weights.quantise import QuantisingSource, made_of
from tests.support import WholeTensors, make_jobs, model_document, run_cli, storages_of, write_yaml
from tests.weights.test_quantise import bits, by_hand

CAST = [{"match": "*.{gate,up,down}_proj.weight", "cast": "blockwise(float8_e4m3fn, 128)"}]
WIDTH, HIDDEN, EXPERTS = 512, 256, 2


@pytest.fixture(scope="module", name="values")
def checkpoint_values():
    torch.manual_seed(3)
    names = {"layers.0.norm.weight": (HIDDEN,), "embed.weight": (100, HIDDEN)}
    for expert in range(EXPERTS):
        base = f"layers.0.mlp.experts.{expert}"
        names |= {f"{base}.{part}_proj.weight": (WIDTH, HIDDEN) for part in ("gate", "up")}
        names[f"{base}.down_proj.weight"] = (HIDDEN, WIDTH)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()}


@pytest.fixture(name="checkpoint")
def checkpoint_folder(tmp_path, values):
    (tmp_path / "model").mkdir()
    save_file(values, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def engine(**more):
    """Return a destination of two ranks that fuses and stacks as engines do."""
    return {
        "name": "infer", "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}},
        "tensors": [
            {"match": "*.{gate,up}_proj.weight", "place": {"tp": "shard(0)"}},
            {"match": "*.down_proj.weight", "place": {"tp": "shard(1)"}},
            {"match": "*"},
        ],
        "storage": [
            {"tensor": "w13_weight", "stack": "expert", "dim": 1,
             "concat": ["layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight"]},
            {"tensor": "w2_weight", "stack": "expert",
             "concat": ["layers.{layer}.mlp.experts.{expert}.down_proj.weight"]},
        ],
        **more,
    }  # fmt: skip


def sharded(ranks, dim):
    return {
        "name": "train", "ranks": ranks, "domain": 2, "meshes": {"m": {"dp": ranks}},
        "tensors": [{"match": "*_proj.weight", "place": {"dp": f"shard({dim})"}}, {"match": "*"}],
    }  # fmt: skip


def expected_of(values, rank):
    """Return a destination rank's tensors, cast whole and then cut by hand."""
    stacked = {}
    parts = {part: [] for part in ("gate", "up", "down")}
    for part, found in parts.items():
        found += [
            by_hand(values[f"layers.0.mlp.experts.{expert}.{part}_proj.weight"], 128)
            for expert in range(EXPERTS)
        ]
    for index, suffix in ((0, ""), (1, "_scale_inv")):

        def half(one, dim, index=index):
            whole = bits(one[index]) if index == 0 else one[index]
            return whole.chunk(2, dim)[rank]

        stacked[f"w13_weight{suffix}"] = torch.stack(
            [torch.cat([half(g, 0), half(u, 0)]) for g, u in zip(parts["gate"], parts["up"], strict=True)]
        )
        stacked[f"w2_weight{suffix}"] = torch.stack([half(one, 1) for one in parts["down"]])
    return stacked


def check_folder(folder, values):
    for rank in range(2):
        have = load_file(folder / f"rank-{rank:05d}.safetensors")
        want = expected_of(values, rank)
        assert set(have) == {*want, "layers.0.norm.weight", "embed.weight"}
        for name, tensor in want.items():
            assert have[name].dtype == (torch.float32 if "scale" in name else torch.float8_e4m3fn)
            got = have[name] if "scale" in name else bits(have[name]).view(have[name].shape)
            assert torch.equal(got, tensor), name
        assert torch.equal(have["embed.weight"], values["embed.weight"])


@pytest.mark.parametrize(
    ("ranks", "dim", "side"), [(2, 0, "sender"), (3, 0, "receiver"), (2, 1, "sender")]
)  # fmt: skip
def test_a_training_job_in_bf16_fills_an_engine_in_float8(tmp_path, checkpoint, values, ranks, dim, side):
    train = write_yaml(tmp_path / "train.yaml", sharded(ranks, dim))
    infer = write_yaml(tmp_path / "infer.yaml", engine(casts=CAST))
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = run_cli(
        "refit", train, infer, "--model", checkpoint, "--from", checkpoint, "--to", out, "--verify",
        "--staging", "1", "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_folder(out, values)
    told = json.loads(report.read_text())
    assert told["verified"] is True
    assert "bfloat16 -> float8_e4m3fn" in told["casts"]
    planned = run_cli("plan", train, infer, "--model", checkpoint, "--json", "-")
    plan = json.loads(planned.stdout)
    cast = [one for one in plan["classes"] if one["destination_dtype"] == "float8_e4m3fn"]
    assert {one["cast_at"] for one in cast} == {side}
    # each element travels once, in one byte where the sender casts and in two where it cannot
    elements = sum(tensor.numel() for name, tensor in values.items() if "_proj" in name)
    others = sum(2 * tensor.numel() for name, tensor in values.items() if "_proj" not in name)
    scales = 4 * elements // 128**2
    moved = others + (elements + scales if side == "sender" else 2 * elements)
    assert plan["traffic"]["network_bytes"] == plan["traffic"]["network_lower_bound"] == moved
    assert plan["memory"]["landing_bytes"] == (0 if side == "sender" else elements)


def test_a_checkpoint_in_float8_travels_as_pairs(tmp_path, values):
    pairs = {name: tensor for name, tensor in values.items() if "_proj" not in name}
    for name, tensor in values.items():
        if "_proj" in name:
            pairs[name], pairs[name + "_scale_inv"] = by_hand(tensor, 128)
    (tmp_path / "model").mkdir()
    save_file(pairs, tmp_path / "model" / "model.safetensors")
    train = write_yaml(tmp_path / "train.yaml", sharded(2, 0))
    infer = write_yaml(tmp_path / "infer.yaml", engine())
    done = run_cli(
        "refit", train, infer, "--model", tmp_path / "model", "--from", tmp_path / "model",
        "--to", tmp_path / "out", "--verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_folder(tmp_path / "out", values)


def matrix_jobs(folder, shape, source, destination):
    model = model_document({"a.weight": (shape, "bfloat16")})
    return make_jobs(folder, model, source, destination)


def place(ranks, text, **more):
    rule = {"match": "*", "place": {"r": text}, **more}
    return {"ranks": ranks, "domain": 1, "meshes": {"m": {"r": ranks}}, "tensors": [rule]}


def test_an_edge_inside_a_block_is_refused_with_the_reason(tmp_path):
    cast = "blockwise(float8_e4m3fn, 128)"
    with pytest.raises(DocumentError) as told:
        matrix_jobs(tmp_path, (384, 128), place(1, "shard(0)"), place(2, "shard(0)", cast=cast))
    text = str(told.value)
    assert "destination.yaml" in text
    assert "'a.weight'" in text
    assert "inside a block of 128" in text
    assert "route: broadcast" in text


def test_an_explicit_piece_that_ends_inside_a_block_is_refused_at_its_line(tmp_path):
    pieces = [((0, 128), 0), ((200, 256), 0), ((128, 200), 1)]
    destination = {
        "ranks": 2,
        "tensors": [{"match": "*", "cast": "blockwise(float8_e4m3fn, 128)"}],
        "pieces": [
            {"tensor": "a.weight", "rank": rank, "box": [list(rows), [0, 128]]} for rows, rank in pieces
        ],
    }
    with pytest.raises(DocumentError) as caught:
        matrix_jobs(tmp_path, (256, 128), place(1, "shard(0)"), destination)
    (problem,) = caught.value.problems
    assert problem.key == "pieces[1].box"


def test_values_without_their_scales_are_refused(tmp_path):
    tensors = {"a.weight": ((256, 128), "float8_e4m3fn"), "a.weight_scale_inv": ((2, 1), "float32")}
    jobs = make_jobs(
        tmp_path, model_document(tensors), place(1, "shard(0)"), {**place(1, "shard(0)"), "dtype": "bfloat16"}
    )
    with pytest.raises(WeightsError, match="block scales"):
        build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=1 << 20)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"cast": "blockwise(int8, 128)"}, "float8_e4m3fn or float8_e5m2"),
        ({"cast": "fp8"}, "float8_e4m3fn"),
        ({"cast": "bfloat16", "dtype": "bfloat16"}, "write one of them"),
        ({"cast": "blockwise(float8_e4m3fn, 0)"}, "at least 1 row"),
    ],
)
def test_a_cast_that_is_none_is_refused(tmp_path, rule, told):
    with pytest.raises(DocumentError, match=told):
        matrix_jobs(tmp_path, (8, 8), place(1, "shard(0)"), place(1, "shard(0)", **rule))


def test_a_vector_has_no_blocks(tmp_path):
    cast = place(1, "shard(0)", cast="blockwise(float8_e4m3fn, 4)")
    with pytest.raises(DocumentError, match="fewer than two dims"):
        make_jobs(tmp_path, model_document({"a": ((8,), "bfloat16")}), place(1, "shard(0)"), cast)


@pytest.mark.parametrize("match", ["*_scale_inv", "a.weight_scale_inv"])
def test_a_rule_for_scales_that_a_cast_makes_is_refused_at_its_line(tmp_path, match):
    destination = {
        "ranks": 1,
        "tensors": [{"match": match}, {"match": "*", "cast": "blockwise(float8_e4m3fn, 128)"}],
    }
    with pytest.raises(DocumentError) as caught:
        matrix_jobs(tmp_path, (256, 128), place(1, "shard(0)"), destination)
    (problem,) = caught.value.problems
    assert problem.key == "tensors[0].match"
    assert "are the scales that the cast of 'a.weight' makes" in problem.message


def test_a_rule_for_scales_that_the_model_has_places_them(tmp_path):
    tensors = {"a.weight": ((256, 128), "float8_e4m3fn"), "a.weight_scale_inv": ((2, 1), "float32")}
    destination = place(2, "shard(0)")
    destination["tensors"].insert(0, {"match": "*_scale_inv"})
    jobs = make_jobs(tmp_path, model_document(tensors), place(1, "shard(0)"), destination)
    shapes = [
        jobs.destination.geometries[one.geometry].local_shape.tolist() for one in jobs.destination.tensors
    ]
    assert shapes == [[[128, 128], [128, 128]], [[2, 1], [2, 1]]]


@st.composite
def cases(draw):
    shape = (draw(st.integers(1, 26)), draw(st.integers(1, 26)))
    sides = []
    for _ in range(2):
        ranks = draw(st.integers(1, 4))
        sides.append((ranks, f"shard({draw(st.integers(0, 1))})" if draw(st.booleans()) else "replicate"))
    return shape, draw(st.sampled_from([1, 2, 4, 8])), sides, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_random_cuts_give_every_rank_its_part_of_the_whole_cast_or_are_refused(tmp_path_factory, case):
    shape, block, (source, destination), whole, stored = case
    cast = {"cast": f"blockwise(float8_e4m3fn, {block})"} | ({"route": "broadcast"} if whole else {})
    folder = tmp_path_factory.mktemp("case")
    try:
        jobs = matrix_jobs(folder, shape, place(*source), place(*destination, **cast))
        plan = build_plan(
            jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=1 << 16
        )
    except DocumentError as error:
        assert "block" in str(error)
        ranks, text = destination
        cut = shape[int(text[6])] if text != "replicate" else 0
        edges = [min(cut, i * -(-cut // ranks)) for i in range(1, ranks)]
        assert whole or any(edge % block and edge != cut for edge in edges)
        return
    torch.manual_seed(sum(shape))
    values = {"a.weight": torch.randn(shape).to(torch.bfloat16)}
    destinations = {}
    executors = {}
    for rank in range(plan.topology.num_ranks):
        base, windows = None, None
        if rank < source[0]:
            held = storages_of(jobs, rank, values) if stored else WholeTensors(values)
            base = QuantisingSource(held, made_of(plan.pairs, at=["sender"]))
        else:
            job = rank - source[0]
            destinations[job] = Destination.create(plan, job, None, 1, torch.device("cpu"))
            windows = destinations[job].windows
        executors[rank] = RankExecutor(plan, rank_schedule(plan, rank), base, windows, torch.device("cpu"))
    run_in_process(executors)
    cast_values, scales = by_hand(values["a.weight"], block)
    truth = {"a.weight": bits(cast_values).view(shape), "a.weight_scale_inv": scales}
    for made in destinations.values():
        made.cast()
        for storage in made.storages:
            dtype = torch.uint8 if storage.name == "a.weight" else torch.float32
            flat = made.buffers[storage.name].view(dtype)
            for window in storage.windows:
                sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
                start = flat.storage_offset() + window.offset  # storages of a rank share one allocation
                view = torch.as_strided(flat, sizes, window.strides, start)
                box = tuple(slice(a, b) for a, b in zip(window.lo, window.hi, strict=True))
                assert torch.equal(view, truth[storage.name][box])


def test_one_document_can_say_it_in_a_rule_too(tmp_path, checkpoint):
    rules = [
        {**rule, "cast": CAST[0]["cast"]} if "_proj" in rule["match"] else rule
        for rule in engine()["tensors"]
    ]
    train = write_yaml(tmp_path / "train.yaml", sharded(2, 0))
    one = read_jobs(train, write_yaml(tmp_path / "a.yaml", engine(casts=CAST)), checkpoint)
    other = read_jobs(train, write_yaml(tmp_path / "b.yaml", engine(tensors=rules)), checkpoint)
    assert [(t.name, t.dtype, t.geometry) for t in one.destination.tensors] == [
        (t.name, t.dtype, t.geometry) for t in other.destination.tensors
    ]


def test_operands_of_several_dtypes_that_are_cast_where_they_land_are_cast_exactly(tmp_path):
    # three source ranks cut blocks of 128, so that the destination casts; its storage has all three operands
    kinds = {"a.weight": torch.bfloat16, "b.weight": torch.float32, "c.weight": torch.float16}
    torch.manual_seed(5)
    values = {name: torch.randn(256, 128).to(dtype) for name, dtype in kinds.items()}
    (tmp_path / "model").mkdir()
    save_file(values, tmp_path / "model" / "model.safetensors")
    train = write_yaml(tmp_path / "train.yaml", {"name": "train", **place(3, "shard(0)")})
    infer = {
        "name": "infer", **place(2, "shard(0)", cast="blockwise(float8_e4m3fn, 128)"),
        "storage": [{"tensor": "abc.weight", "concat": ["{a,b,c}.weight"]}],
    }  # fmt: skip
    done = run_cli(
        "refit", train, write_yaml(tmp_path / "infer.yaml", infer), "--model", tmp_path / "model",
        "--from", tmp_path / "model", "--to", tmp_path / "out", "--verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = {name: by_hand(tensor, 128) for name, tensor in values.items()}
    for rank in range(2):
        have = load_file(tmp_path / "out" / f"rank-{rank:05d}.safetensors")
        rows = slice(128 * rank, 128 * rank + 128)
        want = torch.cat([bits(cast).view(256, 128)[rows] for cast, _ in whole.values()])
        assert torch.equal(bits(have["abc.weight"]).view(384, 128), want)
        assert torch.equal(
            have["abc.weight_scale_inv"], torch.cat([scales[rank : rank + 1] for _, scales in whole.values()])
        )


def planned(jobs):
    return build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=1 << 20)


FLOAT8 = {"a.weight": ((256, 128), "float8_e4m3fn"), "a.weight_scale_inv": ((2, 1), "float32")}


def test_an_alias_of_float8_needs_an_alias_of_its_scales(tmp_path):
    alone = {**place(1, "shard(0)"), "alias": {"tied.weight": "a.weight"}}
    jobs = make_jobs(tmp_path, model_document(FLOAT8), place(1, "shard(0)"), alone)
    mend = r"alias 'tied.weight' would be without scales; write alias: \{tied.weight_scale_inv: a.weight_scale_inv\}"
    with pytest.raises(WeightsError, match=mend):
        planned(jobs)
    both = {**alone, "alias": {"tied.weight": "a.weight", "tied.weight_scale_inv": "a.weight_scale_inv"}}
    jobs = make_jobs(tmp_path, model_document(FLOAT8), place(1, "shard(0)"), both)
    assert {pair.name for pair in planned(jobs).pairs} == set(FLOAT8)


@pytest.mark.parametrize("scales", [(256, 1), (1,), (2, 1), (256,)], ids=str)
def test_float8_with_scales_of_any_shape_is_not_cast_without_them(tmp_path, scales):
    model = model_document({**FLOAT8, "a.weight_scale_inv": (scales, "float32")})
    jobs = make_jobs(tmp_path, model, place(1, "shard(0)"), {**place(1, "shard(0)"), "dtype": "bfloat16"})
    with pytest.raises(WeightsError, match="without which its values mean nothing"):
        planned(jobs)
    jobs = make_jobs(tmp_path, model, place(1, "shard(0)"), place(1, "shard(0)"))
    assert {pair.name for pair in planned(jobs).pairs} == set(FLOAT8)


def test_a_pattern_for_weights_that_fits_the_names_of_their_scales_casts_no_scales(tmp_path):
    everything = {**place(1, "shard(0)"), "casts": [{"match": "a*", "cast": "blockwise(float8_e4m3fn, 128)"}]}
    jobs = make_jobs(tmp_path, model_document(FLOAT8), place(1, "shard(0)"), everything)
    assert [(one.name, one.dtype) for one in jobs.destination.tensors] == [
        ("a.weight", "float8_e4m3fn"),
        ("a.weight_scale_inv", "float32"),
    ]
