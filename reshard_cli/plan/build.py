"""Builds the plan of a refit: a pure function of two layouts, a mode, a topology and a staging bound."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from reshard_cli.errors import DocumentError
from reshard_cli.layout.boxes import Ints
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.balance import RankSets
from reshard_cli.plan.broadcasts import with_broadcast
from reshard_cli.plan.entries import NETWORK, Entries, Intersections
from reshard_cli.plan.m2n import M2nChoice, choose_m2n
from reshard_cli.plan.pairs import TensorPair, pair_tensors
from reshard_cli.plan.relays import chained, chained_streams
from reshard_cli.plan.routes import Mode, Route, route_of
from reshard_cli.plan.streams import KEEPS, Streams, make_streams, quantum_of
from reshard_cli.plan.topology import Topology

__all__ = ["IN_FLIGHT", "PLAN_VERSION", "Plan", "build_plan", "takers"]

PLAN_VERSION = 2
_COARSE = 16384  # bytes: boxes up to this size are not cut among senders or carriers
_BLOCK_PADDING = 16
IN_FLIGHT = 2  # rounds that share the staging: one is packed while the other is on the network
_OVERLAPPING = 8  # rounds from which filling and draining is little beside messages and wake-ups
_RELAYED = 128  # rounds with relays, which lag some rounds behind
_PER_LAG = 16  # rounds for each by which the work of a broadcast lags behind
_WORTH_RELAYS = 1.1  # how many times fewer bytes of the busiest NIC are worth them
_LEAST_ROUND = 1 << 25  # bytes of the busiest rank below which a round is not worth its messages and wake-ups
_LEAST_LAGGING = (
    1 << 18
)  # the same where rounds lag behind each other, and filling and draining takes more of them


@dataclass(slots=True)
class Plan:
    """A refit as data. Everything here is the same on every rank.

    `round_quantum` is the finer grain at which a stream may be cut into `cut_rounds` rounds; where relays lag behind,
    there are more rounds than that in all; `staging` is what rounds may use, in bytes;
    `passed_on` is (rank, stream) of every rank that takes a stream's bytes from its carrier;
    `m2n` is what NCCL M2N carries before the rounds, None where it was not asked for.
    """

    mode: Mode
    source: JobLayout
    destination: JobLayout
    topology: Topology
    pairs: list[TensorPair]
    routes: list[Route]
    extra: list[str]
    entries: Entries
    streams: Streams
    round_quantum: Ints
    cut_rounds: int
    num_rounds: int
    staging: int
    intersections: Intersections = field(repr=False)
    passed_on: tuple[Ints, Ints] = field(repr=False)
    m2n: M2nChoice | None = None
    _digest: str = field(default="", init=False, repr=False)

    @property
    def digest(self) -> str:
        """The plan's fingerprint: ranks that hold the same one do the same."""
        if not self._digest:
            self._digest = _digest(self)
        return self._digest

    @property
    def network_bytes(self) -> int:
        """The bytes that cross from one domain to another."""
        return int(self.streams.num_bytes[self.streams.kind == NETWORK].sum())


