"""DCP folders as a source: written by torch itself, read without running a byte of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from reshard_cli.errors import WeightsError
from reshard_cli.plan.build import build_plan
from reshard_cli.refit.endpoints import open_source
from reshard_cli.spec.dcp import read_dcp
from reshard_cli.spec.model_document import read_model
from reshard_cli.weights.archive import find_tensor
from tests.support import make_jobs, model_document, run_cli, run_module, write_yaml

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that gives the folder of one kind, written once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            done = run_module("tests.weights.dcp_writer", kind, folder)
            assert done.returncode == 0, done.stderr
            made[kind] = folder
        return made[kind]

    return get


@pytest.mark.parametrize("kind", ["single", "fsdp", "fsdp-tp"])
def test_a_refit_from_a_dcp_folder_gives_every_rank_its_part_bit_for_bit(written, tmp_path, kind):
    folder = written(kind)
    source = {
        "name": "source",
        "ranks": 3,
        "tensors": [{"match": "*.weight", "place": {"rank": "shard(0)"}}, {"match": "*"}],
    }
    cut = ["down.weight", "half", "eighth", "turned"]
    destination = {
        "name": "destination", "ranks": 2,
        "tensors": [{"match": name, "place": {"rank": "shard(1)"}} for name in cut] + [{"match": "*"}],
    }  # fmt: skip
    done = run_cli(
        "refit", write_yaml(tmp_path / "source.yaml", source), write_yaml(tmp_path / "destination.yaml", destination),
        "--from", folder / "dcp", "--to", tmp_path / "out", "--verify", "--trust-checkpoint", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["state_dict"] == "app.model"
    assert report["extra"] == []
    whole = load_file(folder / "whole.safetensors")
    assert report["verified_elements"] > sum(one.numel() for one in whole.values())
    for rank in range(2):
        have = load_file(tmp_path / "out" / f"rank-0000{rank}.safetensors")
        assert have.keys() == whole.keys()
        for name, value in whole.items():
            part = torch.chunk(value, 2, dim=1)[rank] if name in cut else value
            assert (have[name].dtype, have[name].shape) == (part.dtype, part.shape)
            assert raw(have[name]) == raw(part), name


def test_any_window_of_a_tensor_is_put_together_from_its_chunks(written, tmp_path):
    folder = written("fsdp-tp")
    whole = load_file(folder / "whole.safetensors")
    plan = plan_of(folder / "dcp", tmp_path)
    source, _ = open_source(str(folder / "dcp"), plan, [0], 1, allow_extra=False, trust=True)
    generator = torch.Generator().manual_seed(1)
    for name, value in whole.items():
        for _ in range(20):
            ends = [
                sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in value.shape
            ]
            lo, hi = tuple(a for a, _ in ends), tuple(b for _, b in ends)
            found = torch.zeros([b - a for a, b in ends], dtype=value.dtype)
            count = 0
            for part_lo, part_hi, values in source.windows(name, lo, hi):
                place = tuple(slice(a - o, b - o) for a, b, o in zip(part_lo, part_hi, lo, strict=True))
                found.view(torch.uint8 if value.element_size() == 1 else value.dtype)[place] = (
                    values.view(torch.uint8) if value.element_size() == 1 else values
                )
                count += values.numel()
            assert count == found.numel()
            assert raw(found) == raw(value[tuple(slice(a, b) for a, b in ends)])


def plan_of(folder: Path, tmp_path: Path):
    model = read_model(folder, trust=True)
    document = model_document(
        {
            name: (one.shape[1:] if one.has_experts else one.shape, one.dtype)
            for one in model.tensors
            for name in one.names()
        }
    )
    job = {"ranks": 1, "tensors": [{"match": "*"}]}
    jobs = make_jobs(tmp_path, document, job, job)
    return build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)


def save(folder: Path, state: object) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


def refused(folder: Path, tmp_path: Path, *words: str, document=None) -> None:
    """Assert that opening the folder for these tensors fails with these words."""
    job = {"ranks": 1, "tensors": [{"match": "*"}]}
    jobs = make_jobs(tmp_path, document or model_document({"w": ((4, 3), "float32")}), job, job)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)

    def read() -> None:
        source, _ = open_source(str(folder), plan, [0], 1, allow_extra=False, trust=True)
        list(source.windows("w", (0, 0), (4, 3)))

    with pytest.raises(WeightsError) as caught:
        read()
    for word in (*words, str(folder)):
        assert word in str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("by_name", [True, False])
def test_members_of_enumerations_are_read_as_any_python_writes_them(tmp_path, monkeypatch, protocol, by_name):
    folder = save(tmp_path / "ck", {"w": torch.ones(4, 3)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    encoding = dcp.metadata._MEM_FORMAT_ENCODING  # of torch's memory formats, once they are pickled
    if by_name:  # Python 3.11.0 to 3.11.3
        monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (encoding, self.name)))
    else:
        monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (encoding, (self.value,)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert (b"getattr" in (folder / ".metadata").read_bytes()) == by_name
    plan = plan_of(folder, tmp_path)
    source, _ = open_source(str(folder), plan, [0], 1, allow_extra=False, trust=True)
    for lo, hi, values in source.windows("w", (0, 0), (4, 3)):
        assert torch.equal(values, torch.ones(4, 3)[lo[0] : hi[0], lo[1] : hi[1]])


def test_without_trust_nothing_is_read_and_the_message_says_what_to_give(tmp_path):
    folder = save(tmp_path / "ck", {"w": torch.ones(2)})
    for arguments in (["inspect", folder], ["inspect", folder, "--trust-checkpoint"]):
        done = run_cli(*arguments)
        trusted = len(arguments) > 2
        assert done.returncode == (0 if trusted else 3), done.stderr
        assert ("--trust-checkpoint" in done.stderr) != trusted


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_malicious_metadata_is_refused_and_not_run(tmp_path, protocol):
    folder = save(tmp_path / "ck", {"w": torch.ones(2)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Bomb(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    with pytest.raises(WeightsError, match="no metadata of a DCP checkpoint"):
        read_dcp(folder, trust=True)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the bomb itself works
    assert (tmp_path / "ran").exists()


def test_a_malicious_shard_is_refused_and_not_run(tmp_path):
    folder = save(tmp_path / "ck", {"w": torch.ones(4, 3)})
    torch.save(Bomb(tmp_path / "ran"), tmp_path / "bomb")
    data = (tmp_path / "bomb").read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / info.relative_path).write_bytes(data)
    refused(folder, tmp_path, info.relative_path, "tensor 'w'", "mkdir")
    assert not (tmp_path / "ran").exists()


def change_shape(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([5, 3])


def change_overlap(metadata):
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([5, 3])
    entry.chunks.append(ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([2, 3])))
    (info,) = metadata.storage_data.values()
    metadata.storage_data[MetadataIndex("w", (3, 0))] = info


def change_outside(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([3, 3])


def change_dtype(metadata):
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def change_file(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "gone.distcp"


def change_way_out(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../x.distcp"


def change_length(metadata):
    next(iter(metadata.storage_data.values())).length += 1


def change_extension(metadata):
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def change_nowhere(metadata):
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    ("change", "words", "dtype"),
    [
        (change_shape, ["'w'", "leave a hole: 12 of 15"], "float32"),
        (change_overlap, ["'w'", "[0:4, 0:3] and [3:5, 0:3] overlap", "__0_0.distcp"], "float32"),
        (change_outside, ["'w'", "lies outside its shape [3, 3]", "__0_0.distcp"], "float32"),
        (change_dtype, ["'w'", "is float32[4, 3], .metadata says int32[4, 3]", "__0_0.distcp"], "int32"),
        (change_file, ["'w'", "gone.distcp, which is not in"], "float32"),
        (change_way_out, ["'w'", "in no file of this folder"], "float32"),
        (change_length, ["'w'", "__0_0.distcp is truncated"], "float32"),
        (change_extension, ["'w'", "through an extension"], "float32"),
        (change_nowhere, ["'w'", "lies in no file"], "float32"),
    ],
)
def test_chunks_that_do_not_add_up_are_refused_with_tensor_and_file(tmp_path, change, words, dtype):
    folder = save(tmp_path / "ck", {"w": torch.ones(4, 3)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    shape = tuple(metadata.state_dict_metadata["w"].size)
    refused(folder, tmp_path, *words, document=model_document({"w": (shape, dtype)}))


def test_the_state_dict_that_holds_the_model_is_found_and_others_are_left_out(tmp_path):
    weights = {"w": torch.arange(12.0).view(4, 3)}
    folder = save(
        tmp_path / "ck", {"model": weights, "optimizer": {"state": {"w": {"exp_avg": torch.ones(1)}}}}
    )
    plan = plan_of(folder, tmp_path)
    source, extra = open_source(str(folder), plan, [0], 1, allow_extra=False, trust=True)
    assert (source.prefix, extra) == ("model", [])
    _, extra = open_source(str(folder), plan, [0], 1, allow_extra=True, trust=True)
    assert extra == ["optimizer.state.w.exp_avg"]


def test_a_tensor_beside_the_models_own_is_extra(tmp_path):
    folder = save(tmp_path / "ck", {"model": {"w": torch.ones(4, 3), "v": torch.ones(1)}})
    refused(folder, tmp_path, "no document declares", "v")


def test_two_state_dicts_that_fit_are_told_apart_by_rename_only(tmp_path):
    one, other = torch.ones(4, 3), torch.zeros(4, 3)
    folder = save(tmp_path / "ck", {"model": {"w": one}, "average": {"w": other}})
    refused(folder, tmp_path, "'average', 'model'", "rename")
    job = {"ranks": 1, "tensors": [{"match": "*"}]}
    jobs = make_jobs(
        tmp_path, model_document({"w": ((4, 3), "float32")}), {**job, "rename": {"average.*": "*"}}, job
    )
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)
    source, _ = open_source(str(folder), plan, [0], 1, allow_extra=False, trust=True)
    ((_, _, values),) = source.windows("w", (0, 0), (4, 3))
    assert torch.equal(values, other)
    assert source.prefix == "average"


def test_a_tensor_that_lacks_is_named_with_the_state_dicts_that_were_looked_at(tmp_path):
    folder = save(tmp_path / "ck", {"model": {"v": torch.ones(4, 3)}})
    refused(folder, tmp_path, "lacks 1 tensor(s): w", "'model'")


def test_the_experts_of_a_projection_are_one_tensor(tmp_path):
    values = {f"mlp.experts.{i}.w": torch.full((2, 3), float(i)) for i in range(3)}
    plan = plan_of(save(tmp_path / "ck", {"model": values}), tmp_path)
    source, _ = open_source(str(tmp_path / "ck"), plan, [0], 1, allow_extra=False, trust=True)
    found = list(source.windows("mlp.experts.{expert}.w", (1, 0, 1), (3, 2, 3)))
    assert torch.equal(torch.cat([one for _, _, one in found]), torch.stack(list(values.values()))[1:, :, 1:])


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5), torch.empty(0, 3), torch.nn.Parameter(torch.randn(3)), torch.randn(6)[2:4], torch.arange(3),
        torch.randn(4).to(torch.float8_e5m2), torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.complex64),
    ],
    ids=lambda value: f"{value.dtype}-{list(value.shape)}-{list(value.stride())}",
)  # fmt: skip
def test_a_tensor_is_found_in_its_archive_as_it_was_saved(tmp_path, value):
    torch.save(value, tmp_path / "x")
    data = torch.frombuffer(bytearray((tmp_path / "x").read_bytes()), dtype=torch.uint8)
    found = find_tensor(data)
    assert (found.dtype, found.shape, found.strides) == (
        str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(value.stride())
    )  # fmt: skip
    size = value.element_size()
    flat = data[found.start : found.start + found.num_bytes // size * size].clone().view(value.dtype)
    assert raw(torch.as_strided(flat, found.shape, found.strides)) == raw(value.detach())


def test_pending_operations_of_a_saved_tensor_are_refused(tmp_path):
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), tmp_path / "x")
    data = torch.frombuffer(bytearray((tmp_path / "x").read_bytes()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="pending operations"):
        find_tensor(data)


def test_a_folder_whose_file_is_cut_short_is_refused(written, tmp_path):
    shutil.copytree(written("fsdp") / "dcp", tmp_path / "ck")
    file = tmp_path / "ck" / "__1_0.distcp"
    os.truncate(file, file.stat().st_size // 4)
    with pytest.raises(WeightsError, match=r"__1_0\.distcp is truncated"):
        read_model(tmp_path / "ck", trust=True)
