"""Two jobs that joined: whichever rank is lost, and whenever, all others end with its name, on whole versions.

`python -m tests.benchmarks.kills` runs many more of these, drawn at random.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refit.joined_harness import Case, Fault, free_port, run_case

KILLS = [
    (Fault("train", 1, "joining", 1), False),
    (Fault("infer", 1, "planning", 1), False),
    (Fault("train", 0, "network", 2), False),
    (Fault("infer", 0, "domain", 2), True),
    (Fault("infer", 1, "before complete/{v}", 2), True),
    (Fault("train", 0, "before decision/{v}", 2), True),
    (Fault("train", 0, "after decision/{v}", 2), True),
    (Fault("infer", 1, "before apply", 2), True),
    (Fault("infer", 0, "after decision/{v}", 2, "gate"), True),
    (Fault("infer", 1, "after decision/{v}", 2, "stop"), True),
    (Fault("train", 0, "between refits", 2, "stop"), False),
]


def shown(case: Fault | bool) -> str:
    if isinstance(case, bool):
        return "double buffer" if case else "in place"
    return f"{case.what} {case.job} {case.rank} {case.point}"


@pytest.mark.parametrize(("fault", "double_buffer"), KILLS, ids=shown)
def test_a_lost_rank_ends_all_others_and_no_rank_says_a_version_that_it_has_not(
    tmp_path: Path, fault: Fault, double_buffer: bool
) -> None:
    outcome = run_case(Case(tmp_path, free_port(), double_buffer=double_buffer, fault=fault, timeout=3))
    assert outcome.problems == []


def test_without_a_fault_every_version_comes_and_nothing_is_left_listening(tmp_path: Path) -> None:
    outcome = run_case(Case(tmp_path, free_port(), refits=5, timeout=20))
    assert outcome.problems == []
    assert len(outcome.ranks) == 4
    assert all(told and told["committed"] == [1, 2, 3, 4, 5] for told in outcome.ranks.values())
