"""Presets as people use them: what mistakes are told, `layouts`, and the rules that win over a preset's.

A mistake gives one message with file, line and key; the line with the mistake ends in `#!`. What `layouts
--expand` prints is a document that plans the very same refit without any engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from reshard_cli.cli.layouts import run_layouts
from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import build_plan
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.spec.layout_document import read_layout_document
from reshard_cli.spec.model_document import read_model
from tests.support import run_cli

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
MODEL = LAYOUTS / "models" / "quickstart-moe.yaml"
ENGINES = ("fsdp2", "hf", "megatron", "sglang", "torchtitan", "vllm")
WHOLE = "name: whole\nranks: 1\nengine: hf\n"
UNKNOWN_FAMILY = """\
name: unknown
dtype: float32
ranges: {layer: 2}
config: {num_attention_heads: 4, num_key_value_heads: 4, head_dim: 2}
tensors:
  "encoder.block.{layer}.{wq,wk}": [8, 8]
  "decoder.stack.{layer}.mamba.in": [7, 8]
"""


def head(ranks: int, engine: str) -> str:
    return f"name: train\nranks: {ranks}\nengine: {engine}\n"


# text; the key and some words of the message
MISTAKES = {
    "unknown size": (
        head(4, "megatron") + "parallel: {tp: 2, tq: 2} #!\n", "parallel", "no 'tq'; known: tp, cp"),
    "unknown size in a block": (
        head(4, "vllm") + "parallel: #!\n  tp: 2\n  cp: 2\n",
        "parallel", "'vllm' has no 'cp'; known: tp, pp, ep"),
    "size as text": (
        head(4, "vllm") + "parallel: {tp: two} #!\n", "parallel.tp", "must be a whole number, not 'two'"),
    "size of nothing": (
        head(4, "vllm") + "parallel: {tp: 0} #!\n", "parallel", "tp must be at least 1, not 0"),
    "more than the ranks": (
        head(2, "vllm") + "parallel: {tp: 4} #!\n", "parallel", "tp 4 do not fit the job's 2 ranks"),
    "ranks left over": (head(6, "megatron") + "parallel: {tp: 4} #!\n", "parallel", "6 ranks"),
    "ranks left over with dp": (head(6, "vllm") + "parallel: {tp: 2, dp: 2} #!\n", "parallel", "6 ranks"),
    "experts in no equal parts": (
        head(8, "megatron") + "parallel: {tp: 2, ep: 3} #!\n", "parallel", "8 ranks"),
    "ep that does not divide tp": (
        head(4, "sglang") + "parallel: {tp: 4, ep: 3} #!\n", "parallel", "must divide tp 4"),
    "ep that does not divide the experts": (
        head(6, "torchtitan") + "parallel: {ep: 3} #!\n",
        "parallel", "8 experts do not divide evenly over ep 3"),
    "ep over stages": (
        head(8, "vllm") + "parallel: {tp: 2, pp: 2, ep: 4} #!\n",
        "parallel", "with pp above 1, ep * etp must be tp"),
    "grouped experts in no equal parts": (
        head(3, "fsdp2") + "parallel: {fsdp: 3} #!\noptions: {grouped: 1}\n",
        "parallel", "need fsdp 3 to divide the 8"),
    "layers in no equal parts": (
        head(3, "megatron") + "parallel: {pp: 3} #!\n",
        "parallel", "4 layers do not split evenly over 3 stages; write"),
    "more stages than layers": (
        head(8, "torchtitan") + "parallel: {pp: 8} #!\n",
        "parallel", "4 layers, with the embedding and the head, do not fill 8 stages; at most 6"),
    "layers of fewer stages": (
        head(2, "megatron") + "parallel: {pp: 2}\npipeline: {layers: [4]} #!\n",
        "pipeline", "`layers` names 1 stages, but pp is 2"),
    "layers of more stages": (
        head(2, "vllm") + "pipeline: #!\n  layers: [1, 2, 1]\nparallel: {pp: 2}\n",
        "pipeline", "`layers` names 3 stages, but pp is 2"),
    "layers of stages without pp": (
        head(2, "sglang") + "parallel: {tp: 2}\npipeline: {layers: [1, 3]} #!\n",
        "pipeline", "`layers` names 2 stages, but pp is 1"),
    "one operand left out": (
        head(1, "vllm") + "leave_out: ['*.k_proj.weight'] #!\n", "leave_out[0]",
        "'model.layers.0.self_attn.k_proj.weight' is left out and 'model.layers.0.self_attn.q_proj.weight' is not, "
        "but both lie in the storage 'model.layers.{layer}.self_attn.qkv_proj.weight'"),
    "first operand left out": (
        head(1, "megatron") + "leave_out: ['*.q_proj.weight'] #!\n", "leave_out[0]", "'model.layers.0.self_attn.q_proj"),
    "one operand left out in one layer": (
        head(1, "megatron") + "leave_out:\n  - lm_head.weight\n  - '*.2.*.v_proj.weight' #!\n", "leave_out[1]",
        "'model.layers.2.self_attn.v_proj.weight' is left out and"),
    "experts of one projection left out": (
        head(1, "vllm") + "leave_out: ['*.experts.{expert}.up_proj.weight'] #!\n", "leave_out[0]", "w13_weight'"),
    "one expert left out": (
        head(1, "hf") + "leave_out: ['*.experts.3.*'] #!\n", "leave_out[0]",
        "leaves out only some experts of 'model.layers.0.mlp.experts.{expert}.gate_proj.weight'"),
    "left out by an open brace": (head(1, "vllm") + "leave_out: ['a{'] #!\n", "leave_out[0]", "a brace is open"),
    "heads in no equal parts, vllm": (head(3, "vllm") + "parallel: {tp: 3} #!\n", "parallel", "tp 3"),
    "heads in no equal parts, sglang": (head(3, "sglang") + "parallel: {tp: 3} #!\n", "parallel", "tp 3"),
    "heads in no equal parts, megatron": (head(3, "megatron") + "parallel: {tp: 3} #!\n", "parallel", "tp 3"),
    "unknown option": (
        head(4, "megatron") + "options: {vocab_multiple: 64} #!\n",
        "options", "no 'vocab_multiple'; known: vocab_divisor"),
    "option below nothing": (
        head(1, "megatron") + "options: {vocab_divisor: -1} #!\n", "options", "at least 0, not -1"),
    "unknown engine": (
        "name: train\nranks: 4\nengine: megatrom #!\n",
        "engine", "no engine preset is named 'megatrom'; there are: fsdp2,"),
    "engine as a list": ("name: train\nranks: 4\nengine: [vllm] #!\n", "engine", "must be"),
    "sizes without an engine": (
        "name: train\nranks: 4\nparallel: {tp: 2} #!\n", "parallel", "goes with `engine`"),
    "config as text": (
        head(1, "vllm") + "config: {head_dim: 64.5} #!\n", "config.head_dim", "must be a whole number"),
    "config below nothing": (
        head(4, "megatron") + "config: {num_key_value_heads: -4} #!\n",
        "config.num_key_value_heads", "must be at least 0, not -4"),
    "config below nothing that no rule needs": (
        head(4, "vllm") + "config:\n  head_dim: -4 #!\n", "config.head_dim", "must be at least 0, not -4"),
    "config beyond all sizes": (
        head(1, "hf") + f"config: {{head_dim: {10**30}}} #!\n", "config.head_dim", "must be at most"),
    "config as true": (head(1, "vllm") + "config: {head_dim: true} #!\n", "config.head_dim", "a whole number"),
    "config as a list": (head(1, "vllm") + "config: {head_dim: [8]} #!\n", "config.head_dim", "a whole number"),
    "config with no groups": (
        "name: train\nranks: 4\nengine: megatron #!\nconfig: {num_key_value_heads: 0}\n", "engine",
        "linear_qkv.weight' (interleave): must be at least 1, not 0; the sizes of the model's config are wrong"),
    "stages that do not add up": (
        head(4, "vllm") + "parallel: {pp: 2}\npipeline:\n  layers: [1, 2] #!\n",
        "pipeline.layers", "the stages hold 3 layers in all, the model has 4"),
    "own mesh of another size": (
        head(8, "vllm") + "meshes: {dense: {dp: 2, tp: 2}} #!\n",
        "meshes.dense", "2 * 2 = 4 is not the job's 8 ranks"),
    "own rule for an axis that is not there": (
        head(4, "vllm") + "parallel: {tp: 2}\ntensors:\n  - {match: '*.o_proj.*', place: {tq: stage}} #!\n",
        "tensors[0].place.tq", "mesh 'dense' has no axis 'tq'; axes: dp, tp"),
}  # fmt: skip


def told(folder: Path, text: str, model: Path = MODEL) -> str:
    """Return the one message that a document with a mistake in the line marked `#!` is refused with."""
    (folder / "train.yaml").write_text(text)
    (folder / "infer.yaml").write_text(WHOLE)
    with pytest.raises(DocumentError) as caught:
        read_jobs(folder / "train.yaml", folder / "infer.yaml", model)
    assert caught.value.exit_code == 2
    (message,) = str(caught.value).splitlines()
    return message


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_told_once_with_its_file_line_and_key(tmp_path, what):
    text, key, words = MISTAKES[what]
    message = told(tmp_path, text)
    line = 1 + next(number for number, one in enumerate(text.splitlines()) if one.endswith("#!"))
    assert message.startswith(f"{tmp_path}/train.yaml:{line}: {key}: ")
    assert words in message


@pytest.mark.parametrize(
    ("engine", "number"),
    [("megatron", "num_attention_heads"), ("vllm", "num_key_value_heads"), ("sglang", "num_key_value_heads")],
)
def test_a_model_without_config_is_told_which_number_and_where_to_write_it(tmp_path, engine, number):
    values = yaml.safe_load(MODEL.read_text())
    del values["config"]
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump(values, sort_keys=False))
    text = head(2, engine) + "parallel: {tp: 2}\n"
    message = told(tmp_path, text, model)
    assert message.startswith(f"{tmp_path}/train.yaml:3: engine: the preset needs {number} of the model")
    assert f"config: {{{number}: ...}}" in message
    numbers = "config: {num_attention_heads: 8, num_key_value_heads: 4, head_dim: 64}\n"
    assert layout_of(tmp_path, text + numbers, model).digest == layout_of(tmp_path, text, MODEL).digest


@pytest.mark.parametrize("engine", ["megatron", "vllm", "sglang", "torchtitan"])
def test_a_model_of_a_family_that_the_engine_does_not_know_is_refused(tmp_path, engine):
    model = tmp_path / "model.yaml"
    model.write_text(UNKNOWN_FAMILY)
    message = told(tmp_path, head(2, engine) + "parallel: {tp: 2}\n", model)
    assert message.startswith(f"{tmp_path}/train.yaml:3: engine: the preset has no rule for tensor ")


def test_a_family_that_torchtitan_has_no_names_for_is_refused(tmp_path):
    message = told(tmp_path, head(2, "torchtitan"), LAYOUTS / "models" / "nemotron-3-ultra-550b-a55b.yaml")
    assert message.startswith(f"{tmp_path}/train.yaml:3: engine: ")


def test_layouts_names_the_preset_once_in_a_message():
    done = run_cli(
        "layouts", "torchtitan", "--expand", "--ranks", "2", "--model", "models/nemotron-3-ultra-550b-a55b"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: torchtitan: the preset has no rule for tensor 'backbone.")


@pytest.mark.parametrize("what", ["unknown size", "unknown engine"])
def test_the_command_line_ends_with_two_and_the_message(tmp_path, what):
    text, _, words = MISTAKES[what]
    message = told(tmp_path, text)
    done = run_cli("plan", tmp_path / "train.yaml", tmp_path / "infer.yaml", "--model", MODEL)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    assert words in message


# ---------------------------------------------------------------- layouts


def test_layouts_lists_presets_profiles_and_documents():
    done = run_cli("layouts")
    assert done.returncode == 0, done.stderr
    for name in (
        *ENGINES,
        "dgx-h100",
        "models/qwen3-4b",
        "quickstart/train",
        "published/qwen3-4b-h100/infer",
    ):
        assert any(line.split()[:1] == [name] for line in done.stdout.splitlines()), name


@pytest.mark.parametrize("name", [*ENGINES, "dgx-h100", "models/qwen3-4b", "quickstart/train.yaml"])
def test_layouts_shows_a_preset_or_document_as_it_is(name, capsys):
    run_layouts(name, expand=False, model=None, ranks=None, parallel="")
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["name"] == Path(name).stem


EXPAND = ("vllm", "--expand", "--ranks", "4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("nothing",), "'nothing' is neither a file, an engine preset nor a shipped document"),
        (("--expand",), "name a preset or a layout document"),
        (("vllm", "--expand"), "needs --model and --ranks"),
        ((*EXPAND, "--model", MODEL, "--parallel", "tp:2"), "--parallel: 'tp:2' is not like"),
        ((*EXPAND, "--model", MODEL, "--parallel", "tq=2"), "--parallel: "),
        ((*EXPAND, "--model", "nothing.yaml"), "nothing.yaml"),
        (("quickstart/train", "--expand", "--ranks", "4"), "a document has its own"),
    ],
    ids=["unknown name", "no name", "no model", "sizes written badly", "unknown size", "no file", "ranks"],
)  # fmt: skip
def test_layouts_says_what_is_wrong_with_its_flags(flags, words):
    done = run_cli("layouts", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "/tmp" not in done.stderr, "names a file that nobody wrote"


# engine, model, ranks, sizes
EXPANDED = [
    ("megatron", "qwen3-4b", 8, "tp=2,pp=2"), ("megatron", "quickstart-moe", 8, "tp=2,ep=2"),
    ("megatron", "quickstart-moe", 8, "tp=4,ep=4,etp=1"), ("megatron", "deepseek-v3", 4, "tp=2,ep=2"),
    ("megatron", "qwen3.5-397b-a17b", 8, "tp=4,pp=2"),
    ("megatron", "nemotron-3-ultra-550b-a55b", 4, "tp=2,pp=2"), ("vllm", "qwen3-4b", 8, "tp=4"),
    ("vllm", "deepseek-v3", 4, "tp=4,ep=4"), ("vllm", "qwen3.5-397b-a17b", 4, "tp=4"),
    ("vllm", "quickstart-moe", 6, "tp=2,pp=3"), ("vllm", "nemotron-3-ultra-550b-a55b", 4, "tp=4"),
    ("sglang", "quickstart-moe", 8, "tp=8,ep=2"), ("sglang", "deepseek-v3", 4, "tp=4"),
    ("fsdp2", "qwen3-4b", 6, "tp=2"), ("fsdp2", "qwen3.5-397b-a17b", 4, ""),
    ("torchtitan", "quickstart-moe", 8, "tp=2,ep=4"), ("torchtitan", "deepseek-v3", 4, "ep=2"),
    ("hf", "quickstart-moe", 2, ""), ("hf", "quickstart-moe", 4, "tp=2"),
]  # fmt: skip


def layout_of(folder: Path, text: str, model: Path = MODEL) -> JobLayout:
    (folder / "job.yaml").write_text(text)
    return build_layout(read_layout_document(folder / "job.yaml"), read_model(model))


def plan_digest(folder: Path, text: str, model: Path | None) -> str:
    """Return the digest of the plan that gives a whole model to a job of this text."""
    (folder / "job.yaml").write_text(text)
    (folder / "whole.yaml").write_text(WHOLE)
    jobs = read_jobs(folder / "whole.yaml", folder / "job.yaml", model)
    return build_plan(
        jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=64 << 20
    ).digest


@pytest.mark.parametrize(("engine", "model", "ranks", "sizes"), EXPANDED)
def test_what_expand_prints_plans_the_same_refit(tmp_path, capsys, engine, model, ranks, sizes):
    run_layouts(engine, expand=True, model=Path(f"models/{model}"), ranks=ranks, parallel=sizes)
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert not {"engine", "parallel", "options", "config"} & values.keys()
    assert "$(" not in printed
    parallel = dict(one.split("=") for one in sizes.split(",")) if sizes else {}
    written = {"parallel": {key: int(size) for key, size in parallel.items()}}
    text = yaml.safe_dump({"name": engine, "ranks": ranks, "engine": engine, **written})
    path = LAYOUTS / "models" / f"{model}.yaml"
    assert plan_digest(tmp_path, printed, path) == plan_digest(tmp_path, text, path)


def test_expand_on_the_command_line_gives_a_file_that_plans_the_same_refit(tmp_path):
    flags = ("--model", MODEL, "--ranks", "4", "--parallel", "tp=2,ep=2")
    done = run_cli("layouts", "megatron", "--expand", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    text = head(4, "megatron") + "parallel: {tp: 2, ep: 2}\n"
    assert plan_digest(tmp_path, done.stdout, None) == plan_digest(tmp_path, text, MODEL)


def test_a_document_with_a_preset_is_expanded_with_its_own_rules_options_and_domain(tmp_path, capsys):
    text = head(4, "megatron") + (
        f"model: {MODEL}\ndomain: 2\nparallel: {{pp: 2, tp: 2}}\n"
        "options: {first_layers: 3, last_layers: 1, vocab_divisor: 5}\n"
        "tensors:\n  - {match: '*.mlp.gate.weight', place: {pp: stage, tp: shard(0)}, dtype: float32}\n"
    )
    (tmp_path / "train.yaml").write_text(text)
    run_layouts(str(tmp_path / "train.yaml"), expand=True, model=None, ranks=None, parallel="")
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert values["domain"] == 2
    assert values["pipeline"]["layers"] == [3, 1]
    assert plan_digest(tmp_path, printed, None) == plan_digest(tmp_path, text, MODEL)


# ---------------------------------------------------------------- what is written in the document goes first


def storages(folder: Path, text: str, rank: int = 0) -> dict[str, RankStorage]:
    return {one.name: one for one in rank_storages(layout_of(folder, text), rank)}


def test_a_rule_of_the_document_wins_over_the_presets(tmp_path):
    text = head(4, "vllm") + "parallel: {tp: 4}\n"
    name = "model.layers.0.self_attn.o_proj.weight"
    assert storages(tmp_path, text)[name].shape == (512, 128)
    own = "tensors:\n  - {match: '*.o_proj.weight', place: {tp: shard(0)}, dtype: float32}\n"
    found = storages(tmp_path, text + own)
    assert (found[name].shape, found[name].dtype) == ((128, 512), "float32")
    assert found["model.layers.0.self_attn.qkv_proj.weight"].shape == (256, 512)


def test_a_storage_of_the_document_wins_over_the_presets(tmp_path):
    text = head(2, "vllm") + (
        "parallel: {tp: 2}\nstorage:\n"
        "  - {tensor: 'fused.{layer}', concat: ['model.layers.{layer}.self_attn.{v,k,q}_proj.weight']}\n"
    )
    found = storages(tmp_path, text)
    assert found["fused.3"].shape == (512, 512)
    assert not any("qkv_proj" in name for name in found)
    assert "model.layers.0.mlp.experts.routed_experts.w13_weight" in found
    first = min(found["fused.0"].windows, key=lambda window: window.offset)
    assert first.tensor == "model.layers.0.self_attn.v_proj.weight"


def test_a_mesh_of_the_document_wins_over_the_presets(tmp_path):
    text = head(4, "megatron") + "parallel: {tp: 2}\n"
    own = text + "meshes: {dense: {tp: 2, dp: 2}}\n"  # tp is now the slow axis
    vocabulary = "embedding.word_embeddings.weight"
    rows = [
        [storages(tmp_path, one, rank)[vocabulary].windows[0].lo[0] for rank in range(4)]
        for one in (text, own)
    ]
    assert rows == [[0, 4096, 0, 4096], [0, 0, 4096, 4096]]


def test_stages_ends_and_aliases_of_the_document_win_over_the_presets(tmp_path):
    text = head(2, "megatron") + (
        "parallel: {pp: 2}\npipeline: {layers: [1, 3], last: ['*']}\nalias: {tied.weight: lm_head.weight}\n"
    )
    stages = [storages(tmp_path, text, rank) for rank in range(2)]
    assert [sum(name.endswith("router.weight") for name in stage) for stage in stages] == [1, 3]
    assert [("embedding.word_embeddings.weight" in stage) for stage in stages] == [True, True]
    assert [("tied.weight" in stage) for stage in stages] == [False, True]


def test_all_operands_of_a_storage_can_be_left_out(tmp_path):
    text = head(4, "vllm") + "parallel: {tp: 2}\nleave_out: ['*.self_attn.{q,k,v}_proj.weight']\n"
    found = storages(tmp_path, text)
    assert not any("qkv" in name or "q_proj" in name for name in found)
    assert "model.layers.0.self_attn.o_proj.weight" in found


def test_config_of_the_document_wins_over_the_models(tmp_path):
    text = head(4, "vllm") + "parallel: {tp: 4}\n"
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert storages(tmp_path, text)[qkv].shape == (256, 512)
    # two KV heads of 128 rows, each on two ranks
    assert storages(tmp_path, text + "config: {num_key_value_heads: 2}\n")[qkv].shape == (384, 512)
