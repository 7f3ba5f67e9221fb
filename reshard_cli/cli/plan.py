"""`reshard-cli plan`: a dry run on a laptop."""

from __future__ import annotations

from pathlib import Path

from reshard_cli.cli.output import check_json_file, write_json
from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.plan.routes import Mode
from reshard_cli.refit.prepare import parse_domain, read_jobs
from reshard_cli.report.plan_report import plan_report
from reshard_cli.report.tensor_report import tensor_lines, tensor_report
from reshard_cli.report.terminal import print_plan

__all__ = ["run_plan"]


def run_plan(
    source: Path,
    destination: Path,
    *,
    model: Path | None,
    mode: Mode,
    staging: int,
    domain: str | None,
    colocated: bool,
    allow_extra: bool,
    json_file: str | None,
    tensor: str | None = None,
) -> None:
    """Plan and print. Raises DocumentError or WeightsError."""
    check_json_file(json_file)
    if domain == "auto":
        raise DocumentError(
            "--domain auto: only running ranks can say which machine they are on; give a number"
        )
    jobs = read_jobs(source, destination, model)
    topology = jobs.topology(parse_domain(domain), colocated)
    if tensor is not None:
        plan = build_plan(
            jobs.source, jobs.destination, topology, mode, staging=staging, allow_extra=allow_extra
        )
        told = tensor_report(jobs, plan, tensor)
        if json_file is not None:
            write_json(told, json_file)
        if json_file != "-":
            print("\n".join(tensor_lines(told, jobs, colocated)))
        return
    report = plan_report(jobs, topology, mode, staging=staging, allow_extra=allow_extra)
    if json_file is not None:
        write_json(report, json_file)
    if json_file != "-":
        print_plan(report)
