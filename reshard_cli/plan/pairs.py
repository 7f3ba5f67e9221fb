"""Pairs each logical tensor of the destination with the source's, and refuses what does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from reshard_cli.errors import DocumentError, WeightsError, listed
from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.job import JobLayout
from reshard_cli.spec.casts import SCALE_SUFFIX
from reshard_cli.spec.dtypes import item_size

__all__ = ["TensorPair", "pair_tensors"]

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One logical tensor on both sides. Several geometries on a side are aliases that hold the same values.

    The wire dtype is the narrower one, so that a cast happens at the sender where that makes fewer bytes.
    A cast to float8 in blocks needs whole blocks: `quantised` says which side makes it, for the tensor
    itself and, where the sender does, for its scales, which are then a pair with `scale_of`.
    """

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    destination_dtype: str
    wire_dtype: str
    source_geometries: tuple[int, ...]
    destination_geometries: tuple[int, ...]
    num_names: int
    asked_route: str | None
    has_experts: bool
    block: int | None = None
    quantised: Literal["sender", "receiver"] | None = None
    scale_of: str | None = None


def _tied_in(job: JobLayout, side: str, names: list[str], other: str) -> list[str]:
    """Return a line on those of these names that only this side's document ties to another tensor."""
    known = {tensor.name for tensor in job.tensors}
    tied = [name for name in names if name in known]
    told = f"{', '.join(tied[:8])}: tied (alias) in the {side}'s document alone; tie it in the {other}'s, too"
    return [told] if tied else []


def pair_tensors(
    source: JobLayout, destination: JobLayout, *, allow_extra: bool = False
) -> tuple[list[TensorPair], list[str]]:
    """Return the pairs in the destination's order, and the names that only the source has.

    Raises WeightsError for tensors that the source lacks, has too many (unless `allow_extra`), or has in
    another shape or in another dtype that no document asked to be cast.
    """
    have = _by_logical(source)
    want = _by_logical(destination)
    # scales that the destination wants and the source has not are found while its tensor is cast
    made = {
        name: tensors[0].scale_of
        for name, tensors in want.items()
        if name not in have and tensors[0].scale_of in have
    }
    missing = [name for name in want if name not in have and name not in made]
    extra = [name for name in have if name not in want]
    unasked = [name for name in extra if not destination.loaded.leaves_out(name)]
    lines = []
    if missing:
        lines.append(f"the source lacks {listed(missing)}")
        lines += _tied_in(source, "source", missing, "destination")
    if unasked and (missing or not allow_extra):
        mend = "" if missing else " (--allow-extra leaves them out)"
        lines.append(f"the destination has no place for {listed(unasked)}{mend}")
        lines += _tied_in(destination, "destination", unasked, "source")
    if lines:
        raise WeightsError(f"{source.name} -> {destination.name}: " + "\n".join(lines))
    pairs, faults = [], []
    for name, wanted in want.items():
        if name in made:
            continue
        held = have[name]
        shapes = {tensor.shape for tensor in held + wanted}
        if len(shapes) > 1:
            one, other = list(held[0].shape), list(wanted[0].shape)
            faults.append(f"tensor {name!r}: the source has shape {one}, the destination {other}")
            continue
        scaled = held[0].dtype.startswith("float8") and name + SCALE_SUFFIX in have
        fault = _dtype_fault(held, wanted) or _scale_fault(held, wanted, want, scaled=scaled)
        if fault:
            faults.append(f"tensor {name!r}: {fault}")
            continue
        pair = _pair(name, held, wanted)
        if wanted[0].block is None or held[0].block is not None:
            pairs.append(pair)
        else:
            pairs += _quantised(pair, wanted[0].block, want[name + SCALE_SUFFIX][0], source)
    if faults:
        more = f"\n… and {len(faults) - _SHOWN} more tensors" if len(faults) > _SHOWN else ""
        raise WeightsError("\n".join(faults[:_SHOWN]) + more)
    return pairs, extra


def _by_logical(layout: JobLayout) -> dict[str, list[HeldTensor]]:
    found: dict[str, list[HeldTensor]] = defaultdict(list)
    for tensor in layout.tensors:
        found[tensor.logical].append(tensor)
    return dict(found)


