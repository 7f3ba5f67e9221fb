"""Mistakes in documents: each is refused with its file, its line and what would be right.

The line with the mistake ends in `#!`; a message has to name that line.
"""

from __future__ import annotations

import pytest

from reshard_cli.errors import DocumentError
from reshard_cli.refit.prepare import read_jobs
from tests.support import run_cli

MODEL = """\
name: tiny
dtype: float32
sizes: {hidden: 8, layers: 4}
ranges: {layer: layers, expert: 4}
tensors:
  embed.weight: [10, hidden]
  "layers.{layer}.{q,k}.weight": [hidden, hidden]
  "layers.{layer}.v.weight": [4, hidden]
  "layers.{layer}.norm": [hidden]
  "layers.{layer}.experts.{expert}.{gate,up}.weight": [6, hidden]
"""
GOOD = "name: infer\nranks: 1\ntensors: [{match: '*'}]\n"
HEAD = "name: train\nranks: 4\nmeshes: {m: {pp: 2, tp: 2}}\n"
REST = "tensors:\n  - match: '*'\n"
STAGES = "pipeline: {layers: [2, 2], first: [embed.weight]}\n"
QKV = "concat: ['layers.{layer}.{q,k,v}.weight']"

LAYOUTS = {
    "unknown key": (HEAD + "rank: 4 #!\n" + REST, "unknown key 'rank'; did you mean 'ranks'?"),
    "unknown key of a rule": (HEAD + REST + "    plaice: {tp: shard(0)} #!\n", "did you mean 'place'?"),
    "unknown key of a pipeline": (HEAD + "pipeline: {layer: [2, 2]} #!\n" + REST, "did you mean 'layers'?"),
    "name missing": ("ranks: 4 #!\n" + REST, "key 'name' is missing"),
    "ranks missing": ("name: train #!\n" + REST, "key 'ranks' is missing"),
    "ranks as text": ("name: train\nranks: four #!\n" + REST, "must be a whole number, not 'four'"),
    "ranks as a fraction": ("name: train\nranks: 4.5 #!\n" + REST, "must be a whole number"),
    "more ranks than there are": ("name: train\nranks: 100000000000 #!\n" + REST, "must be at most 1048576"),
    "empty name": ("name: '' #!\nranks: 4\n" + REST, "must not be empty"),
    "no ranks": ("name: train\nranks: 0 #!\n" + REST, "at least 1, not 0"),
    "negative domain": (HEAD + "domain: -8 #!\n" + REST, "at least 1, not -8"),
    "rules as a mapping": (HEAD + "tensors: {match: '*'} #!\n", "must be a list"),
    "meshes as a list": ("name: train\nranks: 4\nmeshes: [4] #!\n" + REST, "must be a mapping"),
    "mesh of another size": (
        "name: train\nranks: 4\nmeshes:\n  m: {pp: 2, tp: 3} #!\n" + REST, "2 * 3 = 6 is not the job's 4 ranks"),
    "axis of size zero": ("name: train\nranks: 4\nmeshes:\n  m: {pp: 0, tp: 4} #!\n" + REST, "at least 1 coordinate"),
    "mesh without axes": ("name: train\nranks: 4\nmeshes:\n  m: {} #!\n" + REST, "at least one axis"),
    "unknown mesh": (HEAD + REST + "    mesh: dense #!\n", "no mesh 'dense'; meshes: m"),
    "unknown axis": (HEAD + REST + "    place: {ep: shard(0)} #!\n", "no axis 'ep'; axes: pp, tp"),
    "unknown placement": (HEAD + REST + "    place: {tp: split(0)} #!\n", "'split(0)' is no placement"),
    "partial placement": (HEAD + REST + "    place: {tp: partial} #!\n", "write one of: shard(DIM)"),
    "placement without a dim": (HEAD + REST + "    place: {tp: shard()} #!\n", "'shard()' is no placement"),
    "parts that do not divide": (
        HEAD + REST + "    place: {tp: 'shard(0, parts=3)'} #!\n", "3 parts do not divide the axis of 2"),
    "no parts": (HEAD + REST + "    place: {tp: 'shard(0, parts=0)'} #!\n", "parts must be at least 1"),
    "dim that no tensor has": (
        HEAD + REST + "    place: {tp: shard(7)} #!\n", "shard(7) of tensor 'embed.weight', which has 2 dims"),
    "dim below all": (HEAD + REST + "    place: {tp: shard(-3)} #!\n", "shard(-3)"),
    "stage without a pipeline": (HEAD + REST + "    place: {pp: stage} #!\n", "needs the document's `pipeline`"),
    "two stages": (HEAD + STAGES + REST + "    place: {pp: stage, tp: stage} #!\n", "two axes are `stage`"),
    "fewer stages than coordinates": (
        HEAD + "pipeline: {layers: [4], first: ['*']} #!\n" + REST + "    place: {pp: stage}\n",
        "axis 'pp' has 2 coordinates, 1 stages are named"),
    "stages for rules of two meshes": (
        "name: train\nranks: 4\nmeshes: {m: {pp: 2, tp: 2}, e: {pp: 2, ep: 2}}\n"
        "pipeline: {layers: [1, 1, 2], first: ['*']} #!\ntensors:\n  - {match: '*.q.weight', place: {pp: stage}}\n"
        "  - {match: '*.experts.*', mesh: e, place: {pp: stage}}\n  - {match: '*', place: {pp: stage}}\n",
        "axis 'pp' has 2 coordinates, 3 stages are named"),
    "stages that do not add up": (
        HEAD + "pipeline: {layers: [2, 3]} #!\n" + REST + "    place: {pp: stage}\n",
        "the stages hold 5 layers in all, the model has 4"),
    "negative stage": (HEAD + "pipeline:\n  layers:\n    - 5\n    - -1 #!\n" + REST, "0 or more layers, not -1"),
    "tensor without a stage": (
        HEAD + "pipeline: {layers: [2, 2]}\n" + REST + "    place: {pp: stage} #!\n",
        "'embed.weight' has no layer and is in neither pipeline.first nor pipeline.last"),
    "unmatched tensor": (HEAD + "tensors: #!\n  - match: 'layers.*'\n", "no rule matches tensor 'embed.weight'"),
    "no rules": (HEAD.replace("name: train", "name: train #!"), "nothing says what the ranks hold"),
    "empty pattern": (HEAD + "tensors:\n  - match: '' #!\n", "an empty pattern matches nothing"),
    "open brace": (HEAD + "tensors:\n  - match: 'layers.{q,k.weight' #!\n", "a brace is open"),
    "brace with one choice": (HEAD + "tensors:\n  - match: 'layers.{q}.*' #!\n", "neither a choice like {q,k} nor"),
    "rule for some experts": (
        HEAD + "tensors:\n  - match: 'layers.{layer}.experts.0.*' #!\n  - match: '*'\n", "matches only some experts"),
    "experts that are none": (HEAD + REST + "    place: {tp: expert} #!\n", "'embed.weight' has no experts to cut"),
    "unknown dtype": (HEAD + "dtype: bf16 #!\n" + REST, "unknown dtype 'bf16'; write 'bfloat16'"),
    "unknown dtype of a rule": (HEAD + REST + "    dtype: fp8_e4m3 #!\n", "unknown dtype 'fp8_e4m3'"),
    "padding of a dim by name": (HEAD + REST + "    pad: {rows: 64} #!\n", "a dim is a whole number from 0"),
    "padding of a dim in another script": (
        HEAD + REST + "    pad: {²: 64} #!\n", "a dim is a whole number from 0, not '²'"),
    "blocks of a dim in another script": (
        HEAD + REST + "    blocks: {²: [8]} #!\n", "a dim is a whole number from 0, not '²'"),
    "operand in another script": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV}\n    interleave: 2\n    unzip: {{²: 1}} #!\n",
        "operands are numbered 0 to 2"),
    "padding to no multiple": (HEAD + REST + "    pad: {0: 0} #!\n", "a multiple is at least 1"),
    "padding of a dim that is not there": (HEAD + REST + "    pad: {5: 64} #!\n", "has 2 dims"),
    "padding to more than any tensor": (
        HEAD + REST + "    pad: {0: 99999999999999999999999} #!\n", "at most 2**40"),
    "blocks that do not add up": (
        HEAD + REST + "    blocks: {0: [3, 8]} #!\n", "[3, 8] are 11 rows, dim 0 of tensor 'embed.weight' has 10"),
    "blocks of a dim that is not there": (HEAD + REST + "    blocks: {9: [3]} #!\n", "has no"),
    "blocks without rows": (HEAD + REST + "    blocks: {0: [10, 0]} #!\n", "at least 1 row each"),
    "blocks of two dims": (HEAD + REST + "    blocks: {0: [10], 1: [8]} #!\n", "only one dim"),
    "blocks of a padded tensor": (HEAD + REST + "    blocks: {0: [10]} #!\n    pad: {1: 4}\n", "blocks or padded, not both"),
    "unknown padding": (HEAD + REST + "    padding: poison #!\n", "must be 'zero' or 'keep'"),
    "unknown route": (HEAD + REST + "    route: carrier-pigeon #!\n", "must be 'broadcast' or 'reshard'"),
    "storage of nothing": (HEAD + REST + "storage:\n  - tensor: x #!\n", "either `concat` (a list of patterns) or"),
    "storage without a name": (HEAD + REST + f"storage:\n  - {QKV} #!\n", "key 'tensor' is missing"),
    "storage with an unknown capture": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{block}}' #!\n    {QKV}\n", "its captures are {layer}, {expert}"),
    "operand that is missing": (
        HEAD + REST + "storage:\n  - tensor: x\n    concat: ['layers.{layer}.{q,gone}.weight'] #!\n",
        "no tensor of the model is 'layers.0.gone.weight' (and 3 more tensors)"),
    "operand that is left out": (
        HEAD + REST + f"leave_out: ['layers.1.q.weight'] #!\nstorage:\n  - tensor: 'x.{{layer}}'\n    {QKV}\n",
        "'layers.1.q.weight' is left out and 'layers.1.k.weight' is not, but both lie in the storage 'x.{layer}'"),
    "operand that is left out in all layers": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV}\nleave_out:\n  - '*.norm'\n  - '*.k.weight' #!\n",
        "'layers.0.k.weight' is left out and 'layers.0.q.weight' is not"),
    "some experts left out": (
        HEAD + REST + "leave_out: ['*.experts.{1,2}.up.weight'] #!\n",
        "leaves out only some experts of 'layers.0.experts.{expert}.up.weight'"),
    "rule for an expert in the middle": (
        HEAD + "tensors:\n  - match: 'layers.{layer}.experts.2.*' #!\n  - match: '*'\n", "matches only some experts"),
    "operand with a star": (HEAD + REST + "storage:\n  - tensor: x\n    concat: ['layers.*'] #!\n", "named in full"),
    "operands that differ in another dim": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{layer}}'\n    dim: 1\n    {QKV} #!\n", "differ in another dim than 1"),
    "dim that the operands lack": (
        HEAD + REST + "storage:\n  - tensor: 'x.{layer}'\n    concat: ['layers.{layer}.norm']\n    dim: 3 #!\n",
        "has no dim 3"),
    "stack of what has no experts": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV}\n    dim: 1\n    stack: expert #!\n", "no experts to stack"),
    "stack along the experts": (
        HEAD + REST + "storage:\n  - tensor: 'x.{layer}'\n    stack: expert\n    dim: 0 #!\n"
        "    concat: ['layers.{layer}.experts.{expert}.{gate,up}.weight']\n", "dim 0 of a stack is the expert"),
    "stack named by expert": (
        HEAD + REST + "storage:\n  - tensor: 'x.{layer}.{expert}' #!\n    stack: expert\n    dim: 1\n"
        "    concat: ['layers.{layer}.experts.{expert}.{gate,up}.weight']\n", "leave {expert} out"),
    "operands placed differently": (
        HEAD + "tensors:\n  - {match: '*.q.weight', place: {tp: shard(1)}}\n  - match: '*'\n"
        f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV} #!\n", "do not fit along dim 0"),
    "operands on other ranks": (
        HEAD + STAGES + "tensors:\n  - {match: '*.q.weight', place: {pp: stage}}\n  - match: '*'\n"
        f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV} #!\n", "holds only some of its operands"),
    "groups that do not divide": (
        HEAD + REST + f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV}\n    interleave: 3 #!\n", "no multiple of 3 groups"),
    "transposed vector under a new name": (
        HEAD + REST + "storage:\n  - tensor: 'x.{layer}'\n    rename: 'layers.{layer}.norm'\n    transpose: true #!\n",
        "'layers.0.norm' has fewer than two dims to swap"),
    "one name for all layers": (
        HEAD + REST + f"storage:\n  - tensor: qkv #!\n    {QKV}\n", "would both be 'qkv' on rank 0"),
    "operands of other dtypes": (
        HEAD + "tensors:\n  - {match: '*.q.weight', dtype: bfloat16}\n  - match: '*'\n"
        f"storage:\n  - tensor: 'x.{{layer}}'\n    {QKV} #!\n", "operands differ in dtype"),
    "piece of an unknown tensor": (
        HEAD + REST + "pieces:\n  - {tensor: head, rank: 0, box: [[0, 1]]} #!\n", "the model has no tensor 'head'"),
    "piece on no rank": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 4, box: [[0, 10], [0, 8]]} #!\n", "ranks 0 to 3, not 4"),
    "piece of other dims": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 0, box: [[0, 10]]} #!\n", "has 1 dims"),
    "piece outside the tensor": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 0, box: [[0, 10], [0, 9]]} #!\n",
        "dim 1 stops at 9, the tensor at 8"),
    "piece that ends before it starts": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 0, box: [[5, 2], [0, 8]]} #!\n", "0 <= start <= stop"),
    "piece with three corners": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 0, box: [[0, 2, 4], [0, 8]]} #!\n", "[start, stop] per dim"),
    "piece held twice": (
        HEAD + REST + "pieces:\n  - {tensor: embed.weight, rank: 0, box: [[0, 6], [0, 8]]} #!\n"
        "  - {tensor: embed.weight, rank: 0, box: [[5, 10], [0, 8]]}\n", "holds elements of 'embed.weight' twice"),
    "alias of itself": (HEAD + REST + "alias: {embed.weight: embed.weight} #!\n", "cannot be its own alias"),
    "alias of an alias": (HEAD + REST + "alias:\n  a: b #!\n  b: embed.weight\n", "is an alias itself"),
    "alias of nothing": (HEAD + REST + "alias: {head: tail} #!\n", "the model has no tensor 'tail'"),
    "alias of another shape": (
        HEAD + REST + "alias: {layers.0.norm: embed.weight} #!\n", "[8] cannot equal 'embed.weight' [10, 8]"),
    "rename to a name that is taken": (
        HEAD + "rename: {embed.weight: layers.0.norm} #!\n" + REST, "another tensor are both called 'layers.0.norm'"),
    "rename with a star too many": (HEAD + REST + "rename: {'model.*': '*.*'} #!\n", "more `*` than the pattern"),
    "storage with a line end": (
        HEAD + REST + "storage:\n  - tensor: \"x\\n.*\" #!\n    rename: 'layers.*'\n", "cannot be printed"),
    "name of the job that steers a terminal": ('name: "train\\e[31m" #!\nranks: 4\n' + REST, "cannot be printed"),
    "mesh with a line end": ('name: train\nranks: 4\nmeshes:\n  "m\\n": {tp: 4} #!\n' + REST, "cannot be printed"),
    "axis with a line end": ('name: train\nranks: 4\nmeshes:\n  m: {"tp\\n": 4} #!\n' + REST, "cannot be printed"),
    "pattern of many stars": (
        HEAD + f"tensors:\n  - match: '{'*a' * 20}' #!\n  - match: '*'\n", "has 20 `*`; a pattern takes at most 4"),
    "operands of many choices": (
        HEAD + REST + f"storage:\n  - tensor: x\n    concat: ['{'{a,b}' * 40}'] #!\n", "at most 4096"),
    "scales of a cast by a rule of their own": (
        HEAD + "tensors:\n  - {match: '*.q.weight', cast: 'blockwise(float8_e4m3fn, 4)'}\n"
        "  - {match: '*_scale_inv', place: {tp: shard(0)}} #!\n  - match: '*'\n",
        "'layers.0.q.weight_scale_inv' are the scales that the cast of 'layers.0.q.weight' makes"),
    "piece whose edge is inside a block": (
        HEAD + "tensors:\n  - {match: '*.q.weight', cast: 'blockwise(float8_e4m3fn, 4)'}\n  - match: '*'\npieces:\n"
        "  - {tensor: layers.1.q.weight, rank: 0, box: [[0, 4], [0, 8]]}\n"
        "  - {tensor: layers.1.q.weight, rank: 0, box: [[4, 6], [0, 8]]} #!\n",
        "tensor 'layers.1.q.weight' has block scales, but rank 0's shard ends at 6"),
    "rename to an escape": (HEAD + REST + "rename: {'layers.*': \"\\e[31m*\"} #!\n", "cannot be printed"),
    "alias with a NUL": (HEAD + REST + "alias: {\"a\\0\": embed.weight} #!\n", "cannot be printed"),
    "model that is not there": (HEAD + "model: nowhere.yaml #!\n" + REST, "does not exist"),
    "key twice": (HEAD + REST + "domain: 8\ndomain: 4 #!\n", "key 'domain' stands twice"),
    "anchor": (HEAD + "tensors:\n  - &a {match: '*'}\n  - *a #!\n", "anchors and aliases are not taken"),
    "tag that would execute": (HEAD + REST + "dtype: !!python/object/apply:os.system ['true'] #!\n", "is not taken here"),
    "many aliases": (
        "name: &a t\nranks: 1\ntensors: [*a, *a, *a] #!\nstorage: [*a]\n", "anchors and aliases are not taken"),
    "brackets without end": (HEAD + f"tensors: {'[' * 6000} #!\n", "nested more than 32 deep"),
    "braces without end": (HEAD + f"tensors: {'{a: ' * 6000} #!\n", "nested more than 32 deep"),
    "brackets that are closed": (HEAD + f"tensors: {'[' * 40}{']' * 40} #!\n", "nested more than 32 deep"),
    "dashes without end": (HEAD + f"tensors:\n  {'- ' * 6000} #!\n", "nested more than 32 deep"),
    "keys without end": (HEAD + f"tensors:\n  {'? ' * 6000} #!\n", "nested more than 32 deep"),
    "indents without end": (
        HEAD + "".join(f"{' ' * depth}a:{' #!' * (depth == 32)}\n" for depth in range(600)),
        "nested more than 32 deep"),
    "tag that its text does not fit": (HEAD + REST + "dtype: !!bool maybe #!\n", "not a value: 'maybe'"),
    "number without digits": (HEAD + REST + "domain: !!int '' #!\n", "not a value"),
    "number of more digits than any": (HEAD + REST + f"domain: {'9' * 5000} #!\n", "not a value"),
    "control character": (HEAD + REST + "dtype: a\0b #!\n", "control characters are not allowed"),
    "date for a name": ("name: 2026-12-01 #!\nranks: 1\n" + REST, "quote it if it is text"),
    "not YAML": (HEAD + "tensors: [{match: '*'} #!\n", "not YAML"),
    "tab": (HEAD + "tensors:\n\t- match: '*' #!\n", "not YAML"),
    "list at the top": ("- name: train #!\n", "a document is a mapping"),
    "nothing": ("", "a document is a mapping"),
}  # fmt: skip

