"""Several destination jobs on one source are refitted at once: one that is slow, lost or stuck is not the others' affair."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import torch

from reshard_cli.errors import TransferError
from reshard_cli.refit import joined_source
from tests.refit.live_jobs import Place, jobs
from tests.refit.live_weights import differing, documents, held, layout, poisoned, whole
from tests.support import write_yaml

NAMES = ("one", "two")


def bound(place: Place, session: Any, before: Any = None) -> dict[str, torch.Tensor]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    session.bind(live, before=before)
    place.mark(f"{place.job}-{place.rank}-here")
    return live


def all_there(place: Place, names: tuple[str, ...], ranks: int = 2) -> None:
    for name in names:
        for rank in range(ranks):
            place.wait_for(f"{name}-{rank}-here")


# ---- at once ---------------------------------------------------------------------------------------------


def send_two(place: Place) -> None:
    live = held(whole(0), 0, place.size, place.rank)
    with place.join("source", place.folder / "train.yaml", None) as session:
        session.bind(live)
        all_there(place, NAMES)
        for version in (1, 2):
            live.update(held(whole(version), 0, place.size, place.rank))
            session.refit(version)


def take_after_the_other(place: Place) -> list[int]:
    """Begin to write a version when the other job has it; the jobs take turns in who is first."""
    first = NAMES.index(place.job) + 1  # the version that this job has first

    def before(version: int) -> None:
        if version != first:
            place.wait_for(f"{NAMES[2 - first]}-has-{version}")

    with place.join("destination", None, place.folder / "infer.yaml") as session:
        live = bound(place, session, before)
        seen = []
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            place.mark(f"{place.job}-has-{version}")
            seen.append(version)
        return seen


def test_no_job_waits_for_another(tmp_path):
    documents(tmp_path)
    with jobs(tmp_path) as started:
        started.start("train", 3, send_two)
        for name in NAMES:
            started.start(name, 2, take_after_the_other)
        found = started.all_well()
    assert [found[name, rank] for name in NAMES for rank in range(2)] == [[1, 2]] * 4


# ---- more than there are lanes --------------------------------------------------------------------------

MANY = 5


def send_many(place: Place) -> list[str]:
    joined_source._AT_ONCE = 3
    live = held(whole(0), 0, place.size, place.rank)
    names = tuple(f"job-{number}" for number in range(MANY))
    with place.join("source", place.folder / "train.yaml", None, verify=True) as session:
        session.bind(live)
        all_there(place, names, 1)
        for version in range(1, 5):
            live.update(held(whole(version), 0, place.size, place.rank))
            session.refit(version)
        return sorted(one.name for one in threading.enumerate() if one.name.startswith("lane"))


def take_all(place: Place) -> list[int]:
    with place.join("destination", None, place.folder / "infer.yaml", verify=True) as session:
        live = bound(place, session)
        seen = []
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            seen.append(version)
        return seen


def test_more_jobs_than_lanes_all_get_every_version(tmp_path):
    documents(tmp_path)
    write_yaml(tmp_path / "infer.yaml", layout("infer", 1, 1))
    with jobs(tmp_path) as started:
        started.start("train", 3, send_many)
        for number in range(MANY):
            started.start(f"job-{number}", 1, take_all)
        found = started.all_well()
    assert [found[f"job-{number}", 0] for number in range(MANY)] == [[1, 2, 3, 4]] * MANY
    assert [found["train", rank] for rank in range(3)] == [["lane 0", "lane 1", "lane 2"]] * 3


# ---- when the source's tensors may change --------------------------------------------------------------


def send_released(place: Place) -> list[bool]:
    live = held(whole(1), 0, place.size, place.rank)
    with place.join("source", place.folder / "train.yaml", None) as session:
        session.bind(live)
        all_there(place, NAMES)
        handle = session.refit_async(1, until="packed")
        place.wait_for("one-has-1")
        early = handle._released.is_set()
        place.mark(f"looked-{place.rank}")
        handle.wait_released()
        for tensor in live.values():
            tensor.zero_()
        return [early, handle.wait() == 1]


def take_late(place: Place) -> list[str]:
    def before(_: int) -> None:
        if place.job == "two":
            for rank in range(3):
                place.wait_for(f"looked-{rank}")

    with place.join("destination", None, place.folder / "infer.yaml") as session:
        live = bound(place, session, before)
        assert session.refit() == 1
        place.mark(f"{place.job}-has-1")
        return list(differing(live, held(whole(1), 1, place.size, place.rank)))


def test_tensors_are_released_when_no_job_reads_them_any_more(tmp_path):
    documents(tmp_path)
    with jobs(tmp_path) as started:
        started.start("train", 3, send_released)
        for name in NAMES:
            started.start(name, 2, take_late)
        found = started.all_well()
    assert [found["train", rank] for rank in range(3)] == [[False, True]] * 3
    assert [found[name, rank] for name in NAMES for rank in range(2)] == [[]] * 4


# ---- a job that is stuck, and an interrupt ---------------------------------------------------------------


def send_past_a_stuck_job(place: Place) -> list[str]:
    live = held(whole(0), 0, place.size, place.rank)
    told = []
    with place.join("source", place.folder / "train.yaml", None, timeout=5) as session:
        session.bind(live)
        all_there(place, NAMES)
        for version in (1, 2, 3):
            live.update(held(whole(version), 0, place.size, place.rank))
            try:
                session.refit(version)
                told.append("")
            except TransferError as error:
                told.append(str(error))
    return told


def take_or_stop(place: Place) -> list[int]:
    def before(version: int) -> None:
        if place.job == "one" and place.rank == 1 and version == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    began = time.monotonic()
    with place.join("destination", None, place.folder / "infer.yaml", timeout=5) as session:
        live = bound(place, session, before)
        seen = []
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            if version == 1:
                began = time.monotonic()
            if version == 2:
                assert time.monotonic() - began < 4, "it waited for the job that is stuck"
            seen.append(version)
        return seen


def test_a_job_that_is_stuck_holds_no_other_ones_version(tmp_path):
    documents(tmp_path)
    with jobs(tmp_path) as started:
        started.start("train", 3, send_past_a_stuck_job)
        for name in NAMES:
            started.start(name, 2, take_or_stop)
        started.running["one", 1][1].close()
        stuck = started.running.pop(("one", 1))
        try:
            found = started.results()
        finally:
            stuck[0].kill()
            stuck[0].join(10)
    assert [found["two", rank] for rank in range(2)] == [[1, 2, 3]] * 2
    assert "infer 1" in str(found["one", 0])
    for rank in range(3):
        first, second, third = found["train", rank]
        assert (first, third) == ("", "")
        assert "(infer 1)" in second
        # of one layout both, and told apart all the same
        assert re.search(
            r"did not reach infer: .* it is on infer \(job 2\)$|did not reach infer \(job 2\): .* it is on infer$",
            second,
        )


def send_interrupted(place: Place) -> str:
    live = held(whole(1), 0, place.size, place.rank)
    session = place.join("source", place.folder / "train.yaml", None)
    session.bind(live)
    all_there(place, NAMES)
    session.refit(1)
    if place.rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        session.refit(2)
    except (KeyboardInterrupt, TransferError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.close()
    return "none"


def take_slowly(place: Place) -> list[Any]:
    def before(version: int) -> None:
        if version == 2:
            time.sleep(4)

    session = place.join("destination", None, place.folder / "infer.yaml")
    bound(place, session, before)
    seen: list[Any] = [session.refit()]
    try:
        seen.append(session.refit())
    except TransferError as error:
        seen.append(str(error))
    session.close()
    return [*seen, session.version]


def test_an_interrupt_of_one_source_rank_ends_the_refits_of_all_jobs_by_its_name(tmp_path):
    documents(tmp_path)
    began = time.monotonic()
    with jobs(tmp_path) as started:
        started.start("train", 3, send_interrupted)
        for name in NAMES:
            started.start(name, 2, take_slowly)
        found = started.all_well()
    assert time.monotonic() - began < 18  # none waited for the timeout of 20 s
    assert found["train", 1].startswith("KeyboardInterrupt")
    for rank in (0, 2):
        assert "train 1" in found["train", rank]
    for name in NAMES:
        for rank in range(2):
            first, second, version = found[name, rank]
            assert first == 1
            assert "train 1" in second
            assert version is None
