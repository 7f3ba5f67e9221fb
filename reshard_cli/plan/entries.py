"""Intersects the two layouts class by class: every box that some domain needs, who holds it, who wants it.

Tensors with the same shape, dtypes, pieces and route form a class; its boxes are computed once. An entry
is one box of one class for one destination domain: each of the class's tensors has it. Three kinds:

    network   no rank of the domain holds it: it enters the domain once, and is spread there
    domain    a rank of the domain holds it: it goes over NVLink to each rank that wants it
    local     the rank that wants it holds it itself
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from reshard_cli.errors import WeightsError
from reshard_cli.layout.boxes import Intervals, Ints, overlaps, volumes
from reshard_cli.layout.distinct import DistinctBoxes
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.balance import RankSets
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.plan.routes import Route
from reshard_cli.plan.topology import Topology
from reshard_cli.spec.dtypes import item_size

__all__ = ["DOMAIN", "LOCAL", "NETWORK", "Entries", "TensorClass", "intersect"]

NETWORK, DOMAIN, LOCAL = 0, 1, 2


@dataclass(slots=True)
class TensorClass:
    """Tensors that are cut alike, and the boxes of their intersection: lo, hi [boxes, dims]."""

    tensors: Ints
    shape: tuple[int, ...]
    item_size: int
    route: Route
    lo: Ints
    hi: Ints


@dataclass(slots=True)
class Entries:
    """The entries in line order, as columns, and the sets that `holders` and `wanters` index.

    An entry's bytes lie on a line: num_tensors times box_bytes, tensor after tensor. Entries of one group
    (same kind, holders and wanters) follow each other; `start` is where each entry begins on the whole line.
    """

    classes: list[TensorClass]
    kind: Ints
    holders: Ints
    wanters: Ints
    tensor_class: Ints
    box: Ints
    box_bytes: Ints
    num_tensors: Ints
    start: Ints
    holder_sets: RankSets
    wanter_sets: RankSets
    needed_bytes: int

    @property
    def total_bytes(self) -> Ints:
        """The bytes of each entry."""
        return self.box_bytes * self.num_tensors


class _Sets:
    """Numbers distinct sets of ranks in the order in which they are met."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}

    def number(self, ranks: tuple[int, ...]) -> int:
        return self.numbers.setdefault(ranks, len(self.numbers))

    def frozen(self) -> RankSets:
        sizes = [len(ranks) for ranks in self.numbers]
        members = [rank for ranks in self.numbers for rank in ranks]
        return RankSets(np.array(members, np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@dataclass(slots=True)
class _Side:
    """One side of a class: distinct boxes, and the world ranks that have each of them."""

    boxes: DistinctBoxes
    ranks: list[tuple[int, ...]]


def intersect(
    source: JobLayout,
    destination: JobLayout,
    pairs: Sequence[TensorPair],
    routes: Sequence[Route],
    topology: Topology,
) -> Entries:
    """Return all entries of a refit.

    Raises WeightsError naming a tensor with a destination element that no source rank holds.
    """
    classes = _classify(pairs, routes)
    holder_sets, wanter_sets = _Sets(), _Sets()
    columns: list[Ints] = []
    built: list[TensorClass] = []
    needed = 0
    shared = bool(
        np.intersect1d(topology.domain[topology.source], topology.domain[topology.destination]).size
    )
    domain_of = topology.domain.tolist()
    for key, members in classes.items():
        first = pairs[members[0]]
        have = _side(source, key[0], topology.source)
        if key[-1] == "broadcast":
            want = _whole(first.shape, topology.destination)
        else:
            want = _side(destination, key[1], topology.destination)
        mine, theirs = overlaps(have.boxes.intervals, want.boxes.intervals)
        lo = np.maximum(have.boxes.lo[mine], want.boxes.lo[theirs])
        hi = np.minimum(have.boxes.hi[mine], want.boxes.hi[theirs])
        size = volumes(lo, hi)
        _check_cover(source, first, want, theirs, size)
        item = item_size(first.wire_dtype)
        built.append(TensorClass(np.array(members, np.int64), first.shape, item, routes[members[0]], lo, hi))
        rows = []
        wanted = [_by_domain(ranks, domain_of) for ranks in want.ranks]
        numbered_holders = [holder_sets.number(ranks) for ranks in have.ranks] if not shared else []
        numbered: dict[int, list[int]] = {}
        for box, (i, j, elements) in enumerate(
            zip(mine.tolist(), theirs.tolist(), size.tolist(), strict=True)
        ):
            if shared:
                found = list(_shared(have.ranks[i], wanted[j], domain_of, holder_sets, wanter_sets))
                needed += sum(elements * item * len(members) for kind, _, _ in found if kind == NETWORK)
                rows += [(kind, h, w, box, elements * item) for kind, h, w in found]
                continue
            if j not in numbered:
                numbered[j] = [wanter_sets.number(ranks) for ranks in wanted[j].values()]
            rows += [(NETWORK, numbered_holders[i], w, box, elements * item) for w in numbered[j]]
            needed += elements * item * len(members) * len(numbered[j])
        table = np.array(rows, np.int64).reshape(len(rows), 5)
        extra = np.empty((len(rows), 2), np.int64)
        extra[:, 0], extra[:, 1] = len(built) - 1, len(members)
        columns.append(np.concatenate([table, extra], axis=1))
    table = np.concatenate(columns) if columns else np.zeros((0, 7), np.int64)
    order = np.lexsort((np.arange(len(table)), table[:, 2], table[:, 1], table[:, 0]))
    table = table[order]
    start = np.concatenate([[0], np.cumsum(table[:, 4] * table[:, 6])]).astype(np.int64)
    return Entries(
        classes=built, kind=table[:, 0], holders=table[:, 1], wanters=table[:, 2],
        tensor_class=table[:, 5], box=table[:, 3], box_bytes=table[:, 4], num_tensors=table[:, 6],
        start=start, holder_sets=holder_sets.frozen(), wanter_sets=wanter_sets.frozen(),
        needed_bytes=needed,
    )  # fmt: skip


def _classify(
    pairs: Sequence[TensorPair], routes: Sequence[Route]
) -> dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str, Route], list[int]]:
    classes = defaultdict(list)
    for index, (pair, route) in enumerate(zip(pairs, routes, strict=True)):
        if pair.shape and 0 in pair.shape:
            continue  # a tensor without elements is there on both sides, and nothing of it travels
        key = (pair.source_geometries, pair.destination_geometries, pair.shape, pair.wire_dtype, route)
        classes[key].append(index)
    return classes


