"""How a version becomes the one that is there: on every destination rank, or on none.

When every rank has all of it, rank 0 decides once, in one place of the store. A rank that hears of a failure
before it heard of the decision asks that place, and by asking decides against the version where nothing was
decided yet. So all ranks that live go one way. Where the store itself is lost just then, the destination's ranks
ask each other: whoever has committed says so, and then all do, as all of them have everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import torch

from reshard_cli.errors import PeerLostError, ReshardError, TransferError
from reshard_cli.plan.topology import Topology
from reshard_cli.refit.ends import DestinationEnd
from reshard_cli.transport.control import Control
from reshard_cli.transport.message import Message, Pending, Transport

__all__ = ["commit"]

_COMMITTED, _UNKNOWN = 1, 2
_REASON = 8.0  # seconds for another rank to say why it gave a version up
# seconds for another rank to answer: whoever is cut off from the store notices it as long after as this one did
_ANSWER = 3.0


def commit(
    control: Control,
    transport: Transport | None,
    topology: Topology,
    end: DestinationEnd | None,
    version: int,
    *,
    device: torch.device,
    applied: Callable[[], None] = lambda: None,
) -> None:
    """Commit the version when every rank is here, which says that it has all of it.

    `device`: whose memory the transport sends. `applied` is called when every rank has made it the one that is
    there. Raises what ended the refit: before the decision nobody commits; after it everybody has who lives and
    hears of it: a rank that is cut off from the store and from all who have committed cannot know, and keeps what
    it had.
    """
    destinations = topology.destination.tolist()
    control.phase("committing")
    control.deciding = True
    try:
        if not _decided(control, transport, destinations, version, end, device):
            # whoever gave it up is finding out why, and is the one to say so
            control.store.wait_keys(["failure"], [], _REASON)
            control.check()
            raise PeerLostError(f"version {version} was given up while it was being committed")
        if end is not None:
            end.apply(version)
        control.barrier(f"applied/{version}", "committing")
        applied()
        if end is not None:
            end.publish(first=control.rank == destinations[0])
        control.barrier(f"published/{version}", "committing")
    except (RuntimeError, TransferError) as error:
        # the store is lost after the decision: others may not have heard it, and will ask
        if end is not None and end.version == version and transport is not None and not control.alive():
            _asked(transport, device, control.rank, destinations, committed=True)
        if isinstance(error, ReshardError):
            raise
        raise TransferError(f"lost the store while committing version {version}: {error}") from error
    finally:
        control.deciding = False


def _decided(
    control: Control,
    transport: Transport | None,
    destinations: list[int],
    version: int,
    end: DestinationEnd | None,
    device: torch.device,
) -> bool:
    """Return whether the version is committed. Raises what kept the ranks from coming together."""
    key = f"decision/{version}"
    try:
        if control.gather(f"complete/{version}", 1, "committing") is not None:
            return control.decide(key, "commit") == "commit"
        return control.decision(key, "committing") == "commit"
    except (RuntimeError, TransferError) as error:
        try:
            if control.decide(key, "give up") == "commit":
                return True
        except (RuntimeError, TransferError):
            if end is None or transport is None:
                raise error from None
            if _asked(transport, device, control.rank, destinations, committed=False):
                return True
        raise


def _asked(
    transport: Transport, device: torch.device, rank: int, destinations: Iterable[int], *, committed: bool
) -> bool:
    """Tell the destination's other ranks whether this one has committed; return whether any has."""
    own = torch.tensor([_COMMITTED if committed else _UNKNOWN], dtype=torch.uint8, device=device)
    started: list[tuple[Pending, torch.Tensor]] = []
    for one in destinations:
        answer = torch.zeros(1, dtype=torch.uint8, device=device)
        if one != rank:
            with contextlib.suppress(RuntimeError, PeerLostError):
                started.append((transport.start([Message(one, own)], [Message(one, answer)]), answer))
    deadline = time.monotonic() + _ANSWER
    for pending, answer in started:
        try:
            pending.wait(max(0.0, deadline - time.monotonic()))
            committed = committed or int(answer) == _COMMITTED
        except (RuntimeError, PeerLostError):
            if device.type == "cuda":
                break  # its stream comes to nothing more: reading an answer would wait for ever
    return committed
