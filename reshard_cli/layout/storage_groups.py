"""Which tensors share a storage, by the document's storage rules; a tensor without a rule is its own.

A group is one storage rule at one layer: its operands in the order of the rule. What a group looks like on
one rank is worked out in `storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.holdings import Holdings, Interleaved
from reshard_cli.layout.pipeline import Stages
from reshard_cli.spec.casts import SCALE_SUFFIX
from reshard_cli.spec.layout_document import LoadedLayout, StorageRule, leave_out_path
from reshard_cli.spec.located import KeyPath
from reshard_cli.spec.model import LogicalTensor
from reshard_cli.spec.names import Pattern, expand_braces, fill, has_digit, substitute, template_of
from reshard_cli.spec.preset import told_left_out

__all__ = ["StorageGroup", "check_groups", "concat_dim", "group_storages", "storage_name"]

AddProblem = Callable[[KeyPath, str, str], None]


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """Tensors that lie in one storage (or, with `{expert}` in its name, in one storage per expert).

    `operands` index the job's tensors; `name` is the storage's, with `{layer}` filled in.
    """

    name: str
    layer: int | None
    operands: tuple[int, ...]
    index: int | None
    rule: StorageRule | None

    def interleaved_parts(self, tensors: Sequence[tuple[LogicalTensor, str]]) -> dict[int, Interleaved]:
        """Return each operand's part of an interleaved storage; empty for any other storage."""
        if self.rule is None or self.rule.interleave is None:
            return {}
        members = [tensors[position][0] for position in self.operands]
        dim = concat_dim(self.rule, members[0].has_experts)
        sizes = tuple(member.shape[dim] for member in members if dim < len(member.shape))
        return {
            position: Interleaved(dim, sizes, index, self.rule.interleave, self.rule.unzip.get(str(index), 0))
            for index, position in enumerate(self.operands)
        }


def concat_dim(rule: StorageRule, has_experts: bool) -> int:
    """Return the rule's `dim` as a dim of the logical tensor, where the expert is dim 0."""
    return rule.dim + (1 if has_experts and rule.stack is None else 0)


def group_storages(
    loaded: LoadedLayout,
    tensors: Sequence[LogicalTensor],
    add: AddProblem,
    weights: Mapping[int, int],
    blocks: Mapping[str, int],
) -> list[StorageGroup]:
    """Return the storages of a job. Notes operands that are missing or cannot lie together.

    weights: of scales that follow a tensor, that tensor's position; they lie together as those tensors do,
    unless a storage rule names scales itself. blocks: each such tensor's block size by its name.
    """
    operands: list[tuple[int, int, Pattern]] = []
    for index, rule in enumerate(loaded.document.storage):
        texts = [choice for pattern in rule.concat for choice in expand_braces(pattern)]
        if rule.rename is not None:
            texts = [rule.rename]
        operands += [(index, position, Pattern(text)) for position, text in enumerate(texts)]
    members: dict[tuple[int, int | None], dict[int, int]] = {}
    groups: list[StorageGroup] = []
    # names that differ in their numbers alone meet the same rules, unless a rule has a number in it
    numbered = any(has_digit(pattern.text) for _, _, pattern in operands)
    fitting: dict[str, list[tuple[int, int, Pattern]]] = {}
    following: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        probe = tensor.name.replace("{expert}", "0")
        key = probe if numbered else template_of(probe)[0]
        if key not in fitting:
            fitting[key] = [one for one in operands if one[2].matches(probe)]
        found = next((one for one in fitting[key] if _at_layer(loaded, one[0], tensor.layer)), None)
        if position in weights and (found is None or SCALE_SUFFIX not in found[2].text):
            following[weights[position]] = position
            continue
        if found is None:
            groups.append(StorageGroup(tensor.name, tensor.layer, (position,), None, None))
            continue
        index, operand, pattern = found
        rule = loaded.document.storage[index]
        if rule.rename is not None:
            if not _can_transpose(index, rule, tensor, add):
                continue
            groups.append(
                StorageGroup(_renamed(rule, pattern, tensor), tensor.layer, (position,), index, rule)
            )
            continue
        other = members.setdefault((index, tensor.layer), {}).setdefault(operand, position)
        if other != position:
            message = f"{tensor.name!r} and {tensors[other].name!r} are both its operand {operand + 1}"
            add(("storage", index, "concat"), "twice", message)
    wanted = {index: 1 + max(o for i, o, _ in operands if i == index) for index, _ in members}
    for (index, layer), found_operands in members.items():
        rule = loaded.document.storage[index]
        lacking = [operand for operand in range(wanted[index]) if operand not in found_operands]
        if lacking:
            text = next(p.text for i, o, p in operands if (i, o) == (index, lacking[0]))
            missing = fill(text, layer=layer)
            if loaded.leaves_out(missing):
                beside = tensors[min(found_operands.values())].name
                where = leave_out_path(loaded.document.leave_out, missing)
                add(where, "operand", told_left_out(missing, beside, rule.tensor))
            else:
                add(("storage", index, "concat"), "lacking", f"no tensor of the model is {missing!r}")
            continue
        chosen = tuple(found_operands[operand] for operand in range(wanted[index]))
        if _fit(index, rule, [tensors[position] for position in chosen], add):
            groups.append(StorageGroup(rule.tensor, layer, chosen, index, rule))
    if not following:
        return groups
    with_scales = []
    for group in groups:
        with_scales.append(group)
        scales = _scales_of(group, tensors, following, blocks, add)
        if scales is not None:
            with_scales.append(scales)
    return with_scales