MODELS = {
    "unknown size": (MODEL + "  head: [hiden, 4] #!\n", "no size is named 'hiden'"),
    "division by zero": (MODEL + "  head: [hidden // 0] #!\n", "divides by zero"),
    "true division": (MODEL + "  head: [hidden / 2] #!\n", "write // "),
    "negative dim": (MODEL + "  head: [hidden - 9] #!\n", "must be at least 0"),
    "call": (MODEL + "  head: [\"__import__('os').getpid()\"] #!\n", "uses more than sizes"),
    "power": (MODEL + "  head: [hidden ** 9] #!\n", "uses more than sizes"),
    "fraction": (MODEL + "  head: [1.5] #!\n", "1.5"),
    "larger than any tensor": (MODEL + "  head: [hidden * 10000000000 * 10000000000] #!\n", "larger than 2**62"),
    "more elements than any tensor": (
        MODEL + "  head: [hidden * 100000000000, hidden * 100000000000] #!\n", "more than 2**56 elements"),
    "long expression": (MODEL + f"  head: ['{'1+' * 400}1'] #!\n", "more than 500 characters"),
    "unknown dtype": (MODEL.replace("dtype: float32", "dtype: half #!"), "unknown dtype 'half'; write 'float16'"),
    "unknown dtype of a tensor": (MODEL + "  head: {shape: [1], dtype: int4} #!\n", "unknown dtype 'int4'"),
    "tensor of two entries": (MODEL + "  'layers.{layer}.q.weight': [1] #!\n", "is named by two entries"),
    "star": (MODEL + "  'layers.*.x': [1] #!\n", "names its tensors in full"),
    "brace": (MODEL + "  'layers.{block}.x': [1] #!\n", "neither a choice like {q,k} nor a capture"),
    "line end in a name": (MODEL + "  \"a\\nb\": [1] #!\n", "'a\\nb' is no tensor's name"),
    "line end in a choice": (MODEL + "  \"a.{b,c\\t}\": [1] #!\n", "cannot be printed"),
    "name of the model with a line end": (
        MODEL.replace("name: tiny", 'name: "ti\\ny" #!'), "cannot be printed"),
    "more layers than any model": (
        MODEL.replace("ranges: {layer: layers, expert: 4}", "ranges: {layer: 1000000000000, expert: 4} #!"),
        "at most 2000000"),
    "more experts than any model": (
        MODEL.replace("ranges: {layer: layers, expert: 4}", "ranges: {layer: layers, expert: 1000000000000} #!"),
        "at most 2000000"),
    "layers to no end": (
        MODEL + "  'layers.{layer}.x':\n    shape: [1]\n    layers: {to: 1000000000000} #!\n", "at most 2000000"),
    "choices without end": (MODEL + f"  '{'{a,b}' * 40}': [1] #!\n", "at most 4096"),
    "range missing": (
        "name: m\ndtype: float32\ntensors:\n  'layers.{layer}.x': [1] #!\n", "{layer} needs `ranges: {layer: ...}`"),
    "layer outside": (
        MODEL + "  'layers.{layer}.x':\n    shape: [1]\n    layers: [3, 4] #!\n", "layer 4 is not among"),
    "unknown set of layers": (
        MODEL + "  'layers.{layer}.x':\n    shape: [1]\n    layers: dense #!\n", "no set of layers is named 'dense'"),
    "set of no letter": (MODEL + "sets:\n  a: {pattern: ME, letter: ME} #!\n", "at most 1"),
    "layer twice": (MODEL + "  'layers.{layer}.x':\n    shape: [1]\n    layers: [3, 3] #!\n", "a layer stands twice"),
    "layers of a name without one": (MODEL + "  head: {shape: [1], layers: [0]} #!\n", "the name has no {layer}"),
    "unknown key": (MODEL + "  head: {shape: [1], type: int8} #!\n", "unknown key 'type'"),
    "shape missing": (MODEL + "  head: {dtype: int8} #!\n", "key 'shape' is missing"),
    "shape as text": (MODEL + "  head: '[1]' #!\n", "must be"),
    "no tensors": ("name: m\ndtype: float32\ntensors: {} #!\n", "at least 1 item"),
    "dtype missing": ("name: m #!\ntensors: {a: [1]}\n", "key 'dtype' is missing"),
}  # fmt: skip


