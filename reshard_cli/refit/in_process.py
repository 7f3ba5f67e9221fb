"""Runs a whole plan in one process, without any process group: every rank's executor, message by message.

For tests and for looking at a plan: the same packing, order and rounds as between processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from reshard_cli.errors import TransferError
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.transport.message import Message

__all__ = ["run_in_process"]


def run_in_process(executors: Mapping[int, RankExecutor]) -> int:
    """Run all rounds; return the bytes moved between ranks.

    Raises TransferError where two ranks disagree on the order or size of their messages.
    """
    moved = 0
    for number in range(max((one.num_rounds for one in executors.values()), default=0)):
        for executor in executors.values():
            executor.pack(number)
        for phase in (NETWORK, DOMAIN):
            sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
            awaited: dict[tuple[int, int], list[Message]] = defaultdict(list)
            for rank, executor in executors.items():
                for message in executor.receives(number, phase):
                    awaited[message.peer, rank].append(message)
            for rank, executor in executors.items():
                for message in executor.sends(number, phase):
                    sent[rank, message.peer].append(message)
            for origin, target in sorted(sent.keys() | awaited.keys()):
                outgoing, incoming = sent[origin, target], awaited[origin, target]
                sizes = [[message.data.numel() for message in side] for side in (outgoing, incoming)]
                if sizes[0] != sizes[1]:
                    raise TransferError(
                        f"round {number}: rank {origin} sends {sizes[0]}, rank {target} awaits {sizes[1]}"
                    )
                for one, other in zip(outgoing, incoming, strict=True):
                    other.data.copy_(one.data)
                    moved += one.data.numel()
        for executor in executors.values():
            executor.finish(number)
    return moved
