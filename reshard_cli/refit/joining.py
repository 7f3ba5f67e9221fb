"""How the ranks of a world meet: they settle the backend and the domains, which depend on the machines."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch

from reshard_cli.errors import DocumentError
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.environment import machine_place
from reshard_cli.refit.prepare import Jobs, RefitOptions, parse_domain
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World
from reshard_cli.transport.m2n import m2n_fault

__all__ = ["join", "meet"]


def join(
    control: Control, world: World, options: RefitOptions, read: Callable[[], Jobs]
) -> tuple[Jobs, dict[str, Any], Topology]:
    """Read the documents and meet all ranks; return the jobs, what the ranks settled, and the topology.

    They settle `backend`, `places` (a name by rank that ranks joined by NVLink share), `hosts` (their number),
    `token` and this rank's `local_rank`. Raises DocumentError where the documents need another world.
    """
    control.phase("reading the documents")
    jobs = read()
    control.name_of = lambda one: jobs.name_of(one, options.colocated)
    if world.num_ranks != jobs.num_ranks(options.colocated):
        raise DocumentError(
            f"the documents need {jobs.num_ranks(options.colocated)} ranks ({jobs.source.name}: "
            f"{jobs.source.num_ranks}, {jobs.destination.name}: {jobs.destination.num_ranks}), "
            f"the world has {world.num_ranks}"
        )
    return (jobs, *meet(control, world.local_rank, options, jobs))


def meet(
    control: Control, local_rank: int, options: RefitOptions, jobs: Jobs
) -> tuple[dict[str, Any], Topology]:
    """Meet all ranks of two jobs; return what they settled (see `join`), and the topology. Raises DocumentError."""
    control.phase("joining")
    here = {
        "host": socket.gethostname(),
        "gpu": torch.cuda.is_available(),
        "place": machine_place(local_rank),
        "m2n": m2n_fault() if options.m2n else None,
    }
    everybody = control.gather("join", here, "joining")
    setup: dict[str, Any] = {}
    if everybody is not None:
        gpus = all(one["gpu"] for one in everybody)
        if options.backend == "nccl" and not gpus:
            lacking = next(rank for rank, one in enumerate(everybody) if not one["gpu"])
            raise DocumentError(f"--backend nccl: {control.name_of(lacking)} has no GPU; use gloo or auto")
        backend = ("nccl" if gpus else "gloo") if options.backend == "auto" else options.backend
        if options.m2n:
            _check_m2n(control, backend, [one["m2n"] for one in everybody])
        setup = {
            "backend": backend,
            "places": [one["place"] for one in everybody],
            "hosts": len({one["host"] for one in everybody}),
            "token": secrets.token_hex(4),
        }
    setup = {**control.share("setup", setup, "joining"), "local_rank": local_rank}
    control.phase("planning")
    if options.domain == "auto":
        topology = Topology.of_machine(
            jobs.source.num_ranks, jobs.destination.num_ranks, setup["places"], colocated=options.colocated
        )
    else:
        topology = jobs.topology(parse_domain(options.domain), options.colocated)
    return setup, topology


def _check_m2n(control: Control, backend: str, faults: list[str | None]) -> None:
    """Raise DocumentError with what the ranks lack to use NCCL M2N; `faults`: what each one says it lacks."""
    if backend != "nccl":
        raise DocumentError(
            f"--m2n: NCCL M2N moves between GPUs, and the backend is {backend}; leave --m2n out"
        )
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise DocumentError(f"--m2n: {control.name_of(rank)}: {fault}")
