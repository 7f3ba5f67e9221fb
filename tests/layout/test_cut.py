"""The cut of every placement against PyTorch's own DTensor, and against rules written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from reshard_cli.layout.cut import coordinates, cut
from reshard_cli.layout.holdings import placed_holdings
from reshard_cli.spec.placement import Expert, Stage
from reshard_cli.spec.placement import Shard as OurShard

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
