"""Hostile and broken joins, one after the other, at one running loop: it refits on, and every version is exact.

`pytest -s` prints how long the loop's refits took beside each of them, and how long without.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.refit.hostile_peers import ATTACKS, KEPT
from tests.refit.running_loop import running_loop
from tests.transport.gate_harness import descriptors, ends

TIMEOUT = 5.0


def test_a_running_loop_goes_on_whoever_joins_it_and_ends_when_it_is_asked(tmp_path: Path) -> None:
    assert len(ATTACKS) >= 30
    with running_loop(tmp_path, TIMEOUT) as loop:
        loop.goes_on(20)
        seconds = {"nobody": [one["seconds"] for one in loop.lines("train", 0)[2:]]}
        try:
            for name, attack in ATTACKS.items():
                before = len(loop.lines("train", 0))
                try:
                    attack(loop)
                    loop.goes_on()
                except BaseException as error:
                    error.add_note(f"while it was joined by: {name}")
                    raise
                seconds[name] = [one["seconds"] for one in loop.lines("train", 0)[before:]]
            assert all(ends(one, 8) for one in KEPT)
        finally:
            for one in KEPT:
                one.close()
            KEPT.clear()
        gate = int((loop.case.folder / "gate").read_text())
        deadline = time.monotonic() + 5
        while descriptors(gate) >= 30 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert descriptors(gate) < 30
        loop.goes_on(20)
        loop.end()
    for name, took in seconds.items():
        middle = sorted(took)[len(took) // 2]
        print(f"{len(took):4} refits, median {middle:.3f} s, longest {max(took):.3f} s: {name}")
