"""`refit --join`: two jobs that were started each by itself, on the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import end_group, model_document, start_cli, write_yaml

TENSORS = {"a.weight": ((64, 48), "float32"), "b.weight": ((7, 5), "bfloat16"), "scalar": ((), "float32")}


@pytest.fixture(name="jobs")
def two_jobs(tmp_path):
    write_yaml(tmp_path / "model.yaml", model_document(TENSORS))
    job = {"model": "model.yaml", "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}}}
    for name, dim in (("train", 0), ("infer", 1), ("other", 0)):
        rules = [{"match": "*.weight", "place": {"tp": f"shard({dim})"}}, {"match": "*", "place": {}}]
        write_yaml(tmp_path / f"{name}.yaml", {"name": name, **job, "tensors": rules})
    (tmp_path / "token").write_text("a shared secret\n")
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(jobs: Path, port: int, role: str, *flags: object, infer: str = "infer") -> subprocess.Popen[str]:
    documents = (jobs / "train.yaml", jobs / f"{infer}.yaml")
    common = ("--join", f"127.0.0.1:{port}", "--role", role, "--timeout", "20")
    token = () if "--token" in flags else ("--token-file", jobs / "token")
    return start_cli("refit", *documents, *common, *token, *flags)


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        end_group(process)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("first", ["source", "destination"])
def test_two_jobs_meet_in_any_order_and_every_element_is_verified(jobs, first):
    port = free_port()
    flags = {
        "source": ("--iterations", 3, "--verify", "--json", jobs / "source.json", "--metrics", jobs / "prom"),
        "destination": ("--verify", "--lines", "-"),
    }
    second = "destination" if first == "source" else "source"
    processes = {first: start(jobs, port, first, *flags[first])}
    time.sleep(1)
    processes[second] = start(jobs, port, second, *flags[second])
    results = {role: ended(process) for role, process in processes.items()}
    assert [results[role][0] for role in ("source", "destination")] == [0, 0], results
    lines = [json.loads(line) for line in results["destination"][1].splitlines()]
    assert [one["version"] for one in lines] == [1, 2, 3]
    assert all(one["committed"] and not one["torn"] for one in lines)
    report = json.loads((jobs / "source.json").read_text())
    assert report["schema"] == "reshard-cli/refit/1"
    # both destination ranks hold a half of what is cut, and the scalar
    assert report["verified_elements"] == 3 * (64 * 48 + 7 * 5 + 2)
    assert re.search(r'^reshard_version\{role="source",job="infer"\} 3$', (jobs / "prom").read_text(), re.M)
    assert not listening(port)


def test_another_token_is_not_let_in_and_the_loop_goes_on(jobs):
    port = free_port()
    source = start(jobs, port, "source", "--iterations", 2)
    stranger = start(jobs, port, "destination", "--token", "another secret")
    code, _, err = ended(stranger)
    assert code == 4
    assert "the token is not this gate's" in err
    assert len(re.findall("^error: ", err, re.M)) == 1
    assert ended(start(jobs, port, "destination"))[0] == 0
    assert ended(source)[0] == 0


def test_a_job_with_something_else_is_told_every_difference_at_once(jobs):
    port = free_port()
    source = start(jobs, port, "source", "--iterations", 1)
    other = start(jobs, port, "destination", "--mode", "reshard", "--staging", 7, infer="other")
    code, _, err = ended(other)
    assert code == 4
    assert len(re.findall("^error: ", err, re.M)) == 1
    for what in ("mode: reshard here, hybrid there", "staging bytes", "layout of the destination"):
        assert what in err
    assert ended(start(jobs, port, "destination"))[0] == 0
    assert ended(source)[0] == 0


def test_a_source_lets_in_several_layouts_and_one_that_comes_later(jobs):
    port = free_port()
    out = jobs / "lines"
    source = start(jobs, port, "source", "--also", jobs / "other.yaml", "--iterations", 400, "--lines", out)
    one = start(jobs, port, "destination")
    deadline = time.monotonic() + 40
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    other = start(jobs, port, "destination", "--iterations", 3, infer="other")
    assert ended(other)[0] == 0
    os.killpg(source.pid, signal.SIGTERM)
    code, _, err = ended(source)
    assert code == 0, err
    assert ended(one)[0] == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["version"] for line in told if line["job"] == "other"][1:] != []
    assert {line["job"] for line in told} == {"infer", "other"}
    assert all(line["committed"] for line in told)


def test_a_watched_folder_is_refitted_checkpoint_by_checkpoint(jobs):
    port = free_port()
    folder, target = jobs / "checkpoints", jobs / "served"
    folder.mkdir()

    def write(step: int) -> None:
        values = {
            name: torch.full(shape, float(step), dtype=getattr(torch, dtype))
            for name, (shape, dtype) in TENSORS.items()
        }
        hidden = folder / f".step-{step}"
        hidden.mkdir()
        save_file(values, hidden / "model.safetensors")
        hidden.rename(folder / f"step-{step}")

    source = start(jobs, port, "source", "--watch", folder, "--iterations", 2, "--verify")
    destination = start(jobs, port, "destination", "--to", target, "--verify")
    write(5)
    deadline = time.monotonic() + 40
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {float(one.max()) for one in load_file(target / "rank-00000.safetensors").values()} == {5.0}
    write(12)
    code, _, err = ended(source)
    assert code == 0, err
    assert ended(destination)[0] == 0
    assert {float(one.max()) for one in load_file(target / "rank-00001.safetensors").values()} == {12.0}
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".served")] == []


def test_flags_of_joining_alone_are_refused(jobs):
    process = start_cli("refit", jobs / "train.yaml", jobs / "infer.yaml", "--role", "source")
    code, _, err = ended(process)
    assert code == 2
    assert "--join" in err
    process = start_cli(
        "refit", jobs / "train.yaml", jobs / "infer.yaml", "--join", "127.0.0.1:1", "--role", "source"
    )
    code, _, err = ended(process)
    assert code == 2
    assert "--token-file" in err


def wait_for(happened: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the ranks of a job that this launcher has started and that wait for the other one."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(one) for one in children if SIGTERM_IS_TAKEN & _taken_signals(int(one))]


SIGTERM_IS_TAKEN = 1 << (signal.SIGTERM - 1)


def _taken_signals(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16)


@pytest.mark.parametrize(
    ("role", "number"),
    [("source", signal.SIGTERM), ("destination", signal.SIGINT)],
    ids=["source", "destination"],
)
def test_a_job_that_waits_for_the_other_one_ends_when_it_is_asked(jobs, role, number):
    port = free_port()
    process = start(jobs, port, role, "--timeout", 600)
    wait_for(lambda: len(ranks_of(process)) == 2 and (role == "destination" or listening(port)))
    os.killpg(process.pid, number)
    assert ended(process) == (0, "", "")
    assert not listening(port)


def test_a_destination_ends_when_it_is_asked_though_the_next_version_is_always_there(jobs):
    port = free_port()
    lines = jobs / "lines"
    source = start(jobs, port, "source", "--iterations", 1_000_000)
    destination = start(jobs, port, "destination", "--lines", lines)
    wait_for(lines.exists)
    os.killpg(destination.pid, signal.SIGTERM)
    assert ended(destination)[0] == 0
    assert source.poll() is None
    os.killpg(source.pid, signal.SIGTERM)
    code, _, err = ended(source)
    assert code == 0, err
    assert "infer left" in err


def test_a_job_whose_ranks_are_all_stuck_says_why_it_ends(jobs):
    """Its source is killed while its engine does not come back from a hook."""
    (jobs / "stuck_engine.py").write_text(
        "import time, torch\n"
        "class Engine:\n"
        "    tensors = {'a.weight': torch.zeros(64, 24), 'scalar': torch.zeros(()),\n"
        "               'b.weight': torch.zeros(7, 5, dtype=torch.bfloat16)}\n"
        "    def before(self, version):\n"
        f"        open({str(jobs / 'mark')!r}, 'w').close()\n"
        "        time.sleep(600)\n"
        "def make():\n"
        "    return Engine()\n"
    )
    infer = {"name": "infer", "model": "model.yaml", "ranks": 2, "domain": 2, "meshes": {"m": {"tp": 2}}}
    rules = [{"match": "a.weight", "place": {"tp": "shard(1)"}}, {"match": "*", "place": {}}]
    write_yaml(jobs / "infer.yaml", {**infer, "tensors": rules})
    port = free_port()
    source = start(jobs, port, "source")
    common = ("--join", f"127.0.0.1:{port}", "--role", "destination", "--token-file", jobs / "token")
    destination = start_cli(
        "refit", jobs / "train.yaml", jobs / "infer.yaml", *common, "--to", "live:stuck_engine:make",
        environment={"PYTHONPATH": os.pathsep.join([str(jobs), *sys.path])},
    )  # fmt: skip
    wait_for((jobs / "mark").exists)
    end_group(source)
    code, _, err = ended(destination)
    assert code == 4
    assert len(re.findall("^error: .*train [01]\\) is not running any more", err, re.M)) == 1, err


@pytest.mark.parametrize("guilty", ["source", "destination"])
def test_what_ends_one_job_in_mid_loop_is_told_to_the_other_one_with_the_name_of_its_rank(jobs, guilty):
    port = free_port()
    flags = {guilty: ("--lines", "/dev/full")}
    roles = ("source", "destination")
    processes = {role: start(jobs, port, role, "--iterations", 1000, *flags.get(role, ())) for role in roles}
    results = {role: ended(process) for role, process in processes.items()}
    assert [results[role][0] for role in roles] == [2 if role == guilty else 4 for role in roles], results
    name = {"source": "train 0", "destination": "infer 0"}[guilty]
    why = "--lines: /dev/full cannot be written: No space left on device"
    for role, (_, _, err) in results.items():
        assert len(re.findall("^error: ", err, re.M)) == 1, err
        assert (why if role == guilty else f"{name} ended: {why}") in err
        assert "no destination job came" not in err  # without --rejoin nobody is waited for


def test_all_ranks_of_a_job_end_with_its_own_exit_code_whichever_ends_first(jobs):
    """The other job tells the second rank of the end of the first, which is still there."""
    (jobs / "sitecustomize.py").write_text(
        "import os, time\nend = os._exit\nos._exit = lambda code: (time.sleep(1.5 if code == 2 else 0), end(code))\n"
    )
    port = free_port()
    source = start(jobs, port, "source", "--iterations", 1000)
    destination = start_cli(
        "refit", jobs / "train.yaml", jobs / "infer.yaml", "--join", f"127.0.0.1:{port}", "--role", "destination",
        "--token-file", jobs / "token", "--lines", "/dev/full",
        environment={"PYTHONPATH": os.pathsep.join([str(jobs), *sys.path])},
    )  # fmt: skip
    code, _, err = ended(destination)
    assert code == 2, err
    assert len(re.findall("^error: ", err, re.M)) == 1, err
    assert ended(source)[0] == 4


@pytest.mark.parametrize(
    ("role", "flags", "told"),
    [
        ("destination", ("--rejoin",), "--rejoin: is for the source job; leave it out on the destination"),
        ("destination", ("--from", "checkpoint"), "--from: is for the source job"),
        ("destination", ("--watch", "."), "--watch: is for the source job"),
        ("destination", ("--also", "other.yaml"), "--also: is for the source job"),
        ("source", ("--to", "served"), "--to: is for the destination job; leave it out on the source"),
        ("source", ("--double-buffer",), "--double-buffer: is for the destination job"),
        ("source", ("--watch", "model.yaml"), "model.yaml is no folder"),
        (
            "source",
            ("--metrics", "/dev/null"),
            "--metrics: /dev/null is replaced after each refit, so it has to be",
        ),
        ("source", ("--timeout", "nan"), "--timeout: nan is not a number of seconds, more than 0"),
        ("source", ("--timeout", "1e30"), "--timeout: 1e+30 is not"),
        ("source", ("--token", ""), "--token: jobs that join need a shared secret, which is not empty"),
        ("source", ("--token-file", "nothing"), "--token-file: nothing cannot be read: No such file"),
        ("source", ("--token-file", "empty"), "empty is empty; both jobs need the same secret in it"),
        ("source", ("--token-file", "binary"), "binary is no text (UTF-8)"),
        ("source", ("--token-file", "/dev/zero"), "--token-file: /dev/zero is longer than 4096 bytes"),
        ("destination", ("--to", "live:nothing.at.all:make"), "--to: nothing.at.all: cannot be imported"),
        ("destination", ("--to", "/nothing/at/all"), "/nothing/at"),
        ("source", ("--join", "http://127.0.0.1:1"), "--join: 'http://127.0.0.1:1' is not HOST:PORT"),
    ],
)
def test_what_is_wrong_on_one_side_alone_is_told_before_it_joins(jobs, role, flags, told):
    (jobs / "empty").write_text("\n")
    (jobs / "binary").write_bytes(bytes(range(256)))
    given = [jobs / one if one in ("empty", "binary", "model.yaml") else one for one in flags]
    documents = (jobs / "train.yaml", jobs / "infer.yaml")
    token = () if any(str(one).startswith("--token") for one in flags) else ("--token-file", jobs / "token")
    join = () if "--join" in flags else ("--join", "127.0.0.1:9")
    code, _, err = ended(start_cli("refit", *documents, *join, "--role", role, *token, *given))
    assert code == 2
    assert told in err
    assert len(err.splitlines()) == 1
