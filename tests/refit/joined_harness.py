"""Two jobs of two ranks each, joined through the library, with a fault at a named point of one rank: for tests.

Every rank is a process. A fault is (job, rank, point, what): the rank, or the gate, is killed or stopped
when it comes to the point, which is the name of a phase, or "before"/"after" a key of the control plane. Every rank
writes down how its refits ended, what it says of its version, and whether its tensors are that version bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import reshard_cli as rs
from reshard_cli.errors import ReshardError
from reshard_cli.transport.control import Control

TOKEN = "a-secret-that-is-never-sent"
MODEL = {
    "name": "m", "dtype": "float32", "sizes": {},
    "tensors": {"a.weight": [64, 48], "b.weight": [7, 5], "c.norm": [300], "s": []},
}  # fmt: skip
RANKS = 2
# what the points of a fault can be; {v} is the version at which it happens
PHASES = (
    "joining", "planning", "opening the ends", "scheduling", "reading the source", "comparing plans", "connecting",
    "bind", "pack", "network", "domain", "unpack", "verify", "commit", "committing",
)  # fmt: skip
COMMIT_POINTS = (
    "before complete/{v}", "after complete/{v}", "before decision/{v}", "after decision/{v}", "before apply",
    "after apply", "before applied/{v}", "after applied/{v}", "before published/{v}", "after published/{v}",
)  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.refit.joined_harness"])


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which rank, at its `occasion`-th arrival at a point of version `version`."""

    job: str
    rank: int
    point: str
    version: int
    what: str = "kill"  # kill, stop, gate (the gate is killed instead) or nic (see `network_harness`)
    occasion: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """How the jobs are set up."""

    folder: Path
    port: int
    timeout: float = 4.0
    double_buffer: bool = False
    refits: int = 4
    fault: Fault | None = None
    host: str = "127.0.0.1"
    extra: dict[str, Any] = field(default_factory=dict)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def write_documents(folder: Path) -> None:
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    for name, dim, domain in (("train", 0, 1), ("infer", 1, 2)):
        rules: list[dict[str, Any]] = [
            {"match": "*.weight", "place": {"tp": f"shard({dim})"}},
            {"match": "*"},
        ]
        document = {
            "name": name, "model": "model.yaml", "ranks": RANKS, "domain": domain, "meshes": {"m": {"tp": RANKS}},
            "tensors": rules,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))


def cut(version: int, job: str, rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name, shape in MODEL["tensors"].items():  # type: ignore[attr-defined]
        value = torch.randn(shape, generator=generator)
        if name.endswith("weight"):
            value = value.chunk(RANKS, 0 if job == "train" else 1)[rank].clone().contiguous()
        tensors[name] = value
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- a rank ---------------------------------------------------------------------------------------


class Seam:
    """Comes to know of every point of a rank, and does the fault there."""

    def __init__(self, case: Case, job: str, rank: int) -> None:
        self.case, self.job, self.rank = case, job, rank
        self.version = 0
        self.arrivals = 0

    def at(self, point: str) -> None:
        fault = self.case.fault
        if fault is None or (fault.job, fault.rank) != (self.job, self.rank) or self.version < fault.version:
            return
        wanted = fault.point.format(v=self.version)
        if point.partition(", round")[0] != wanted:
            return
        self.arrivals += 1
        if self.arrivals != fault.occasion:
            return
        self.befall(fault)

    def befall(self, fault: Fault) -> None:
        """Have the fault happen."""
        (self.case.folder / "fault").write_text(str(time.time()))
        if fault.what == "gate":
            os.kill(int((self.case.folder / "gate").read_text()), signal.SIGKILL)
            return
        os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)

    def install(self) -> None:
        """Wrap the control plane's calls, in this process only."""

        def around(name: str) -> None:
            inner = getattr(Control, name)

            def call(control: Control, key: str, *rest: Any, **named: Any) -> Any:
                key_of = key.removesuffix("/in") if name == "gather" else key
                if name == "phase":
                    done = inner(control, key, *rest, **named)
                    self.at(key)
                    return done
                self.at(f"before {key_of}")
                done = inner(control, key, *rest, **named)
                self.at(f"after {key_of}")
                return done

            setattr(Control, name, call)

        for name in ("phase", "gather", "decide", "decision"):
            around(name)


