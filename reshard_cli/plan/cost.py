"""What a plan costs on given hardware, from bytes, messages and rates. A prediction, never a measurement.

The model, in full. Of every rank we know the bytes that its NIC sends and takes, the bytes that it gives and
takes inside its domain, and in how many messages. Each of these resources works on its own:

    NIC, each direction         bytes / nic_achieved
    NVLink, each direction      bytes / nvlink
    packing and unpacking       2 · (sent + taken + passed on) / memory        (a read and a write)
    launches                    rounds · 2 · launch + messages · message

Rounds overlap (reading and packing the next, the network on this one, the domain's exchange of the last), so a
refit takes as long as its busiest resource, and one round of all the others to fill and drain the pipeline; a NIC sends
and takes a round at the same time, and so does NVLink. Relays lag some rounds behind; what is left to do in those
rounds comes on top.

A gather-and-broadcast system, which mode `broadcast` is priced as and, for its broadcast part, mode `hybrid-ffn`,
works in steps that wait for each other:

    gather       the busiest NIC or NVLink, of what the plan gathers at its roots
    broadcast    the busiest NIC or NVLink, of what goes from the roots to and through the destination's domains
    launches     tensors · tensor

The last constant was fitted to published results of such systems; nothing else is. The plan itself does better where
it is run: its hops overlap, and it packs tensors (`plan.broadcasts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reshard_cli.layout.boxes import Ints
from reshard_cli.plan.build import Plan, takers
from reshard_cli.plan.entries import BROADCAST, DOMAIN, LOCAL, NETWORK
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.streams import GATHERS, Streams
from reshard_cli.spec.hardware_profile import Hardware

__all__ = ["Prediction", "Traffic", "limit_seconds", "predict", "split_routes", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one refit: totals by kind, and by world rank; messages: by world rank, sent and taken."""

    network_bytes: int
    domain_bytes: int
    local_bytes: int
    send_network: Ints
    receive_network: Ints
    send_domain: Ints
    receive_domain: Ints
    messages: Ints


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one refit, what they are spent on, and the seconds of each resource where it is busiest."""

    seconds: float
    bottleneck: str
    parts: dict[str, float]


def traffic_of(plan: Plan) -> Traffic:
    """Return the plan's bytes by kind and rank."""
    streams, num_ranks = plan.streams, plan.topology.num_ranks
    size = streams.num_bytes

    def by_rank(rank: Ints, amount: Ints) -> Ints:
        return np.bincount(rank, amount, minlength=num_ranks).astype(np.int64)

    network, domain, local = (streams.kind == kind for kind in (NETWORK, DOMAIN, LOCAL))
    neighbour, stream = plan.passed_on
    passed_on = by_rank(streams.carrier[stream], size[stream])
    moving = ~local
    # what a carrier takes from several senders it passes on in one message a neighbour
    sets = plan.entries.wanter_sets
    key = np.unique(streams.carrier[network] * max(1, len(sets)) + streams.wanters[network])
    carrier, wanters = key // max(1, len(sets)), key % max(1, len(sets))
    taker, index = takers(sets, carrier, wanters)
    counts = (
        np.bincount(streams.sender[moving], minlength=num_ranks)
        + np.bincount(streams.carrier[moving], minlength=num_ranks)
        + np.bincount(taker, minlength=num_ranks)
        + np.bincount(carrier[index], minlength=num_ranks)
    )
    return Traffic(
        network_bytes=int(size[network].sum()),
        domain_bytes=int(size[domain].sum() + passed_on.sum()),
        local_bytes=int(size[local].sum()),
        send_network=by_rank(streams.sender[network], size[network]),
        receive_network=by_rank(streams.carrier[network], size[network]),
        send_domain=by_rank(streams.sender[domain], size[domain]) + passed_on,
        receive_domain=by_rank(streams.carrier[domain], size[domain]) + by_rank(neighbour, size[stream]),
        messages=counts * plan.cut_rounds,
    )


def predict(plan: Plan, traffic: Traffic, hardware: Hardware, mode: Mode) -> Prediction:
    """Return what a refit takes in this mode, by the model above."""
    if mode == "broadcast":
        return _gather_and_broadcast(plan, hardware)
    if mode != "hybrid-ffn" or "broadcast" not in plan.routes:
        return _pipelined(plan, traffic, hardware)
    fragments, whole = split_routes(plan)
    parted = _pipelined(fragments, traffic_of(fragments), hardware)
    rest = _gather_and_broadcast(whole, hardware)
    longer = max(parted, rest, key=lambda one: one.seconds)
    parts = {**parted.parts, **rest.parts}
    return Prediction(parted.seconds + rest.seconds, longer.bottleneck, parts)