def _side(layout: JobLayout, geometries: tuple[int, ...], world: Ints) -> _Side:
    boxes = layout.distinct_boxes(geometries)
    first = int(world[0])  # a job's ranks follow each other in the world
    return _Side(
        boxes, boxes.ranks if first == 0 else [tuple(r + first for r in ranks) for ranks in boxes.ranks]
    )


def _whole(shape: tuple[int, ...], world: Ints) -> _Side:
    dims = len(shape)
    everybody = tuple(world.tolist())
    lo, hi = np.zeros((1, dims), np.int64), np.array(shape, np.int64).reshape(1, dims)
    return _Side(DistinctBoxes(lo, hi, [everybody], Intervals.of(lo, hi)), [everybody])


def _check_cover(source: JobLayout, pair: TensorPair, want: _Side, theirs: Ints, size: Ints) -> None:
    covered = np.bincount(theirs, size, minlength=len(want.boxes.lo)).astype(np.int64)
    whole = volumes(want.boxes.lo, want.boxes.hi)
    if np.array_equal(covered, whole):
        return
    box = int(np.nonzero(covered != whole)[0][0])
    where = [[a, b] for a, b in zip(want.boxes.lo[box].tolist(), want.boxes.hi[box].tolist(), strict=True)]
    raise WeightsError(
        f"tensor {pair.name!r}: the ranks of {source.name!r} hold {covered[box]} of the {whole[box]} elements "
        f"of box {where}, which rank {want.ranks[box][0]} wants; its shards do not add up to {list(pair.shape)}"
    )


def _by_domain(ranks: tuple[int, ...], domain_of: list[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(domain_of[rank], []).append(rank)
    return {domain: tuple(members) for domain, members in found.items()}


def _shared(
    holders: tuple[int, ...],
    wanted: dict[int, tuple[int, ...]],
    domain_of: list[int],
    holder_sets: _Sets,
    wanter_sets: _Sets,
) -> Iterable[tuple[int, int, int]]:
    """Yield (kind, holder set, wanter set) for one box where the jobs share ranks or domains."""
    for domain, wanters in wanted.items():
        inside = tuple(rank for rank in holders if domain_of[rank] == domain)
        if not inside:
            yield NETWORK, holder_sets.number(holders), wanter_sets.number(wanters)
            continue
        for rank in wanters:
            if rank in inside:
                yield LOCAL, holder_sets.number((rank,)), wanter_sets.number((rank,))
            else:
                yield DOMAIN, holder_sets.number(inside), wanter_sets.number((rank,))
