"""Rank folders: written in place, published in one step, and never seen half."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.layout.storage import RankStorage
from reshard_cli.weights import rank_folder
from reshard_cli.weights.rank_folder import PendingFolder

STORAGES = [
    RankStorage("a", (3,), "bfloat16", (), False),
    RankStorage("b", (2, 2), "float64", (), False),
    RankStorage("empty", (0, 4), "float32", (), False),
    RankStorage("scalar", (), "uint8", (), False),
]


def publish(target: Path, version: int, token: str) -> None:
    folder = PendingFolder(target, token)
    folder.check()
    for rank in range(2):
        buffers, mapped = folder.create(rank, STORAGES, version)
        for data in buffers.values():
            data.fill_(version)
        mapped.flush()
    folder.publish()


def test_a_file_is_what_the_safetensors_library_reads(tmp_path):
    publish(tmp_path / "out", 7, "t")
    with safe_open(tmp_path / "out" / "rank-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "7"}
        assert set(file.keys()) == {"a", "b", "empty", "scalar"}
        assert file.get_tensor("scalar") == 7
        assert file.get_tensor("empty").shape == (0, 4)
        assert torch.equal(file.get_tensor("a").view(torch.uint8), torch.full((6,), 7, dtype=torch.uint8))


def test_a_reader_finds_one_whole_version_at_any_moment(tmp_path):
    target = tmp_path / "out"
    publish(target, 1, "first")
    stop = threading.Event()
    seen: set[str] = set()
    faults: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                before = target.stat().st_ino
                names = sorted(path.name for path in target.iterdir())
                with safe_open(target / "rank-00000.safetensors", "pt") as file:
                    seen.add(file.metadata()["version"])
                # a listing that ran across an exchange may show the old folder while it is removed
                if target.stat().st_ino == before and len(names) != 2:
                    faults.append(str(names))
            except OSError as error:
                # so may an open file, but the name itself is always there
                if not target.exists():
                    faults.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for version in range(2, 60):
            publish(target, version, f"t{version}")
    finally:
        stop.set()
        reader.join(timeout=30)
    assert not faults
    assert len(seen) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_not_a_refits_folder_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DocumentError, match="is not a refit's folder"):
        PendingFolder(tmp_path / "out", "t").check()
    with pytest.raises(DocumentError, match="make it first"):
        PendingFolder(tmp_path / "no" / "out", "t").check()


def test_a_folder_that_cannot_be_made_is_told_with_its_path(tmp_path):
    (tmp_path / ".out.t").write_text("in the way")
    with pytest.raises(TransferError, match=r"\.out\.t"):
        PendingFolder(tmp_path / "out", "t").create(0, STORAGES, 1)


def test_where_folders_cannot_change_names_the_earlier_one_is_replaced_all_the_same(tmp_path, monkeypatch):
    def cannot(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(rank_folder, "_exchange", cannot)
    for version in (1, 2):
        publish(tmp_path / "out", version, f"t{version}")
        with safe_open(tmp_path / "out" / "rank-00001.safetensors", "pt") as file:
            assert file.metadata()["version"] == str(version)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_reason_not_to_exchange_is_told_and_the_earlier_folder_stays(tmp_path, monkeypatch):
    def cannot(one: Path, other: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    publish(tmp_path / "out", 1, "first")
    monkeypatch.setattr(rank_folder, "_exchange", cannot)
    with pytest.raises(TransferError, match="out: cannot be published: Input/output error"):
        publish(tmp_path / "out", 2, "second")
    with safe_open(tmp_path / "out" / "rank-00001.safetensors", "pt") as file:
        assert file.metadata()["version"] == "1"


def test_a_place_that_cannot_be_written_is_refused_as_a_wrong_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(DocumentError, match="--to: nothing can be written into"):
        PendingFolder(tmp_path / "out", "t").check()
