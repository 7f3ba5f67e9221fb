"""Dozens of random pairs of layouts between real gloo processes, their domains drawn at random."""

from __future__ import annotations

from tests.support import run_module


def test_random_pairs_between_gloo_processes_equal_tensors_cut_by_hand():
    done = run_module("tests.refit.pairs_harness", "0", "80", timeout=300)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == ["pairs", "80"]
    assert int(words[3]) > 1000
