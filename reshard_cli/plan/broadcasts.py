"""The broadcast route: tensors are gathered whole in the source, then go from domain to domain, to everybody.

A tensor's *roots* are the ranks in one domain of those that hold it (of its pipeline stage, where there are stages).
They take turns: every root gathers an equal part of what each rank holds, over NVLink or the network, and sends it
out once. From there it goes down a chain of all destination domains, into each once and on to the next once, and in
each domain from the carriers to every rank, which keeps what it wants of it. A part that several destination domains
have to pass is `LAG` rounds further at each hop, and lies in their staging until then, as ranks do not keep it whole.
Many tensors share a round, and every hop works on a round of its own at the same time.

What published refits do, as this route models it:

- NeMo RL: each trainer makes tensors whole (`full_tensor()`, Megatron-Bridge's export); rank 0 packs them in two
  buffers and broadcasts in one NCCL group of all training and all inference ranks (`broadcast_weights_for_collective`).
- slime, miles: tensors are all-gathered over TP and EP in buckets; in each pipeline stage the rank of DP 0 and TP 0 is
  the root of a group with all inference ranks (`UpdateWeightFromDistributed`, "slime-pp_{pp_rank}").
- verl: `checkpoint_engine` all-gathers, then broadcasts (nccl) or passes on in a ring of ranks (nixl), in two buffers.
- vLLM's `packed_broadcast_producer` and SkyRL's, prime-rl's senders: rank 0 of the trainers is the one root.

Where this is kinder than any of them: a part is gathered at one root only, not on every rank of the source or stage;
the roots of a stage share its domain's NICs evenly (rings of NCCL's get there where all trainers are in the group);
nobody waits for a tensor or a buffer to be complete; and there is no cost for each tensor.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reshard_cli.layout.boxes import Ints
from reshard_cli.plan.balance import Floats, RankSets, least_maximum, share_out
from reshard_cli.plan.entries import BROADCAST, DOMAIN, LOCAL, NETWORK, Entries
from reshard_cli.plan.relays import LAG
from reshard_cli.plan.streams import (
    GATHERS,
    KEEPS,
    SENDS_HELD,
    Streams,
    cut_segments,
    groups_of,
    round_positions,
    sorted_streams,
)
from reshard_cli.plan.topology import Topology

__all__ = ["with_broadcast"]


@dataclass(slots=True)
class _Segments:
    """Runs of the line with one sender, root and carriers. `group`: which run of equal holders and roots each is in."""

    group: Ints
    sender: Ints
    root: Ints
    start: Ints
    stop: Ints

    @property
    def fetched(self) -> NDArray[np.bool_]:
        """Whether the root has it from another rank."""
        found: NDArray[np.bool_] = self.sender != self.root
        return found

    @property
    def lag(self) -> Ints:
        """The rounds by which a root sends it on after the first round."""
        return np.where(self.fetched, LAG, 0)

    @property
    def held(self) -> Ints:
        """What a root sends it from, as `held` of a stream."""
        return np.where(self.fetched, SENDS_HELD, 0)

    def streams(
        self,
        here: Ints,
        kind: Ints | int,
        sender: Ints | int,
        carrier: Ints | int,
        wanters: Ints | int,
        lag: Ints | int,
        held: Ints | int,
    ) -> Ints:
        """Return the table of the streams of these segments."""
        columns = (kind, sender, carrier, wanters, self.start[here], self.stop[here], lag, held)
        return np.stack([np.broadcast_to(np.asarray(one, np.int64), here.shape) for one in columns])


class _Sets:
    """The wanter sets, to which those of this route are added: whole domains, and single ranks."""

    def __init__(self, sets: RankSets) -> None:
        members, offsets = sets.members.tolist(), sets.offsets.tolist()
        self._numbers = {
            tuple(members[a:b]): number for number, (a, b) in enumerate(itertools.pairwise(offsets))
        }

    def number(self, ranks: tuple[int, ...]) -> int:
        return self._numbers.setdefault(ranks, len(self._numbers))

    def singles(self, ranks: Ints) -> Ints:
        """Return the number of each rank's own set."""
        distinct, inverse = np.unique(ranks, return_inverse=True)
        numbers = [self.number((rank,)) for rank in distinct.tolist()]
        return np.array(numbers, np.int64)[inverse.reshape(-1)]

    def frozen(self) -> RankSets:
        return _rank_sets(list(self._numbers))