def build_plan(
    source: JobLayout,
    destination: JobLayout,
    topology: Topology,
    mode: Mode,
    *,
    staging: int,
    allow_extra: bool = False,
    known: Iterable[Plan] = (),
    m2n: bool = False,
) -> Plan:
    """Return the plan. staging: bytes of extra memory that a rank may use for a round.

    m2n: NCCL M2N carries what it can of the reshard route; its buffer is taken from the staging.

    `known` plans of the same jobs and topology lend what they found, all of it where the routes are the same. Sets of
    ranks keep the numbers that they have there: the plan moves the same, but has another digest than one made alone.
    Raises WeightsError where the two sides' tensors do not fit together, DocumentError where the staging
    is too small for a single round.
    """
    lender = next(iter(known), None)
    if lender is None:
        pairs, extra = pair_tensors(source, destination, allow_extra=allow_extra)
        intersections = Intersections(source, destination, topology)
    else:
        pairs, extra, intersections = lender.pairs, lender.extra, lender.intersections
    routes = [route_of(pair, mode) for pair in pairs]
    choice = choose_m2n(source, destination, topology, pairs, routes, staging) if m2n else None
    if choice is not None:
        staging -= choice.buffer_bytes
        for index in (index for one in choice.carried for index in one.tensors):
            routes[index] = "m2n"
    conventional = mode != "hybrid"
    for other in known:
        if other.routes == routes and ("broadcast" not in routes or conventional == (other.mode != "hybrid")):
            return replace(other, mode=mode, m2n=choice)
    entries = intersections.entries(pairs, routes)
    coarse = max(1, min(_COARSE, staging // 64))
    streams = make_streams(entries, topology.rails(), quantum_of(entries, coarse), topology.num_ranks)
    least = _OVERLAPPING
    chosen = _relayed(entries, streams, topology, coarse, pairs)
    if chosen is not None:
        entries, streams = chosen
        least = _RELAYED
    if "broadcast" in routes:
        quantum = quantum_of(entries, coarse)
        entries, streams = with_broadcast(entries, streams, topology, quantum, one_chain=conventional)
        behind = math.ceil(_PER_LAG * streams.rounds_behind(topology.num_ranks))
        least = max(least, min(_RELAYED, 2 * behind), behind)
    passed_on = _neighbours(entries, streams)
    reserved = 0 if choice is None else choice.buffer_bytes
    rounds, grain = _rounds(entries, streams, passed_on, topology.num_ranks, staging, least, reserved)
    return Plan(
        mode=mode, source=source, destination=destination, topology=topology, pairs=pairs, routes=routes,
        extra=extra, entries=entries, streams=streams, round_quantum=quantum_of(entries, grain),
        cut_rounds=rounds, num_rounds=rounds + streams.longest_lag, staging=staging,
        intersections=intersections, passed_on=passed_on, m2n=choice,
    )  # fmt: skip


def _relayed(
    entries: Entries, streams: Streams, topology: Topology, coarse: int, pairs: list[TensorPair]
) -> tuple[Entries, Streams] | None:
    """Return entries and streams with relays where they make the busiest NIC's bytes clearly fewer, else None."""
    ratio = streams.best_send / streams.best_receive if streams.best_receive else 0.0
    if ratio < _WORTH_RELAYS:
        return None
    # what is widened on arrival need not come back bit for bit
    same = [pair.quantised is not None or pair.wire_dtype == pair.destination_dtype for pair in pairs]
    kept = [all(same[tensor] for tensor in one.tensors.tolist()) for one in entries.classes]
    made = chained(entries, ratio, np.array(kept, bool))
    if made is None:
        return None
    fewer = chained_streams(*made, topology.rails(), quantum_of(made[0], coarse), topology.num_ranks)
    stretched = 1 + fewer.longest_lag / _RELAYED
    before, after = (max(one.best_send, one.best_receive) for one in (streams, fewer))
    return (made[0], fewer) if after * stretched * _WORTH_RELAYS < before else None


def _staged_bytes(streams: Streams, passed_on: tuple[Ints, Ints], num_ranks: int) -> tuple[Ints, Ints]:
    """Return per rank the bytes that pass through its staging in all, and the number of its streams.

    A sender packs, a carrier takes, and the carrier's neighbours take what it passes on. What a carrier holds for the
    next hop lies there twice as long as a round does, and counts twice.
    """
    size = streams.num_bytes.astype(np.float64)
    total = np.bincount(streams.sender, size, minlength=num_ranks)
    total += np.bincount(streams.carrier, size, minlength=num_ranks)
    count = np.bincount(streams.sender, minlength=num_ranks)
    count += np.bincount(streams.carrier, minlength=num_ranks)
    keeps = (streams.held & KEEPS) > 0
    total += np.bincount(streams.carrier[keeps], size[keeps], minlength=num_ranks)
    count += np.bincount(streams.carrier[keeps], minlength=num_ranks)
    neighbour, stream = passed_on
    total += np.bincount(neighbour, size[stream], minlength=num_ranks)
    count += np.bincount(neighbour, minlength=num_ranks)
    return total.astype(np.int64), count.astype(np.int64)


def _neighbours(entries: Entries, streams: Streams) -> tuple[Ints, Ints]:
    """Return (rank, stream) of every rank that takes a stream's bytes from its carrier."""
    crossing = np.nonzero(streams.kind == NETWORK)[0]
    rank, index = takers(entries.wanter_sets, streams.carrier[crossing], streams.wanters[crossing])
    return rank, crossing[index].astype(np.int64)


def takers(sets: RankSets, carrier: Ints, wanters: Ints) -> tuple[Ints, Ints]:
    """Return (rank, index) of the ranks to which carriers pass on: those of their wanter sets, but themselves."""
    several = np.nonzero(sets.sizes[wanters] > 1)[0]
    sizes = sets.sizes[wanters[several]]
    index = np.repeat(several, sizes)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank = sets.members[sets.offsets[wanters[index]] + nth]
    other = rank != carrier[index]
    return rank[other], index[other].astype(np.int64)


def _rounds(
    entries: Entries,
    streams: Streams,
    passed_on: tuple[Ints, Ints],
    num_ranks: int,
    staging: int,
    least: int,
    reserved: int,
) -> tuple[int, int]:
    """Return (rounds, grain): `IN_FLIGHT` rounds of each rank fit the staging, with cuts rounded to the grain.

    There are `least` of them where there is enough to overlap, also where the staging would hold everything.
    reserved: the bytes that NCCL M2N has of what was given, at most half of it.
    """
    if not len(streams.kind):
        return 1, 1
    total, count = _staged_bytes(streams, passed_on, num_ranks)
    floor = _LEAST_ROUND if least == _OVERLAPPING else _LEAST_LAGGING * _RELAYED // min(least, _RELAYED)
    overlapping = min(least, int(total.max()) // floor)
    if overlapping <= 1 and total.max() + count.max() * _BLOCK_PADDING <= staging:
        return 1, max(1, min(_COARSE, staging // 64))
    widest = max(one.item_size for one in entries.classes)
    arena = staging // IN_FLIGHT
    grain = max(widest, min(_COARSE, arena // 4 // int(count.max())))
    room = arena - count * (grain + _BLOCK_PADDING)
    if np.any(room[total > 0] <= 0):
        enough = int(2 * IN_FLIGHT * count.max() * (widest + _BLOCK_PADDING)) * (2 if reserved else 1)
        raise DocumentError(
            f"--staging: {staging + reserved} bytes are too few for the {int(count.max())} streams of the busiest rank; "
            f"give at least {math.ceil(enough / 2**20 * 1e6) / 1e6:g} MiB"
        )
    return max(overlapping, int(np.max(-(-total // np.maximum(room, 1))))), grain


def _digest(plan: Plan) -> str:
    hasher = hashlib.sha256()
    head = [PLAN_VERSION, plan.mode, plan.staging, plan.cut_rounds, plan.routes]
    hasher.update(json.dumps(head).encode())
    for one in plan.m2n.carried if plan.m2n is not None else ():
        hasher.update(repr(one).encode())
    for pair in plan.pairs:
        told = (pair.name, pair.shape, pair.source_dtype, pair.destination_dtype, pair.block, pair.quantised)
        hasher.update(repr(told).encode())
    for array in _arrays(plan):
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def _arrays(plan: Plan) -> Iterable[Ints]:
    topology, entries, streams = plan.topology, plan.entries, plan.streams
    yield from (topology.source, topology.destination, topology.domain, plan.round_quantum)
    yield from (entries.kind, entries.holders, entries.wanters, entries.tensor_class, entries.box)
    for one in entries.classes:
        yield from (one.tensors, one.lo, one.hi)
    for sets in (entries.holder_sets, entries.wanter_sets):
        yield from (sets.members, sets.offsets)
    yield from (
        streams.kind,
        streams.sender,
        streams.carrier,
        streams.wanters,
        streams.start,
        streams.stop,
        streams.lag,
    )
    if streams.held.any():
        yield streams.held
