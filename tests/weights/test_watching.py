"""Checkpoints under a watched folder: complete ones only, each once, lower versions first."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from reshard_cli.weights import watching
from reshard_cli.weights.watching import Watched, is_complete


def write(folder: Path, names: list[str], *, index: bool = False) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        save_file({name: torch.ones(8)}, folder / name)
    if index:
        told = {"weight_map": {name: name for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return folder


def test_an_index_that_names_a_file_that_is_not_there_yet_is_incomplete(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    folder = write(tmp_path / "step-1", names, index=True)
    assert is_complete(folder)
    (folder / names[1]).rename(tmp_path / "aside")
    assert not is_complete(folder)


def test_files_that_count_themselves_wait_for_their_index(tmp_path):
    folder = write(tmp_path / "step-1", ["model-00001-of-00001.safetensors"])
    assert not is_complete(folder)


def test_a_file_that_is_shorter_than_its_header_says_is_still_being_written(tmp_path):
    folder = write(tmp_path / "step-1", ["model.safetensors"])
    assert is_complete(folder)
    data = (folder / "model.safetensors").read_bytes()
    for size in (0, 4, len(data) // 2, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:size])
        assert not is_complete(folder), size


def test_an_index_that_is_half_written_is_incomplete(tmp_path):
    folder = write(tmp_path / "step-1", ["model.safetensors"], index=True)
    for text in ("", '{"weight_map": {"a"', "[]", '{"weight_map": 3}'):
        (folder / "model.safetensors.index.json").write_text(text)
        assert not is_complete(folder), text


def test_each_complete_checkpoint_comes_once_lower_numbers_first(tmp_path):
    watched = Watched(tmp_path / "runs")
    assert watched.next() is None
    for name in ("step-10", "step-9"):
        write(tmp_path / "runs" / name, ["model.safetensors"])
    write(tmp_path / "runs" / ".step-1-tmp", ["model.safetensors"])
    (tmp_path / "runs" / "step-2").mkdir()
    seen = [watched.next(), watched.next(), watched.next()]
    assert [one and (one.path.name, one.version) for one in seen] == [("step-9", 9), ("step-10", 10), None]
    save_file({"a": torch.ones(1)}, tmp_path / "runs" / "step-2" / "model.safetensors")
    late = watched.next()
    assert late is not None
    assert late.version == 2


def test_a_link_to_a_checkpoint_and_another_name_of_one_are_no_checkpoints_of_their_own(tmp_path):
    runs = tmp_path / "runs"
    watched = Watched(runs)
    first = write(runs / "tmp-step-1", ["model.safetensors"])
    (runs / "latest").symlink_to(first.name)
    found = watched.next()
    assert found is not None
    assert found.path.name == "tmp-step-1"
    assert watched.next() is None
    first.rename(runs / "step-1")
    (runs / "latest").unlink()
    (runs / "latest").symlink_to("step-1")
    assert watched.next() is None
    (runs / "step-7").symlink_to(write(runs / ".data", ["model.safetensors"]).name)
    found = watched.next()
    assert found is not None, "nothing else leads to what is hidden"
    assert (found.path.name, found.version) == ("step-7", 7)
    elsewhere = write(tmp_path / "elsewhere" / "step-2", ["model.safetensors"])
    (runs / "step-2").symlink_to(elsewhere)
    found = watched.next()
    assert found is not None
    assert (found.path.name, found.version) == ("step-2", 2)


def test_what_goes_away_or_changes_while_it_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    folder = write(tmp_path / "step-1", ["model.safetensors"])
    (tmp_path / "dangling").symlink_to("nowhere")
    real = watching.is_complete

    def change(path: Path) -> bool:
        os.utime(path / "model.safetensors", ns=(5, 5))
        return real(path)

    def take_away(path: Path) -> bool:
        complete = real(path)
        path.rename(tmp_path / ".gone")
        return complete

    watched = Watched(tmp_path)
    for meanwhile in (change, take_away):
        with monkeypatch.context() as patched:
            patched.setattr(watching, "is_complete", meanwhile)
            assert watched.next() is None
    (tmp_path / ".gone").rename(folder)
    assert watched.next() is not None
    assert watched.next() is None


def test_new_weights_are_new_whatever_the_folder_is_called_or_reuses(tmp_path):
    """Slots that are written in turn, with a link of each step's number; folders of one name, or with times set back."""
    watched = Watched(tmp_path)

    def given() -> list[tuple[str, int]]:
        return [(one.path.name, one.version) for one in iter(watched.next, None)]

    slot = write(tmp_path / "slot", ["model.safetensors"])
    for step in (1, 2, 3):
        (slot / "model.safetensors").unlink()
        save_file({"w": torch.full((8,), step)}, slot / "model.safetensors")
        (tmp_path / f"step-{step}").symlink_to("slot")
        assert given() == [(f"step-{step}", step)]
        (tmp_path / f"step-{step}").unlink()
    shutil.rmtree(slot)
    for count in range(4, 8):
        folder = write(tmp_path / "latest", ["model.safetensors"])
        assert given() == [("latest", count)], "the file system gives the same number to each"
        (folder / "README.md").write_text("more")
        (folder / "model.safetensors").chmod(0o600)
        assert given() == []
        shutil.rmtree(folder)
    for step in (10, 11, 12):
        folder = write(tmp_path / f"step-{step}", ["model.safetensors"])
        os.utime(folder / "model.safetensors", ns=(0, 0))
        assert given() == [(folder.name, step)]
        folder = folder.rename(tmp_path / f"kept-{step}")
        (folder / "README.md").write_text("more")
        assert given() == []
        shutil.rmtree(folder)