def with_broadcast(
    entries: Entries, streams: Streams, topology: Topology, quantum: Ints, *, one_chain: bool
) -> tuple[Entries, Streams]:
    """Return the entries and streams with those of the tensors that travel whole.

    quantum: see `quantum_of`; one_chain: every root sends one copy out, as published systems do. Otherwise roots send
    as many as the busiest NIC does not notice, so that chains are short.
    """
    rows = np.nonzero(entries.kind == BROADCAST)[0]
    if not len(rows):
        return entries, streams
    domains = _destination_domains(topology)
    first, last, holders, roots = groups_of(entries, rows)
    sizes = np.unique([len(one) for one in domains])
    edges = {int(n): _edges(entries, quantum, first, last, int(n)) for n in sizes}
    own = entries.wanter_sets.sizes[roots]
    root_edges = {int(n): _edges(entries, quantum, first, last, int(n)) for n in np.unique(own)}
    cut = np.unique(np.concatenate([one.reshape(-1) for one in (*edges.values(), *root_edges.values())]))
    start, stop = cut[:-1], cut[1:]
    group = np.searchsorted(first, start, side="right") - 1
    root = np.zeros(len(start), np.int64)
    for size, one in root_edges.items():
        here = np.nonzero(own[group] == size)[0]
        at = entries.wanter_sets.offsets[roots[group[here]]] + _turn(one, start[here], group[here])
        root[here] = entries.wanter_sets.members[at]
    segments = _gathered(entries, holders, _Segments(group, root, root, start, stop), topology, quantum)
    sets = _Sets(entries.wanter_sets)
    chains = 1
    if not one_chain:
        amounts = np.bincount(roots, last - first, minlength=len(entries.wanter_sets))
        chains = _chains(streams, domains, int(amounts.sum()), amounts / entries.wanter_sets.sizes)
    chain = np.arange(len(domains)) * chains // len(domains)
    tables = [
        _gather(segments, topology, sets),
        *_in_roots_domains(segments, domains, topology, sets),
        *_down_chains(segments, domains, chain, edges, topology, sets),
    ]
    whole = np.concatenate(tables, axis=1)
    table = np.concatenate([streams.table(), whole], axis=1)
    send, receive = _least(table, whole, entries, topology)
    frozen = sets.frozen()
    made = sorted_streams(
        table,
        topology.num_ranks,
        len(frozen),
        max(send, streams.best_send),
        max(receive, streams.best_receive),
    )
    return replace(entries, wanter_sets=frozen), made


