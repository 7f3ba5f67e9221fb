"""One rank's side of a plan: what to send, where to receive, how to unpack, in a bounded staging arena.

It knows nothing of processes: a driver takes the messages of each phase from it and moves them, over a
process group or, in one process, from one rank's executor to another's.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reshard_cli.plan.build import IN_FLIGHT, Plan
from reshard_cli.plan.entries import DOMAIN, LOCAL, NETWORK
from reshard_cli.plan.relays import LAG
from reshard_cli.plan.schedule import (
    Block,
    Fragment,
    RankSchedule,
    Transfer,
    passed_on_runs,
    transfers,
)
from reshard_cli.refit.copies import Copies
from reshard_cli.transport.message import Message
from reshard_cli.weights.pinned import PinnedBuffers
from reshard_cli.weights.streams import Streams, mark_on, streams_of
from reshard_cli.weights.tensors import copy_exact, typed
from reshard_cli.weights.windows import Corner, Source, StorageWindows, contiguous_bytes, within

__all__ = ["RankExecutor"]

_ALIGN = 16
_HOLDING = LAG + IN_FLIGHT  # rounds from which on a place of held bytes is free again


@dataclass(slots=True)
class _Slot:
    """Where one message lies on this rank: its place in a storage, or a range of the round's arena.

    `copies` pack or unpack what lies somewhere else; `made` are tensors that no view shows, as they are made when asked for.
    `held`: what it is packed from where that is what this rank held: runs of (slot, offset in it, bytes). `sent_as_held`:
    it lies where it was received, and needs no packing.
    """

    fragments: list[Fragment]
    place: Tensor | None
    offset: int
    num_bytes: int
    arena: int
    relay: bool
    copies: Copies | None = None
    made: frozenset[int] = frozenset()
    held: list[tuple[_Slot, int, int]] = field(default_factory=list)
    sent_as_held: bool = False


@dataclass(slots=True)
class _Round:
    """The messages of one round with their slots; `taken` are those to unpack at its end.

    staged, holding: the bytes of its arena, and of the one for what is held until the next hop.
    """

    network: list[tuple[Transfer, _Slot]] = field(default_factory=list)
    domain: list[tuple[Transfer, _Slot]] = field(default_factory=list)
    taken: list[_Slot] = field(default_factory=list)
    local: list[Block] = field(default_factory=list)
    staged: int = 0
    holding: int = 0


class RankExecutor:
    """Runs one rank's schedule. Slots, views and copies are found once and serve every later refit.

    Rounds take turns in `IN_FLIGHT` arenas, so that one can be packed while another is on the network. What a rank
    holds for the next hop of a broadcast, `LAG` rounds later, lies in arenas of its own.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: RankSchedule,
        source: Source | None,
        destination: StorageWindows | None,
        device: torch.device,
    ) -> None:
        """`source` is None on a rank that only receives, `destination` on one that only sends."""
        self.plan = plan
        self.rank = schedule.rank
        self.source = source
        self.destination = destination
        self._device = device
        self._dtypes = [(pair.name, pair.wire_dtype) for pair in plan.pairs]
        self._held: dict[int, dict[Fragment, tuple[_Slot, int]]] = {}
        self._rounds = [self._prepared(number, blocks) for number, blocks in enumerate(schedule.rounds)]
        self._held.clear()
        self.arena_bytes = [
            max((one.staged for one in self._rounds[turn::IN_FLIGHT]), default=0) for turn in range(IN_FLIGHT)
        ]
        self.arena_bytes += [
            max((one.holding for one in self._rounds[turn::_HOLDING]), default=0) for turn in range(_HOLDING)
        ]
        self.peak_staging_bytes = sum(self.arena_bytes)
        self._arenas: list[Tensor] = []
        self.streams: Streams = streams_of(device)
        self._pinned: PinnedBuffers | None = None

    @property
    def num_rounds(self) -> int:
        """The rounds of the plan."""
        return len(self._rounds)

    def _pinned_buffers(self) -> PinnedBuffers | None:
        """Return the buffers for copies between a GPU and mapped files, in what the arenas leave of the staging.

        None where that is too little: each such copy then stops the host.
        """
        if self._pinned is None:
            size = PinnedBuffers.size_within(self.plan.staging - self.peak_staging_bytes)
            if size:
                self._pinned = PinnedBuffers(size, mark_on)
                self.peak_staging_bytes += self._pinned.num_bytes
        return self._pinned

    def _prepared(self, number: int, blocks: list[Block]) -> _Round:
        ready = _Round(local=[block for block in blocks if block.kind == LOCAL])
        self._held[number] = {}
        slots: dict[tuple[int, int | None], _Slot] = {}
        # what is passed on in one message lies together
        for run in passed_on_runs(blocks):
            if run[0].carrier != self.rank:
                continue
            for block in run:
                transfer = Transfer(block.sender, self.rank, (block,), None)
                slots[id(block), None] = self._placed(ready, number, transfer, align=block is run[-1])
        for phase, found in ((NETWORK, ready.network), (DOMAIN, ready.domain)):
            for transfer in transfers(blocks, self.rank, phase=phase):
                key = (id(transfer.blocks[0]), transfer.part)
                slot = slots.get(key)
                if slot is None:
                    slot = self._placed(ready, number, transfer)
                elif len(transfer.blocks) > 1:
                    slot = self._slot(
                        transfer, slot.offset, slot.arena
                    )  # passes on what it took from several
                if transfer.target == self.rank:
                    slots[key] = slot
                    if self.destination is not None:  # a root that only sends keeps nothing
                        ready.taken.append(slot)
                    if transfer.blocks[0].kept:
                        self._hold(number, slot)
                found.append((transfer, slot))
        self._held.pop(number - LAG, None)
        return ready

    def _placed(self, ready: _Round, number: int, transfer: Transfer, *, align: bool = True) -> _Slot:
        """Return a new slot for a message, with room of its own where it has no place."""
        block = transfer.blocks[0]
        step = _ALIGN if align else 1
        held: list[tuple[_Slot, int, int]] = []
        if block.held and transfer.origin == self.rank:
            held = self._held_runs(number - LAG, transfer.fragments)
            if len(held) == 1:
                found, at, size = held[0]
                place = None if found.place is None else found.place[at : at + size]
                return replace(
                    found, place=place, offset=found.offset + at, num_bytes=size, sent_as_held=True
                )
        if block.kept and transfer.target == self.rank:
            slot = self._slot(transfer, ready.holding, IN_FLIGHT + number % _HOLDING)
            if slot.place is None:
                ready.holding = -(-(ready.holding + slot.num_bytes) // step) * step
            return slot
        slot = self._slot(transfer, ready.staged, number % IN_FLIGHT)
        slot.held = held
        if slot.place is None:
            ready.staged = -(-(ready.staged + slot.num_bytes) // step) * step
        return slot

    def _held_runs(self, number: int, fragments: list[Fragment]) -> list[tuple[_Slot, int, int]]:
        """Return where these fragments, which came in that round, are: runs of (slot, offset in it, bytes)."""
        runs: list[tuple[_Slot, int, int]] = []
        for fragment in fragments:
            slot, at = self._held[number][fragment]
            if runs and runs[-1][0] is slot and runs[-1][1] + runs[-1][2] == at:
                runs[-1] = slot, runs[-1][1], runs[-1][2] + fragment.num_bytes
            else:
                runs.append((slot, at, fragment.num_bytes))
        return runs

    def _hold(self, number: int, slot: _Slot) -> None:
        """Note where the fragments of a message are, for the hop that sends them on."""
        position = 0
        for fragment in slot.fragments:
            self._held[number][fragment] = slot, position
            position += fragment.num_bytes

    def _slot(self, transfer: Transfer, offset: int, arena: int) -> _Slot:
        place = None
        if transfer.part is not None:
            own = transfer.origin == self.rank and not transfer.blocks[0].relay
            holder = self.source if own else self.destination
            fragment = transfer.blocks[0].big[transfer.part]
            name, dtype = self._dtypes[fragment.tensor]
            if holder is not None and holder.in_place(name):
                place = contiguous_bytes(holder, name, fragment, dtype)
                if place is not None and place.device != self._device:
                    place = None  # mapped bytes, and another GPU's, go through the arena
        relay = transfer.origin == self.rank and transfer.blocks[0].relay
        return _Slot(transfer.fragments, place, offset, transfer.num_bytes, arena, relay)

    @property
    def arenas(self) -> list[Tensor]:
        """The staging memory; empty before the first message is packed or received."""
        return self._arenas

    def lend(self, arenas: list[Tensor]) -> None:
        """Use these arenas, of `arena_bytes` at least, instead of its own: executors that take turns share them."""
        self._arenas = arenas

    def _bytes(self, slot: _Slot) -> Tensor:
        if slot.place is not None:
            return slot.place
        if not self._arenas:
            self._arenas = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for size in self.arena_bytes
            ]
        return self._arenas[slot.arena][slot.offset : slot.offset + slot.num_bytes]

    def receives(self, number: int, phase: int) -> list[Message]:
        """Return where the messages of a phase are to be received, in order."""
        ready = self._rounds[number]
        chosen = ready.network if phase == NETWORK else ready.domain
        return [Message(t.origin, self._bytes(slot)) for t, slot in chosen if t.target == self.rank]

    def pack(self, number: int) -> None:
        """Pack what this rank sends in a round of its own, in both phases, and what it relays to other domains.

        Relays send from the storages, or from what they hold: what they send came two rounds before.
        """
        ready = self._rounds[number]
        for transfer, slot in (*ready.network, *ready.domain):
            own = transfer.blocks[0].sender == self.rank
            if transfer.origin == self.rank and slot.place is None and own and not slot.sent_as_held:
                self._pack(slot)

    def sends(self, number: int, phase: int) -> list[Message]:
        """Return the messages that this rank sends in a phase, in order; `pack` comes before.

        For phase DOMAIN, what was received in phase NETWORK must be there.
        """
        ready = self._rounds[number]
        chosen = ready.network if phase == NETWORK else ready.domain
        return [Message(t.target, self._bytes(slot)) for t, slot in chosen if t.origin == self.rank]

    def finish(self, number: int) -> None:
        """Unpack what the round brought, and copy what this rank holds itself."""
        ready = self._rounds[number]
        for slot in ready.taken:
            if slot.place is None:
                self._unpack(slot)
        for block in ready.local:
            for fragment in block.packed + block.big:
                self._keep(fragment)

    def _boxes(
        self, slot: _Slot, tensors: Container[int] | None = None
    ) -> Iterator[tuple[Fragment, Corner, Corner, Tensor]]:
        """Yield (fragment, lo, hi, its elements in the message) of the boxes of a message (of these tensors)."""
        data = self._bytes(slot)
        position = 0
        for fragment in slot.fragments:
            start = position
            position += fragment.num_bytes
            if tensors is not None and fragment.tensor not in tensors:
                continue
            values = typed(data[start:position], self._dtypes[fragment.tensor][1])
            for lo, hi, at in fragment.boxes():
                shape = [b - a for a, b in zip(lo, hi, strict=True)]
                yield fragment, lo, hi, values[at : at + math.prod(shape)].view(shape)

    def _pack(self, slot: _Slot) -> None:
        if slot.held:
            self._pack_held(slot)
            return
        source = self.destination if slot.relay else self.source
        assert source is not None
        if slot.copies is None:
            slot.copies = Copies(self._pinned_buffers)
            tensors = {one.tensor for one in slot.fragments}
            fixed = {one for one in tensors if source.in_place(self._dtypes[one][0])}
            slot.made = frozenset(tensors - fixed)
            for fragment, lo, hi, box in self._boxes(slot, fixed) if fixed else ():
                for part_lo, part_hi, view in source.windows(self._dtypes[fragment.tensor][0], lo, hi):
                    slot.copies.add(within(box, lo, part_lo, part_hi), view)
        slot.copies.run()
        for fragment, lo, hi, box in self._boxes(slot, slot.made) if slot.made else ():
            for part_lo, part_hi, view in source.windows(self._dtypes[fragment.tensor][0], lo, hi):
                copy_exact(within(box, lo, part_lo, part_hi), view)

    def _pack_held(self, slot: _Slot) -> None:
        if slot.copies is None:
            slot.copies = Copies()
            position = 0
            for held, at, size in slot.held:
                slot.copies.add(
                    self._bytes(slot)[position : position + size], self._bytes(held)[at : at + size]
                )
                position += size
        slot.copies.run()

    def _unpack(self, slot: _Slot) -> None:
        if slot.copies is None:
            slot.copies = Copies(self._pinned_buffers)
            for fragment, lo, hi, box in self._boxes(slot):
                for target, values in self._places(fragment.tensor, lo, hi, box):
                    slot.copies.add(target, values)
        slot.copies.run()

    def _keep(self, fragment: Fragment) -> None:
        assert self.source is not None
        name, dtype = self._dtypes[fragment.tensor]
        for lo, hi, _ in fragment.boxes():
            for part_lo, part_hi, view in self.source.windows(name, lo, hi):
                if str(view.dtype) != f"torch.{dtype}":
                    view = view.to(getattr(torch, dtype))
                for target, values in self._places(fragment.tensor, part_lo, part_hi, view):
                    copy_exact(target, values)

    def _places(self, tensor: int, lo: Corner, hi: Corner, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (target, values) wherever this rank holds a part of a box: aliases hold it more than once."""
        assert self.destination is not None
        for part_lo, part_hi, view in self.destination.windows(self._dtypes[tensor][0], lo, hi):
            yield view, within(values, lo, part_lo, part_hi)
