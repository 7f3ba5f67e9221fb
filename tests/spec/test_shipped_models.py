"""The shipped model documents: totals to the parameter, and the published policy's share of FFN projections."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_cli.plan.routes import is_ffn_projection
from reshard_cli.spec.model_document import read_model

MODELS = Path(__file__).parent.parent.parent / "layouts" / "models"
PUBLISHED = {
    "qwen3-4b": (4_022_468_096, 66.86),
    "qwen3-32b": (32_762_123_264, 76.81),
    "qwen3-30b-a3b": (30_532_122_624, 94.95),
    "qwen3-235b-a22b": (235_093_634_560, 96.60),
    "deepseek-v3": (671_026_419_200, 97.63),
    "kimi-k2": (1_026_408_232_448, 98.90),
    "qwen3.5-397b-a17b": (396_346_350_336, 97.53),
    "qwen3.8-2.4t-a95b": (2_419_804_697_984, 97.98),
    "nemotron-3-ultra-550b-a55b": (549_308_993_536, 93.83),
}


def test_every_shipped_model_is_held_against_its_published_total():
    assert {path.stem for path in MODELS.glob("*.yaml")} == {*PUBLISHED, "quickstart-moe", "deepseek-v3-fp8"}


def test_deepseek_in_float8_is_the_same_model_with_a_scale_for_each_block():
    plain = {one.name: one for one in read_model(MODELS / "deepseek-v3.yaml").tensors}
    coded = {one.name: one for one in read_model(MODELS / "deepseek-v3-fp8.yaml").tensors}
    assert {name for name in coded if not name.endswith("_scale_inv")} == set(plain)
    for name, tensor in plain.items():
        assert coded[name].shape == tensor.shape
        scale = coded.get(f"{name}_scale_inv")
        assert (scale is not None) == (coded[name].dtype == "float8_e4m3fn") == ("_proj" in name)
        if scale is not None:
            *lead, rows, columns = tensor.shape
            assert (scale.shape, scale.dtype) == ((*lead, -(-rows // 128), -(-columns // 128)), "float32")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_has_its_published_parameters_and_share_of_ffn_projections(name):
    model = read_model(MODELS / f"{name}.yaml")
    parameters, share = PUBLISHED[name]
    assert model.num_parameters == parameters
    bulk = sum(tensor.num_bytes for tensor in model.tensors if is_ffn_projection(tensor.name))
    assert 100 * bulk / model.num_bytes == pytest.approx(share, abs=0.005)
