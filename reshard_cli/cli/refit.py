"""`reshard-cli refit`: under torchrun one rank of it, else the launcher of all of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from reshard_cli.cli.telling import Telling
from reshard_cli.refit.prepare import Jobs, RefitOptions, parse_domain, read_jobs
from reshard_cli.spec.headers import is_rank_folder

__all__ = ["run_refit"]

_SHOW_PROGRESS_AFTER = 2.0


def run_refit(options: RefitOptions, *, telling: Telling, debug: bool) -> None:
    """Run the refit and end the process with its exit code. Raises what can be said before any rank starts."""

    def read() -> Jobs:
        telling.check()
        parse_domain(options.domain)
        folder = Path(options.origin)
        # rank files have an engine's storages and names; only a checkpoint's are the model's
        checkpoint = options.origin != "synthetic" and folder.is_dir() and not is_rank_folder(folder)
        fallback = folder if checkpoint else None
        return read_jobs(
            options.source, options.destination, options.model, fallback, trust=options.trust_checkpoint
        )

    under_torchrun = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    jobs = None if under_torchrun else read()

    # torch takes seconds to import: a mistake in a document is told before
    import torch

    from reshard_cli.refit.endpoints import check_target
    from reshard_cli.refit.joined_loop import RefitOfLoop
    from reshard_cli.refit.session import Iteration, RefitReport, run_rank
    from reshard_cli.report.refit_report import refit_report
    from reshard_cli.transport.launcher import World, launch, world_of_environment

    def show(report: RefitReport) -> None:
        telling.report(refit_report(report))

    def tell(one: Iteration) -> None:
        telling.refit(RefitOfLoop("both", "", one.version, True, False, one.seconds, one))

    def run(world: World) -> int:
        local = world.num_ranks if world.launcher else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
        progress = _Progress() if world.rank == 0 and sys.stderr.isatty() else None
        # a forked rank has what its launcher read
        given = read if jobs is None else lambda: jobs
        return run_rank(world, options, given, on_report=show, on_refit=tell, progress=progress, debug=debug)

    if jobs is None:
        sys.exit(run(world_of_environment(os.environ)))
    if not options.target.startswith("live:"):
        check_target(options.target, "check")
    sys.exit(launch(jobs.num_ranks(options.colocated), options.timeout, run))


class _Progress:
    """A bar on the terminal, shown once the work has proved to be long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._width = 30

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._began < _SHOW_PROGRESS_AFTER and done < total:
            return
        filled = self._width * done // total
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (self._width - filled)
        print(f"\rrefit [{bar}] round {done} of {total}", end=end, file=sys.stderr, flush=True)
