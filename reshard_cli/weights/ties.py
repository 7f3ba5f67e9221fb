"""Tied tensors that lie in a source more than once: whether they hold the values that their document says they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reshard_cli.errors import VerifyError
from reshard_cli.layout.job import JobLayout
from reshard_cli.weights.checkpoint import CheckpointSource
from reshard_cli.weights.dcp import DcpSource
from reshard_cli.weights.quantise import QuantisingSource
from reshard_cli.weights.tensors import same_bits
from reshard_cli.weights.windows import Boxed, Source, StorageWindows, intersection, parts_of, within

__all__ = ["check_ties"]

_COMPARED = 1 << 20  # elements at a time


@dataclass(frozen=True, slots=True)
class _Twice:
    """A box that is held twice, under two names or in two storages."""

    tensor: str
    other: str
    one: Boxed
    two: Boxed


def check_ties(source: Source, layout: JobLayout, rank: int) -> None:
    """Compare what one rank's source holds of each tensor under several names (alias), bit for bit.

    A refit sends one of them; a source in which they differ is not what its document says, and which of them is
    meant only its owner knows. A checkpoint, which all ranks see alike, is compared by the first one.
    Raises VerifyError naming both and the first element that differs.
    """
    base = source.base if isinstance(source, QuantisingSource) else source
    if isinstance(base, StorageWindows):
        found = _held_twice(base, layout)
    elif isinstance(base, (CheckpointSource, DcpSource)) and rank == 0:
        found = _stored_twice(base)
    else:
        return
    for twice in found:
        (one_lo, one_hi, one), (two_lo, two_hi, two) = twice.one, twice.two
        shared = intersection(one_lo, one_hi, two_lo, two_hi) if one_lo else ((), ())
        if shared is None or (one.data_ptr() == two.data_ptr() and one.stride() == two.stride()):
            continue
        for lo, hi in parts_of(*shared, _COMPARED):
            equal = same_bits(within(one, one_lo, lo, hi), within(two, two_lo, lo, hi))
            if not bool(equal.all()):
                at = [int(i) + a for i, a in zip((~equal).nonzero()[0], lo, strict=True)]
                raise VerifyError(
                    f"verification failed on {layout.name} {rank}: element {at} of {twice.other!r} differs from that of "
                    f"{twice.tensor!r}, which {layout.loaded.path} says it equals (alias): mend the weights, or take "
                    "the alias out of both documents"
                )


def _held_twice(held: StorageWindows, layout: JobLayout) -> Iterator[_Twice]:
    """Yield the pairs of windows of each tied tensor."""
    for name in sorted({one.logical for one in layout.tensors if one.name != one.logical}):
        others = [one.name for one in layout.tensors if one.logical == name and one.name != name]
        views = held.views(name)
        for number, one in enumerate(views):
            for two in views[:number]:
                yield _Twice(name, others[0], two, one)


def _stored_twice(stored: CheckpointSource | DcpSource) -> Iterator[_Twice]:
    """Yield the parts of each tensor that a checkpoint has under the name of an alias, too."""
    for other, (name, shape) in stored.ties.items():
        origin = (0,) * len(shape)
        for lo, hi in parts_of(origin, shape, _COMPARED):
            for one in stored.windows(name, lo, hi):
                for two in stored.windows(other, one[0], one[1]):
                    yield _Twice(name, other, one, two)
