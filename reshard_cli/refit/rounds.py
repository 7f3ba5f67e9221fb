"""Runs a rank's rounds as a pipeline, so that the network always has a round to work on.

While round i is on the network, round i - 1 is passed on inside the domain and unpacked, and round i + 1 is packed
and started behind it. Two rounds share the staging: the next one is packed where the last but one has been.

On a GPU the host waits for messages only; copies run in streams of their own. Three marks keep that right. What is
packed and received in a round comes after the last but one is unpacked, whose arena it takes, and what relays send
was unpacked then. What a round passes on comes after it is packed and received. Unpacking comes after both phases.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from reshard_cli.plan.build import IN_FLIGHT
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.transport.message import Pending, Transport
from reshard_cli.weights.streams import Mark

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

    streams = executor.streams
    packed: dict[int, Mark] = {}
    unpacked: dict[int, Mark] = {}

    def start(number: int, phase: int) -> Pending:
        sends = executor.sends(number, phase)
        sent[phase] += sum(message.data.numel() for message in sends)
        return transport.start(sends, executor.receives(number, phase), phase)

    def told(number: int) -> str:
        return f", round {number + 1} of {count}"

    def packed_and_started(number: int) -> Pending:
        with timed("pack", told(number)), streams.packing(after=unpacked.pop(number - IN_FLIGHT, None)):
            executor.pack(number)
            packed[number] = streams.mark()
            return start(number, NETWORK)

    if not count:
        return sent
    streams.begin()
    network = packed_and_started(0)
    for number in range(count):
        following: Pending | None = None
        if number + 1 < count:
            following = packed_and_started(number + 1)
        with timed("network", told(number)), streams.unpacking():
            network.wait()
        with timed("domain", told(number)), streams.unpacking(after=packed.pop(number)):
            start(number, DOMAIN).wait()
        with timed("unpack", told(number)), streams.unpacking():
            executor.finish(number)
            unpacked[number] = streams.mark()
        on_round(number + 1)
        if following is not None:
            network = following
    with timed("unpack", told(count - 1)):
        streams.end()
    return sent