def split_routes(plan: Plan) -> tuple[Plan, Plan]:
    """Return the plan with the streams of the fragments alone, and with those of what is broadcast."""
    at = np.searchsorted(plan.entries.start, plan.streams.start, side="right") - 1
    whole = plan.entries.kind[at] == BROADCAST
    return _with_streams(plan, ~whole), _with_streams(plan, whole)


def _with_streams(plan: Plan, chosen: NDArray[np.bool_]) -> Plan:
    """Return the plan with some of its streams."""
    streams = plan.streams
    own = Streams.of(streams.table()[:, chosen], streams.best_send, streams.best_receive)
    rank, stream = plan.passed_on
    kept = chosen[stream]
    passed_on = rank[kept], (np.cumsum(chosen) - 1)[stream[kept]]
    rounds = plan.cut_rounds + own.longest_lag
    return replace(plan, streams=own, passed_on=passed_on, num_rounds=rounds)


def _pipelined(plan: Plan, traffic: Traffic, hardware: Hardware) -> Prediction:
    copied = traffic.send_network + traffic.receive_network + traffic.send_domain + traffic.receive_domain
    loads: dict[str, NDArray[np.floating]] = {
        "NIC, sending": traffic.send_network / hardware.nic_achieved,
        "NIC, receiving": traffic.receive_network / hardware.nic_achieved,
        "NVLink, sending": traffic.send_domain / hardware.nvlink,
        "NVLink, receiving": traffic.receive_domain / hardware.nvlink,
        "packing": 2 * copied / hardware.memory,
        "launches": traffic.messages * hardware.message + plan.num_rounds * 2 * hardware.launch,
    }
    if not traffic.messages.any():
        return Prediction(0.0, "nothing to move", dict.fromkeys(loads, 0.0))
    parts = {what: float(load.max(initial=0)) for what, load in loads.items()}
    busiest = max(parts, key=lambda what: parts[what])
    # a link sends and receives at the same time: both directions are one stage of the pipeline
    stages: dict[str, float] = {}
    for what, seconds in parts.items():
        stage = what.split(",")[0]
        stages[stage] = max(stages.get(stage, 0.0), seconds)
    fill = (sum(stages.values()) - parts[busiest]) / plan.cut_rounds
    rank = int(np.argmax(loads[busiest]))
    behind = plan.streams.rounds_behind(plan.topology.num_ranks)
    seconds = parts[busiest] * (1 + behind / plan.cut_rounds) + fill
    return Prediction(seconds, f"{busiest}, rank {rank}", parts)


def _gather_and_broadcast(plan: Plan, hardware: Hardware) -> Prediction:
    """Return the price of what a plan with nothing else gathers in the source and broadcasts."""
    gather = (plan.streams.held & GATHERS) > 0
    names = [
        pair.num_names for pair, route in zip(plan.pairs, plan.routes, strict=True) if route == "broadcast"
    ]
    parts = {
        "gather": _busiest_link(_with_streams(plan, gather), hardware),
        "broadcast": _busiest_link(_with_streams(plan, ~gather), hardware),
        "tensors one by one": sum(names) * hardware.tensor,
    }
    busiest = max(parts, key=lambda what: parts[what])
    return Prediction(sum(parts.values()), busiest if len(gather) else "nothing to move", parts)


def _busiest_link(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of the NIC or NVLink that is busiest."""
    traffic = traffic_of(plan)
    network = max(traffic.send_network.max(initial=0), traffic.receive_network.max(initial=0))
    domain = max(traffic.send_domain.max(initial=0), traffic.receive_domain.max(initial=0))
    return float(max(network / hardware.nic_achieved, domain / hardware.nvlink))


def limit_seconds(reshard: Plan, hardware: Hardware) -> float:
    """Return the time that no plan beats: the least possible load of the busiest NIC, over its line rate.

    A byte that several domains need has to leave the source once (domains may pass it on to each other),
    so the sending side counts each byte once, spread over all source ranks.
    """
    entries = reshard.entries
    crossing = np.nonzero(entries.kind == NETWORK)[0]
    once = 0
    if len(crossing):
        most = 1 + int(entries.box.max())
        _, first = np.unique(entries.tensor_class[crossing] * most + entries.box[crossing], return_index=True)
        once = int(entries.total_bytes[crossing][first].sum())
    sending = once / max(1, len(reshard.topology.source))
    return max(reshard.streams.best_receive, sending) / hardware.nic
