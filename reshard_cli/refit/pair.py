"""One rank in the refits of one source job to one destination job: agree, connect, and run a version at a time.

Read `Pair.refit` from top to bottom: bind, run the rounds, verify, commit. Every step is named to the control plane,
so that a message about a rank can say what it was doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard_cli.errors import VerifyError
from reshard_cli.plan.build import Plan
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.plan.schedule import RankSchedule, rank_schedule
from reshard_cli.refit.agreement import agree
from reshard_cli.refit.checksums import compare_sums, source_sums
from reshard_cli.refit.clock import Clock
from reshard_cli.refit.committing import commit
from reshard_cli.refit.endpoints import Destination, state_dict_of
from reshard_cli.refit.ends import DestinationEnd, SourceEnd
from reshard_cli.refit.environment import own_device
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.m2n import carry
from reshard_cli.refit.prepare import RefitOptions
from reshard_cli.refit.rounds import run_rounds
from reshard_cli.refit.verify import verify_padding, verify_rank, wire_dtypes
from reshard_cli.transport.control import Control
from reshard_cli.transport.exchange import open_m2n, open_transport
from reshard_cli.transport.m2n import M2n
from reshard_cli.transport.message import Transport
from reshard_cli.weights.ties import check_ties
from reshard_cli.weights.windows import Source, StorageWindows

__all__ = ["Iteration", "Pair", "Progress"]

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Iteration:
    """One refit of a loop: its version, seconds by phase (of the slowest rank), bytes really sent."""

    version: int
    seconds: float
    phases: dict[str, float]
    network_bytes: int
    domain_bytes: int


class Pair:
    """One rank of either job, or of both: bound to its ends, agreed with its peers."""

    def __init__(
        self,
        options: RefitOptions,
        plan: Plan,
        control: Control,
        setup: dict[str, Any],
        source: SourceEnd | None,
        destination: DestinationEnd | None,
        *,
        truth: SourceEnd | None = None,
    ) -> None:
        """`truth`: where this process can read all of a version's values for itself, to verify them."""
        self.options, self.plan, self.control, self.setup = options, plan, control, setup
        rank, topology = control.rank, plan.topology
        sources, destinations = topology.source.tolist(), topology.destination.tolist()
        self.source_rank = sources.index(rank) if rank in sources else None
        self.destination_rank = destinations.index(rank) if rank in destinations else None
        self.source_end = None if self.source_rank is None else source
        self.end = None if self.destination_rank is None else destination
        self.truth = truth
        self.device = own_device(setup)
        self.transport: Transport | None = None
        self._m2n: M2n | None = None
        self.compared = self.compared_by_all = 0  # elements; the second is known on rank 0
        self.extra = plan.extra
        self.own: Iteration | None = None  # what the last refit was on this rank alone
        self.applied = False  # whether every rank has the last refit's version, as far as this one knows
        self._refits = 0
        self.state_dict = ""
        self.peak = 0
        self._schedule: RankSchedule | None = None
        self._executors: list[tuple[list[object], RankExecutor]] = []
        self._destination: Destination | None = None
        self._source: Source | None = None

    def open(self, version: int, tamper: Callable[[RankSchedule], None] | None = None) -> None:
        """Check the source that the first version comes from, agree with all ranks, and connect to them."""
        self.control.phase("scheduling")
        self._schedule = rank_schedule(self.plan, self.control.rank)
        if tamper is not None:
            tamper(self._schedule)
        self.control.phase("reading the source")
        self._check(version)
        agree(self.control, self.plan, self._schedule, self.options)
        self.control.phase("connecting")
        self.transport = open_transport(
            self.setup["backend"], self.control.store, self.control.rank, self.control.num_ranks,
            self.options.timeout, domains=self.plan.topology.domain.tolist(), check=self.control.check,
        )  # fmt: skip
        if self.plan.m2n is not None and self.plan.m2n.carried:
            self._m2n = open_m2n(self.transport, self.device, self.options.timeout, self.control.check)
        self.control.barrier("connected", "connecting")

    def _check(self, version: int) -> None:
        """Hold both ends' headers or tensors against the documents on every rank that will use them."""
        if self.end is not None and self.destination_rank is not None:
            self.end.check(self.plan, self.destination_rank)
        if self.source_end is not None:
            assert self.source_rank is not None
            extra = self.source_end.check(self.plan, [self.source_rank], version)
            self.extra = sorted({*self.extra, *extra})
        elif self.truth is not None and self.options.verify and self.end is not None:
            self.truth.check(self.plan, [], version)

    def refit(
        self, version: int, progress: Progress | None = None, released: Callable[[], None] = lambda: None
    ) -> Iteration | None:
        """Run one refit; return what it took, on rank 0. `released` is called when the source is not read any more.

        Raises TransferError, WeightsError, VerifyError: then the version was not committed, unless the
        destination's end says that it is there (the loss of a rank was seen after that).
        """
        self._refits += 1  # names what is left for others: a version may come again
        self.applied = False
        clock = Clock(self.control)
        began = time.perf_counter()
        try:
            with clock.phase("bind"):
                executor = self._bound(version)
            carried = self._carried(clock)
            sent = self._rounds(executor, clock, progress)
            destination = self._destination
            if destination is not None and destination.landing is not None:
                with clock.phase("cast"):
                    destination.cast()
            if self.options.verify:
                with clock.phase("verify"):
                    self._verify(version)
            released()
            with clock.phase("commit"):
                if destination is not None and destination.mapped is not None:
                    destination.mapped.flush()
                if self.end is not None:
                    self.end.prepare(version)
                commit(
                    self.control, self.transport, self.plan.topology, self.end, version,
                    device=self.device, applied=self._applied,
                )  # fmt: skip
        except BaseException:
            if self.end is not None and self.end.version != version:
                self.end.discard()
            raise
        seconds = time.perf_counter() - began
        self.peak = max(self.peak, executor.peak_staging_bytes + carried)
        return self._gathered(version, seconds, clock, sent)

    def _applied(self) -> None:
        self.applied = True

    def _bound(self, version: int) -> RankExecutor:
        """Return the executor over this version's memory: one that is there, where nothing moved."""
        assert self._schedule is not None
        places: list[object] = []
        if self.source_end is not None and self.source_rank is not None:
            self._source, place = self.source_end.source(self.plan, self.source_rank, version)
            places.append(place)
            self.state_dict = state_dict_of(self._source)
        if self.end is not None and self.destination_rank is not None:
            self.end.check(self.plan, self.destination_rank)
        # nobody writes over a version before all ranks have found what they send from and write to
        self.control.barrier(f"bound/{version}", "binding")
        if self.end is not None and self.destination_rank is not None:
            self._destination, place = self.end.begin(self.plan, self.destination_rank, version, self.device)
            places.append(place)
        known = next((one for seen, one in self._executors if seen == places), None)
        if known is not None:
            known.source = self._source
            return known
        lent = self._executors[-1][1].arenas if self._executors else []
        windows = None if self._destination is None else self._destination.windows
        executor = RankExecutor(self.plan, self._schedule, self._source, windows, self.device)
        executor.lend(lent)
        # two, as a destination may fill two sets of storages in turn
        self._executors = [*self._executors[-1:], (places, executor)]
        return executor

    def _carried(self, clock: Clock) -> int:
        """Run what NCCL M2N carries; return the bytes of the buffer that it took on this rank."""
        if self._m2n is None:
            return 0
        windows = None if self._destination is None else self._destination.windows
        with clock.phase("m2n"):
            return carry(self.plan, self.control.rank, self._source, windows, self.device, self._m2n)

    def _rounds(self, executor: RankExecutor, clock: Clock, progress: Progress | None) -> dict[int, int]:
        assert self.transport is not None

        def done(rounds: int) -> None:
            if progress is not None:
                progress(rounds, executor.num_rounds)
            if rounds % 16 == 0:
                self.control.check()

        return run_rounds(executor, self.transport, clock.phase, done)

    def _verify(self, version: int) -> None:
        """Compare this rank's elements with the source, found by the layouts alone, and the source with its document."""
        truth = None if self.truth is None else self.truth.truth(self.plan, version)
        try:
            if self._source is not None and self.source_rank is not None:
                check_ties(self._source, self.plan.source, self.source_rank)
            if truth is None:
                self._verify_by_sums(version)
            elif self._destination is not None:
                self.compared += verify_rank(
                    self.control.rank, self._destination.storages, self._destination.buffers, truth,
                    wire_dtypes(self.plan),
                )  # fmt: skip
        except VerifyError as error:
            raise VerifyError(
                f"{error} ({self.control.name_of(self.control.rank)}); nothing was committed"
            ) from error

    def _verify_by_sums(self, version: int) -> None:
        if self._source is not None and self.source_rank is not None:
            self.control.post(f"sums/{self._refits}", source_sums(self.plan, self.source_rank, self._source))
        destination = self._destination
        if destination is None or self.destination_rank is None:
            return
        told: dict[int, dict[str, int]] = {}
        for rank, world in enumerate(self.plan.topology.source.tolist()):
            everybody = self.control.read(f"sums/{self._refits}", world, "verifying")
            told[rank] = everybody.get(str(self.destination_rank), {})
        held, storage_of = StorageWindows(), {}
        landing = destination.landing
        held.add(
            destination.storages if landing is None else landing.others(destination.storages),
            destination.buffers,
        )
        if landing is not None:
            held.add(landing.storages, landing.buffers)
        for storage in destination.storages:
            storage_of.update({window.tensor: storage.name for window in storage.windows})
        name = self.control.name_of(self.control.rank)
        self.compared += compare_sums(self.plan, self.destination_rank, name, held, told, storage_of)
        for storage in destination.storages:
            verify_padding(self.control.rank, storage, destination.buffers[storage.name])

    def _gathered(self, version: int, seconds: float, clock: Clock, sent: dict[int, int]) -> Iteration | None:
        self.own = Iteration(version, seconds, dict(clock.seconds), sent[NETWORK], sent[DOMAIN])
        own = {
            "seconds": seconds, "phases": dict(clock.seconds), "network": sent[NETWORK], "domain": sent[DOMAIN],
            "compared": self.compared,
        }  # fmt: skip
        everybody = self.control.gather(f"iteration/{version}", own, "reporting")
        if everybody is None:
            return None
        self.compared_by_all = sum(one["compared"] for one in everybody)
        phases: dict[str, float] = {}
        for one in everybody:
            for name, value in one["phases"].items():
                phases[name] = max(phases.get(name, 0.0), value)
        return Iteration(
            version,
            max(one["seconds"] for one in everybody),
            phases,
            sum(one["network"] for one in everybody),
            sum(one["domain"] for one in everybody),
        )

    def abort(self) -> None:
        """Give up what is in flight, after a failure."""
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        """Close the connections; nothing may be in flight."""
        if self._m2n is not None:
            self._m2n.close()
            self._m2n = None
        if self.transport is not None:
            self.transport.close()
            self.transport = None
