"""Runs a small refit with a fault put into one rank, as a process of its own: `python -m tests.refit.harness`.

Arguments: FAULT SOURCE DESTINATION TARGET. The faults are seams of the tests, not of the product: they
patch the running program the way a broken rank would behave.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from reshard_cli.plan.schedule import Fragment, RankSchedule
from reshard_cli.refit import pair
from reshard_cli.refit.prepare import RefitOptions, read_jobs
from reshard_cli.refit.session import RefitReport, run_rank
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import GlooTransport
from reshard_cli.transport.launcher import World, launch
from reshard_cli.weights.rank_folder import PendingFolder

GUILTY = 2


def shift_one_element(schedule: RankSchedule) -> None:
    """Make this rank's first fragment start one element late."""
    for blocks in schedule.rounds:
        for block in blocks:
            for fragments in (block.packed, block.big):
                for index, one in enumerate(fragments):
                    if one.stop - one.start > 1:
                        fragments[index] = Fragment(
                            one.tensor, one.lo, one.hi, one.start + 1, one.stop, one.item_size
                        )
                        return


def swap_two(schedule: RankSchedule) -> None:
    """Swap two fragments of equal size, as a rank that orders its tensors otherwise would."""
    for blocks in schedule.rounds:
        for block in blocks:
            for fragments in (block.packed, block.big):
                for i, one in enumerate(fragments):
                    for j in range(i + 1, len(fragments)):
                        if fragments[j].num_bytes == one.num_bytes and fragments[j].tensor != one.tensor:
                            fragments[i], fragments[j] = fragments[j], one
                            return
    raise AssertionError("no two fragments to swap: the injection itself does not work")


def flip_bit(last: bool) -> None:
    """Flip one bit of one received message before it is unpacked."""
    start = GlooTransport.start
    done = []

    def broken(self, sends, receives, *phase):
        pending = start(self, sends, receives, *phase)

        class Flipping:
            def wait(inner) -> None:
                pending.wait()
                if receives and not done:
                    data = max(receives, key=lambda message: message.data.numel()).data
                    data[-1 if last else 0] ^= 1
                    done.append(1)

        return Flipping()

    GlooTransport.start = broken


def raise_in_unpack() -> None:
    """Raise where a receiver's own code would run."""

    def broken(self, number):
        raise ValueError("the hook of this rank failed")

    pair.RankExecutor.finish = broken


def stop_at(point: str, number: int) -> None:
    """Send this process a signal at a named point of the commit."""
    publish = PendingFolder.publish
    gather, barrier, decide = Control.gather, Control.barrier, Control.decide

    def stop() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    def stopping_publish(self):
        if point == "before-publish":
            stop()
        publish(self)
        if point == "after-publish":
            stop()

    def stopping_gather(self, key, value, what):
        if key.startswith("complete") and point == "before-complete":
            stop()
        return gather(self, key, value, what)

    def stopping_decide(self, key, wish):
        if point == "before-decision":
            stop()
        decided = decide(self, key, wish)
        if point == "after-decision":
            stop()
        return decided

    def stopping_barrier(self, key, what):
        if key.startswith("applied") and point == "before-applied":
            stop()
        barrier(self, key, what)
        if key.startswith("applied") and point == "after-applied":
            stop()
        if key.startswith("published") and point == "after-published":
            stop()

    PendingFolder.publish = stopping_publish
    Control.gather, Control.barrier, Control.decide = stopping_gather, stopping_barrier, stopping_decide


def main() -> int:
    fault, source, destination, target = sys.argv[1:5]
    options = RefitOptions(
        source=Path(source),
        destination=Path(destination),
        target=target,
        verify=True,
        timeout=6,
        mode="reshard",
    )
    jobs = read_jobs(options.source, options.destination)

    def show(report: RefitReport) -> None:
        print(f"verified {report.verified_elements}")

    def run(world: World) -> int:
        torch.set_num_threads(1)
        tamper = None
        if fault.startswith("unchecked"):
            pair.agree = lambda *_: None
        if world.rank == (0 if fault.endswith("-decision") else GUILTY):
            if fault == "shifted":
                tamper = shift_one_element
            elif fault in ("swapped", "unchecked-swapped"):
                tamper = swap_two
            elif fault in ("first-bit", "last-bit"):
                flip_bit(fault == "last-bit")
            elif fault == "hook":
                raise_in_unpack()
            elif fault.startswith("kill-"):
                stop_at(fault.removeprefix("kill-"), signal.SIGKILL)
        return run_rank(world, options, lambda: jobs, on_report=show, tamper=tamper)

    return launch(jobs.num_ranks(False), options.timeout, run)


if __name__ == "__main__":
    sys.exit(main())
