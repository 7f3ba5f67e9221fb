"""A NIC that fails for good ends all ranks within the timeout plus 5 s, by name; one that stalls is waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard_cli.transport.emulated import EmulatedCluster, parse_rate
from tests.refit.joined_harness import Fault
from tests.refit.network_harness import (
    CONTROL,
    DATA,
    WITHIN,
    NetworkCase,
    Programs,
    programs,
    run_on_nodes,
)
from tests.transport.test_emulated import needs_cluster

pytestmark = needs_cluster
RATE = parse_rate("100mbit")
TIMEOUT = 3
STALL = 3


@pytest.fixture(name="run")
def programs_on_a_cluster(tmp_path: Path) -> Iterator[Programs]:
    with EmulatedCluster(2, 2, RATE) as cluster, programs(cluster, tmp_path) as started:
        yield started


@pytest.mark.parametrize(
    ("gate", "down", "point", "timeout", "ranks_per_node"),
    [
        (CONTROL, 0, "pack", TIMEOUT, 2),
        (CONTROL, 1, "connecting", TIMEOUT, 2),
        (DATA, 0, "pack", 8, 2),
        (DATA, 1, "before complete/{v}", TIMEOUT, 2),
        (DATA, 1, "between refits", TIMEOUT, 2),
        (DATA, 3, "network", TIMEOUT, 1),
    ],
)
def test_joined_jobs_end_in_time_by_name_and_on_whole_versions(
    tmp_path: Path, gate: str, down: int, point: str, timeout: float, ranks_per_node: int
) -> None:
    version = 1 if point == "connecting" else 2
    with EmulatedCluster(4 // ranks_per_node, ranks_per_node, RATE) as cluster:
        names = tuple(node.name for node in cluster.nodes)
        fault = Fault("train", 1, point, version, "nic")
        outcome = run_on_nodes(
            NetworkCase(
                tmp_path, 29600, timeout=timeout, host=gate, fault=fault, nodes=names, down=names[down],
                double_buffer=point.startswith("before"),
            )
        )  # fmt: skip
    assert outcome.problems == []


@pytest.mark.parametrize(
    ("down", "point"), [(3, "before decision/{v}"), (2, "before complete/{v}"), (0, "before complete/{v}")]
)
def test_a_destination_of_several_nodes_that_is_cut_in_a_commit_ends_in_time(
    tmp_path: Path, down: int, point: str
) -> None:
    """Only a rank that is cut off from all that know the decision may have another version than they."""
    fault = Fault("train", 1, point, 2, "nic")
    with EmulatedCluster(4, 1, RATE) as cluster:
        names = tuple(node.name for node in cluster.nodes)
        outcome = run_on_nodes(
            NetworkCase(
                tmp_path, 29600, timeout=8, host=DATA, fault=fault, nodes=names, down=names[down],
                double_buffer=True,
            )
        )  # fmt: skip
    cut_off = outcome.ranks[f"infer {down - 2}"] if down >= 2 else None
    if cut_off is not None and cut_off["version"] == 1:
        outcome.problems = [one for one in outcome.problems if "ranks have versions {1, 2}" not in one]
    assert outcome.problems == []


def test_joined_programs_that_are_cut_in_the_middle_of_a_stream_end_in_time_by_name(run: Programs) -> None:
    run.start_jobs(DATA, TIMEOUT, ("--iterations", 10000))
    run.cut(0)
    ended = run.ended(TIMEOUT + WITHIN)
    assert {name: code for name, (code, _) in ended.items()} == {"source": 4, "destination": 4}, ended
    for name, (_, told) in ended.items():
        assert "Traceback" not in told
        assert len(re.findall("^error: ", told, re.M)) == 1, f"{name}: {told}"
        assert re.search(r"error: .*(train|infer) \d\).*\(last: ", told), f"{name}: {told}"
    assert run.left(TIMEOUT + WITHIN) == []
    assert all(one["committed"] and not one["torn"] for one in run.lines("destination"))


@pytest.mark.parametrize(("store", "down"), [(CONTROL, 0), (DATA, 1)])
def test_a_refit_in_one_world_ends_in_time_by_name(run: Programs, store: str, down: int) -> None:
    run.start_world(store, TIMEOUT, "--iterations", 10000)
    run.cut(down)
    ended = run.ended(TIMEOUT + WITHIN)
    assert {name: code for name, (code, _) in ended.items()} == {f"rank {rank}": 4 for rank in range(4)}
    for side in ((0, 1), (2, 3)):  # who is cut off from the store cannot know that the others tell
        errors = [
            line for rank in side for line in ended[f"rank {rank}"][1].splitlines() if "error: " in line
        ]
        assert len(errors) == 1 if store == DATA else len(errors) < 2, ended
        assert all(re.search(r"(train|infer) \d\).*\(last: ", line) for line in errors), errors
    assert run.left(TIMEOUT + WITHIN) == []


def test_joined_programs_outlive_a_stall_and_every_element_is_verified(run: Programs) -> None:
    run.start_jobs(DATA, 5 * STALL, ("--iterations", 4))
    run.cut(0, stall=STALL)
    ended = run.ended(60)
    assert {name: code for name, (code, _) in ended.items()} == {"source": 0, "destination": 0}, ended
    assert [(one["version"], one["committed"]) for one in run.lines("destination")] == [
        (version, True) for version in (1, 2, 3, 4)
    ]
    assert max(float(str(one["seconds"])) for one in run.lines("source")) > STALL


def test_a_refit_in_one_world_outlives_a_stall_and_every_element_is_verified(run: Programs) -> None:
    run.start_world(DATA, 5 * STALL, "--iterations", 4)
    run.cut(1, stall=STALL)
    ended = run.ended(60)
    assert [code for code, _ in ended.values()] == [0] * 4, ended
    assert max(float(str(one["seconds"])) for one in run.lines("source")) > STALL
