"""The network bound by domain: the least bytes that any way to do a refit has a domain's NICs send or take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import changes
from reshard_cli.plan.build import Plan
from reshard_cli.plan.entries import NETWORK

__all__ = ["DomainBound", "domain_bound"]


@dataclass(frozen=True, slots=True)
class DomainBound:
    """Least bytes of the busiest domain: taken (what its ranks need and none holds), and sent."""

    take: int
    send: int

    @property
    def most(self) -> int:
        """The larger of both."""
        return max(self.take, self.send)


def domain_bound(plan: Plan) -> DomainBound:
    """Return the bound. The plan's routes do not matter: what each rank needs is taken from the layouts.

    A byte leaves the source at least once, however many domains want it. It may leave any domain that holds
    it, so a domain has to send what only it holds, and all domains together everything once.
    """
    shared = plan.intersections.entries(plan.pairs, ["reshard"] * len(plan.pairs))
    domain = plan.topology.domain
    crossing = np.nonzero(shared.kind == NETWORK)[0]
    if not len(crossing):
        return DomainBound(0, 0)
    total = shared.total_bytes[crossing]
    wanting = np.array([domain[shared.wanter_sets.of(one)[0]] for one in range(len(shared.wanter_sets))])
    take = np.bincount(wanting[shared.wanters[crossing]], total)
    order = np.lexsort((shared.box[crossing], shared.tensor_class[crossing]))
    key = np.stack([shared.tensor_class[crossing], shared.box[crossing], shared.holders[crossing]])[:, order]
    first = changes(*key)
    once = total[order][first]
    holding = [np.unique(domain[shared.holder_sets.of(one)]) for one in range(len(shared.holder_sets))]
    alone = np.array([one[0] if len(one) == 1 else -1 for one in holding])[key[2][first]]
    own = np.bincount(alone[alone >= 0], once[alone >= 0], minlength=1)
    sources = len(np.unique(domain[plan.topology.source]))
    return DomainBound(int(take.max()), int(max(own.max(), once.sum() / sources)))