def _chains(streams: Streams, domains: list[Ints], total: int, by_root: Floats) -> int:
    """Return into how many chains the domains are parted, so that no root sends more than the busiest NIC takes.

    by_root: what each set of roots has, over their number.
    """
    whole = float(total) / min(len(one) for one in domains)
    spare = streams.best_receive + whole - streams.best_send
    return int(np.clip(spare // max(1.0, by_root.max()), 1, len(domains)))


def _destination_domains(topology: Topology) -> list[Ints]:
    """Return the destination's ranks by domain."""
    domain = topology.domain[topology.destination]
    return [topology.destination[domain == one] for one in np.unique(domain)]


def _edges(entries: Entries, quantum: Ints, first: Ints, last: Ints, parts: int) -> Ints:
    """Return where each group is cut in equal parts [groups, parts + 1], at places where a box may be cut."""
    raw = first[:, None] + (last - first)[:, None] * np.arange(parts + 1) // parts
    return round_positions(entries, quantum, raw.reshape(-1)).reshape(raw.shape)


def _turn(edges: Ints, start: Ints, group: Ints) -> Ints:
    """Return whose turn each segment is: its part, one further in each group, so that short ones spread too."""
    parts = edges.shape[1] - 1
    part = np.searchsorted(edges[:, :-1].reshape(-1), start, side="right") - 1
    turn: Ints = (part + group) % parts
    return turn


def _gathered(
    entries: Entries, holders: Ints, segments: _Segments, topology: Topology, quantum: Ints
) -> _Segments:
    """Return the segments cut among their senders: the root itself, else holders in its domain, else any."""
    domain, num_ranks = topology.domain, topology.num_ranks
    key = holders[segments.group] * num_ranks + segments.root
    distinct, index = np.unique(key, return_inverse=True)
    near: dict[tuple[int, tuple[int, ...]], int] = {}
    numbers = []
    for one in distinct.tolist():
        root = one % num_ranks
        held = entries.holder_sets.of(one // num_ranks)
        inside = held[domain[held] == domain[root]]
        if root in inside:
            choice = (LOCAL, (root,))
        else:
            choice = (DOMAIN, tuple(inside.tolist())) if len(inside) else (NETWORK, tuple(held.tolist()))
        numbers.append(near.setdefault(choice, len(near)))
    chosen = np.array(numbers, np.int64)[index.reshape(-1)]
    kinds = np.array([kind for kind, _ in near])
    sets = _rank_sets([ranks for _, ranks in near])
    amounts = np.bincount(chosen, segments.stop - segments.start, minlength=len(near)).astype(np.int64)
    # NICs and NVLink are shared out each by itself
    parted = [share_out(sets, np.where(kinds == kind, amounts, 0), num_ranks) for kind in np.unique(kinds)]
    shares = np.sum(parted, axis=0)
    at, sender, start, stop = cut_segments(
        sets, chosen, segments.root, segments.start, segments.stop, shares, topology.rails()
    )
    start, stop = (round_positions(entries, quantum, edge) for edge in (start, stop))
    kept = stop > start
    at = at[kept]
    return _Segments(segments.group[at], sender[kept], segments.root[at], start[kept], stop[kept])


def _gather(segments: _Segments, topology: Topology, sets: _Sets) -> Ints:
    """Return the streams that bring to the roots what they do not hold."""
    away = np.nonzero(segments.fetched)[0]
    root, sender = segments.root[away], segments.sender[away]
    kind = np.where(topology.domain[sender] == topology.domain[root], DOMAIN, NETWORK)
    # a root that is the whole destination has nobody to send it to
    alone = (root == topology.destination[0]) & (len(topology.destination) == 1)
    held = np.where(alone, GATHERS, GATHERS | KEEPS)
    return segments.streams(away, kind, sender, root, sets.singles(root), 0, held)


def _in_roots_domains(
    segments: _Segments, domains: list[Ints], topology: Topology, sets: _Sets
) -> list[Ints]:
    """Return what goes from the roots to destination ranks of their own domain, and what a root keeps for itself."""
    tables = []
    home = topology.domain[segments.root]
    for members in domains:
        near = topology.domain[members[0]] == home
        for rank in members.tolist() if near.any() else ():
            own = sets.number((rank,))
            here = np.nonzero(near & (segments.root != rank))[0]
            lag, held = segments.lag[here], segments.held[here]
            tables.append(segments.streams(here, DOMAIN, segments.root[here], rank, own, lag, held))
            here = np.nonzero(near & (segments.root == rank) & ~segments.fetched)[0]
            tables.append(segments.streams(here, LOCAL, rank, rank, own, 0, 0))
    return tables


def _down_chains(
    segments: _Segments,
    domains: list[Ints],
    chain: Ints,
    edges: dict[int, Ints],
    topology: Topology,
    sets: _Sets,
) -> list[Ints]:
    """Return the streams from the roots to the first domain of each chain, and from domain to domain.

    chain: the number of each domain's chain. A root's own domain is in none.
    """
    tables = []
    outside = [topology.domain[members[0]] != topology.domain[segments.root] for members in domains]
    for one in np.unique(chain):
        numbers = np.nonzero(chain == one)[0].tolist()
        last = np.zeros(len(segments.root), np.int64)
        for number in numbers:
            last[outside[number]] = number
        origin, lag, held = segments.root.copy(), segments.lag.copy(), segments.held.copy()
        for number in numbers:
            members = domains[number]
            here = np.nonzero(outside[number])[0]
            turn = _turn(edges[len(members)], segments.start[here], segments.group[here])
            carrier, wanters = members[turn], sets.number(tuple(members.tolist()))
            flags = held[here] | np.where(last[here] > number, KEEPS, 0)
            tables.append(segments.streams(here, NETWORK, origin[here], carrier, wanters, lag[here], flags))
            origin[here] = carrier
            lag[here] += LAG
            held[here] = SENDS_HELD
    return tables


def _least(table: Ints, whole: Ints, entries: Entries, topology: Topology) -> list[float]:
    """Return the least possible network bytes of the busiest sender and taker, fragments and whole tensors together.

    table: all streams; whole: those of this route. Which domains send and take what travels whole is given; inside
    a domain any of its ranks could.
    """
    crossing = np.nonzero(entries.kind == NETWORK)[0]
    found = []
    for column, known, chosen in (
        (1, entries.holder_sets, entries.holders),
        (2, entries.wanter_sets, entries.wanters),
    ):
        amounts = np.bincount(chosen[crossing], entries.total_bytes[crossing], minlength=len(known))
        loads, own = (_network_load(one, one[column], topology.num_ranks) for one in (table, whole))
        domain, at = np.unique(topology.domain, return_inverse=True)
        more = _rank_sets([tuple(np.nonzero(topology.domain == one)[0].tolist()) for one in domain])
        total = np.bincount(at.reshape(-1), own, minlength=len(more))
        both = RankSets(
            np.concatenate([known.members, more.members]),
            np.concatenate([known.offsets, known.offsets[-1] + more.offsets[1:]]),
        )
        found.append(least_maximum(both, np.concatenate([amounts, total]).astype(np.int64), loads))
    return found


def _network_load(table: Ints, rank: Ints, num_ranks: int) -> Floats:
    """Return the bytes of each rank at one end of the network streams of a table."""
    size = (table[5] - table[4]) * (table[0] == NETWORK)
    return np.bincount(rank, size, minlength=num_ranks).astype(np.float64)


def _rank_sets(ranks: list[tuple[int, ...]]) -> RankSets:
    members = [rank for one in ranks for rank in one]
    offsets = np.cumsum([0, *(len(one) for one in ranks)])
    return RankSets(np.array(members, np.int64), offsets.astype(np.int64))