def marked_line(text: str) -> int:
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("#!")]
    return lines[0] if lines else 1


@pytest.fixture(name="written")
def write_documents(tmp_path):
    def write(layout: str = HEAD + REST, model: str = MODEL):
        (tmp_path / "model.yaml").write_text(model)
        (tmp_path / "train.yaml").write_text(layout)
        (tmp_path / "infer.yaml").write_text(GOOD)
        return tmp_path / "train.yaml", tmp_path / "infer.yaml", tmp_path / "model.yaml"

    return write


def test_the_documents_without_a_mistake_are_read(written):
    assert read_jobs(*written()).source.num_ranks == 4


@pytest.mark.parametrize("what", LAYOUTS)
def test_a_mistake_in_a_layout_is_refused_at_its_line(written, what):
    text, words = LAYOUTS[what]
    source, destination, model = written(text)
    if "model:" in text:
        model = None
    with pytest.raises(DocumentError) as caught:
        read_jobs(source, destination, model)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert words in message
    at = next(line for line in message.splitlines() if words in line)
    assert f"train.yaml:{marked_line(text)}:" in at
    assert message.replace("\n", "").isprintable()


def test_stages_that_do_not_fit_are_told_once_and_not_at_every_rule(written):
    text, words = LAYOUTS["stages for rules of two meshes"]
    source, destination, model = written(text)
    with pytest.raises(DocumentError, match=words) as caught:
        read_jobs(source, destination, model)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("what", MODELS)
