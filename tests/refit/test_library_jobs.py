"""Several destination jobs with layouts of their own on one source, coming and going; and a loop that does not grow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.refit.live_jobs import Place, jobs
from tests.refit.live_weights import differing, documents, held, layout, poisoned, whole
from tests.support import write_yaml

ROUNDS = 6


def train_for_many(place: Place) -> list[int]:
    """Send a version to whoever is there; let jobs come and go in between, at known versions."""
    live = held(whole(0), 0, place.size, place.rank)
    with place.join("source", place.folder / "train.yaml", None, verify=True) as session:
        session.bind(live)
        for name in ("columns-0", "columns-1", "rows-0"):
            place.wait_for(f"{name}-here")
        for version in range(1, ROUNDS + 1):
            live.update(held(whole(version), 0, place.size, place.rank))
            session.refit(version)
            place.mark(f"sent-{version}-{place.rank}")
            for name in {2: ("columns-0-left", "columns-1-left", "late-0-here"), 4: ("back-0", "back-1")}.get(
                version, ()
            ):
                place.wait_for(name)
        return list(range(1, ROUNDS + 1))


def take(place: Place, document: str, dim: int, stays: list[int]) -> list[list[int]]:
    """Take versions: so many, leave, come again; 0: until the source has closed."""
    if place.job == "late":
        place.wait_for("sent-2-0")
    live = poisoned(held(whole(0), dim, place.size, place.rank))
    seen: list[list[int]] = []
    for count in stays:
        own: list[int] = []
        if seen:
            place.wait_for("sent-4-0")
        with place.join("destination", None, place.folder / document, verify=True) as session:
            session.bind(live)
            place.mark(f"back-{place.rank}" if seen else f"{place.job}-{place.rank}-here")
            while (not count or len(own) < count) and (version := session.refit()) is not None:
                assert not list(differing(live, held(whole(version), dim, place.size, place.rank))), version
                own.append(version)
        place.mark(f"{place.job}-{place.rank}-left")
        seen.append(own)
    return seen


def test_jobs_with_layouts_of_their_own_come_late_leave_and_come_again(tmp_path):
    documents(tmp_path)
    write_yaml(tmp_path / "rows.yaml", layout("rows", 1, 0))
    write_yaml(tmp_path / "late.yaml", layout("late", 3, 1))
    with jobs(tmp_path) as started:
        started.start("train", 3, train_for_many)
        started.start("columns", 2, take, "infer.yaml", 1, [2, 0])
        started.start("rows", 1, take, "rows.yaml", 0, [0])
        started.start("late", 3, take, "late.yaml", 1, [0])
        found = started.all_well()
    assert found["columns", 0] == found["columns", 1] == [[1, 2], [5, 6]]
    assert found["rows", 0] == [[1, 2, 3, 4, 5, 6]]
    assert found["late", 0] == [[3, 4, 5, 6]]


# ---- a loop ---------------------------------------------------------------------------------------------


def grown(pid: int | str = "self") -> dict[str, int]:
    """Return what a process holds now: KiB of memory, open files, threads."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    values = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "kib": int(values["VmRSS"].split()[0]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(values["Threads"]),
    }


def train_in_a_loop(place: Place, count: int, looks: list[int]) -> list[dict[str, int]]:
    live = held(whole(0), 0, place.size, place.rank)
    seen = []
    with place.join("source", place.folder / "train.yaml", None, verify=True) as session:
        session.bind(live)
        for version in range(1, count + 1):
            live.update(held(whole(version), 0, place.size, place.rank))
            session.refit(version)
            if version in looks:
                seen.append(grown())
    return seen


def take_in_a_loop(place: Place, count: int, looks: list[int]) -> list[dict[str, int]]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    seen, last = [], 0
    with place.join("destination", None, place.folder / "infer.yaml", verify=True) as session:
        session.bind(live)
        while (version := session.refit()) is not None:
            assert version == last + 1
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            last = version
            if version in looks:
                seen.append(grown())
    assert last == count
    return seen


def test_a_loop_does_not_grow(tmp_path):
    documents(tmp_path)
    with jobs(tmp_path) as started:
        for name, ranks, program in (("train", 3, train_in_a_loop), ("infer", 2, take_in_a_loop)):
            # not after the last one: ranks that are done with it close their ends of the connections
            started.start(name, ranks, program, 61, [20, 60])
        found: dict[Any, list[dict[str, int]]] = started.all_well()
    assert len(found) == 5
    for who, (early, late) in found.items():
        assert (late["files"], late["threads"]) == (early["files"], early["threads"]), who
        assert late["kib"] - early["kib"] < 4096, who
