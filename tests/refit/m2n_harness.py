"""A whole refit between gloo processes with the stand-in for NCCL M2N: `python -m tests.refit.m2n_harness SOURCE DESTINATION OUT [kill]`.

With `kill`, rank 3 is killed in its second call.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from reshard_cli.refit import joining
from reshard_cli.refit.prepare import RefitOptions, read_jobs
from reshard_cli.refit.session import run_rank
from reshard_cli.report.refit_report import refit_report
from reshard_cli.transport.exchange import GlooTransport
from reshard_cli.transport.launcher import World, launch
from tests import m2n_fake


def kill_in_second_call() -> None:
    move, calls = m2n_fake.GlooComm.move, []

    def dying(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        move(self, *arguments)

    m2n_fake.GlooComm.move = dying


def main() -> int:
    source, destination, target = (Path(one) for one in sys.argv[1:4])
    m2n_fake.install()
    GlooTransport.communicator = property(lambda self: m2n_fake.GlooComm(self._group))
    joining._check_m2n = lambda control, backend, faults: None  # the backend is gloo
    options = RefitOptions(
        source=source, destination=destination, target=str(target), verify=True, timeout=30, iterations=3,
        mode="reshard", m2n=True,
    )  # fmt: skip
    jobs = read_jobs(source, destination)

    def run(world: World) -> int:
        torch.set_num_threads(1)
        if "kill" in sys.argv and world.rank == 3:
            kill_in_second_call()
        return run_rank(
            world, options, lambda: jobs, on_report=lambda report: print(json.dumps(refit_report(report)))
        )

    return launch(jobs.num_ranks(False), options.timeout, run)


if __name__ == "__main__":
    sys.exit(main())
