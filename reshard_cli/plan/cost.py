"""What a plan costs on given hardware: bytes per rank and direction over rates. A prediction, no measurement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.plan.build import Plan, neighbours
from reshard_cli.plan.entries import DOMAIN, LOCAL, NETWORK

__all__ = ["DGX_H100", "Hardware", "Prediction", "Traffic", "limit_seconds", "predict", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one kind of machine, in bytes per second, per GPU and direction.

    `nic`: the line rate, for the bound; `nic_achieved` and `nvlink`: what transfers reach, for predictions.
    """

    name: str
    nic: float
    nic_achieved: float
    nvlink: float


# one 400 Gb/s NIC per GPU, of which 48 to 49 GB/s are reached; NVLink as NCCL plans with it
DGX_H100 = Hardware("dgx-h100", nic=50e9, nic_achieved=48.5e9, nvlink=371e9)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one refit: totals by kind, and by world rank."""

    network_bytes: int
    domain_bytes: int
    local_bytes: int
    send_network: Ints
    receive_network: Ints
    send_domain: Ints
    receive_domain: Ints


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one refit and what they are spent on."""

    seconds: float
    bottleneck: str


def traffic_of(plan: Plan) -> Traffic:
    """Return the plan's bytes by kind and rank."""
    streams, num_ranks = plan.streams, plan.topology.num_ranks
    size = streams.num_bytes

    def by_rank(rank: Ints, amount: Ints) -> Ints:
        return np.bincount(rank, amount, minlength=num_ranks).astype(np.int64)

    network, domain, local = (streams.kind == kind for kind in (NETWORK, DOMAIN, LOCAL))
    neighbour, stream = neighbours(plan.entries, streams)
    passed_on = by_rank(streams.carrier[stream], size[stream])
    return Traffic(
        network_bytes=int(size[network].sum()),
        domain_bytes=int(size[domain].sum() + passed_on.sum()),
        local_bytes=int(size[local].sum()),
        send_network=by_rank(streams.sender[network], size[network]),
        receive_network=by_rank(streams.carrier[network], size[network]),
        send_domain=by_rank(streams.sender[domain], size[domain]) + passed_on,
        receive_domain=by_rank(streams.carrier[domain], size[domain]) + by_rank(neighbour, size[stream]),
    )


def predict(traffic: Traffic, hardware: Hardware) -> Prediction:
    """Return the busiest NIC's or NVLink port's time, whichever is longer."""
    loads = [
        (traffic.send_network, hardware.nic_achieved, "NIC, sending"),
        (traffic.receive_network, hardware.nic_achieved, "NIC, receiving"),
        (traffic.send_domain, hardware.nvlink, "NVLink, sending"),
        (traffic.receive_domain, hardware.nvlink, "NVLink, receiving"),
    ]
    seconds, index = max((float(load.max(initial=0)) / rate, -i) for i, (load, rate, _) in enumerate(loads))
    load, _, what = loads[-index]
    return Prediction(seconds, f"{what}, rank {int(np.argmax(load))}" if seconds else "nothing to move")


def limit_seconds(reshard: Plan, hardware: Hardware) -> float:
    """Return the time that no plan beats: the least possible load of the busiest NIC, over its line rate.

    A byte that several domains need has to leave the source once (domains may pass it on to each other),
    so the sending side counts each byte once, spread over all source ranks.
    """
    entries = reshard.entries
    crossing = entries.kind == NETWORK
    once = 0
    if np.any(crossing):
        _, first = np.unique(
            np.stack([entries.tensor_class[crossing], entries.box[crossing]]), axis=1, return_index=True
        )
        once = int(entries.total_bytes[crossing][first].sum())
    sending = once / max(1, len(reshard.topology.source))
    return max(reshard.streams.best_receive, sending) / hardware.nic
