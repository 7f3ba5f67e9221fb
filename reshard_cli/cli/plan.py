"""`reshard-cli plan`: a dry run on a laptop."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reshard_cli.cli.output import check_files, write_json, write_text
from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.prepare import Jobs, parse_domain, read_jobs
from reshard_cli.report.plan_report import plan_report
from reshard_cli.report.tensor_classes import tensors_like
from reshard_cli.report.tensor_report import tensor_lines, tensor_report
from reshard_cli.report.terminal import print_plan, print_tensors
from reshard_cli.spec.hardware_profile import Hardware, read_hardware

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
    hardware: str | None,
    json_file: str | None,
    html_file: str | None,
    tensor: str | None,
    tensors: str | None,
    trust: bool,
    m2n: bool,
) -> None:
    """Plan and print. Raises DocumentError or WeightsError."""
    check_files({"--json": json_file, "--html": html_file})
    if domain == "auto":
        raise DocumentError(
            "--domain auto: only running ranks can say which machine they are on; give a number"
        )
    jobs = read_jobs(source, destination, model, trust=trust)
    topology = jobs.topology(parse_domain(domain), colocated)
    if tensor is not None or tensors is not None:
        if html_file is not None:
            raise DocumentError("--html: shows a whole plan; leave out --tensor and --tensors")
        plan = build_plan(
            jobs.source, jobs.destination, topology, mode,
            staging=staging, allow_extra=allow_extra, m2n=m2n,
        )  # fmt: skip
    if tensors is not None:
        _list_tensors(jobs, plan, tensors, json_file)
        return
    if tensor is not None:
        told = tensor_report(jobs, plan, tensor)
        if json_file is not None:
            write_json(told, json_file)
        if json_file != "-":
            print("\n".join(tensor_lines(told, jobs, colocated)))
        return
    profile = _hardware(hardware, topology)
    report, plan = plan_report(
        jobs, topology, mode, profile, staging=staging, allow_extra=allow_extra, m2n=m2n
    )
    if json_file is not None:
        write_json(report, json_file)
    if html_file is not None:
        from reshard_cli.report.plan_page import plan_page

        write_text(plan_page(report, plan, jobs, colocated), html_file, "--html")
    if "-" not in (json_file, html_file):
        print_plan(report)


def _hardware(name: str | None, topology: Topology) -> Hardware:
    if name == "cpu":
        from reshard_cli.transport.probe import measured_cpu

        return measured_cpu()
    return read_hardware(name, int(np.bincount(topology.domain).max()))


def _list_tensors(jobs: Jobs, plan: Plan, pattern: str, json_file: str | None) -> None:
    try:
        found = tensors_like(jobs, plan, pattern)
    except ValueError as error:
        raise DocumentError(f"--tensors: {error}") from error
    if not found:
        raise DocumentError(f"--tensors: no tensor of the plan is named {pattern!r}")
    if json_file is not None:
        write_json({"schema": "reshard-cli/tensors/1", "tensors": found}, json_file)
    if json_file != "-":
        print_tensors(found)
