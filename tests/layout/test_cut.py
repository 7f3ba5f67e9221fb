"""The cut of every placement against PyTorch's own DTensor, and against rules written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard_cli.layout.cut import coordinates, cut
from reshard_cli.layout.holdings import (
    Interleaved,
    blocked_holdings,
    interleaved_holdings,
    placed_holdings,
)
from reshard_cli.spec.placement import Expert, Stage, parse_placement
from reshard_cli.spec.placement import Shard as OurShard
from tests.strategies import cut_by_hand, local_tensor, meshes, places

MANY = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def meshes_and_placements(draw):
    """A mesh of 1 to 4 axes, a tensor of 0 to 5 dims, and a dim or None for each axis, in mesh order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13]), max_size=5))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None for _ in sizes]
    return sizes, tuple(shape), dims


@MANY
@given(meshes_and_placements())
def test_shards_applied_in_mesh_order_are_dtensors_shard(case):
    sizes, shape, dims = case
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    place = {f"axis{i}": OurShard(dim) for i, dim in enumerate(dims) if dim is not None}
    shards = cut(shape, axes, place)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for rank in range(math.prod(sizes)):
        at = [int(i) for i in np.unravel_index(rank, sizes)]
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, at, placements)
        assert tuple(shards.count[rank]) == tuple(local)
        if math.prod(local):
            assert tuple(shards.start[rank]) == tuple(offset)


@MANY
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_tensor_parallel_first_then_fsdp_is_dtensors_strided_shard(dp, tp, rows, uneven):
    rows = rows if uneven else rows * dp * tp
    shards = cut((rows, 3), {"dp": dp, "tp": tp}, {"tp": OurShard(0), "dp": OurShard(0)})
    if rows % tp:
        return  # DTensor's strided shard of uneven rows is not what FSDP2 does: it pads the TP shard
    whole = torch.arange(rows)
    for rank in range(dp * tp):
        d, t = divmod(rank, tp)
        local = list(torch.chunk(list(torch.chunk(whole, tp))[t], dp)) if rows else []
        mine = local[d] if d < len(local) else whole[:0]
        start, count = int(shards.start[rank, 0]), int(shards.count[rank, 0])
        assert whole[start : start + count].tolist() == mine.tolist()
    if rows and rows % (dp * tp) == 0:
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        for rank in range(dp * tp):
            local, offset = _compute_local_shape_and_global_offset(
                (rows, 3), (dp, tp), list(divmod(rank, tp)), placements
            )
            assert int(shards.count[rank, 0]) == local[0]
            assert int(shards.start[rank, 0]) == offset[0]


def test_the_strided_reading_and_the_naive_one_differ():
    strided = cut((8,), {"dp": 2, "tp": 2}, {"tp": OurShard(0), "dp": OurShard(0)})
    assert strided.start[:, 0].tolist() == [0, 4, 2, 6]
    nested = cut((8,), {"dp": 2, "tp": 2}, {"dp": OurShard(0), "tp": OurShard(0)})
    assert nested.start[:, 0].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("shape", "axes", "place", "counts"),
    [
        ((10, 3), {"a": 4}, {"a": OurShard(0)}, [3, 3, 3, 1]),
        ((6,), {"a": 4}, {"a": OurShard(0)}, [2, 2, 2, 0]),
        ((2,), {"a": 2, "b": 4}, {"a": OurShard(0), "b": OurShard(0)}, [1, 0, 0, 0, 1, 0, 0, 0]),
    ],
    ids=["short tail", "empty tail", "six of eight empty"],
)
def test_uneven_cuts_leave_short_and_empty_tails(shape, axes, place, counts):
    assert cut(shape, axes, place).count[:, 0].tolist() == counts


@MANY
@given(st.integers(1, 12), st.integers(1, 8))
def test_experts_go_in_blocks_with_the_remainder_on_the_first_ranks(experts, size):
    shards = cut((experts, 2), {"ep": size}, {"ep": Expert()}, has_experts=True)
    for rank, mine in enumerate(np.array_split(np.arange(experts), size)):
        start, count = int(shards.start[rank, 0]), int(shards.count[rank, 0])
        assert list(range(start, start + count)) == mine.tolist()
        # vLLM's linear placement: E // ep each, the first E % ep ranks one more
        assert count == experts // size + (rank < experts % size)


@MANY
@given(st.integers(1, 12), st.integers(1, 8))
def test_experts_dealt_out_in_turn_go_to_the_rank_of_their_remainder(experts, size):
    holdings = placed_holdings(
        (experts, 2), {"ep": size}, {"ep": Expert(round_robin=True)}, stage=None, has_experts=True, pad={}
    )
    owners = {}
    for rank, lo, hi in zip(holdings.rank, holdings.lo[:, 0], holdings.hi[:, 0], strict=True):
        for expert in range(lo, hi):
            assert expert not in owners
            owners[expert] = rank
    assert owners == {expert: expert % size for expert in range(experts)}


