"""Cuts the line of all entries into streams: runs of bytes that one rank sends to one carrier.

A carrier takes bytes off the network for all ranks of its domain that want them and passes them on. Both
cuts, among the carriers of a domain and among the holders of the bytes, follow the shares of `balance`;
ranks with the same index in their domains (rails) are lined up with each other, which costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import Ints, changes
from reshard_cli.plan.balance import Floats, RankSets, best_maximum, share_out
from reshard_cli.plan.entries import DOMAIN, NETWORK, Entries, TensorClass

__all__ = [
    "GATHERS",
    "KEEPS",
    "SENDS_HELD",
    "Streams",
    "cut_groups",
    "cut_segments",
    "groups_of",
    "make_streams",
    "quantum_of",
    "round_positions",
    "sorted_streams",
]

GATHERS, KEEPS, SENDS_HELD = 1, 2, 4  # of a stream's `held`


@dataclass(slots=True)
class Streams:
    """The streams as columns: kind, sender and carrier (world ranks), wanter set, bytes of the line, lag, held.

    A stream with a lag is a relay's: its sender is a carrier of another stream, which has the bytes that many
    rounds before. What travels whole is relayed from staging, and `held` has flags for that: the carrier is a root
    (GATHERS), the carrier holds the bytes for the next hop (KEEPS), the sender sends what it held (SENDS_HELD).
    best_send and best_receive: the least possible network bytes of the busiest sender and carrier.
    """

    kind: Ints
    sender: Ints
    carrier: Ints
    wanters: Ints
    start: Ints
    stop: Ints
    lag: Ints
    held: Ints
    best_send: float
    best_receive: float

    @property
    def num_bytes(self) -> Ints:
        """The bytes of each stream."""
        return self.stop - self.start

    @property
    def longest_lag(self) -> int:
        """The rounds by which the last stream begins after the first."""
        return int(self.lag.max(initial=0))

    @classmethod
    def of(cls, table: Ints, best_send: float, best_receive: float) -> Streams:
        """Return the streams of the rows of a table (see `table`)."""
        kind, sender, carrier, wanters, start, stop, lag, held = table
        return cls(kind, sender, carrier, wanters, start, stop, lag, held, best_send, best_receive)

    def table(self) -> Ints:
        """Return the columns as rows of one array, in the order of the fields."""
        columns = (
            self.kind,
            self.sender,
            self.carrier,
            self.wanters,
            self.start,
            self.stop,
            self.lag,
            self.held,
        )
        return np.stack(columns)

    def rounds_behind(self, num_ranks: int) -> float:
        """Return how many rounds' worth of the busiest NIC is left when streams without a lag are through.

        Where everything goes through relays that is the longest lag; where little does, almost nothing. Without a
        network it is about the domains.
        """
        lags, index = np.unique(self.lag, return_inverse=True)
        if len(lags) < 2:
            return 0.0
        chosen = self.kind == (NETWORK if np.any(self.kind == NETWORK) else DOMAIN)
        size, row = self.num_bytes[chosen], index.reshape(-1)[chosen]
        found = np.zeros(len(lags))
        for rank in (self.sender[chosen], self.carrier[chosen]):
            by_lag = np.bincount(row * num_ranks + rank, size, minlength=len(lags) * num_ranks)
            left = np.cumsum(by_lag.reshape(len(lags), num_ranks)[::-1], axis=0)[::-1]
            found = np.maximum(found, left.max(axis=1))
        return float((np.diff(lags) * found[1:]).sum() / found[0])


def quantum_of(entries: Entries, tolerance: int) -> Ints:
    """Return per entry the bytes at whose multiples a box may be cut.

    That is the largest row (all of the box, or a trailing part of its dims) of at most `tolerance` bytes,
    so boxes up to that size stay whole; where even the last dim is longer, a part of it.
    """
    by_box = [_quantum_of_class(one, tolerance) for one in entries.classes]
    if not by_box:
        return np.ones(0, np.int64)
    first = np.cumsum([0, *map(len, by_box)])[:-1]
    return np.concatenate(by_box)[first[entries.tensor_class] + entries.box]


def _quantum_of_class(one: TensorClass, tolerance: int) -> Ints:
    sizes = one.hi - one.lo
    rows = np.full(len(sizes), one.item_size, np.int64)
    best = np.full(len(sizes), max(1, tolerance // one.item_size) * one.item_size, np.int64)
    for dim in range(sizes.shape[1] - 1, -1, -1):
        rows = rows * sizes[:, dim]
        best = np.where(rows <= tolerance, rows, best)
    return best if sizes.shape[1] else rows


def round_positions(entries: Entries, quantum: Ints, positions: Ints) -> Ints:
    """Return each position of the line moved to the nearest place where its box may be cut."""
    if not len(entries.kind):
        return positions
    index = np.searchsorted(entries.start, positions, side="right") - 1
    index = np.minimum(index, len(entries.kind) - 1)
    inside = positions - entries.start[index]
    box = entries.box_bytes[index]
    step = quantum[index]
    rounded = (inside % box + step // 2) // step * step
    moved: Ints = entries.start[index] + inside // box * box + np.minimum(rounded, box)
    return moved


def make_streams(
    entries: Entries, rails: Ints, quantum: Ints, num_ranks: int, *, skip: int | None = None
) -> Streams:
    """Return the streams of all groups of entries but the kind to skip. rails: each rank's index in its domain."""
    columns: list[Ints] = []
    best = [0.0, 0.0]
    for kind in (NETWORK, DOMAIN, 2):
        chosen = np.nonzero(entries.kind == kind)[0]
        if not len(chosen) or kind == skip:
            continue
        first, last, holders, wanters = groups_of(entries, chosen)
        amounts = last - first
        carrier_total = np.bincount(wanters, amounts, minlength=len(entries.wanter_sets)).astype(np.int64)
        shares = share_out(entries.wanter_sets, carrier_total, num_ranks)
        if kind == NETWORK:
            best[1] = best_maximum(entries.wanter_sets, carrier_total, shares, num_ranks)
        group, carrier, start, stop = cut_groups(entries.wanter_sets, wanters, first, last, shares)
        start, stop = (round_positions(entries, quantum, edge) for edge in (start, stop))
        kept = stop > start
        group, carrier, start, stop = group[kept], carrier[kept], start[kept], stop[kept]
        sender_total = np.bincount(holders, amounts, minlength=len(entries.holder_sets)).astype(np.int64)
        sent = share_out(entries.holder_sets, sender_total, num_ranks)
        if kind == NETWORK:
            best[0] = best_maximum(entries.holder_sets, sender_total, sent, num_ranks)
        segment, sender, start, stop = cut_segments(
            entries.holder_sets, holders[group], carrier, start, stop, sent, rails
        )
        start, stop = (round_positions(entries, quantum, edge) for edge in (start, stop))
        kept = stop > start
        segment, sender, start, stop = segment[kept], sender[kept], start[kept], stop[kept]
        made = [sender, carrier[segment], wanters[group[segment]], start, stop]
        none = np.zeros(len(start), np.int64)
        columns.append(np.stack([np.full(len(start), kind), *made, none, none]))
    table = np.concatenate(columns, axis=1) if columns else np.zeros((8, 0), np.int64)
    return sorted_streams(table, num_ranks, len(entries.wanter_sets), best[0], best[1])


