"""`reshard-cli bench`: under torchrun one rank of it, else the launcher of all of them, on an emulated cluster too."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from reshard_cli.cli.output import check_files, write_json, write_text
from reshard_cli.errors import DocumentError
from reshard_cli.plan.routes import Mode
from reshard_cli.refit.bench_result import BenchOptions, BenchResult, sweep_sizes
from reshard_cli.refit.bench_scale import changes_report, read_scaled_jobs
from reshard_cli.refit.prepare import Jobs, RefitOptions, parse_domain, read_jobs
from reshard_cli.spec.scaling import Change, Room
from reshard_cli.transport.emulated import parse_cluster, parse_rate

__all__ = ["BenchFlags", "run_bench"]

_SWEPT_MODES = "broadcast,reshard"  # one tensor is no feed-forward part: the hybrids are one of these


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """The flags of `bench` alone, as written."""

    modes: str | None = None
    warmup: int = 2
    repeats: int = 7
    scale: float | None = None
    sweep: str | None = None
    emulate: str | None = None
    nic: str = "1gbit"
    json_file: str | None = None
    csv_file: str | None = None
    html_file: str | None = None

    def measured(self) -> BenchOptions:
        """Return what to measure. Raises DocumentError."""
        sizes = None if self.sweep is None else sweep_sizes(self.sweep)
        default = ",".join(get_args(Mode)) if sizes is None else _SWEPT_MODES
        return BenchOptions(
            _modes(default if self.modes is None else self.modes), self.warmup, self.repeats, sweep=sizes
        )

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is read. Raises DocumentError."""
        check_files({"--json": self.json_file, "--csv": self.csv_file, "--html": self.html_file})

    def room(self) -> Room | None:
        """Return the emulated cluster that a scaled pair has to fill."""
        if self.emulate is None:
            return None
        nodes, each = parse_cluster(self.emulate)
        return Room(nodes * each, each)


def run_bench(options: RefitOptions, flags: BenchFlags, *, debug: bool) -> None:
    """Run the bench and end the process with its exit code. Raises what can be said before any rank starts."""
    measured = flags.measured()
    under_torchrun = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if flags.emulate is not None:
        if under_torchrun:
            raise DocumentError(
                "--emulate: makes its own cluster on this machine; it cannot run under torchrun"
            )
        if options.backend == "nccl":
            raise DocumentError("--emulate: the nodes are joined by TCP alone; give --backend gloo or auto")
        options = replace(options, backend="gloo", domain=options.domain or "auto")
    changes: list[Change] = []

    def read() -> Jobs:
        flags.check()
        parse_domain(options.domain)
        if flags.scale is None:
            return read_jobs(options.source, options.destination, options.model)
        jobs, made = read_scaled_jobs(
            options.source, options.destination, options.model, flags.scale, flags.room()
        )
        changes[:] = made
        return jobs

    jobs = None if under_torchrun else read()
    shape = None if flags.emulate is None else (*parse_cluster(flags.emulate), parse_rate(flags.nic))

    # torch takes seconds to import: a mistake in a document is told before
    import torch

    from reshard_cli.refit.bench import run_bench_rank
    from reshard_cli.transport.emulated import EmulatedCluster, launch_emulated
    from reshard_cli.transport.launcher import World, launch, world_of_environment

    def run(world: World) -> int:
        local = world.num_ranks if world.launcher else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
        given = read if jobs is None else lambda: jobs
        return run_bench_rank(
            world, options, measured, given, on_result=lambda result: _show(result, flags, changes), debug=debug,
            progress=_progress if world.rank == 0 and sys.stderr.isatty() else lambda _: None,
        )  # fmt: skip

    if jobs is None:
        sys.exit(run(world_of_environment(os.environ)))
    num_ranks = jobs.num_ranks(options.colocated)
    if shape is None:
        sys.exit(launch(num_ranks, options.timeout, run))
    with EmulatedCluster(*shape) as cluster:
        code = launch_emulated(cluster, num_ranks, options.timeout, run)
    sys.exit(code)


def _show(result: BenchResult, flags: BenchFlags, changes: list[Change]) -> None:
    """Write the reports, on rank 0."""
    from reshard_cli.report.bench_page import bench_page
    from reshard_cli.report.bench_report import bench_report
    from reshard_cli.report.terminal_bench import print_bench

    scaled = None if flags.scale is None else changes_report(flags.scale, tuple(changes))
    report = bench_report(result, scaled)
    if flags.emulate is not None:
        report["environment"]["emulated"] = {"cluster": flags.emulate, "nic": flags.nic}
    if flags.json_file is not None:
        write_json(report, flags.json_file)
    if flags.csv_file is not None:
        write_text(_csv(report), flags.csv_file, "--csv")
    if flags.html_file is not None:
        write_text(bench_page(report), flags.html_file, "--html")
    if "-" not in (flags.json_file, flags.csv_file, flags.html_file):
        print_bench(report)


def _modes(text: str) -> tuple[Mode, ...]:
    known = get_args(Mode)
    modes = [part.strip() for part in text.split(",") if part.strip()]
    for mode in modes:
        if mode not in known:
            raise DocumentError(f"--modes: {mode!r} is none of {', '.join(known)}")
    if not modes:
        raise DocumentError(f"--modes: names none; there are {', '.join(known)}")
    return cast("tuple[Mode, ...]", tuple(dict.fromkeys(modes)))


def _csv(report: dict[str, Any]) -> str:
    """Return one line per repeat: mode, repeat, seconds; of a sweep, the bytes before them."""
    if not report["sweep"]:
        return "\n".join(["mode,repeat,seconds", *_repeats(report["modes"], "")]) + "\n"
    lines = ["bytes,mode,repeat,seconds"]
    for size in report["sweep"]:
        lines += _repeats(size["modes"], f"{size['bytes']},")
    return "\n".join(lines) + "\n"


def _repeats(modes: list[dict[str, Any]], before: str) -> list[str]:
    return [
        f"{before}{one['mode']},{repeat},{seconds!r}"
        for one in modes
        for repeat, seconds in enumerate(one["seconds"])
    ]


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
