"""Works out what a plan's page draws: bytes by sender and receiver, by rank, and by round, coarse where many.

Everything is summed with numpy over the plan's streams; loops run only over what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.plan.build import Plan
from reshard_cli.plan.cost import Traffic, traffic_of
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.plan.schedule import _edges
from reshard_cli.plan.streams import GATHERS

__all__ = ["Axis", "load_data", "make_axis", "matrix_data", "rounds_data"]

_MOST_CELLS = 128  # per side of a matrix
_MOST_BARS = 512  # per chart of loads
_MOST_ROUNDS = 200
_MOST_EDGES = 1 << 23  # cuts of streams to work out for the rounds: about a second

NameOf = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """World ranks in the groups in which they are drawn; group_of is -1 for ranks that are not.

    unit says what a group is, marks what stands at the edge of the picture, names what the tooltip says;
    boundaries are the groups before which another NVLink domain begins, where groups are ranks.
    """

    unit: str
    group_of: Ints
    marks: list[str]
    names: list[str]
    boundaries: list[int]

    def __len__(self) -> int:
        return len(self.names)

    def data(self) -> dict[str, Any]:
        """Return what the page needs of it."""
        return {"unit": self.unit, "marks": self.marks, "names": self.names, "boundaries": self.boundaries}


def make_axis(ranks: Ints, domain: Ints, name_of: NameOf, *, by_rank: bool, most: int) -> Axis:
    """Return the axis of these world ranks (sorted): each, or by domain, or by runs of domains."""
    group_of = np.full(len(domain), -1, np.int64)
    own = domain[ranks]
    if by_rank:
        group_of[ranks] = np.arange(len(ranks))
        boundaries = (np.nonzero(own[1:] != own[:-1])[0] + 1).tolist()
        listed = ranks.tolist()
        return Axis(
            "rank", group_of, [str(one) for one in listed], [name_of(one) for one in listed], boundaries
        )
    domains, number = np.unique(own, return_inverse=True)
    number = number.reshape(-1)
    per = max(1, -(-len(domains) // most))
    groups = number // per
    group_of[ranks] = groups
    _, first = np.unique(groups, return_index=True)
    _, behind = np.unique(groups[::-1], return_index=True)
    last = len(groups) - 1 - behind
    marks, names = [], []
    for index, (one, other) in enumerate(zip(first, last, strict=True)):
        low, high = int(domains[index * per]), int(domains[min(len(domains), (index + 1) * per) - 1])
        marks.append(str(low) if low == high else f"{low}–{high}")
        title = f"domain {low}" if low == high else f"domains {low} to {high}"
        members = name_of(int(ranks[one]))
        if other > one:
            members = f"{members} to {name_of(int(ranks[other]))}"
        names.append(f"{title}: {members}")
    return Axis("domain" if per == 1 else f"{per} domains", group_of, marks, names, [])


def matrix_data(plan: Plan, name_of: NameOf) -> dict[str, Any]:
    """Return who sends whom how many bytes: over the network, and inside the domains."""
    topology, streams = plan.topology, plan.streams
    by_rank = max(len(topology.source), len(topology.destination)) <= _MOST_CELLS
    size = streams.num_bytes
    crossing = streams.kind == NETWORK
    rows, columns = (
        make_axis(ranks, topology.domain, name_of, by_rank=by_rank, most=_MOST_CELLS)
        for ranks in (_network_senders(plan), _takers(plan, NETWORK))
    )
    network = _matrix(rows, columns, streams.sender[crossing], streams.carrier[crossing], size[crossing])
    sender, receiver, amount = _inside(plan)
    if by_rank:
        rows, columns = (
            make_axis(ranks, topology.domain, name_of, by_rank=True, most=_MOST_CELLS)
            for ranks in (_inside_senders(plan), _takers(plan, DOMAIN))
        )
    else:
        # whole domains would all lie on the diagonal: who passes on to whom shows by the places in a domain
        rows = columns = _places(plan)
    return {"network": network, "inside": _matrix(rows, columns, sender, receiver, amount)}


def _inside(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """Return (sender, receiver, bytes) of what moves inside domains: sent there directly or passed on."""
    streams = plan.streams
    direct = streams.kind == DOMAIN
    neighbour, stream = plan.passed_on
    sender = np.concatenate([streams.sender[direct], streams.carrier[stream]])
    receiver = np.concatenate([streams.carrier[direct], neighbour])
    size = streams.num_bytes
    return sender, receiver, np.concatenate([size[direct], size[stream]])


def _network_senders(plan: Plan) -> Ints:
    """Return the source's ranks, and those of the destination that relay to other domains."""
    streams = plan.streams
    return np.union1d(plan.topology.source, streams.sender[streams.kind == NETWORK])


def _takers(plan: Plan, kind: int) -> Ints:
    """Return the destination's ranks, and those of the source that gather what is broadcast."""
    streams = plan.streams
    return np.union1d(plan.topology.destination, streams.carrier[streams.kind == kind])


def _inside_senders(plan: Plan) -> Ints:
    """Return the ranks that may send inside a domain: the source's only where domains are shared."""
    topology = plan.topology
    if np.any(plan.streams.kind == DOMAIN):
        return np.union1d(topology.source, topology.destination)
    return topology.destination


