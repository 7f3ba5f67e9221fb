"""The report of a plan: schema reshard-cli/plan/1."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.plan.cost import Prediction, Traffic, limit_seconds, predict, split_routes, traffic_of
from reshard_cli.plan.entries import NETWORK
from reshard_cli.plan.routes import MODES, Mode
from reshard_cli.plan.schedule import count_messages
from reshard_cli.plan.streams import GATHERS, SENDS_HELD
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.prepare import Jobs
from reshard_cli.report.tensor_classes import largest_tensors, memory_of, tensor_classes
from reshard_cli.spec.dtypes import item_size
from reshard_cli.spec.hardware_profile import Hardware

__all__ = ["PLAN_SCHEMA", "plan_report"]

PLAN_SCHEMA = "reshard-cli/plan/1"


def plan_report(
    jobs: Jobs,
    topology: Topology,
    mode: Mode,
    hardware: Hardware,
    *,
    staging: int,
    allow_extra: bool = False,
    m2n: bool = False,
) -> tuple[dict[str, Any], Plan]:
    """Plan every mode; return the report of one, with the others beside it, and that one's plan.

    m2n: NCCL M2N carries what it can in all of them; the figures are of the rest. Raises WeightsError or
    DocumentError as `build_plan` does.
    """
    began = time.perf_counter()
    plans: dict[Mode, Plan] = {}
    for one in dict.fromkeys((mode, *MODES)):
        plans[one] = build_plan(
            jobs.source, jobs.destination, topology, one,
            staging=staging, allow_extra=allow_extra, known=plans.values(), m2n=m2n,
        )  # fmt: skip
    traffic = {one: traffic_of(plan) for one, plan in plans.items()}
    predicted = {one: predict(plans[one], traffic[one], hardware, one) for one in MODES}
    plan, chosen = plans[mode], traffic[mode]
    classes = tensor_classes(jobs, plan)
    report = {
        "schema": PLAN_SCHEMA,
        "model": {
            "name": jobs.destination.model.name,
            "tensors": sum(pair.num_names for pair in plan.pairs if not pair.quantised or not pair.scale_of),
            "parameters": jobs.destination.model.num_parameters,
            "bytes": jobs.destination.model.num_bytes,
        },
        "source": _side(jobs.source.name, topology, plan, source=True),
        "destination": _side(jobs.destination.name, topology, plan, source=False),
        "mode": mode,
        "routes": _routes(plan),
        **_m2n(plan),
        "traffic": {
            "network_bytes": chosen.network_bytes,
            "domain_bytes": chosen.domain_bytes,
            "local_bytes": chosen.local_bytes,
            "network_lower_bound": plans["reshard"].entries.needed_bytes,
            "conventional_network_bytes": traffic["broadcast"].network_bytes,
        },
        "per_rank": {
            "send_network": chosen.send_network.tolist(),
            "receive_network": chosen.receive_network.tolist(),
            "send_domain": chosen.send_domain.tolist(),
            "receive_domain": chosen.receive_domain.tolist(),
        },
        "balance": _balance(plan, chosen),
        "messages": count_messages(plan),
        "rounds": plan.num_rounds,
        "relays": _relays(plan),
        "broadcast": _broadcast(plan),
        "memory": {"staging_bytes": staging, **memory_of(jobs, plan)},
        "limit_seconds": limit_seconds(plans["reshard"], hardware),
        "predicted": _predicted(predicted[mode], hardware),
        "compare": [
            {
                "mode": one,
                "network_bytes": traffic[one].network_bytes,
                "predicted_seconds": predicted[one].seconds,
                "bottleneck": predicted[one].bottleneck,
            }
            for one in MODES
        ],
        "classes": classes,
        "largest": largest_tensors(plan),
        "extra": plan.extra,
        "plan_seconds": time.perf_counter() - began,
        "digest": plan.digest,
    }
    return report, plan


def _side(name: str, topology: Topology, plan: Plan, *, source: bool) -> dict[str, Any]:
    ranks = topology.source if source else topology.destination
    return {"name": name, "ranks": len(ranks), "domains": len(set(topology.domain[ranks].tolist()))}


def _routes(plan: Plan) -> dict[str, Any]:
    names = ("reshard", "broadcast") if plan.m2n is None else ("reshard", "broadcast", "m2n")
    found = {route: {"tensors": 0, "bytes": 0, "share": 0.0} for route in names}
    total = 0
    for pair, route in zip(plan.pairs, plan.routes, strict=True):
        size = math.prod(pair.shape) * item_size(pair.wire_dtype)
        found[route]["tensors"] += pair.num_names
        found[route]["bytes"] += size
        total += size
    for one in found.values():
        one["share"] = one["bytes"] / total if total else 0.0
    return found


def _m2n(plan: Plan) -> dict[str, Any]:
    """Return what NCCL M2N declines and why, the largest part first; nothing where it was not asked for."""
    if plan.m2n is None:
        return {}
    declined = sorted(plan.m2n.declined.items(), key=lambda item: -item[1].num_bytes)
    return {
        "m2n": {
            **plan.m2n.totals(plan.pairs),
            "buffer_bytes": plan.m2n.buffer_bytes,
            "declined": [
                {"reason": reason, "tensors": one.tensors, "bytes": one.num_bytes} for reason, one in declined
            ],
        }
    }


def _relays(plan: Plan) -> dict[str, int]:
    """Return what destination domains pass on to each other of what is resharded."""
    streams = plan.streams
    relayed = (streams.lag > 0) & (streams.held == 0)
    behind = int(streams.lag[relayed].max(initial=0))
    return {"network_bytes": int(streams.num_bytes[relayed].sum()), "rounds_behind": behind}


def _broadcast(plan: Plan) -> dict[str, int]:
    """Return what the broadcast route gathers in the source, and what it sends from domain to domain."""
    streams = split_routes(plan)[1].streams
    network, gathers = streams.kind == NETWORK, (streams.held & GATHERS) > 0
    roots = np.union1d(
        streams.carrier[gathers], streams.sender[~gathers & ((streams.held & SENDS_HELD) == 0)]
    )
    return {
        "roots": len(roots),
        "gather_network_bytes": int(streams.num_bytes[gathers & network].sum()),
        "gather_domain_bytes": int(streams.num_bytes[gathers & ~network].sum()),
        "network_bytes": int(streams.num_bytes[~gathers & network].sum()),
        "rounds_behind": streams.longest_lag,
    }


def _balance(plan: Plan, traffic: Traffic) -> dict[str, float]:
    sent, taken = float(traffic.send_network.max(initial=0)), float(traffic.receive_network.max(initial=0))
    return {
        "send_max_over_best": sent / plan.streams.best_send if plan.streams.best_send else 1.0,
        "receive_max_over_best": taken / plan.streams.best_receive if plan.streams.best_receive else 1.0,
    }


def _predicted(prediction: Prediction, hardware: Hardware) -> dict[str, Any]:
    return {
        "seconds": prediction.seconds,
        "bottleneck": prediction.bottleneck,
        "hardware": hardware.name,
        "parts": prediction.parts,
    }
