"""Weights that do not fit, places that cannot be written: one message, the right exit code, nothing left."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import end_group, model_document, run_cli, start_cli, write_yaml

SHAPES = {"a.w": ((8, 4), "float32"), "b.w": ((6,), "bfloat16"), "c.w": ((2, 2), "uint8")}


def tensors():
    return {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in SHAPES.items()}


@pytest.fixture(name="setting")
def small_setting(tmp_path):
    """A checkpoint that fits, the two documents, and what runs a refit of them."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    write_yaml(tmp_path / "model.yaml", model_document(SHAPES))
    job = {"model": "model.yaml", "ranks": 1, "tensors": [{"match": "*"}]}
    source = write_yaml(tmp_path / "source.yaml", {"name": "train", **job})
    destination = write_yaml(tmp_path / "destination.yaml", {"name": "infer", **job})

    def run(*flags, origin=folder, target=tmp_path / "out", environment=None):
        return run_cli(
            "refit", source, destination, "--from", origin, "--to", target, "--timeout", "20", *flags,
            environment=environment,
        )  # fmt: skip

    return folder, run, tmp_path / "out"


def assert_refused(done, code, *words):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall(r"^error: ", done.stderr, re.M)) == 1, done.stderr
    message = done.stderr.partition("error: ")[2].splitlines()[0]
    assert message
    assert done.stderr.count(message) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def assert_nothing_left(out):
    """Nothing stands under the final name, nor under a hidden one beside it."""
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_that_fits_is_refitted(setting):
    _, run, out = setting
    assert run("--verify").returncode == 0
    assert out.is_dir()


def lacking():
    return {name: tensor for name, tensor in tensors().items() if name != "b.w"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lacking, ["lacks 1 tensor(s): b.w"]),
        (
            lambda: {**tensors(), "z.w": torch.ones(1)},
            ["no document declares: 1 tensor(s): z.w", "--allow-extra"],
        ),
        (lambda: {**tensors(), "a.w": torch.ones(4, 8)}, ["'a.w' has shape [4, 8], declared [8, 4]"]),
        (lambda: {**tensors(), "a.w": torch.ones(8, 4).half()}, ["'a.w' is float16", "declares float32"]),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_weights_that_do_not_fit_the_documents_are_named(setting, content, words):
    folder, run, out = setting
    save_file(content(), folder / "model.safetensors")
    assert_refused(run(), 3, *words)
    assert_nothing_left(out)


def test_an_extra_tensor_is_left_out_where_allowed(setting):
    folder, run, out = setting
    save_file({**tensors(), "z.w": torch.ones(1)}, folder / "model.safetensors")
    assert run("--allow-extra", "--verify").returncode == 0
    assert load_file(out / "rank-00000.safetensors").keys() == SHAPES.keys()


def test_a_tensor_left_out_by_allow_extra_is_listed_in_the_report(setting):
    folder, run, _ = setting
    save_file({**tensors(), "z.w": torch.ones(1)}, folder / "model.safetensors")
    done = run("--allow-extra", "--json", "-", target="memory")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["extra"] == ["z.w"]


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def huge_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def index_of_nothing(folder):
    weight_map = dict.fromkeys(SHAPES, "model-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_without_the_tensor(folder):
    weight_map = dict.fromkeys([*SHAPES, "ghost.w"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, ["model.safetensors: truncated"]),
        (huge_header, ["model.safetensors: its header claims 1152921504606846976 bytes"]),
        (index_of_nothing, ["names model-00001.safetensors, which is not in"]),
        (index_without_the_tensor, ["'ghost.w' is in model.safetensors, which does not hold it"]),
    ],
    ids=["truncated", "header of 2^60 bytes", "index of a missing file", "tensor in no file"],
)
def test_a_corrupt_checkpoint_is_refused_with_its_file(setting, spoil, words):
    folder, run, out = setting
    spoil(folder)
    assert_refused(run(), 3, *words)
    assert_nothing_left(out)


def test_places_that_do_not_exist_or_are_somebody_elses_are_refused(setting, tmp_path):
    _, run, out = setting
    assert_refused(run(origin=tmp_path / "nowhere"), 3, "no such folder")
    assert_refused(run(target=tmp_path / "no" / "parent"), 2, "make it first")
    out.mkdir()
    (out / "precious.txt").write_text("keep")
    assert_refused(run(), 2, "is not a refit's folder")
    assert (out / "precious.txt").read_text() == "keep"
    assert_refused(run("--json", str(tmp_path / "no" / "report.json")), 2, "--json")


def test_an_earlier_refits_folder_is_replaced(setting):
    _, run, out = setting
    assert run().returncode == 0
    before = (out / "rank-00000.safetensors").stat().st_ino
    assert run().returncode == 0
    assert (out / "rank-00000.safetensors").stat().st_ino != before
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(".")) == []


def test_a_failed_refit_leaves_the_earlier_refits_folder_as_it_was(setting):
    folder, run, out = setting
    assert run().returncode == 0
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    truncate(folder)
    assert_refused(run(), 3, "model.safetensors: truncated")
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("same", [False, True], ids=["each to its own folder", "all to one folder"])
def test_refits_at_once_on_one_host_do_not_clash(setting, tmp_path, same):
    folder, _, _ = setting
    targets = [tmp_path / ("out" if same else f"out{i}") for i in range(3)]
    running = [
        start_cli(
            "refit", tmp_path / "source.yaml", tmp_path / "destination.yaml", "--from", folder,
            "--to", target, "--verify", "--timeout", "30",
        )
        for target in targets
    ]  # fmt: skip
    try:
        for process in running:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert "Traceback" not in err
    finally:
        for process in running:
            end_group(process)
    expected = tensors()
    for target in targets:
        assert [path.name for path in target.iterdir()] == ["rank-00000.safetensors"]
        written = load_file(target / "rank-00000.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "nccl"], "no GPU"),
        (["--domain", "some"], "'some' is neither a number of ranks nor 'auto'"),
        (["--staging", "0.0000001"], "too few"),
    ],
)
def test_flags_that_cannot_be_met_are_refused(setting, flags, words):
    _, run, _ = setting
    assert_refused(run(*flags), 2, words)


def test_a_world_of_another_size_is_refused(setting):
    _, run, _ = setting
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    assert_refused(run(environment=environment), 2, "the documents need 2 ranks", "the world has 1")


def test_half_of_torchruns_environment_is_refused(setting):
    _, run, out = setting
    assert_refused(run(environment={"RANK": "0"}), 2, "RANK set", "WORLD_SIZE", "start with torchrun")
    assert_nothing_left(out)


@pytest.fixture(name="disk")
def disk_of_one_mib(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("ranks", "elements"),
    [(1, 1 << 20), (4, 4 * 80_000)],
    ids=["one file too large", "room for three of four files"],
)
def test_a_full_disk_is_told_with_its_path_and_leaves_nothing(tmp_path, disk, ranks, elements):
    write_yaml(tmp_path / "model.yaml", model_document({"w": ((elements,), "float32")}))
    job = {"model": "model.yaml", "ranks": ranks, "meshes": {"m": {"tp": ranks}}}
    rules = [{"match": "*", "place": {"tp": "shard(0)"}}]
    source = write_yaml(tmp_path / "source.yaml", {"name": "train", **job, "tensors": rules})
    for _ in range(1 if ranks == 1 else 3):  # which rank finds the disk full is a matter of chance
        done = run_cli("refit", source, source, "--to", disk / "out", "--timeout", "20")
        assert_refused(done, 4, str(disk), ".safetensors", "No space left")
        assert list(disk.iterdir()) == []
