"""The messages of an exchange, and what every transport does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from reshard_cli.plan.entries import NETWORK
from reshard_cli.plan.schedule import MAX_MESSAGE

__all__ = ["Message", "Pending", "Transport", "chunks"]


@dataclass(frozen=True, slots=True)
class Message:
    """`peer` is a world rank, `data` flat uint8 that is sent from or received into."""

    peer: int
    data: Tensor


class Pending(Protocol):
    """Messages on their way."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait for all of them. Raises PeerLostError naming the peer that failed.

        seconds: at most so many instead of the timeout, and whatever the control plane says meanwhile.
        """
        ...


class Transport(Protocol):
    """Sends and receives the messages of a phase."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], phase: int = NETWORK) -> Pending:
        """Start all of them. phase: NETWORK, or DOMAIN for messages between ranks of one domain.

        On a GPU they come after what the current stream was given before.
        """
        ...

    def close(self) -> None:
        """Close the connections; nothing may be in flight."""
        ...

    def abort(self) -> None:
        """Give up what is in flight, after a failure. Never blocks for long; the transport is of no use then."""
        ...


def chunks(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with none above MAX_MESSAGE bytes, as transports count in 32 bits."""
    found = []
    for message in messages:
        size = message.data.numel()
        if size <= MAX_MESSAGE:
            found.append(message)
            continue
        for start in range(0, size, MAX_MESSAGE):
            found.append(Message(message.peer, message.data[start : start + MAX_MESSAGE]))
    return found
