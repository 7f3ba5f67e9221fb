"""Measures refits: all modes on the same layouts, interleaved, warmed up, beside a bare exchange on the same wires.

Weights are synthetic and lie in memory on both sides, as with live ranks. Every repeat starts together on all
ranks; what counts is the slowest rank. Modes take turns repeat by repeat, so that drift hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from reshard_cli.plan.bound import domain_bound
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.bench_result import BenchOptions, BenchResult, ModeResult
from reshard_cli.refit.bench_side import BenchSide, Together, busiest_bytes
from reshard_cli.refit.environment import describe_environment, own_device
from reshard_cli.refit.joining import join
from reshard_cli.refit.prepare import Jobs, RefitOptions
from reshard_cli.refit.ranked import run_ranked
from reshard_cli.refit.sweep import Sweep
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import open_transport
from reshard_cli.transport.launcher import World
from reshard_cli.transport.message import Message, Transport

__all__ = ["run_bench_rank"]

_PROBES = 5


def run_bench_rank(
    world: World,
    options: RefitOptions,
    bench: BenchOptions,
    read: Callable[[], Jobs],
    *,
    on_result: Callable[[BenchResult], None],
    progress: Callable[[str], None] = lambda _: None,
    debug: bool = False,
) -> int:
    """Run this process's part of the bench; return its exit code. `on_result` is called on rank 0."""

    def body(
        control: Control, undo: list[Callable[[], None]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        jobs, setup, topology = join(control, world, options, read)
        rank = _BenchRank(control, jobs, topology, options, bench, setup, undo)
        result = rank.run(progress)
        return rank.close, lambda: None if result is None else on_result(result)

    return run_ranked(world, options.timeout, body, debug=debug)


class _BenchRank:
    def __init__(
        self, control: Control, jobs: Jobs, topology: Topology, options: RefitOptions, bench: BenchOptions,
        setup: dict[str, Any], undo: list[Callable[[], None]],
    ) -> None:  # fmt: skip
        self.undo = undo
        self.control, self.jobs, self.topology = control, jobs, topology
        self.options, self.bench, self.setup = options, bench, setup
        self.device = own_device(setup)
        self.transport: Transport | None = None

    def run(self, progress: Callable[[str], None]) -> BenchResult | None:
        side: BenchSide | None = None
        if self.bench.sweep is None:
            side = BenchSide(
                self.control, self.jobs, self.topology, self.options, self.bench.modes, self.device
            )
            side.prepare()
        self.control.phase("connecting")
        self.transport = open_transport(
            self.setup["backend"], self.control.store, self.control.rank, self.control.num_ranks,
            self.options.timeout, domains=self.topology.domain.tolist(), check=self.control.check,
        )  # fmt: skip
        self.undo.append(self.transport.abort)
        self.control.barrier("connected", "connecting")
        together = Together(self.control, self.transport, self.device)
        found = self._result()
        if side is None:
            found.probe_rates = self._probes(together)
            found.sweep = Sweep(
                self.control, self.topology, self.options, self.bench, self.device, self.jobs
            ).run(together, progress)
        else:
            self._measure(side, together, found, progress)
        return found if self.control.rank == 0 else None

    def _result(self) -> BenchResult:
        """Return the result with what is known before anything is measured."""
        source, destination = self.jobs.source, self.jobs.destination
        return BenchResult(
            results=[], probe_rates=[], bound=None, model_bytes=destination.model.num_bytes,
            world={
                "ranks": self.control.num_ranks, "hosts": self.setup["hosts"],
                "source": {"name": source.name, "ranks": source.num_ranks},
                "destination": {"name": destination.name, "ranks": destination.num_ranks},
            },
            backend=self.setup["backend"], warmup=self.bench.warmup,
            environment=describe_environment(self.setup["backend"]),
            layouts={"source": source.digest, "destination": destination.digest},
        )  # fmt: skip

    def _measure(
        self, side: BenchSide, together: Together, found: BenchResult, progress: Callable[[str], None]
    ) -> None:
        """Warm every mode up, verify it where asked, and measure them in turn; add it all to the result."""
        results = found.results = [
            ModeResult(mode, plan.digest, plan.network_bytes, busiest_bytes(plan), plan.num_rounds)
            for mode, plan in side.plans.items()
        ]
        for result in results:
            # what is verified has to have been brought
            for _ in range(max(self.bench.warmup, int(self.options.verify))):
                progress(f"warming up {result.mode}")
                side.poison()
                side.measure(result.mode, "warm-up", together)
            if self.options.verify:
                result.verified = side.verified(result.mode)
        found.probe_rates = self._probes(together)
        for repeat in range(self.bench.repeats):
            # every mode comes first, second, … equally often
            turn = repeat % len(results)
            for place, result in enumerate(results[turn:] + results[:turn]):
                progress(f"repeat {repeat + 1} of {self.bench.repeats}: {result.mode}")
                one = side.measure(result.mode, f"{repeat}", together)
                if one is not None:
                    result.add(one, repeat * len(results) + place)
        if self.control.rank == 0:
            found.bound = domain_bound(next(iter(side.plans.values())))

    def _probes(self, together: Together) -> list[float]:
        rates = [self._probe(together) for _ in range(_PROBES)]
        return [rate for rate in rates if rate is not None]

    def _probe(self, together: Together) -> float | None:
        """Send bytes from source ranks to as many destination ranks; return the best domain's rate on rank 0.

        Bytes per second of one domain: what its NICs together take of a bare exchange. (A sender is done when
        its last bytes are in buffers, a receiver when they are there.)
        """
        topology, rank = self.topology, self.control.rank
        pairs = [
            (int(one), int(other))
            for one, other in zip(topology.source, topology.destination, strict=False)
            if topology.domain[one] != topology.domain[other]
        ]
        data = torch.zeros(self.bench.probe_bytes, dtype=torch.uint8, device=self.device)
        self.control.phase("probing the network")
        together.wait()
        began = time.perf_counter()
        sends = [Message(other, data) for one, other in pairs if one == rank]
        receives = [Message(one, data) for one, other in pairs if other == rank]
        together.transport.start(sends, receives).wait()
        seconds = time.perf_counter() - began
        together.wait()
        everybody = self.control.gather("probe", [seconds, len(receives)], "probing the network")
        if everybody is None or not pairs:
            return None
        domains = topology.domain[: self.control.num_ranks]
        rates = []
        for domain in np.unique(domains):
            mine = [everybody[one] for one in np.nonzero(domains == domain)[0].tolist() if everybody[one][1]]
            if mine:
                rates.append(len(mine) * self.bench.probe_bytes / max(one[0] for one in mine))
        return float(max(rates))

    def close(self) -> None:
        """Close the connections; everybody has passed the last barrier."""
        if self.transport is not None:
            self.transport.close()
