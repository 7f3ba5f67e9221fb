"""Intersects the two layouts class by class: every box that some domain needs, who holds it, who wants it.

Tensors with the same shape, dtypes, pieces and route form a class; its boxes are computed once. An entry
is one box of one class for one destination domain: each of the class's tensors has it. Four kinds:

    network   no rank of the domain holds it: it enters the domain once, and is spread there
    domain    a rank of the domain holds it: it goes over NVLink to each rank that wants it
    local     the rank that wants it holds it itself
    broadcast it travels whole, to every destination domain; its `wanters` are the roots that gather it first
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

__all__ = ["BROADCAST", "DOMAIN", "LOCAL", "NETWORK", "Entries", "Intersections", "TensorClass", "classify"]

NETWORK, DOMAIN, LOCAL, BROADCAST = 0, 1, 2, 3


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
    needed_bytes: what enters domains on the reshard route.
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
    """One side of a class: distinct boxes, the world ranks that have each of them, and their domains'.

    sets: the number of each box's rank set (of the source), or, flattened, of its rank sets by domain (of
    the destination): those of box i are sets[offsets[i]:offsets[i+1]].
    """

    boxes: DistinctBoxes
    ranks: list[tuple[int, ...]]
    by_domain: list[list[tuple[int, ...]]]
    sets: Ints
    offsets: Ints


class _Sides:
    """The sides of a plan's classes; each is worked out once, as classes share them."""

    def __init__(self, topology: Topology) -> None:
        self.domain_of = topology.domain.tolist()
        self.world = {"source": topology.source, "destination": topology.destination}
        self.sets = {"source": _Sets(), "destination": _Sets()}
        self._known: dict[object, _Side] = {}

    def of(self, layout: JobLayout, geometries: tuple[int, ...], which: str) -> _Side:
        """Return what a job has of a tensor with these geometries."""
        key = (which, geometries)
        if key not in self._known:
            boxes = layout.distinct_boxes(geometries)
            first = int(self.world[which][0])  # a job's ranks follow each other in the world
            self._known[key] = self._side(
                boxes, [tuple(r + first for r in ranks) for ranks in boxes.ranks], which
            )
        return self._known[key]

    def whole(self, shape: tuple[int, ...]) -> _Side:
        """Return the side on which every destination rank wants all of a tensor."""
        if shape not in self._known:
            lo, hi = np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)
            everybody = [tuple(self.world["destination"].tolist())]
            boxes = DistinctBoxes(lo, hi, everybody, Intervals.of(lo, hi))
            none = np.zeros(0, np.int64)
            self._known[shape] = _Side(boxes, everybody, [], none, none)
        return self._known[shape]

    def roots(self, have: _Side) -> int:
        """Return the set of the ranks that gather a tensor: of its holders, those in the first one's domain."""
        holders = sorted(set().union(*have.ranks))
        home = self.domain_of[holders[0]]
        return self.sets["destination"].number(tuple(one for one in holders if self.domain_of[one] == home))

    def _side(self, boxes: DistinctBoxes, ranks: list[tuple[int, ...]], which: str) -> _Side:
        number = self.sets[which].number
        if which == "source":
            numbers = [number(one) for one in ranks]
            return _Side(boxes, ranks, [], np.array(numbers, np.int64), np.arange(len(ranks) + 1))
        by_domain = [_by_domain(one, self.domain_of) for one in ranks]
        numbers = [number(part) for parts in by_domain for part in parts]
        offsets = np.cumsum([0, *(len(parts) for parts in by_domain)])
        return _Side(boxes, ranks, by_domain, np.array(numbers, np.int64), offsets)


