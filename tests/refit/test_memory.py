"""A refit of 2 GiB with 64 MiB of staging: what each rank really takes of private memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import end_group, start_cli, write_yaml

MIB = 1 << 20
STAGING = 64
ALLOWED = (STAGING + 200) * MIB
TENSORS, ROWS, COLUMNS = 16, 8192, 8192  # bfloat16: 128 MiB each


def anonymous(pid: int | str) -> int:
    """Return a process's private memory (RssAnon) in bytes; mapped files do not count."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


@pytest.fixture(name="checkpoint")
def two_gib_checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    pattern = os.urandom(MIB)
    for number in range(4):
        names = [f"layers.{number * 4 + i}.w" for i in range(4)]
        size = ROWS * COLUMNS * 2
        header = {
            name: {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        with (folder / f"part-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for block in range(4 * size // MIB):
                shift = (block * 7919 + number) % MIB
                file.write(pattern[shift:] + pattern[:shift])
    yield folder
    for path in folder.iterdir():
        path.unlink()


def bare_import() -> int:
    """Return the private memory of a process that has only imported what a rank imports."""
    code = (
        "import torch, reshard_cli.cli.refit, reshard_cli.refit.session, sys\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        taken = anonymous(process.pid)
        process.communicate("")
    return taken


@pytest.mark.skipif(not anonymous("self"), reason="/proc tells no RssAnon here")
@pytest.mark.parametrize("cut", ["shard(0)", "shard(1)"], ids=["contiguous", "strided"])
def test_ranks_take_no_more_than_the_staging_beside_their_shard(checkpoint, tmp_path, cut):
    job = {"ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}}}
    source = write_yaml(
        tmp_path / "source.yaml",
        {"name": "train", **job, "tensors": [{"match": "*", "place": {"tp": "shard(0)"}}]},
    )
    destination = write_yaml(
        tmp_path / "destination.yaml",
        {"name": "infer", **job, "tensors": [{"match": "*", "place": {"tp": cut}}]},
    )
    bare = bare_import()
    process = start_cli(
        "refit",
        source,
        destination,
        "--from",
        checkpoint,
        "--staging",
        str(STAGING),
        "--verify",
        "--json",
        "-",
    )
    peaks: dict[int, int] = {}
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None:
            for pid in children.read_text().split() if children.exists() else []:
                peaks[int(pid)] = max(peaks.get(int(pid), 0), anonymous(pid))
            time.sleep(0.01)
        out, err = process.communicate(timeout=10)
    finally:
        end_group(process)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["peak_staging_bytes"] <= STAGING * MIB
    above = [peaks[pid] - bare for pid in sorted(peaks)]
    print(f"\nbare import {bare / MIB:.0f} MiB; above it, by rank: {[round(one / MIB) for one in above]} MiB")
    shard = TENSORS * ROWS * COLUMNS * 2 // 2
    assert len(above) == 4
    for source_rank in above[:2]:
        assert source_rank <= ALLOWED
    for destination_rank in above[2:]:
        assert destination_rank <= shard + ALLOWED
