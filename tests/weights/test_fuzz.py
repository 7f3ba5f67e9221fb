"""Broken weight files: each is read or refused, without a hang and without an allocation that it claims.

RESHARD_FUZZ_INPUTS sets how many inputs of each format are tried (400 by default).
"""

from __future__ import annotations

import json
import os

import pytest

from tests.support import run_module


@pytest.mark.parametrize("kind", ["safetensors", "index", "rank-folder", "dcp-metadata", "distcp"])
def test_no_broken_file_does_anything_but_be_read_or_refused(kind):
    count = int(os.environ.get("RESHARD_FUZZ_INPUTS", "400"))
    done = run_module("tests.weights.fuzz", kind, str(count), "0", timeout=60 + count)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["inputs"] == count
    assert report["refused"] > count // 4  # it does break files
    assert report["read"] > 0  # and not only so that nothing can be read