def test_a_mistake_in_a_model_is_refused_at_its_line(written, what):
    text, words = MODELS[what]
    with pytest.raises(DocumentError) as caught:
        read_jobs(*written(model=text))
    message = str(caught.value)
    at = next((line for line in message.splitlines() if words in line), message)
    assert words in at
    assert f"model.yaml:{marked_line(text)}:" in at


def test_all_mistakes_of_both_documents_are_told_at_once(written):
    text = HEAD + "domian: 8\ntensors:\n  - {match: '*', place: {tq: shard(0)}}\n  - {mesh: n, match: 'a{'}\n"
    source, destination, model = written(text)
    destination.write_text("name: infer\nranks: 1\ntensors: [{match: '*', dtype: f7}]\n")
    with pytest.raises(DocumentError) as caught:
        read_jobs(source, destination, model)
    places = [(problem.file.rpartition("/")[2], problem.line) for problem in caught.value.problems]
    assert places == [
        ("train.yaml", 4), ("train.yaml", 6), ("train.yaml", 7), ("train.yaml", 7), ("infer.yaml", 3),
    ]  # fmt: skip


def test_a_file_that_is_no_text_or_not_there_is_refused(written, tmp_path):
    source, destination, model = written()
    source.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_jobs(source, destination, model)
    with pytest.raises(DocumentError, match="cannot be read: No such file"):
        read_jobs(tmp_path / "nothing.yaml", destination, model)
    with pytest.raises(DocumentError, match="names no `model`"):
        read_jobs(destination, destination, None)


@pytest.mark.parametrize(
    "what", ["unknown key", "mesh of another size", "unmatched tensor", "not YAML", "key twice"]
)
def test_the_command_line_ends_with_two_and_one_message(written, what):
    text, words = LAYOUTS[what]
    source, destination, model = written(text)
    done = run_cli("plan", source, destination, "--model", model)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags",
    [["--mode", "magic"], ["--stagin", "4"], ["--domain", "zero"], ["--domain", "auto"], ["--staging", "0"]],
    ids=" ".join,
)
def test_a_wrong_flag_ends_with_two(written, flags):
    source, destination, model = written()
    done = run_cli("plan", source, destination, "--model", model, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", ["inf", "nan", "-1", "1e300"])
def test_staging_that_is_no_amount_of_memory_is_refused_with_its_value(written, number):
    source, destination, model = written()
    done = run_cli("plan", source, destination, "--model", model, f"--staging={number}")
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert (
        f"--staging: must be a number of MiB, more than 0 and less than 2**40, not {float(number):g}" in words
    )
