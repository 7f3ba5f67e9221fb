"""No hang, ever: a rank that dies, stops, lags, raises, or comes with another plan ends the refit on all ranks."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.refit.test_memory import anonymous
from tests.support import end_group, model_document, run_cli, run_module, start_cli, write_yaml

TIMEOUT = 6
RANKS = 4


@pytest.fixture(name="documents")
def small_documents(tmp_path):
    """2 -> 2 ranks, 40 tensors of one shape, some small and some that travel by themselves."""
    tensors = {f"small.{i}.w": ((64, 48), "float32") for i in range(30)}
    tensors |= {f"big.{i}.w": ((1024, 512), "bfloat16") for i in range(10)}
    write_yaml(tmp_path / "model.yaml", model_document(tensors))
    job = {"model": "model.yaml", "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}}}
    source = write_yaml(
        tmp_path / "source.yaml",
        {"name": "source", **job, "tensors": [{"match": "*", "place": {"tp": "shard(0)"}}]},
    )
    destination = write_yaml(
        tmp_path / "destination.yaml",
        {"name": "destination", **job, "tensors": [{"match": "*", "place": {"tp": "shard(1)"}}]},
    )
    return source, destination


def run_harness(fault: str, documents: tuple[Path, Path], target: str) -> subprocess.CompletedProcess[str]:
    return run_module("tests.refit.harness", fault, *documents, target, timeout=90)


def children_of(pid: int) -> list[int]:
    """Return the ranks of a launcher in order of their pids, which is the order of their ranks."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return sorted(int(word) for word in text.split())


def looping(documents: tuple[Path, Path]) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a refit that would go on for long, and return it with its ranks once they move data."""
    process = start_cli("refit", *documents, "--iterations", "100000", "--timeout", str(TIMEOUT))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = children_of(process.pid)
        if len(ranks) == RANKS and all(_threads(pid) > 3 for pid in ranks):
            time.sleep(1.0)
            return process, ranks
        time.sleep(0.05)
    end_group(process)
    raise AssertionError("the refit did not start")


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def assert_clean(done: subprocess.CompletedProcess[str], code: int) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall(r"^error: ", done.stderr, re.M)) == 1, done.stderr


def test_the_harness_without_a_fault_verifies(documents, tmp_path):
    done = run_harness("none", documents, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verified ")


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_killed_rank_ends_all_and_is_named(documents, victim):
    process, ranks = looping(documents)
    try:
        time.sleep(random.Random(victim).random())
        os.kill(ranks[victim], signal.SIGKILL)
        began = time.monotonic()
        _, err = process.communicate(timeout=TIMEOUT + 30)
    finally:
        end_group(process)
    assert process.returncode == 4, err
    assert f"rank {victim}" in err.splitlines()[0]
    assert "SIGKILL" in err
    assert time.monotonic() - began < TIMEOUT + 15
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_rank_ends_all_within_the_timeout_and_is_named(documents, victim):
    process, ranks = looping(documents)
    try:
        os.kill(ranks[victim], signal.SIGSTOP)
        _, err = process.communicate(timeout=TIMEOUT + 40)
    finally:
        end_group(process)
    assert process.returncode == 4, err
    assert f"rank {victim}" in err.splitlines()[0], err
    assert len(re.findall(r"^error: ", err, re.M)) == 1, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_killed_launcher_takes_its_ranks_with_it(documents):
    process, ranks = looping(documents)
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        deadline = time.monotonic() + 20
        while any(_alive(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(_alive(pid) for pid in ranks)
    finally:
        end_group(process)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def by_hand(
    documents, ranks: dict[int, list[str]], world: int
) -> dict[int, subprocess.CompletedProcess[str]]:
    """Start single ranks as a scheduler would, each with its own flags, and wait for all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = {
        rank: start_cli(
            "refit", *documents, "--timeout", str(TIMEOUT), *flags,
            environment={
                "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank, flags in ranks.items()
    }  # fmt: skip
    done = {}
    try:
        for rank, process in processes.items():
            out, err = process.communicate(timeout=90)
            done[rank] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        for process in processes.values():
            end_group(process)
    return done


def test_a_rank_that_never_joins_is_named(documents):
    done = by_hand(documents, {rank: [] for rank in range(3)}, RANKS)
    assert {one.returncode for one in done.values()} == {4}, done
    text = "".join(one.stderr for one in done.values())
    assert "rank 3 (destination 1)" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--staging", "1"], "staging bytes"),
        (["--mode", "broadcast"], "mode"),
        (["--domain", "1"], "domains"),
    ],
    ids=["staging", "mode", "domains"],
)
def test_a_rank_with_other_flags_is_refused_before_the_first_byte(documents, flags, difference):
    done = by_hand(documents, {0: [], 1: [], 2: flags, 3: []}, RANKS)
    assert {one.returncode for one in done.values()} == {4}, done
    text = "".join(one.stderr for one in done.values())
    assert text.count("error: ") == 1, text
    assert "rank 2 (destination 0) came with another plan" in text
    assert difference in text


