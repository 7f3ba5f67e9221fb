"""How each tensor travels in each mode: as fragments (`reshard`) or whole (`broadcast`).

Of the tensors that would go as fragments, NCCL M2N may carry some, where it is asked for: their route is `m2n`.
"""

from __future__ import annotations

from typing import Literal, get_args

from reshard_cli.plan.pairs import TensorPair

__all__ = ["MODES", "Mode", "Route", "is_ffn_projection", "route_of"]

Mode = Literal["broadcast", "hybrid-ffn", "reshard", "hybrid"]
Route = Literal["reshard", "broadcast", "m2n"]
MODES: tuple[Mode, ...] = get_args(Mode)

_FFN = frozenset(["gate_proj", "up_proj", "down_proj", "gate_up_proj"])
_NOT_BULK = frozenset(["shared_expert", "shared_experts", "mtp"])


def is_ffn_projection(name: str) -> bool:
    """Say whether the published policy counts this tensor as bulk.

    That is gate, up and down projections of dense MLPs and routed experts; shared experts and MTP layers
    are not in it (NeMo RL's hybrid refit).
    """
    parts = name.split(".")
    return bool(_FFN.intersection(parts)) and not _NOT_BULK.intersection(parts)


def route_of(pair: TensorPair, mode: Mode) -> Route:
    """Return the tensor's route.

    In mode hybrid a document's `route` decides, else the cheaper: fragments are packed per pair of ranks,
    so resharding a tensor never moves more bytes or messages than sending it whole, and is taken.
    """
    if mode == "broadcast":
        return "broadcast"
    if mode == "reshard":
        return "reshard"
    if mode == "hybrid-ffn":
        return "reshard" if is_ffn_projection(pair.name) else "broadcast"
    return "broadcast" if pair.asked_route == "broadcast" else "reshard"