def rank_process(case: Case, job: str, rank: int) -> None:
    torch.set_num_threads(1)
    seam = Seam(case, job, rank)
    seam.install()
    told: dict[str, Any] = {"job": job, "rank": rank, "committed": [], "error": None}
    try:
        (run_source if job == "train" else run_destination)(case, rank, seam, told)
    except ReshardError as error:
        told["error"], told["class"], told["guilty"] = str(error), type(error).__name__, error.exit_code
    except BaseException as error:
        told["error"], told["class"] = repr(error), type(error).__name__
        raise
    finally:
        told["ended"] = time.time()
        (case.folder / f"{job}-{rank}.json").write_text(json.dumps(told))


def join(case: Case, job: str, rank: int, **more: Any) -> rs.Session:
    settings: dict[str, Any] = {
        "role": "source" if job == "train" else "destination", "rendezvous": address_of(case), "token": TOKEN,
        "rank": rank, "world_size": RANKS, "timeout": case.timeout, "verify": True, "job": job,
        "double_buffer": case.double_buffer and job != "train", **case.extra, **more,
    }  # fmt: skip
    return rs.join(case.folder / "train.yaml", case.folder / "infer.yaml", **settings)


def address_of(case: Case) -> str:
    return f"[{case.host}]:{case.port}" if ":" in case.host else f"{case.host}:{case.port}"


def run_source(case: Case, rank: int, seam: Seam, told: dict[str, Any]) -> None:
    seam.version = 1
    if rank == 0:
        opened(case)
    live = cut(0, "train", rank)
    session = join(case, "train", rank)
    try:
        session.bind(live)
        for version in range(1, case.refits + 1):
            seam.version = version
            live.update(cut(version, "train", rank))
            session.refit(version=version)
            told["committed"].append(version)
            seam.at("between refits")
    finally:
        told["refit ended"] = time.time()
        session.close()


def opened(case: Case) -> None:
    """Write down the gate's process as soon as there is one."""
    from reshard_cli.refit import joined_source

    inner = joined_source.open_gate

    def opening(*parameters: Any) -> Any:
        process = inner(*parameters)
        (case.folder / "gate").write_text(str(process.child.pid))
        return process

    joined_source.open_gate = opening


def run_destination(case: Case, rank: int, seam: Seam, told: dict[str, Any]) -> None:
    from reshard_cli.refit.ends import LiveEnd

    seam.version = 1
    apply = LiveEnd.apply

    def applied(end: LiveEnd, version: int) -> None:
        seam.at("before apply")
        apply(end, version)
        seam.at("after apply")

    LiveEnd.apply = applied  # type: ignore[method-assign]
    start = {name: torch.full_like(value, float("nan")) for name, value in cut(0, "infer", rank).items()}
    live = {name: value.clone() for name, value in start.items()}
    session = join(case, "infer", rank)
    try:
        session.bind(live)
        while (version := session.refit()) is not None:
            assert session.version == version
            assert same(live, cut(version, "infer", rank)), f"version {version} is not what it should be"
            told["committed"].append(version)
            seam.version = version
            seam.at("between refits")
            seam.version = version + 1
    finally:
        told["refit ended"] = time.time()
        told["version"], told["torn"] = session.version, session.torn
        # the checker: what is reported is wholly there, and with double buffers something whole always is
        if session.version is not None:
            told["whole"] = same(live, cut(session.version, "infer", rank))
        elif case.double_buffer:
            told["whole"] = all(torch.isnan(value).all() for value in live.values())
        else:
            told["whole"] = True
        session.close()


# ---- all of them ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """How a case ended: by rank's name, what it wrote down, None where it could not."""

    ranks: dict[str, dict[str, Any] | None]
    codes: dict[str, int | None]
    fault_at: float | None
    problems: list[str]


