"""Kills at random points of two joined jobs: `python -m tests.benchmarks.kills [NUMBER] [SEED] [AT ONCE]`.

Each of them is `kill -9` or SIGSTOP of a rank of either job, or `kill -9` of the gate, in a phase or at a point of
the commit, with and without double buffers. Prints a line for each, and how many ended as promised.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.refit.joined_harness import COMMIT_POINTS, PHASES, Case, Fault, free_port, run_case

__all__ = ["draw", "main"]

# where only some ranks come
DESTINATION_ONLY = ("before apply", "after apply", "unpack")
FIRST_ONLY = (
    "joining",
    "planning",
    "opening the ends",
    "scheduling",
    "reading the source",
    "comparing plans",
    "connecting",
)


def draw(random: Random) -> tuple[Fault, bool]:
    """Return a fault that can happen, and whether the destination has double buffers."""
    job, rank = random.choice(["train", "infer"]), random.randrange(2)
    points = [*PHASES, *COMMIT_POINTS, *COMMIT_POINTS, "between refits"]
    while True:
        point = random.choice(points)
        if job == "train" and point in DESTINATION_ONLY:
            continue
        break
    what = random.choices(["kill", "stop", "gate"], [5, 3, 2])[0]
    version = 1 if point in FIRST_ONLY else random.randint(1, 3)
    return Fault(job, rank, point, version, what), random.random() < 0.5


def main() -> int:
    number, seed, at_once = (*(int(one) for one in sys.argv[1:]), *(50, 1, 2)[len(sys.argv) - 1 :])
    random = Random(seed)
    faults = [draw(random) for _ in range(number)]
    good, lock = [], threading.Lock()

    def one(index: int) -> None:
        fault, double = faults[index]
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(Case(Path(folder), free_port(), double_buffer=double, fault=fault))
        with lock:
            if not outcome.problems:
                good.append(index)
            what = f"{fault.what} {fault.job} {fault.rank} {fault.point!r} of version {fault.version}"
            longest = max(
                (told["refit ended"] - outcome.fault_at for told in outcome.ranks.values()
                 if told and "refit ended" in told and outcome.fault_at), default=0.0,
            )  # fmt: skip
            print(
                f"{index}: {what}{' double' if double else ''}: {longest:.1f} s: {outcome.problems or 'good'}",
                flush=True,
            )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(number)))
    print(f"{len(good)} of {number}")
    return 0 if len(good) == number else 1


if __name__ == "__main__":
    sys.exit(main())
