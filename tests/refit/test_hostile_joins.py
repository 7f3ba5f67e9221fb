"""Hostile and broken joins, one after the other, at one running loop: it refits on, and every version is exact.

`pytest -s` prints how long the loop's refits took beside each of them, and how long without.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.refit.hostile_peers import ATTACKS, KEPT, Attack
from tests.refit.running_loop import RunningLoop, running_loop
from tests.transport.gate_harness import descriptors, ends

TIMEOUT = 5.0
SECONDS: dict[str, list[float]] = {}


@pytest.fixture(scope="module", name="loop")
def one_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLoop]:
    with running_loop(tmp_path_factory.mktemp("loop"), TIMEOUT) as loop:
        loop.goes_on(20)
        SECONDS["nobody"] = [one["seconds"] for one in loop.lines("train", 0)[2:]]
        yield loop
    for one in KEPT:
        one.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_running_loop_goes_on(loop: RunningLoop, attack: Attack, request: pytest.FixtureRequest) -> None:
    loop.goes_on(0)
    before = len(loop.lines("train", 0))
    attack(loop)
    loop.goes_on()
    SECONDS[request.node.callspec.id] = [one["seconds"] for one in loop.lines("train", 0)[before:]]


def test_there_were_enough_of_them() -> None:
    assert len(ATTACKS) >= 30


def test_after_all_of_them_the_loop_ends_when_it_is_asked_and_leaves_nothing(loop: RunningLoop) -> None:
    assert all(ends(one, 8) for one in KEPT)
    gate = int((loop.case.folder / "gate").read_text())
    assert descriptors(gate) < 30
    loop.goes_on(20)
    loop.end()
    for name, seconds in SECONDS.items():
        print(
            f"{len(seconds):4} refits, median {sorted(seconds)[len(seconds) // 2]:.3f} s, most {max(seconds):.3f} s: {name}"
        )