def start(case: Case, job: str, rank: int, run: Callable[..., None] = rank_process) -> Any:
    process = CONTEXT.Process(target=run, args=(case, job, rank), daemon=True)
    process.start()
    return process


def run_case(
    case: Case,
    slack: float = 5.0,
    run: Callable[..., None] = rank_process,
    left: Callable[[Any], list[str]] | None = None,
) -> Outcome:
    """Run both jobs with the case's fault; hold the promises against what came of it.

    `run` is what a rank runs, `left` says what a case leaves behind.
    """
    write_documents(case.folder)
    processes = {
        f"{job} {rank}": start(case, job, rank, run) for job in ("infer", "train") for rank in range(RANKS)
    }
    fault = case.fault
    guilty = None if fault is None or fault.what in ("gate", "nic") else f"{fault.job} {fault.rank}"
    marker = case.folder / "fault"
    limit = time.monotonic() + 60
    try:
        while time.monotonic() < limit:
            if all(not one.is_alive() for name, one in processes.items() if name != guilty):
                break
            time.sleep(0.05)
        late = [name for name, one in processes.items() if one.is_alive() and name != guilty]
    finally:
        for one in processes.values():
            one.kill()
            one.join()
    fault_at = float(marker.read_text()) if marker.exists() else None
    ranks: dict[str, dict[str, Any] | None] = {}
    for name in processes:
        path = case.folder / f"{name.replace(' ', '-')}.json"
        ranks[name] = json.loads(path.read_text()) if path.exists() else None
    codes = {name: one.exitcode for name, one in processes.items()}
    outcome = Outcome(ranks, codes, fault_at, [])
    outcome.problems += [f"{name} did not end" for name in late]
    outcome.problems += judge(case, outcome, guilty, slack)
    outcome.problems += (left or left_behind)(case)
    return outcome


def judge(case: Case, outcome: Outcome, guilty: str | None, slack: float) -> list[str]:
    problems = []
    if case.fault is not None and outcome.fault_at is None:
        problems.append("the fault never happened")
    versions: set[int | None] = set()
    for name, told in outcome.ranks.items():
        if name == guilty:
            continue
        if told is None:
            problems.append(f"{name} wrote nothing; its exit code is {outcome.codes[name]}")
            continue
        if outcome.fault_at is not None:
            if told["error"] is None or told.get("guilty") != 4:
                problems.append(f"{name} ended with {told['error']}, no TransferError")
            elif name == "train 1" and "train 0 has closed" in told["error"]:
                pass  # it was through with the version; its rank 0 was not, and has to name the guilty one
            elif guilty is not None and (guilty not in told["error"] or "(last: " not in told["error"]):
                problems.append(f"{name} does not name {guilty} and its phase: {told['error']}")
            took = told["refit ended"] - outcome.fault_at if "refit ended" in told else 0.0
            if took > case.timeout + slack:
                problems.append(f"{name} took {took:.1f} s")
        if name.startswith("infer") and "version" in told:
            versions.add(told["version"])
            if not told["whole"]:
                problems.append(f"{name} says version {told['version']}, and has something else")
    # one rank may not have begun where another is torn: it has the old version still
    old = set() if case.fault is None else {case.fault.version - 1}
    some_torn = any(
        one is not None and one.get("torn") for name, one in outcome.ranks.items() if "infer" in name
    )
    if len(versions) > 1 and not all_torn(outcome) and not (some_torn and versions == {None, *old}):
        problems.append(f"the destination's ranks have versions {versions}")
    return problems


def all_torn(outcome: Outcome) -> bool:
    return all(one is None or one.get("torn", True) for name, one in outcome.ranks.items() if "infer" in name)


def left_behind(case: Case, seconds: float = 10.0) -> list[str]:
    """Return what still lives of a case: its gate, its port."""
    path = case.folder / "gate"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        gone = not path.exists() or not is_alive(int(path.read_text()))
        if gone and not is_listening(case.host, case.port):
            return []
        time.sleep(0.05)
    return ["the gate is there still"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_listening(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.connect_ex((host, port)) == 0