def test_fewer_parts_than_ranks_put_one_part_on_neighbours():
    # 4 KV heads of 2 rows over TP 8: each head on two neighbouring ranks
    shards = cut((8, 5), {"tp": 8}, {"tp": OurShard(0, parts=4)})
    assert shards.start[:, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert set(shards.count[:, 0].tolist()) == {2}


def test_a_stage_axis_keeps_a_tensor_on_its_stage_alone():
    shards = cut((4,), {"pp": 2, "tp": 2}, {"pp": Stage(), "tp": OurShard(0)}, stage=frozenset([1]))
    assert shards.present.tolist() == [False, False, True, True]


def test_padding_is_cut_with_the_tensor_and_holds_nothing_of_it():
    # 10 rows padded to 16, over 4: local tensors of 4 rows, the last one all padding but its first two
    holdings = placed_holdings(
        (10,), {"tp": 4}, {"tp": OurShard(0)}, stage=None, has_experts=False, pad={0: 16}
    )
    assert holdings.local_shape[:, 0].tolist() == [4, 4, 4, 4]
    pieces = list(zip(holdings.rank, holdings.lo[:, 0], holdings.hi[:, 0], strict=True))
    assert pieces == [(0, 0, 4), (1, 4, 8), (2, 8, 10)]


def test_rank_numbers_are_row_major_with_the_outermost_axis_first():
    at = coordinates({"pp": 2, "dp": 3, "tp": 2})
    assert at["pp"].tolist() == [0] * 6 + [1] * 6
    assert at["tp"].tolist() == [0, 1] * 6
    assert at["dp"].tolist() == [0, 0, 1, 1, 2, 2] * 2


@st.composite
def even_cuts(draw):
    """A mesh, a tensor whose dims every axis divides, a dim or None per axis, and an order of the axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rest = draw(st.lists(st.integers(1, 3), max_size=5))
    dims = [draw(st.none() | st.integers(0, len(rest) - 1)) if rest else None for _ in sizes]
    shape = list(rest)
    for size, dim in zip(sizes, dims, strict=True):
        if dim is not None:
            shape[dim] *= size
    return sizes, tuple(shape), dims, draw(st.permutations(range(len(sizes))))


@MANY
@given(even_cuts())
def test_shards_applied_in_any_order_are_dtensors_strided_shards(case):
    sizes, shape, dims, order = case
    place = {f"axis{i}": OurShard(dims[i]) for i in order if dims[i] is not None}
    shards = cut(shape, {f"axis{i}": size for i, size in enumerate(sizes)}, place)
    placements = []
    for axis, dim in enumerate(dims):
        # DTensor goes through the mesh from left to right: what later axes cut before this one is its stride
        before = [a for a in order[: order.index(axis)] if a > axis and dims[a] == dim]
        factor = math.prod(sizes[a] for a in before)
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    for rank in range(math.prod(sizes)):
        at = [int(i) for i in np.unravel_index(rank, sizes)]
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, at, placements)
        assert tuple(shards.count[rank]) == tuple(local)
        assert tuple(shards.start[rank]) == tuple(offset)


@pytest.mark.parametrize(
    ("sizes", "shape", "dims"),
    [
        ((4,), (10, 3), [0]),
        ((4,), (6,), [0]),
        ((2, 4), (2,), [0, 0]),
        ((2, 3), (7, 5), [1, 1]),
        ((2, 2, 2), (5, 3, 2), [0, None, 0]),
        ((2, 2, 2), (5, 1, 3, 2, 2), [4, 2, 0]),
        ((3,), (), [None]),
    ],
)
def test_every_ranks_shard_is_the_local_tensor_that_dtensor_makes_on_a_mesh(sizes, shape, dims):
    whole = torch.arange(math.prod(shape)).view(shape)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    place = {f"axis{i}": OurShard(dim) for i, dim in enumerate(dims) if dim is not None}
    shards = cut(shape, {f"axis{i}": size for i, size in enumerate(sizes)}, place)
    for rank in range(math.prod(sizes)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
        try:
            mesh = init_device_mesh("cpu", sizes)
            local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        finally:
            dist.destroy_process_group()
        start, count = shards.start[rank].tolist(), shards.count[rank].tolist()
        assert (
            whole[tuple(slice(a, a + n) for a, n in zip(start, count, strict=True))].tolist()
            == local.tolist()
        )
        assert tuple(count) == tuple(size)
        if math.prod(size):
            assert tuple(start) == tuple(offset)


@st.composite
def rules(draw):
    """A mesh, a whole tensor (of experts perhaps), and a rule with parts, padding or blocks."""
    axes = draw(meshes(draw(st.integers(1, 12))))
    experts = draw(st.booleans())
    dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 9)) for _ in range(dims))
    rule = {"place": draw(places(axes, dims, experts))}
    kind = draw(st.sampled_from(["plain", "pad", "blocks"])) if dims else "plain"
    dim = draw(st.integers(0, dims - 1)) if dims else 0
    if kind == "pad":
        rule["pad"] = {str(dim): draw(st.integers(1, 5))}
    elif kind == "blocks" and shape[dim]:
        first = draw(st.integers(1, shape[dim]))
        rule["blocks"] = {str(dim): [size for size in (first, shape[dim] - first) if size]}
    shape = (draw(st.integers(1, 7)), *shape) if experts else shape
    return axes, torch.arange(1, 1 + math.prod(shape)).view(shape), rule, experts


def rebuilt(holdings, whole, rank):
    """Return the rank's local tensor, put together from its pieces alone; 0 where there is none."""
    local = torch.zeros(holdings.local_shape[rank].tolist(), dtype=whole.dtype)
    for piece in np.nonzero(holdings.rank == rank)[0]:
        lo, hi, at = (each[piece].tolist() for each in (holdings.lo, holdings.hi, holdings.local_lo))
        box = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
        place = tuple(slice(c, c + b - a) for a, b, c in zip(lo, hi, at, strict=True))
        assert box.numel() > 0
        assert not local[place].any()  # nothing twice
        local[place] = box
    return local


@MANY
@given(rules())
def test_the_pieces_of_a_rank_make_up_the_local_tensor_that_is_cut_by_hand(case):
    axes, whole, rule, experts = case
    place = {axis: parse_placement(text) for axis, text in rule["place"].items()}
    more = {"stage": None, "has_experts": experts}
    if "blocks" in rule:
        dim, sizes = next(iter(rule["blocks"].items()))
        found = blocked_holdings(tuple(whole.shape), axes, place, int(dim) + experts, sizes, **more)
    else:
        pad = {int(dim) + experts: multiple for dim, multiple in rule.get("pad", {}).items()}
        found = placed_holdings(tuple(whole.shape), axes, place, pad=pad, **more)
    assert found.present.all()
    for rank in range(math.prod(axes.values())):
        expected = local_tensor(whole, axes, rule, rank, 0, experts)
        assert found.local_shape[rank].tolist() == list(expected.shape)
        assert torch.equal(rebuilt(found, whole, rank), expected)


@MANY
@given(
    st.integers(1, 8).flatmap(meshes),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_the_pieces_of_interleaved_operands_make_up_the_cut_of_the_whole_laid_group_by_group(
    axes, groups, multiples, data
):
    place = data.draw(places(axes, 2))
    operands, first = [], 1
    for multiple in multiples:
        rows = groups * multiple
        operands.append(torch.arange(first, first + 2 * rows).view(rows, 2))
        first += 2 * rows
    parts = [torch.chunk(one, groups) for one in operands]
    fused = torch.cat([part[group] for group in range(groups) for part in parts])
    parsed = {axis: parse_placement(text) for axis, text in place.items()}
    sizes = tuple(len(one) for one in operands)
    found = [
        interleaved_holdings(
            tuple(one.shape),
            axes,
            parsed,
            Interleaved(0, sizes, index, groups),
            stage=None,
            has_experts=False,
        )
        for index, one in enumerate(operands)
    ]
    for rank in range(math.prod(axes.values())):
        each = [rebuilt(holdings, one, rank) for holdings, one in zip(found, operands, strict=True)]
        assert torch.equal(sum(each), cut_by_hand(fused, axes, place, rank))
        assert torch.equal(sum((one > 0).int() for one in each), torch.ones_like(each[0], dtype=torch.int32))


@MANY
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_experts_cut_by_two_axes_are_cut_one_after_the_other(experts, outer, inner, first_robin, then_robin):
    place = {"a": Expert(round_robin=first_robin), "b": Expert(round_robin=then_robin)}
    found = placed_holdings(
        (experts, 2), {"a": outer, "b": inner}, place, stage=None, has_experts=True, pad={}
    )

    def dealt(numbers, size, robin, here):
        return numbers[here::size] if robin else [list(one) for one in np.array_split(numbers, size)][here]

    for rank in range(outer * inner):
        mine = dealt(list(range(experts)), outer, first_robin, rank // inner)
        mine = dealt(mine, inner, then_robin, rank % inner)
        held = []
        for lo, hi in zip(found.lo[found.rank == rank, 0], found.hi[found.rank == rank, 0], strict=True):
            held += range(lo, hi)
        assert held == [int(number) for number in mine]


@pytest.mark.parametrize("stages", [[0], [1], [0, 2]])
def test_stages_that_do_not_hold_a_tensor_have_neither_pieces_nor_a_local_tensor(stages):
    found = placed_holdings(
        (5, 2), {"pp": 3, "tp": 2}, {"tp": OurShard(0), "pp": Stage()},
        stage=frozenset(stages), has_experts=False, pad={},
    )  # fmt: skip
    assert found.present.tolist() == [rank // 2 in stages for rank in range(6)]
    for rank in range(6):
        rows = [3, 2][rank % 2] if rank // 2 in stages else 0
        assert found.local_shape[rank].tolist() == ([rows, 2] if rows else [0, 0])
        assert (found.rank == rank).sum() == (rank // 2 in stages)
