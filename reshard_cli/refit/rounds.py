"""Runs a rank's rounds as a pipeline, so that the network always has a round to work on.

While round i is on the network, round i - 1 is passed on inside the domain and unpacked, and round i + 1 is packed
and started behind it. Two rounds share the staging: the next one is packed where the last but one has been.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.transport.exchange import Pending, Transport

__all__ = ["Timed", "run_rounds"]

Timed = Callable[[str, str], AbstractContextManager[None]]


def run_rounds(
    executor: RankExecutor,
    transport: Transport,
    timed: Timed,
    on_round: Callable[[int], None] = lambda _: None,
) -> dict[int, int]:
    """Run all rounds of one refit; return the bytes sent by kind (NETWORK, DOMAIN).

    `timed(phase, detail)` is entered around what this rank does or waits for; `on_round` is called with the
    number of rounds that are done. Raises what the transport raises.
    """
    sent = {NETWORK: 0, DOMAIN: 0}
    count = executor.num_rounds

    def start(number: int, phase: int) -> Pending:
        sends = executor.sends(number, phase)
        sent[phase] += sum(message.data.numel() for message in sends)
        return transport.start(sends, executor.receives(number, phase))

    def told(number: int) -> str:
        return f", round {number + 1} of {count}"

    if not count:
        return sent
    with timed("pack", told(0)):
        executor.pack(0)
        network = start(0, NETWORK)
    for number in range(count):
        following: Pending | None = None
        if number + 1 < count:
            with timed("pack", told(number + 1)):
                executor.pack(number + 1)
                following = start(number + 1, NETWORK)
        with timed("network", told(number)):
            network.wait()
        with timed("domain", told(number)):
            start(number, DOMAIN).wait()
        with timed("unpack", told(number)):
            executor.finish(number)
        on_round(number + 1)
        if following is not None:
            network = following
    return sent
