"""What all ranks must have in common before the first byte, compared on rank 0.

Transports find a difference out too late or never: sizes that differ abort the process, dtypes or an
order that differ succeed with garbage. So it is all compared first, and the first difference is named.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

from reshard_cli.errors import TransferError
from reshard_cli.plan.build import PLAN_VERSION, Plan
from reshard_cli.plan.schedule import RankSchedule, pair_digests
from reshard_cli.refit.prepare import RefitOptions
from reshard_cli.transport.control import Control

__all__ = ["agree"]


def agree(
    control: Control, plan: Plan, schedule: RankSchedule, options: RefitOptions, key: str = "plan"
) -> None:
    """Compare this rank's plan with everybody's. `key`: another one for each plan of a session.

    Raises TransferError naming the rank that came with something else, and what.
    """
    control.phase("comparing plans")
    dtypes = repr([(pair.name, pair.source_dtype, pair.destination_dtype) for pair in plan.pairs])
    facts = {
        "version of the plan": PLAN_VERSION,
        "mode": plan.mode,
        "staging bytes": plan.staging,
        "iterations": options.iterations,
        "verify": options.verify,
        "NCCL M2N": options.m2n,
        "layout of the source": plan.source.digest,
        "layout of the destination": plan.destination.digest,
        "dtypes": hashlib.sha256(dtypes.encode()).hexdigest(),
        "domains": plan.topology.domain.tolist(),
        "rounds": plan.num_rounds,
        "plan": plan.digest,
    }
    digests = pair_digests(schedule)
    pairs = [[origin, target, digest] for (origin, target), digest in digests.items()]
    everybody = control.gather(f"facts/{key}", {"facts": facts, "pairs": pairs}, "comparing plans")
    if everybody is not None:
        _compare_facts(control, [one["facts"] for one in everybody])
        _compare_pairs(control, [one["pairs"] for one in everybody])
    control.share(f"agreed/{key}", 1, "comparing plans")


def _compare_facts(control: Control, facts: list[dict[str, Any]]) -> None:
    for key, value in facts[0].items():
        for rank, other in enumerate(facts):
            if other.get(key) != value:
                raise TransferError(
                    f"{control.name_of(rank)} came with another plan: {key}: "
                    f"{_short(other.get(key))} there, {_short(value)} on {control.name_of(0)}; "
                    f"give all ranks the same documents and flags",
                    rank,
                )


def _compare_pairs(control: Control, pairs: list[list[list[Any]]]) -> None:
    seen: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for rank, own in enumerate(pairs):
        for origin, target, digest in own:
            seen[origin, target][rank] = digest
    for (origin, target), views in sorted(seen.items()):
        if len(views) != 2 or len(set(views.values())) != 1:
            raise TransferError(
                f"{control.name_of(origin)} and {control.name_of(target)} disagree on the order, "
                f"sizes or contents of their messages; nothing was sent",
                target,
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "…"