def sorted_streams(
    table: Ints, num_ranks: int, num_sets: int, best_send: float, best_receive: float
) -> Streams:
    """Return the streams of a table (see `Streams.table`), by kind, sender, carrier, set, held and start."""
    # one key for kind, sender, carrier and wanter set: they are small enough for 64 bits together
    key = (table[0] * num_ranks + table[1]) * num_ranks + table[2]
    key = key * max(1, num_sets) + table[3]
    table = table[:, np.lexsort((table[4], table[7], key))].astype(np.int64, copy=False)
    return Streams.of(table, best_send, best_receive)


def groups_of(entries: Entries, chosen: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (start, stop, holders, wanters) of each run of entries with the same holders and wanters."""
    holders, wanters = entries.holders[chosen], entries.wanters[chosen]
    at = np.nonzero(changes(holders, wanters))[0]
    first = entries.start[chosen[at]]
    ends = np.concatenate([at[1:], [len(chosen)]]) - 1
    last = entries.start[chosen[ends] + 1]
    return first, last, holders[at], wanters[at]


def cut_groups(
    sets: RankSets, wanters: Ints, first: Ints, last: Ints, shares: Floats
) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut each group among its wanters by their shares. Returns (group, carrier, start, stop)."""
    sizes = sets.sizes[wanters]
    group = np.repeat(np.arange(len(wanters)), sizes)
    nth = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    member = sets.offsets[wanters[group]] + nth
    running = np.cumsum(shares)
    before = np.concatenate([[0.0], running])
    base = before[sets.offsets[wanters]]
    whole = before[sets.offsets[wanters + 1]] - base
    amount = (last - first).astype(np.float64)
    scale = np.divide(amount, whole, out=np.zeros_like(amount), where=whole > 0)
    start = first[group] + np.rint((before[member] - base[group]) * scale[group]).astype(np.int64)
    stop = first[group] + np.rint((before[member + 1] - base[group]) * scale[group]).astype(np.int64)
    start = np.where(nth == 0, first[group], start)
    stop = np.where(nth == sizes[group] - 1, last[group], stop)
    return group.astype(np.int64), sets.members[member], start, stop


def cut_segments(
    sets: RankSets, holders: Ints, carrier: Ints, start: Ints, stop: Ints, shares: Floats, rails: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut the carriers' segments among the holders. Returns (segment, sender, start, stop).

    Per holder set, the segments follow each other by the carriers' rails and the holders by their own, so
    that equal shares meet the same rail.
    """
    num_ranks = len(rails)
    order = np.lexsort((start, (holders * num_ranks + rails[carrier]) * num_ranks + carrier))
    length = (stop - start)[order]
    edge = np.concatenate([[0], np.cumsum(length)])
    owner = holders[order]
    at = np.nonzero(changes(owner))[0]
    begin = edge[at]
    end = edge[np.concatenate([at[1:], [len(owner)]])]
    sizes = sets.sizes[owner[at]]
    block = np.repeat(np.arange(len(at)), sizes)
    nth = np.arange(len(block)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    member = sets.offsets[owner[at][block]] + nth
    member = member[np.lexsort((sets.members[member], rails[sets.members[member]], block))]
    amount = shares[member]
    running = np.cumsum(amount)
    first_of = np.searchsorted(block, np.arange(len(at)))
    base = np.concatenate([[0.0], running])[first_of]
    whole = np.add.reduceat(amount, first_of)
    scale = np.divide((end - begin).astype(float), whole, out=np.zeros(len(at)), where=whole > 0)
    upto = begin[block] + np.rint((running - base[block]) * scale[block]).astype(np.int64)
    upto = np.where(nth == sizes[block] - 1, end[block], np.minimum(upto, end[block]))
    edges = np.sort(np.concatenate([edge, upto]))
    edges = edges[changes(edges)]
    low, high = edges[:-1], edges[1:]
    segment = np.searchsorted(edge, low, side="right") - 1
    sender = sets.members[member[np.searchsorted(upto, low, side="right")]]
    shift = low - edge[segment]
    chosen = order[segment]
    return chosen, sender, start[chosen] + shift, start[chosen] + shift + (high - low)
