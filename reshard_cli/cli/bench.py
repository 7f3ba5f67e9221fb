"""`reshard-cli bench`: under torchrun one rank of it, else the launcher of all of them, on an emulated cluster too."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import cast, get_args

from reshard_cli.cli.output import check_file, write_json, write_text
from reshard_cli.errors import DocumentError
from reshard_cli.plan.routes import Mode
from reshard_cli.refit.prepare import Jobs, RefitOptions, parse_domain, read_jobs

__all__ = ["run_bench"]


def run_bench(
    options: RefitOptions,
    *,
    modes: str,
    warmup: int,
    repeats: int,
    emulate: str | None,
    nic: str,
    json_file: str | None,
    csv_file: str | None,
    debug: bool,
) -> None:
    """Run the bench and end the process with its exit code. Raises what can be said before any rank starts."""
    chosen = _modes(modes)
    under_torchrun = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if emulate is not None:
        if under_torchrun:
            raise DocumentError(
                "--emulate: makes its own cluster on this machine; it cannot run under torchrun"
            )
        if options.backend == "nccl":
            raise DocumentError("--emulate: the nodes are joined by TCP alone; give --backend gloo or auto")
        options = replace(options, backend="gloo", domain=options.domain or "auto")

    def read() -> Jobs:
        check_file(json_file, "--json")
        check_file(csv_file, "--csv")
        parse_domain(options.domain)
        return read_jobs(options.source, options.destination, options.model)

    jobs = None if under_torchrun else read()
    from reshard_cli.transport.emulated import EmulatedCluster, launch_emulated, parse_cluster, parse_rate

    shape = None if emulate is None else (*parse_cluster(emulate), parse_rate(nic))

    # torch takes seconds to import: a mistake in a document is told before
    import torch

    from reshard_cli.refit.bench import BenchOptions, BenchResult, run_bench_rank
    from reshard_cli.report.bench_report import bench_report
    from reshard_cli.report.terminal_bench import print_bench
    from reshard_cli.transport.launcher import World, launch, world_of_environment

    def show(result: BenchResult) -> None:
        report = bench_report(result)
        if emulate is not None:
            report["environment"]["emulated"] = {"cluster": emulate, "nic": nic}
        if json_file is not None:
            write_json(report, json_file)
        if csv_file is not None:
            write_text(_csv(report), csv_file, "--csv")
        if json_file != "-":
            print_bench(report)

    def run(world: World) -> int:
        local = world.num_ranks if world.launcher else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
        given = read if jobs is None else lambda: jobs
        return run_bench_rank(
            world, options, BenchOptions(chosen, warmup, repeats), given, on_result=show, debug=debug,
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


def _modes(text: str) -> tuple[Mode, ...]:
    known = get_args(Mode)
    modes = [part.strip() for part in text.split(",") if part.strip()]
    for mode in modes:
        if mode not in known:
            raise DocumentError(f"--modes: {mode!r} is none of {', '.join(known)}")
    if not modes:
        raise DocumentError(f"--modes: names none; there are {', '.join(known)}")
    return cast("tuple[Mode, ...]", tuple(dict.fromkeys(modes)))


def _csv(report: dict[str, object]) -> str:
    """Return one line per repeat: mode, repeat, seconds."""
    lines = ["mode,repeat,seconds"]
    for one in cast("list[dict[str, list[float]]]", report["modes"]):
        lines += [f"{one['mode']},{repeat},{seconds!r}" for repeat, seconds in enumerate(one["seconds"])]
    return "\n".join(lines) + "\n"


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
