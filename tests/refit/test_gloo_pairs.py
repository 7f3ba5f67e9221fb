"""Dozens of random pairs of layouts between real gloo processes, their domains drawn at random."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import end_group

ROOT = Path(__file__).parent.parent.parent


def test_random_pairs_between_gloo_processes_equal_tensors_cut_by_hand():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.refit.pairs_harness", "0", "80"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        end_group(process)
    assert process.returncode == 0, err
    words = out.split()
    assert words[:2] == ["pairs", "80"]
    assert int(words[3]) > 1000