def _dtype_fault(held: list[HeldTensor], wanted: list[HeldTensor]) -> str | None:
    for side, tensors in (("source", held), ("destination", wanted)):
        kinds = {tensor.dtype for tensor in tensors}
        if len(kinds) > 1:
            names = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in tensors)
            return f"tied tensors of the {side} differ in dtype: {names}"
    if held[0].dtype != wanted[0].dtype and not wanted[0].dtype_asked:
        return (
            f"the source has {held[0].dtype}, the destination {wanted[0].dtype}; "
            f"to have it cast, write dtype: {wanted[0].dtype} in the destination's document "
            "(Layout.of of its live tensors: cast=True)"
        )
    return None


def _scale_fault(
    held: list[HeldTensor], wanted: list[HeldTensor], want: Mapping[str, list[HeldTensor]], *, scaled: bool
) -> str | None:
    """Say what is wrong where one side's values mean something only together with scales.

    scaled: the source has scales for it, be they those of blocks or others.
    """
    mine, theirs = held[0], wanted[0]
    scales = mine.logical + SCALE_SUFFIX
    if scaled and (theirs.dtype != mine.dtype or scales not in want):
        return (
            f"the source has it in {mine.dtype} with block scales, without which its values mean nothing; "
            f"the destination has to take it in {mine.dtype}, with {scales!r}"
        )
    names = {one.name for one in want.get(scales, ())}
    alone = next((one.name for one in wanted if scaled and one.name + SCALE_SUFFIX not in names), None)
    if alone is not None:
        return f"its alias {alone!r} would be without scales; write alias: {{{alone + SCALE_SUFFIX}: {scales}}} too"
    if mine.block is None and theirs.block is not None and mine.dtype.startswith("float8"):
        return f"the source has it in {mine.dtype} without scales, the destination wants it with block scales"
    return None


def _quantised(pair: TensorPair, block: int, scale: HeldTensor, source: JobLayout) -> list[TensorPair]:
    """Return the pairs of a tensor that is cast in blocks: with its scales where the sender makes them.

    The sender needs to hold whole blocks; where the source cuts them, values travel as they are.
    """
    scaled = [source.scale_geometry(one, pair.shape, block) for one in pair.source_geometries]
    geometries = tuple(sorted(one for one in scaled if one is not None))
    if len(geometries) < len(scaled):
        if pair.asked_route == "broadcast":
            raise DocumentError(
                f"tensor {pair.name!r}: the ranks of {source.name!r} hold parts of blocks of {block}, and so may "
                "the destination's on the broadcast route; let one of them be cut at whole blocks"
            )
        return [replace(pair, wire_dtype=pair.source_dtype, block=block, quantised="receiver")]
    values = replace(pair, wire_dtype=pair.destination_dtype, block=block, quantised="sender")
    scales = TensorPair(
        name=pair.name + SCALE_SUFFIX,
        shape=scale.shape,
        source_dtype=scale.dtype,
        destination_dtype=scale.dtype,
        wire_dtype=scale.dtype,
        source_geometries=geometries,
        destination_geometries=(scale.geometry,),
        num_names=pair.num_names,
        asked_route=pair.asked_route,
        has_experts=pair.has_experts,
        block=block,
        quantised="sender",
        scale_of=pair.name,
    )
    return [values, scales]


def _pair(name: str, held: list[HeldTensor], wanted: list[HeldTensor]) -> TensorPair:
    have, want = held[0].dtype, wanted[0].dtype
    asked = [tensor.route for tensor in held + wanted if tensor.route is not None]
    if len(set(asked)) > 1:
        raise DocumentError(f"tensor {name!r}: one document says route: {asked[0]}, the other {asked[-1]}")
    return TensorPair(
        name=name,
        shape=wanted[0].shape,
        source_dtype=have,
        destination_dtype=want,
        wire_dtype=want if item_size(want) <= item_size(have) else have,
        source_geometries=tuple(sorted({tensor.geometry for tensor in held})),
        destination_geometries=tuple(sorted({tensor.geometry for tensor in wanted})),
        num_names=wanted[0].shape[0] if wanted[0].has_experts else 1,
        asked_route=asked[0] if asked else None,
        has_experts=wanted[0].has_experts,
    )
