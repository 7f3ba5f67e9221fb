"""Relays: where the source's NICs would be the bottleneck, destination domains pass bytes on to each other.

A box that k domains want leaves the source only once for each of a few *chains* of domains; inside a chain a
carrier of one domain sends it to the next domain's carrier, some rounds after it has it. So a source byte need not
leave its domain more often than its NICs can bear, and every destination NIC sends at most what it takes.

The line of bytes then has each box once for a chain, not once for a domain. A stream of it is cut so that it has
one carrier in each domain of its chain; its *hops* are streams of the same range, each `LAG` rounds behind the
one before, when the bytes have been received, passed on in the domain, and unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reshard_cli.layout.boxes import Ints, changes
from reshard_cli.plan.balance import best_maximum, share_out
from reshard_cli.plan.entries import NETWORK, Entries
from reshard_cli.plan.streams import (
    Streams,
    cut_groups,
    cut_segments,
    make_streams,
    round_positions,
    sorted_streams,
)

__all__ = ["LAG", "Chains", "chained", "chained_streams"]

Booleans = np.ndarray[tuple[int], np.dtype[np.bool_]]
LAG = 2  # rounds between two hops: the network, then the domain's exchange and unpacking


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains' wanter sets [chains, longest], -1 behind a chain's end; `path` is each entry's chain, or -1."""

    sets: Ints
    path: Ints

    @property
    def lengths(self) -> Ints:
        """The number of domains of each chain."""
        found: Ints = (self.sets >= 0).sum(axis=1)
        return found


def chained(entries: Entries, ratio: float, kept: Booleans) -> tuple[Entries, Chains] | None:
    """Return the entries with each box once for a chain of domains, or None where no box has several domains.

    ratio: how many times the source's busiest NIC has more to send than the destination's busiest has to take.
    A box that k domains want gets k / ratio chains, rounded down, and one at least. kept [classes]: whether
    destination ranks keep what they take as it travels, so that they can send it on.
    """
    crossing = np.nonzero(entries.kind == NETWORK)[0]
    order = np.lexsort((entries.wanters[crossing], entries.box[crossing], entries.tensor_class[crossing]))
    rows = crossing[order]
    new = changes(entries.tensor_class[rows], entries.box[rows], entries.holders[rows])
    first = np.nonzero(new)[0]
    count = np.diff(np.concatenate([first, [len(rows)]]))
    if not len(rows) or count.max() < 2:
        return None
    chains = np.maximum(1, np.floor(count / ratio).astype(np.int64))
    chains = np.where(kept[entries.tensor_class[rows[first]]], chains, count)
    if np.all(chains == count):
        return None
    box = np.repeat(np.arange(len(first)), count)
    nth = np.arange(len(rows)) - first[box]
    chain = nth * chains[box] // count[box]
    heads = np.nonzero(changes(box, chain))[0]
    member = np.repeat(np.arange(len(heads)), np.diff(np.concatenate([heads, [len(rows)]])))
    hop = np.arange(len(rows)) - heads[member]
    sets = np.full((len(heads), int(hop.max()) + 1), -1, np.int64)
    sets[member, hop] = entries.wanters[rows]
    distinct, number = np.unique(sets, axis=0, return_inverse=True)
    others = np.nonzero(entries.kind != NETWORK)[0]
    order = np.concatenate([rows[heads], others])
    path = np.concatenate([number.reshape(-1), np.full(len(others), -1, np.int64)])
    columns = (entries.kind, entries.holders, entries.wanters, entries.tensor_class, entries.box,
               entries.box_bytes, entries.num_tensors)  # fmt: skip
    table = np.stack([*(column[order] for column in columns), path])
    table = table[:, np.lexsort((table[2], table[7], table[1], table[0]))]
    kind, holders, wanters, tensor_class, box_of, box_bytes, num_tensors, path = table
    start = np.concatenate([[0], np.cumsum(box_bytes * num_tensors)]).astype(np.int64)
    made = replace(
        entries, kind=kind, holders=holders, wanters=wanters, tensor_class=tensor_class, box=box_of,
        box_bytes=box_bytes, num_tensors=num_tensors, start=start,
    )  # fmt: skip
    return made, Chains(distinct, path)


def chained_streams(entries: Entries, chains: Chains, rails: Ints, quantum: Ints, num_ranks: int) -> Streams:
    """Return the streams of entries with chains: those from the source, their hops, and all that is no network."""
    rest = make_streams(entries, rails, quantum, num_ranks, skip=NETWORK)
    rows = np.nonzero(entries.kind == NETWORK)[0]
    new = changes(entries.holders[rows], chains.path[rows])
    at = rows[new]
    first = entries.start[at]
    last = np.concatenate([first[1:], [entries.start[rows[-1] + 1]]])
    holders, path = entries.holders[at], chains.path[at]
    amounts = last - first
    sets, lengths = entries.wanter_sets, chains.lengths[path]
    longest = chains.sets.shape[1]
    taken = np.zeros(len(sets), np.int64)
    for hop in range(longest):
        on = np.nonzero(lengths > hop)[0]
        np.add.at(taken, chains.sets[path[on], hop], amounts[on])
    shares = share_out(sets, taken, num_ranks)
    cuts: list[tuple[Ints, Ints]] = []
    for hop in range(longest):
        here = np.nonzero(lengths > hop)[0]
        _, carrier, start, stop = cut_groups(
            sets, chains.sets[path[here], hop], first[here], last[here], shares
        )
        start, stop = (round_positions(entries, quantum, edge) for edge in (start, stop))
        kept = stop > start
        cuts.append((start[kept], carrier[kept]))
    edges = np.unique(np.concatenate([first, *(start for start, _ in cuts)]))
    start, stop = edges, np.concatenate([edges[1:], last[-1:]])
    group = np.searchsorted(first, start, side="right") - 1
    carriers = np.full((len(start), longest), -1, np.int64)
    for hop, (begin, carrier) in enumerate(cuts):
        here = np.nonzero(lengths[group] > hop)[0]
        carriers[here, hop] = carrier[np.searchsorted(begin, start[here], side="right") - 1]
    total = np.bincount(holders, amounts, minlength=len(entries.holder_sets)).astype(np.int64)
    sent = share_out(entries.holder_sets, total, num_ranks)
    segment, sender, start, stop = cut_segments(
        entries.holder_sets, holders[group], carriers[:, 0], start, stop, sent, rails
    )
    start, stop = (round_positions(entries, quantum, edge) for edge in (start, stop))
    kept = stop > start
    segment, sender, start, stop = segment[kept], sender[kept], start[kept], stop[kept]
    tables = []
    relayed = np.zeros(num_ranks)
    for hop in range(longest):
        here = np.nonzero(lengths[group[segment]] > hop)[0]
        origin = sender[here] if hop == 0 else carriers[segment[here], hop - 1]
        wanted = chains.sets[path[group[segment[here]]], hop]
        columns = (origin, carriers[segment[here], hop], wanted, start[here], stop[here])
        same = np.ones(len(here), np.int64)
        tables.append(np.stack([same * NETWORK, *columns, same * hop * LAG, same * 0]))
        if hop:
            relayed += np.bincount(origin, stop[here] - start[here], minlength=num_ranks)
    best_send = best_maximum(entries.holder_sets, total, sent, num_ranks)
    return sorted_streams(
        np.concatenate([*tables, rest.table()], axis=1), num_ranks, len(sets),
        max(best_send, float(relayed.max(initial=0))), best_maximum(sets, taken, shares, num_ranks),
    )  # fmt: skip