def _places(plan: Plan) -> Axis:
    places = plan.topology.rails()
    largest = int(places.max()) + 1
    per = -(-largest // _MOST_CELLS)
    count = -(-largest // per)
    marks = [str(one * per) for one in range(count)]
    if per == 1:
        return Axis("place in the domain", places, marks, [f"place {one} in its domain" for one in marks], [])
    names = [
        f"places {one * per} to {min(largest, (one + 1) * per) - 1} in their domain" for one in range(count)
    ]
    return Axis(f"{per} places in the domain", places // per, marks, names, [])


def _matrix(rows: Axis, columns: Axis, sender: Ints, receiver: Ints, amount: Ints) -> dict[str, Any]:
    key = rows.group_of[sender] * len(columns) + columns.group_of[receiver]
    sums = np.bincount(key, amount, minlength=len(rows) * len(columns)).astype(np.int64)
    filled = np.nonzero(sums)[0]
    return {
        "rows": rows.data(),
        "columns": columns.data(),
        "cells": filled.tolist(),
        "bytes": sums[filled].tolist(),
    }


def load_data(plan: Plan, name_of: NameOf) -> dict[str, list[dict[str, Any]]]:
    """Return the bytes of each rank's NIC and NVLink port, sending and receiving."""
    topology, streams = plan.topology, plan.streams
    traffic: Traffic = traffic_of(plan)
    names = (plan.source.name, plan.destination.name)
    inside = _inside_senders(plan)
    relays = " and relays" if streams.longest_lag else ""
    roots = " and roots" if np.any(streams.held & GATHERS) else ""
    both = " and ".join(dict.fromkeys(names)) if len(inside) > len(topology.destination) else names[1]

    def chart(title: str, ranks: Ints, loads: Ints, best: float | None) -> dict[str, Any]:
        by_rank = len(ranks) <= _MOST_BARS
        axis = make_axis(ranks, topology.domain, name_of, by_rank=by_rank, most=_MOST_BARS)
        return {"title": title, "best": best, **axis.data(), **_bars(axis, ranks, loads, name_of)}

    return {
        "nic": [
            chart(
                f"Sending, {names[0]}{relays}",
                _network_senders(plan),
                traffic.send_network,
                streams.best_send,
            ),
            chart(
                f"Receiving, {names[1]}{roots}",
                _takers(plan, NETWORK),
                traffic.receive_network,
                streams.best_receive,
            ),
        ],
        "nvlink": [
            chart(f"Sending, {both}", inside, traffic.send_domain, None),
            chart(f"Receiving, {names[1]}{roots}", _takers(plan, DOMAIN), traffic.receive_domain, None),
        ],
    }


def _bars(axis: Axis, ranks: Ints, loads: Ints, name_of: NameOf) -> dict[str, Any]:
    """Return the busiest rank's bytes of each group and, where groups are several ranks, the others' too."""
    if axis.unit == "rank":
        return {"busiest": loads[ranks].tolist()}
    groups = axis.group_of[ranks]
    # least loaded first: a group's last is its busiest
    order = np.lexsort((-ranks, loads[ranks], groups))
    ordered = ranks[order]
    ends = np.cumsum(np.bincount(groups))
    starts = np.concatenate([[0], ends[:-1]])
    busiest = ordered[ends - 1]
    return {
        "busiest": loads[busiest].tolist(),
        "who": [name_of(one) for one in busiest.tolist()],
        "least": loads[ordered[starts]].tolist(),
        "total": np.add.reduceat(loads[ordered], starts).tolist(),
    }


def rounds_data(plan: Plan, name_of: NameOf) -> dict[str, Any]:
    """Return the network bytes by round, in all and of the busiest rank; several rounds a bar if many."""
    streams, num_ranks = plan.streams, plan.topology.num_ranks
    chosen = np.nonzero(streams.kind == NETWORK)[0].astype(np.int64)
    most = max(8, min(_MOST_ROUNDS, _MOST_EDGES // max(1, len(chosen))))
    per = -(-plan.num_rounds // most)
    first = np.arange(0, plan.num_rounds, per, dtype=np.int64)
    last = np.minimum(first + per, plan.num_rounds)
    sender, carrier = streams.sender[chosen], streams.carrier[chosen]
    total, busiest, who = [], [], []
    before = streams.start[chosen]
    for step in last.tolist():
        own = np.clip(step - streams.lag[chosen], 0, plan.cut_rounds)[:, None]
        after = _edges(plan, chosen, own)[:, 0]
        amount = after - before
        before = after
        loads = np.concatenate([np.bincount(rank, amount, minlength=num_ranks) for rank in (sender, carrier)])
        at = int(np.argmax(loads))
        total.append(int(amount.sum()))
        busiest.append(int(loads[at]))
        who.append(f"{name_of(at % num_ranks)}, {'sending' if at < num_ranks else 'receiving'}")
    return {
        "count": plan.num_rounds,
        "per": per,
        "marks": _round_marks(first, last),
        "total": total,
        "busiest": busiest,
        "who": who,
    }


def _round_marks(first: Ints, last: Ints) -> Sequence[str]:
    """Return what the bars' rounds are called; people count from 1."""
    pairs = zip((first + 1).tolist(), last.tolist(), strict=True)
    return [str(low) if low == high else f"{low}–{high}" for low, high in pairs]