def _scales_of(
    group: StorageGroup,
    tensors: Sequence[LogicalTensor],
    following: Mapping[int, int],
    blocks: Mapping[str, int],
    add: AddProblem,
) -> StorageGroup | None:
    """Return the storage of a storage's scales, or None where it has none."""
    have = [position for position in group.operands if position in following]
    if not have:
        return None
    where: KeyPath = ("storage",) if group.index is None else ("storage", group.index)
    if len(have) < len(group.operands):
        lacking = next(position for position in group.operands if position not in following)
        a, b = tensors[have[0]].name, tensors[lacking].name
        add((*where, "concat"), "scales", f"{a!r} has block scales and {b!r} has not")
        return None
    rule = group.rule
    if rule is not None and rule.block is not None:
        size = blocks[tensors[have[0]].name]
        if rule.block % size:
            told = f"{rule.block} rows are no multiple of the {size} of the scales' blocks"
            add((*where, "block"), "scales", told)
            return None
        rule = rule.model_copy(update={"block": rule.block // size})
    operands = tuple(following[position] for position in group.operands)
    return StorageGroup(group.name + SCALE_SUFFIX, group.layer, operands, group.index, rule)


def _at_layer(loaded: LoadedLayout, index: int, layer: int | None) -> bool:
    layers = loaded.document.storage[index].layers
    return layers is None or layer in layers


def _renamed(rule: StorageRule, pattern: Pattern, tensor: LogicalTensor) -> str:
    """Return the new name; `*` and captures are carried over in order, local numbers filled in later."""
    mark = "987654321"
    groups = pattern.groups(tensor.name.replace("{expert}", mark)) or ()
    return substitute(rule.tensor, pattern, groups).replace(mark, "{expert}")


def _fit(index: int, rule: StorageRule, members: list[LogicalTensor], add: AddProblem) -> bool:
    """Say whether whole operands can be concatenated; note why they cannot."""
    where: KeyPath = ("storage", index)
    first = members[0]
    if len({member.has_experts for member in members}) > 1:
        add((*where, "concat"), "experts", "some operands are experts' and some are not")
        return False
    if rule.stack == "expert" and not first.has_experts:
        add((*where, "stack"), "experts", f"{first.name!r} has no experts to stack")
        return False
    dim = concat_dim(rule, first.has_experts)
    for member in members:
        if dim >= len(member.shape):
            add((*where, "dim"), "dim", f"{member.name!r} has no dim {rule.dim}")
            return False
        if len(member.shape) != len(first.shape) or any(
            a != b for d, (a, b) in enumerate(zip(member.shape, first.shape, strict=True)) if d != dim
        ):
            message = f"{first.name!r} {list(first.shape)} and {member.name!r} {list(member.shape)} differ"
            add((*where, "concat"), "shape", f"{message} in another dim than {rule.dim}")
            return False
        if rule.interleave is not None and member.shape[dim] % rule.interleave:
            message = f"{member.name!r} has {member.shape[dim]} rows, no multiple of {rule.interleave} groups"
            add((*where, "interleave"), "groups", message)
            return False
        run = rule.unzip.get(str(members.index(member)))
        if rule.interleave is not None and run and member.shape[dim] // rule.interleave % (2 * run):
            rows = member.shape[dim] // rule.interleave
            message = f"{member.name!r} has {rows} rows a group, no pairs of {run}"
            add((*where, "unzip", str(members.index(member))), "runs", message)
            return False
    return _can_transpose(index, rule, first, add)


def _can_transpose(index: int, rule: StorageRule, tensor: LogicalTensor, add: AddProblem) -> bool:
    if rule.transpose and len(tensor.shape) - tensor.has_experts < 2:
        add(("storage", index, "transpose"), "dims", f"{tensor.name!r} has fewer than two dims to swap")
        return False
    return True


def check_groups(
    loaded: LoadedLayout,
    groups: Sequence[StorageGroup],
    held: Sequence[HeldTensor],
    geometries: Sequence[Holdings],
    stages: Stages,
    add: AddProblem,
) -> None:
    """Note storages whose operands do not fit on some rank, and names that two storages of a rank share."""
    owners: dict[str, list[StorageGroup]] = {}
    by_name = {tensor.name: tensor for tensor in held}
    for group in groups:
        members = [held[position] for position in group.operands]
        where: KeyPath = ("storage",) if group.index is None else ("storage", group.index)
        if len({member.dtype for member in members}) > 1:
            kinds = ", ".join(f"{member.name} {member.dtype}" for member in members)
            add((*where, "concat"), "dtype", f"operands differ in dtype: {kinds}")
            continue
        if len({member.padding for member in members}) > 1:
            kinds = ", ".join(f"{member.name} {member.padding}" for member in members)
            add((*where, "concat"), "padding", f"operands differ in what becomes of their padding: {kinds}")
            continue
        if members[0].scale_of is not None and group.rule is not None:
            _check_scales(group, members, by_name, geometries, add)
        if len(members) > 1:
            _check_on_ranks(group, [(member, geometries[member.geometry]) for member in members], where, add)
        name = storage_name(group, stages)
        owners.setdefault(name, []).append(group)
    for name, sharing in owners.items():
        for other in sharing[1:]:
            first = geometries[held[sharing[0].operands[0]].geometry].present
            second = geometries[held[other.operands[0]].geometry].present
            if np.any(first & second):
                rank = int(np.nonzero(first & second)[0][0])
                a, b = held[sharing[0].operands[0]].name, held[other.operands[0]].name
                index = other.index if other.index is not None else sharing[0].index
                where = ("storage",) if index is None else ("storage", index, "tensor")
                add(where, "owners", f"{a!r} and {b!r} would both be {name!r} on rank {rank}")


def _check_scales(
    group: StorageGroup,
    members: Sequence[HeldTensor],
    by_name: Mapping[str, HeldTensor],
    geometries: Sequence[Holdings],
    add: AddProblem,
) -> None:
    """Note operands after which the next one would begin inside a block of the storage."""
    assert group.rule is not None
    for member in members[:-1]:
        weight = by_name[member.scale_of or ""]
        dim = concat_dim(group.rule, weight.has_experts)
        if weight.block is None or dim < len(weight.shape) - 2:
            continue
        uneven = np.nonzero(geometries[weight.geometry].local_shape[:, dim] % weight.block)[0]
        if len(uneven):
            rows = int(geometries[weight.geometry].local_shape[uneven[0], dim])
            told = f"rank {int(uneven[0])} has {rows} rows of {weight.name!r}, no multiple of {weight.block}"
            path: KeyPath = ("storage",) if group.index is None else ("storage", group.index, "concat")
            add(path, "scales", f"{told}: the next operand would begin inside a block of its scales")
            return


def storage_name(group: StorageGroup, stages: Stages) -> str:
    """Return the storage's name with the layer filled in; `{expert}` words stay."""
    local = None if group.layer is None else stages.local_layer(group.layer)
    return fill(group.name, layer=group.layer, local_layer=local)


def _check_on_ranks(
    group: StorageGroup,
    members: Sequence[tuple[HeldTensor, Holdings]],
    where: KeyPath,
    add: AddProblem,
) -> None:
    rule = group.rule
    assert rule is not None
    first_tensor, first = members[0]
    for tensor, holdings in members[1:]:
        name = tensor.name
        if not np.array_equal(first.present, holdings.present):
            rank = int(np.nonzero(first.present != holdings.present)[0][0])
            message = f"rank {rank} holds only some of its operands ({name!r} is placed differently)"
            add((*where, "concat"), "present", message)
            return
        dim = concat_dim(rule, tensor.has_experts)
        differs = first.local_shape != holdings.local_shape
        if rule.interleave is None and rule.block is None:
            differs[:, dim] = False
        if np.any(differs):
            rank = int(np.nonzero(np.any(differs, axis=1))[0][0])
            a, b = first.local_shape[rank].tolist(), holdings.local_shape[rank].tolist()
            message = (
                f"on rank {rank} {first_tensor.name!r} {a} and {name!r} {b} do not fit along dim {rule.dim}"
            )
            add((*where, "concat"), "local", message)
            return
    if rule.block is not None:
        dim = concat_dim(rule, first_tensor.has_experts)
        uneven = np.nonzero(first.local_shape[:, dim] % rule.block)[0]
        if len(uneven):
            rank = int(uneven[0])
            rows = int(first.local_shape[rank, dim])
            add((*where, "block"), "rows", f"rank {rank} has {rows} rows, no multiple of {rule.block}")