class Intersections:
    """The intersections of two layouts, class by class; plans of several modes share them."""

    def __init__(self, source: JobLayout, destination: JobLayout, topology: Topology) -> None:
        self._source, self._destination = source, destination
        self._sides = _Sides(topology)
        one, other = topology.domain[topology.source], topology.domain[topology.destination]
        self._shared = bool(np.intersect1d(one, other).size)
        self._overlaps: dict[
            tuple[int, int], tuple[tuple[Ints, Ints, Ints, Ints, Ints], DistinctBoxes, DistinctBoxes]
        ] = {}
        self._known: dict[object, tuple[Ints, Ints, Ints, tuple[Ints, Ints, Ints, Ints]]] = {}

    def entries(self, pairs: Sequence[TensorPair], routes: Sequence[Route]) -> Entries:
        """Return all entries of a refit with these routes.

        Raises WeightsError naming a tensor with a destination element that no source rank holds.
        """
        columns: list[Ints] = []
        built: list[TensorClass] = []
        for key, members in classify(pairs, routes).items():
            if key[-1] == "m2n":
                continue
            first = pairs[members[0]]
            lo, hi, size, rows = self._class(first, key[-1] == "broadcast")
            kind, holders, wanters, box = rows
            item = item_size(first.wire_dtype)
            table = np.empty((7, len(box)), np.int64)
            table[0], table[1], table[2], table[3], table[4] = kind, holders, wanters, len(built), box
            table[5], table[6] = size[box] * item, len(members)
            columns.append(table)
            built.append(
                TensorClass(np.array(members, np.int64), first.shape, item, routes[members[0]], lo, hi)
            )
        table = np.concatenate(columns, axis=1) if columns else np.zeros((7, 0), np.int64)
        num_holders, num_wanters = (len(one.numbers) for one in self._sides.sets.values())
        key_column = (table[0] * num_holders + table[1]) * num_wanters + table[2]
        table = table[:, np.argsort(key_column, kind="stable")]
        kind, holders, wanters, tensor_class, box, box_bytes, num_tensors = table
        total = box_bytes * num_tensors
        return Entries(
            classes=built, kind=kind, holders=holders, wanters=wanters, tensor_class=tensor_class, box=box,
            box_bytes=box_bytes, num_tensors=num_tensors,
            start=np.concatenate([[0], np.cumsum(total)]).astype(np.int64),
            holder_sets=self._sides.sets["source"].frozen(),
            wanter_sets=self._sides.sets["destination"].frozen(),
            needed_bytes=int(total[kind == NETWORK].sum()),
        )  # fmt: skip

    def _class(self, pair: TensorPair, whole: bool) -> tuple[Ints, Ints, Ints, tuple[Ints, Ints, Ints, Ints]]:
        """Return (lo, hi, elements) of the boxes of a class, and its rows."""
        key = (pair.source_geometries, whole, pair.shape if whole else pair.destination_geometries)
        if key not in self._known:
            sides = self._sides
            have = sides.of(self._source, pair.source_geometries, "source")
            want = (
                sides.whole(pair.shape)
                if whole
                else sides.of(self._destination, pair.destination_geometries, "destination")
            )
            mine, theirs, lo, hi, size = self._overlap(have.boxes, want.boxes)
            _check_cover(self._source, pair, want, theirs, size)
            if whole:
                same = np.ones(len(mine), np.int64)
                rows = same * BROADCAST, have.sets[mine], same * sides.roots(have), np.arange(len(mine))
            elif self._shared:
                rows = _shared_rows(have, want, mine, theirs, sides)
            else:
                rows = _rows(have, want, mine, theirs)
            self._known[key] = lo, hi, size, rows
        return self._known[key]

    def _overlap(self, have: DistinctBoxes, want: DistinctBoxes) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return (i, j, lo, hi, elements) of the boxes that overlap; stages with the same boxes share it."""
        key = (id(have.intervals), id(want.intervals))
        if key not in self._overlaps:
            mine, theirs = overlaps(have.intervals, want.intervals)
            lo = np.maximum(have.lo[mine], want.lo[theirs])
            hi = np.minimum(have.hi[mine], want.hi[theirs])
            # the boxes are kept with it, so that no other object can come to have their identity
            self._overlaps[key] = (mine, theirs, lo, hi, volumes(lo, hi)), have, want
        return self._overlaps[key][0]


def _rows(have: _Side, want: _Side, mine: Ints, theirs: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (kind, holder set, wanter set, box) of a class whose jobs share no domain: all network."""
    counts = (want.offsets[1:] - want.offsets[:-1])[theirs]
    box = np.repeat(np.arange(len(mine)), counts)
    nth = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    wanters = want.sets[want.offsets[theirs[box]] + nth]
    return np.full(len(box), NETWORK, np.int64), have.sets[mine[box]], wanters, box


def _shared_rows(
    have: _Side, want: _Side, mine: Ints, theirs: Ints, sides: _Sides
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (kind, holder set, wanter set, box) of a class whose jobs share ranks or domains."""
    rows = []
    for box, (i, j) in enumerate(zip(mine.tolist(), theirs.tolist(), strict=True)):
        rows += [(*one, box) for one in _shared(have.ranks[i], want.by_domain[j], sides)]
    kind, holders, wanters, boxes = np.array(rows, np.int64).reshape(len(rows), 4).T
    return kind, holders, wanters, boxes


def classify(
    pairs: Sequence[TensorPair], routes: Sequence[Route]
) -> dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str, Route], list[int]]:
    """Return the classes: by geometries of both sides, shape, wire dtype and route, the indices of their pairs.

    Tensors without elements are in none.
    """
    classes = defaultdict(list)
    for index, (pair, route) in enumerate(zip(pairs, routes, strict=True)):
        if pair.shape and 0 in pair.shape:
            continue  # a tensor without elements is there on both sides, and nothing of it travels
        key = (pair.source_geometries, pair.destination_geometries, pair.shape, pair.wire_dtype, route)
        classes[key].append(index)
    return classes


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


def _by_domain(ranks: tuple[int, ...], domain_of: list[int]) -> list[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(domain_of[rank], []).append(rank)
    return [tuple(members) for members in found.values()]


def _shared(
    holders: tuple[int, ...], wanted: list[tuple[int, ...]], sides: _Sides
) -> Iterable[tuple[int, int, int]]:
    """Yield (kind, holder set, wanter set) for one box where the jobs share ranks or domains."""
    domain_of, held, want = sides.domain_of, sides.sets["source"], sides.sets["destination"]
    for wanters in wanted:
        inside = tuple(rank for rank in holders if domain_of[rank] == domain_of[wanters[0]])
        if not inside:
            yield NETWORK, held.number(holders), want.number(wanters)
            continue
        for rank in wanters:
            if rank in inside:
                yield LOCAL, held.number((rank,)), want.number((rank,))
            else:
                yield DOMAIN, held.number(inside), want.number((rank,))
