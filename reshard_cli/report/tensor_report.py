"""One tensor of a plan in words: which rank holds what on both sides, and which part goes where.

Made to settle an argument about one weight, so it is worked out from the plan that a refit runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard_cli.errors import DocumentError
from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.plan.build import Plan
from reshard_cli.plan.entries import DOMAIN, LOCAL, NETWORK
from reshard_cli.plan.schedule import Fragment
from reshard_cli.refit.prepare import Jobs
from reshard_cli.report.tensor_classes import cast_at
from reshard_cli.spec.names import fill, normalise, template_of

__all__ = ["TENSOR_SCHEMA", "tensor_lines", "tensor_report"]

TENSOR_SCHEMA = "reshard-cli/tensor/1"
_KIND = {NETWORK: "network", DOMAIN: "domain", LOCAL: "local"}


def tensor_report(jobs: Jobs, plan: Plan, name: str) -> dict[str, Any]:
    """Return who holds the tensor on both sides and its fragments in the plan.

    `name` may be one expert's: then only that expert is shown. Raises DocumentError for an unknown name.
    """
    index, expert = _find(plan, normalise(name))
    pair = plan.pairs[index]
    return {
        "schema": TENSOR_SCHEMA,
        "tensor": pair.name,
        "expert": expert,
        "shape": list(pair.shape),
        "source_dtype": pair.source_dtype,
        "destination_dtype": pair.destination_dtype,
        "route": plan.routes[index],
        "cast_at": cast_at(pair),
        "source": _holders(jobs.source, pair.name, expert),
        "destination": _holders(jobs.destination, pair.name, expert),
        "fragments": _fragments(plan, index, expert),
        "m2n": _m2n(plan, index),
    }


def _m2n(plan: Plan, index: int) -> list[dict[str, Any]] | None:
    """Return both sides' meshes where NCCL M2N carries the tensor, else None."""
    for one in plan.m2n.carried if plan.m2n is not None else ():
        if index in one.tensors:
            return [
                {"first_rank": side.start, "mesh": list(side.mesh), "cut_axis": side.axis, "dim": side.dim}
                for side in (one.source, one.destination)
            ]
    return None


def _find(plan: Plan, name: str) -> tuple[int, int | None]:
    names = {pair.name: index for index, pair in enumerate(plan.pairs)}
    if name in names:
        return names[name], None
    template, layer, expert = template_of(name)
    grouped = fill(template, layer=layer)
    if grouped in names and expert is not None and expert < plan.pairs[names[grouped]].shape[0]:
        return names[grouped], expert
    raise DocumentError(f"--tensor: the plan has no tensor {name!r}; `reshard-cli inspect` lists a model's")


def _holders(layout: JobLayout, name: str, expert: int | None) -> list[dict[str, Any]]:
    """Return per rank of the job the boxes of the tensor that it holds, with their storages."""
    found = []
    for rank in range(layout.num_ranks):
        for storage in rank_storages(layout, rank, name):
            for window in storage.windows:
                if window.tensor == name and (expert is None or window.lo[0] <= expert < window.hi[0]):
                    box = [list(edge) for edge in zip(window.lo, window.hi, strict=True)]
                    found.append({"rank": rank, "box": box, "storage": storage.name, "offset": window.offset})
    return found


def _fragments(plan: Plan, index: int, expert: int | None) -> list[dict[str, Any]]:
    """Return the tensor's fragments: the parts of the plan's streams that are its bytes."""
    entries, streams = plan.entries, plan.streams
    order = np.argsort(streams.start, kind="stable")
    starts, stops = streams.start[order], streams.stop[order]
    found = []
    for number, one in enumerate(entries.classes):
        at = np.nonzero(one.tensors == index)[0]
        if not len(at):
            continue
        for entry in np.nonzero(entries.tensor_class == number)[0].tolist():
            size = int(entries.box_bytes[entry])
            begin = int(entries.start[entry]) + int(at[0]) * size
            box = int(entries.box[entry])
            lo, hi = tuple(one.lo[box].tolist()), tuple(one.hi[box].tolist())
            first = int(np.searchsorted(stops, begin, side="right"))
            last = int(np.searchsorted(starts, begin + size, side="left"))
            for stream in order[first:last].tolist():
                start = max(int(streams.start[stream]), begin) - begin
                stop = min(int(streams.stop[stream]), begin + size) - begin
                item = one.item_size
                fragment = Fragment(index, lo, hi, start // item, stop // item, item)
                found += _parts(plan, stream, fragment, expert)
    return found


def _parts(plan: Plan, stream: int, fragment: Fragment, expert: int | None) -> list[dict[str, Any]]:
    streams = plan.streams
    wanters = plan.entries.wanter_sets.of(int(streams.wanters[stream])).tolist()
    found = []
    for lo, hi, _ in fragment.boxes():
        if expert is not None and not lo[0] <= expert < hi[0]:
            continue
        elements = int(np.prod([b - a for a, b in zip(lo, hi, strict=True)], dtype=np.int64))
        carrier = int(streams.carrier[stream])
        found.append(
            {
                "box": [list(edge) for edge in zip(lo, hi, strict=True)],
                "bytes": elements * fragment.item_size,
                "kind": _KIND[int(streams.kind[stream])],
                "sender": int(streams.sender[stream]),
                "carrier": carrier,
                "passed_on_to": [rank for rank in wanters if rank != carrier],
            }
        )
    return found


def tensor_lines(report: dict[str, Any], jobs: Jobs, colocated: bool) -> list[str]:
    """Return the report in sentences."""
    name = report["tensor"]
    if report["expert"] is not None:
        name = fill(name, expert=report["expert"])
    lines = [f"{name}: shape {report['shape']}, route {report['route']}"]
    if report["expert"] is not None or "{expert}" in name:
        lines[0] += " (dim 0 counts the experts)"
    if report["source_dtype"] != report["destination_dtype"]:
        side = report["cast_at"]
        lines.append(f"cast from {report['source_dtype']} to {report['destination_dtype']} by the {side}")
    elif report["cast_at"]:
        lines.append(f"scales that the {report['cast_at']} makes while it casts their tensor")
    for side, layout in (("source", jobs.source), ("destination", jobs.destination)):
        lines.append(f"held by the {side}, {layout.name}:")
        for one in report[side]:
            where = f"{one['storage']!r} from element {one['offset']}"
            lines.append(f"  {layout.name} {one['rank']}: {_box(one['box'])} in {where}")
    lines.append("moves:")
    if report["m2n"] is not None:
        for side, one in zip(("source", "destination"), report["m2n"], strict=True):
            lines.append(
                f"  by NCCL M2N, {side}: mesh {one['mesh']} from rank {one['first_rank']}, "
                f"axis {one['cut_axis']} cuts dim {one['dim']}"
            )
    for one in report["fragments"]:
        sender, carrier = (jobs.name_of(one[end], colocated) for end in ("sender", "carrier"))
        text = f"  {_box(one['box'])}, {one['bytes']:,} bytes: "
        if one["kind"] == "local":
            text += f"{carrier} holds it itself"
        else:
            way = "over the network" if one["kind"] == "network" else "inside their domain"
            text += f"{sender} sends it {way} to {carrier}"
        if one["passed_on_to"]:
            text += ", which passes it on to rank(s) " + ", ".join(str(rank) for rank in one["passed_on_to"])
        lines.append(text)
    return lines


def _box(box: list[list[int]]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
