"""One rank's part of a plan: per round, the blocks that it sends, takes, passes on or keeps.

A block is what one sender gives one carrier for one set of wanters in one round. Its small fragments
travel packed as one message, each big one by itself, so that it can go from and into its place without a
copy. A fragment is a run of elements of a box, in row-major order of the box.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard_cli.layout.boxes import Ints, changes
from reshard_cli.plan.build import Plan
from reshard_cli.plan.entries import DOMAIN, LOCAL, NETWORK
from reshard_cli.plan.streams import KEEPS, SENDS_HELD, round_positions

__all__ = [
    "BIG_FRAGMENT",
    "MAX_MESSAGE",
    "Block",
    "Fragment",
    "RankSchedule",
    "Transfer",
    "count_messages",
    "pair_digests",
    "passed_on_runs",
    "rank_schedule",
    "transfers",
]

BIG_FRAGMENT = 1 << 18  # bytes from which a fragment is a message of its own
_COUNTED = 1 << 18  # streams times rounds up to which every message is counted
MAX_MESSAGE = 1 << 30  # bytes; longer ones are sent as several, as transports count in 32 bits


class Fragment(NamedTuple):
    """Elements start to stop (row-major) of the box lo..hi of a tensor (an index into the plan's pairs)."""

    tensor: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    start: int
    stop: int
    item_size: int

    @property
    def num_bytes(self) -> int:
        """The bytes on the wire."""
        return (self.stop - self.start) * self.item_size

    @property
    def whole(self) -> bool:
        """Whether it is all of its box."""
        return self.stop - self.start == math.prod(b - a for a, b in zip(self.lo, self.hi, strict=True))

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield (lo, hi, element offset in the fragment) of the boxes that make up the run, in order."""
        if self.whole:
            yield self.lo, self.hi, 0
            return
        shape = tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))
        for start, stop, at in _run_boxes(shape, self.start, self.stop):
            lo = tuple(a + b for a, b in zip(self.lo, start, strict=True))
            hi = tuple(a + b for a, b in zip(self.lo, stop, strict=True))
            yield lo, hi, at - self.start


def _run_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the boxes (lo, hi, start) that a run of row-major elements consists of: at most 2·dims-1."""
    position = start
    while position < stop:
        # the largest trailing block that starts here and fits
        depth, size = len(shape), 1
        while (
            depth > 0
            and position % (size * shape[depth - 1]) == 0
            and position + size * shape[depth - 1] <= stop
        ):
            size *= shape[depth - 1]
            depth -= 1
        if depth == 0:
            yield (0,) * len(shape), shape, position
            return
        index = position // size
        lead = []
        rest = index
        for dim in range(depth - 1, -1, -1):
            lead.append(rest % shape[dim])
            rest //= shape[dim]
        lead.reverse()
        steps = min((stop - position) // size, shape[depth - 1] - lead[-1])
        lo = (*lead, *(0,) * (len(shape) - depth))
        hi = (*(i + 1 for i in lead[:-1]), lead[-1] + steps, *shape[depth:])
        yield lo, hi, position
        position += steps * size


@dataclass(slots=True)
class Block:
    """What one sender gives one carrier for one set of wanters in one round.

    A relay's sender is no source, but a carrier of another domain, which sends from its own storages; where `held`,
    from what it has in staging. `kept`: the carrier holds it there for the next hop.
    """

    kind: int
    sender: int
    carrier: int
    wanters: tuple[int, ...]
    packed: list[Fragment] = field(default_factory=list)
    big: list[Fragment] = field(default_factory=list)
    relay: bool = False
    held: bool = False
    kept: bool = False

    @property
    def packed_bytes(self) -> int:
        """The bytes of the packed message."""
        return sum(fragment.num_bytes for fragment in self.packed)

    @property
    def num_bytes(self) -> int:
        """The bytes of all its fragments."""
        return self.packed_bytes + sum(fragment.num_bytes for fragment in self.big)


@dataclass(slots=True)
class RankSchedule:
    """The rounds of one rank; the blocks of a round stand in the same order on every rank."""

    rank: int
    rounds: list[list[Block]]


class Transfer(NamedTuple):
    """One message between two ranks: the packed parts of blocks (part None), or one of a block's big fragments.

    Several blocks go in one message where a carrier passes on what it took from several senders.
    """

    origin: int
    target: int
    blocks: tuple[Block, ...]
    part: int | None

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments of the message, in order."""
        if self.part is not None:
            return [self.blocks[0].big[self.part]]
        return [fragment for block in self.blocks for fragment in block.packed]

    @property
    def num_bytes(self) -> int:
        """The bytes of the message."""
        if self.part is not None:
            return self.blocks[0].big[self.part].num_bytes
        return sum(block.packed_bytes for block in self.blocks)


def rank_schedule(plan: Plan, rank: int) -> RankSchedule:
    """Return one rank's part, expanding only the streams in which it takes part."""
    streams, sets = plan.streams, plan.entries.wanter_sets
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    wanting = np.zeros(len(sets), bool)
    wanting[owner[sets.members == rank]] = True
    mine = (streams.sender == rank) | (streams.carrier == rank)
    if len(sets):
        mine |= wanting[streams.wanters] & (streams.kind == NETWORK)
    chosen = np.nonzero(mine)[0].astype(np.int64)
    blocks: list[dict[tuple[int, ...], Block]] = [{} for _ in range(plan.num_rounds)]
    members = {number: tuple(sets.of(number).tolist()) for number in set(streams.wanters[chosen].tolist())}
    keys = _block_keys(plan)[:, chosen].T.tolist()
    for stream, number, fragment in _fragments(plan, chosen):
        key = tuple(keys[stream])
        block = blocks[number].get(key)
        if block is None:
            relay, held, kept = (bool(flag) for flag in key[4:])
            block = Block(key[0], key[1], key[2], members[key[3]], relay=relay, held=held, kept=kept)
            blocks[number][key] = block
        (block.big if fragment.num_bytes >= BIG_FRAGMENT else block.packed).append(fragment)
    for found in blocks:
        for block in found.values():
            # wide elements first: every fragment then starts at a multiple of its own element's size
            block.packed.sort(key=lambda fragment: -fragment.item_size)
    return RankSchedule(rank, [[found[key] for key in sorted(found)] for found in blocks])


def _block_keys(plan: Plan) -> Ints:
    """Return what tells the blocks of a round apart, as rows: kind, sender, carrier, wanters, relay, held, kept."""
    streams = plan.streams
    held, kept = (streams.held & SENDS_HELD) > 0, (streams.held & KEEPS) > 0
    columns = (streams.kind, streams.sender, streams.carrier, streams.wanters)
    return np.stack([*columns, (streams.lag > 0) & ~held, held, kept])


def _edges(plan: Plan, chosen: Ints, steps: Ints) -> Ints:
    """Return the line positions [streams, steps] at which its round `step` of each chosen stream begins.

    steps: of 0 to the plan's `cut_rounds`, [steps] or [streams, steps]; a relay's rounds count from its own first.
    """
    start, stop = plan.streams.start[chosen][:, None], plan.streams.stop[chosen][:, None]
    whole, rest = (stop - start) // plan.cut_rounds, (stop - start) % plan.cut_rounds
    raw = start + whole * steps + rest * steps // plan.cut_rounds
    edges = round_positions(plan.entries, plan.round_quantum, raw.reshape(-1)).reshape(raw.shape)
    edges = np.where(steps == 0, start, np.where(steps == plan.cut_rounds, stop, edges))
    clipped: Ints = np.clip(edges, start, stop)
    return clipped


def _segments(plan: Plan, chosen: Ints, rounds: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return (stream, round, entry, first, last): the bytes first..last of each entry in these rounds.

    rounds: of 0 to the plan's `cut_rounds`; those returned count from the plan's first, lags and all.
    """
    low = _edges(plan, chosen, rounds).reshape(-1)
    high = _edges(plan, chosen, rounds + 1).reshape(-1)
    kept = np.nonzero(high > low)[0]
    low, high = low[kept], high[kept]
    starts = plan.entries.start
    first = np.searchsorted(starts, low, side="right") - 1
    last = np.searchsorted(starts, high, side="left") - 1
    repeats = last - first + 1
    interval = np.repeat(np.arange(len(kept)), repeats)
    nth = np.arange(len(interval)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    entry = first[interval] + nth
    begin = np.maximum(low[interval], starts[entry]) - starts[entry]
    end = np.minimum(high[interval], starts[entry + 1]) - starts[entry]
    where = kept[interval]
    stream = where // len(rounds)
    return stream, rounds[where % len(rounds)] + plan.streams.lag[chosen[stream]], entry, begin, end


def _fragments(plan: Plan, chosen: Ints) -> Iterator[tuple[int, int, Fragment]]:
    """Yield (position in chosen, round, fragment) in line order."""
    entries = plan.entries
    boxes: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    tensors: dict[int, list[int]] = {}
    every = np.arange(plan.cut_rounds, dtype=np.int64)
    streams, numbers, entry, begins, ends = _segments(plan, chosen, every)
    columns = (streams, numbers, entries.tensor_class[entry], entries.box[entry], entries.box_bytes[entry])
    listed = (column.tolist() for column in (*columns, begins, ends))
    for stream, number, index, box, size, begin, end in zip(*listed, strict=True):
        if index not in boxes:
            one = entries.classes[index]
            boxes[index] = [
                (tuple(a), tuple(b)) for a, b in zip(one.lo.tolist(), one.hi.tolist(), strict=True)
            ]
            tensors[index] = one.tensors.tolist()
        lo, hi = boxes[index][box]
        item = entries.classes[index].item_size
        for nth in range(begin // size, -(-end // size)):
            start = max(begin - nth * size, 0) // item
            stop = min(end - nth * size, size) // item
            yield stream, number, Fragment(tensors[index][nth], lo, hi, start, stop, item)


def transfers(blocks: list[Block], rank: int, *, phase: int) -> list[Transfer]:
    """Return the messages of one round in which the rank takes part, in the order that both ends share.

    phase NETWORK: sender to carrier. phase DOMAIN: from the carrier to the others that want the block, and
    what a rank of the same domain sends directly.
    """
    found = []
    for block in blocks:
        for origin, target in _routes_of(block, rank, phase):
            if block.packed and (phase == NETWORK or block.kind == DOMAIN):
                found.append(Transfer(origin, target, (block,), None))
            found += [Transfer(origin, target, (block,), part) for part in range(len(block.big))]
    if phase == DOMAIN:
        for run in passed_on_runs(blocks):
            found += [
                Transfer(origin, target, run, None) for origin, target in _routes_of(run[0], rank, phase)
            ]
    return found


def passed_on_runs(blocks: Iterable[Block]) -> list[tuple[Block, ...]]:
    """Return the blocks whose packed parts a carrier passes on together: of one set of wanters, by sender.

    A run ends where the next block's elements would not start at a multiple of their size.
    """
    groups: dict[tuple[int, tuple[int, ...], bool], list[Block]] = {}
    for block in blocks:
        if block.kind == NETWORK and block.packed and len(block.wanters) > 1:
            groups.setdefault((block.carrier, block.wanters, block.kept), []).append(block)
    runs: list[tuple[Block, ...]] = []
    for _, members in sorted(groups.items()):
        run: list[Block] = []
        size = 0
        for block in sorted(members, key=lambda one: (one.sender, one.relay, one.held)):
            if run and size % block.packed[0].item_size:
                runs.append(tuple(run))
                run, size = [], 0
            run.append(block)
            size += block.packed_bytes
        runs.append(tuple(run))
    return runs


def _routes_of(block: Block, rank: int, phase: int) -> list[tuple[int, int]]:
    """Return (origin, target) of the block's messages in which the rank takes part in a phase."""
    if block.kind == LOCAL:
        return []
    if (block.kind == NETWORK) == (phase == NETWORK):
        return [(block.sender, block.carrier)] if rank in (block.sender, block.carrier) else []
    if block.kind != NETWORK:
        return []
    if rank == block.carrier:
        return [(rank, other) for other in block.wanters if other != rank]
    return [(block.carrier, rank)] if rank in block.wanters else []


def pair_digests(schedule: RankSchedule) -> dict[tuple[int, int], str]:
    """Return per ordered pair of ranks a digest of the order, sizes and contents of its messages.

    Both ends compute it from their own schedules; they must agree before anything is sent.
    """
    # a pair's messages all belong to one phase, as it either crosses domains or does not
    contents: dict[tuple[int, int], list[bytes]] = {}
    for number, blocks in enumerate(schedule.rounds):
        for block in blocks:
            told: bytes | None = None
            for phase in (NETWORK, DOMAIN):
                for pair in _routes_of(block, schedule.rank, phase):
                    if told is None:
                        parts = [tuple(one) for one in block.packed], [tuple(one) for one in block.big]
                        which = block.relay, block.held, block.kept
                        told = repr((number, block.kind, which, parts)).encode()
                    contents.setdefault(pair, []).append(told)
    return {pair: hashlib.sha256(b"".join(told)).hexdigest() for pair, told in contents.items()}


def count_messages(plan: Plan) -> int:
    """Return the number of messages of one refit, over all ranks and rounds.

    A plan of very many streams and rounds is counted in some of its rounds, evenly spread, and scaled up:
    rounds are equal parts of the same streams. Where elements of several widths do not line up, a few more
    messages pass on what came from several senders than are counted here.
    """
    streams, entries = plan.streams, plan.entries
    moving = np.nonzero(streams.kind != LOCAL)[0].astype(np.int64)
    if not len(moving):
        return 0
    counted = min(plan.cut_rounds, max(1, _COUNTED // len(moving)))
    rounds = np.arange(counted, dtype=np.int64) * plan.cut_rounds // counted
    stream, number, entry, begin, end = _segments(plan, moving, rounds)
    size = entries.box_bytes[entry]
    first, last = begin // size, (end - 1) // size
    head = np.where(first == last, end - begin, size - begin % size)
    tail = np.where(first == last, 0, end - last * size)
    inner = np.maximum(last - first - 1, 0)
    long = sum(_messages_of(part) for part in (head, tail)) + inner * _messages_of(size)
    short = sum(np.where(part < BIG_FRAGMENT, part, 0) for part in (head, tail))
    short = short + np.where(size < BIG_FRAGMENT, inner * size, 0)
    chosen = moving[stream]
    crossing = streams.kind[chosen] == NETWORK
    sizes = entries.wanter_sets.sizes[streams.wanters[chosen]]
    # blocks in the order of the streams: those of one sender, carrier and wanter set follow each other
    block = np.cumsum(changes(*_block_keys(plan))).astype(np.int64)[chosen]
    # what a carrier took from several senders it passes on in one message a wanter
    group = streams.carrier[chosen] * len(entries.wanter_sets) + streams.wanters[chosen]
    group = 2 * group + ((streams.held[chosen] & KEEPS) > 0)
    found = int((long * np.where(crossing, sizes, 1)).sum())
    found += _packed_messages(block, number, short, np.ones_like(sizes))
    found += _packed_messages(group[crossing], number[crossing], short[crossing], sizes[crossing] - 1)
    return found * plan.cut_rounds // counted


def _packed_messages(group: Ints, number: Ints, size: Ints, copies: Ints) -> int:
    """Return the messages of packed bytes, one for each group and round; copies: how often it is sent."""
    if not len(group):
        return 0
    key = group * (1 + int(number.max())) + number
    _, at, inverse = np.unique(key, return_index=True, return_inverse=True)
    packed = np.bincount(inverse.reshape(-1), size).astype(np.int64)
    return int((-(-packed // MAX_MESSAGE) * copies[at]).sum())


def _messages_of(size: Ints) -> Ints:
    return np.where(size >= BIG_FRAGMENT, -(-size // MAX_MESSAGE), 0)
