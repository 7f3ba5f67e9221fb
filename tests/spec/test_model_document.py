"""Model documents: what they expand to, and that what is written of a model reads back as that model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from reshard_cli.spec.dtypes import ITEM_SIZE
from reshard_cli.spec.model import LogicalTensor, Model, group_experts
from reshard_cli.spec.model_document import model_document_text, read_model

DOCUMENT = """\
name: small-moe
dtype: bfloat16
sizes: {hidden: 8, layers: 4, heads: 2, experts: hidden // 2}
ranges: {layer: layers, expert: experts}
tensors:
  embed: ["ceil_div(11, 2)", hidden]
  "layers.{layer}.{q,k}": [heads * 4, hidden]
  "layers.{layer}.bias": {shape: [], dtype: float32, layers: {from: 1, step: 2}}
  "layers.{layer}.dense": {shape: [hidden], layers: [0, 3]}
  "layers.{layer}.experts.{expert}.up": {shape: [3, hidden], layers: {from: 1, to: layers - 1}}
  "layers.3.experts.{expert}.up": {shape: [3, hidden], experts: 2}
"""


def read_text(text: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(text)
        return read_model(path)


def test_a_document_expands_to_all_its_tensors_and_the_experts_of_a_projection_are_one():
    model = read_text(DOCUMENT)
    found = {tensor.name: tensor for tensor in model.tensors}
    assert found["embed"] == LogicalTensor("embed", (6, 8), "bfloat16")
    assert found["layers.2.k"] == LogicalTensor("layers.2.k", (8, 8), "bfloat16", 2)
    assert [name for name in found if name.endswith("bias")] == ["layers.1.bias", "layers.3.bias"]
    assert found["layers.1.bias"].dtype == "float32"
    assert [name for name in found if name.endswith("dense")] == ["layers.0.dense", "layers.3.dense"]
    experts = found["layers.1.experts.{expert}.up"]
    assert experts == LogicalTensor(
        "layers.1.experts.{expert}.up", (4, 3, 8), "bfloat16", 1, has_experts=True
    )
    assert experts.names() == [f"layers.1.experts.{e}.up" for e in range(4)]
    assert found["layers.3.experts.{expert}.up"].shape == (2, 3, 8)
    assert model.num_tensors == 1 + 8 + 2 + 2 + 8 + 2
    assert model.num_parameters == 48 + 8 * 64 + 2 + 16 + 10 * 24


@st.composite
def models(draw):
    layers = draw(st.integers(0, 4))
    dtypes = st.sampled_from(list(ITEM_SIZE))
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    tensors = {}
    for index in range(draw(st.integers(0, 3))):
        tensors[f"top{index}.w"] = (draw(shapes), draw(dtypes))
    for index in range(draw(st.integers(0, 3))):
        experts = draw(st.integers(0, 3))
        shape, dtype = draw(shapes), draw(dtypes)
        for layer in range(layers):
            if draw(st.booleans()):
                shape = draw(shapes) if draw(st.integers(0, 5)) == 0 else shape
                for expert in range(experts) if experts else [None]:
                    middle = "" if expert is None else f"experts.{expert}."
                    tensors[f"layers.{layer}.{middle}p{index}.w"] = (shape, dtype)
    return Model("m", tuple(group_experts(LogicalTensor(name, *value) for name, value in tensors.items())))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(models())
def test_what_is_written_of_a_model_reads_back_as_that_model(model):
    if not model.tensors:
        return
    again = read_text(model_document_text(model, "m"))
    assert {tensor.name: tensor for tensor in again.tensors} == {
        tensor.name: tensor for tensor in model.tensors
    }


def test_experts_that_differ_or_have_gaps_stay_tensors_of_their_own():
    names = {"experts.0.w": (2,), "experts.1.w": (3,), "experts.0.v": (2,), "experts.2.v": (2,)}
    model = group_experts(LogicalTensor(name, shape, "uint8") for name, shape in names.items())
    assert {tensor.name for tensor in model} == set(names)