def test_a_rank_with_another_dtype_of_equal_size_is_refused(documents, tmp_path):
    text = documents[1].read_text()
    other = tmp_path / "other.yaml"
    other.write_text(text + "dtype: float16\n")
    same = tmp_path / "same.yaml"
    same.write_text(text + "dtype: bfloat16\n")
    pairs = {0: same, 1: same, 2: other, 3: same}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        start_cli(
            "refit", documents[0], document, "--timeout", str(TIMEOUT),
            environment={
                "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank, document in pairs.items()
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            end_group(process)
    assert {process.returncode for process in processes} == {4}, errors
    assert "rank 2 (destination 0) came with another plan" in "".join(errors)


@pytest.mark.parametrize("fault", ["shifted", "swapped"])
def test_a_plan_that_is_off_on_one_rank_is_refused_before_the_first_byte(documents, tmp_path, fault):
    done = run_harness(fault, documents, str(tmp_path / "out"))
    assert_clean(done, 4)
    assert "disagree on the order, sizes or contents" in done.stderr
    assert not (tmp_path / "out").exists()


def test_two_swapped_tensors_that_no_digest_caught_are_caught_by_verification(documents, tmp_path):
    done = run_harness("unchecked-swapped", documents, str(tmp_path / "out"))
    assert_clean(done, 5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["first-bit", "last-bit"])
def test_a_flipped_bit_is_found_named_and_not_committed(documents, tmp_path, fault):
    done = run_harness(fault, documents, str(tmp_path / "out"))
    assert_clean(done, 5)
    assert re.search(r"on rank 2: tensor '\w+\.\d+\.w'.*piece \[\d+:\d+, \d+:\d+\]", done.stderr)
    assert not (tmp_path / "out").exists()


def test_a_rank_that_raises_ends_all_and_is_named(documents, tmp_path):
    done = run_harness("hook", documents, str(tmp_path / "out"))
    assert_clean(done, 4)
    assert "rank 2 (destination 0) raised ValueError: the hook of this rank failed" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "point",
    [
        "before-complete",
        "before-decision",
        "after-decision",
        "before-applied",
        "after-applied",
        "before-publish",
        "after-publish",
        "after-published",
    ],
)
def test_a_crash_at_any_step_of_the_commit_leaves_the_old_version_whole_or_the_new(
    documents, tmp_path, point
):
    out = tmp_path / "out"
    assert run_harness("none", documents, str(out)).returncode == 0
    before = {path.name: path.stat().st_ino for path in out.iterdir()}
    done = run_harness(f"kill-{point}", documents, str(out))
    assert done.returncode == 4, done.stderr
    assert ("rank 0" if "decision" in point else "rank 2") in done.stderr
    after = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert sorted(after) == sorted(before) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    changed = [after[name] != before[name] for name in before]
    assert all(changed) or not any(changed)
    assert any(changed) == (point in ("after-publish", "after-published"))
    for path in out.iterdir():
        assert len(load_file(path)) == 40


def test_fifty_refits_in_a_loop_stay_right_and_leave_nothing(documents, tmp_path):
    done = run_cli(
        "refit", *documents, "--iterations", "50", "--verify", "--to", tmp_path / "out", timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_loop_grows_in_nothing(documents):
    process, ranks = looping(documents)
    try:
        samples = []
        for _ in range(2):
            time.sleep(4)
            samples.append([(_threads(pid), _descriptors(pid), anonymous(pid)) for pid in ranks])
    finally:
        end_group(process)
    for before, after in zip(*samples, strict=True):
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 8 << 20


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
