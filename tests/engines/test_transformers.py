"""A checkpoint that went through a training job's layout gives transformers the same model: equal logits.

Each model is saved by `save_pretrained`, refitted into the rank files of a training layout, and from those
files into one whole file, which has to be what was saved, and to load twice: by `from_pretrained`, and by a
strict `load_state_dict` into a model full of NaN. And with `parallel: {tp: 2}` the preset `hf` gives each rank
just what transformers' own tensor-parallel plan gives it.

Needs: pip install torch==2.13.0 transformers==5.24.0; for the last part also: pip install accelerate
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.engines.tiny_models import FAMILIES, engine_document, logits_of, model_of, random_model, refit
from tests.support import run_module

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

# engine, ranks, what the document says more
TRAINING = {
    "megatron": ("megatron", 4, {"parallel": {"tp": 2, "pp": 2, "ep": 2}}),
    "fsdp2": ("fsdp2", 3, {}),  # chunks of unequal size
    "fsdp2-tp": ("fsdp2", 4, {"parallel": {"tp": 2}}),
    "torchtitan": ("torchtitan", 4, {"parallel": {"tp": 2, "ep": 2}}),
}
CASES = [
    *[(family, "megatron") for family in FAMILIES if family not in ("qwen2", "qwen3", "bert")],
    *[(family, "fsdp2") for family in ("qwen3-moe", "qwen3.5-moe", "nemotron-h", "bert")],
    *[(family, "fsdp2-tp") for family in ("qwen3-tied", "deepseek-v3")],
    *[(family, "torchtitan") for family in ("qwen3-moe", "deepseek-v3")],
]
PARALLEL = ("qwen3-tied", "qwen3-moe", "deepseek-v3", "qwen3.5-moe", "nemotron-h")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def by_module_names(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under the names of the modules, which differ from those on disk.

    On disk every expert has tensors of its own; the modules stack a layer's: `experts.down_proj`, and
    `experts.gate_up_proj` (an expert's gate rows, then its up rows) or, without gates, `experts.up_proj`.
    Nemotron-H is `backbone.*` on disk and `model.*` in modules. Tied weights are on disk once.
    """
    wanted = model.state_dict().keys()
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        of_module = re.sub(r"^backbone\.", "model.", name)
        expert = EXPERT.fullmatch(of_module)
        if expert:
            experts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
        else:
            found[of_module] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        found[f"{prefix}.down_proj"] = torch.stack([parts[i, "down"] for i in range(count)])
        if (0, "gate") in parts:
            both = [torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in range(count)]
            found[f"{prefix}.gate_up_proj"] = torch.stack(both)
        else:
            found[f"{prefix}.up_proj"] = torch.stack([parts[i, "up"] for i in range(count)])
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if model.config.tie_word_embeddings:
        found.update({name: found[of] for name, of in tied.items() if name in wanted and name not in found})
    return found


def loaded_strictly(family: str, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a model that was full of NaN before these tensors of a checkpoint were loaded into it."""
    model = model_of(family)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    model.load_state_dict(by_module_names(tensors, model), strict=True)
    return model


def loaded_by_transformers(family: str, file: Path, checkpoint: Path, folder: Path) -> nn.Module:
    """Return what `from_pretrained` makes of this file and the checkpoint's config."""
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    shutil.copy(file, folder / "model.safetensors")
    model, told = type(model_of(family)).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


@pytest.mark.parametrize(("family", "training"), CASES, ids=[f"{one}-by-{other}" for one, other in CASES])
def test_a_model_that_went_through_a_training_layout_has_equal_logits(tmp_path, family, training):
    model = random_model(family)
    expected = logits_of(model)
    assert expected.isfinite().all()
    assert expected.std() > 0.1
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    engine, ranks, more = TRAINING[training]
    whole = engine_document("whole", "hf", 1, checkpoint)
    trained = engine_document("train", engine, ranks, checkpoint, **more)
    sharded = refit(tmp_path, whole, trained, checkpoint, "sharded")
    out = refit(tmp_path, trained, whole, sharded, "out")

    file = out / "rank-00000.safetensors"
    saved, tensors = load_file(checkpoint / "model.safetensors"), load_file(file)
    assert tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert torch.equal(logits_of(loaded_strictly(family, tensors)), expected)
    loaded = loaded_by_transformers(family, file, checkpoint, tmp_path / "folder")
    assert torch.equal(logits_of(loaded), expected)


def differences(held: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return in which names, shapes or values what a rank holds differs from what the engine holds there."""
    told = [f"{name}: only the preset has it" for name in sorted(held.keys() - wanted.keys())]
    for name, tensor in wanted.items():
        if name not in held:
            told.append(f"{name} {list(tensor.shape)}: only the engine has it")
        elif held[name].shape != tensor.shape:
            told.append(f"{name}: the preset has {list(held[name].shape)}, the engine {list(tensor.shape)}")
        elif not torch.equal(held[name], tensor):
            told.append(f"{name}: values differ")
    return told


@pytest.fixture(scope="module", name="parallel")
def models_loaded_with_tensor_parallelism(tmp_path_factory) -> Path:
    """A folder per family: its checkpoint, and what transformers holds of it on each of two ranks."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers asks for accelerate to load with a tensor-parallel plan")
    work = tmp_path_factory.mktemp("parallel")
    for family in PARALLEL:
        random_model(family).save_pretrained(work / family / "checkpoint")
    done = run_module(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "tests.engines.transformers_tp", *[work / family for family in PARALLEL], timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return work


@pytest.mark.parametrize("family", PARALLEL)
def test_with_tp_each_rank_holds_what_transformers_own_plan_gives_it(parallel, tmp_path, family):
    checkpoint = parallel / family / "checkpoint"
    whole = engine_document("whole", "fsdp2", 1, checkpoint)
    cut = engine_document("cut", "hf", 2, checkpoint, parallel={"tp": 2})
    out = refit(tmp_path, whole, cut, checkpoint, "out")
    for rank in range(2):
        name = f"rank-{rank:05d}.safetensors"
        told = differences(load_file(out / name), load_file(parallel / family / "held" / name))
        if told:
            pytest.fail(f"rank {rank}:\n" + "\n".join(told))
