"""Live tensors as they are found and held against the documents, and windows into tensors with strides of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reshard_cli.errors import WeightsError
from reshard_cli.layout.storage import RankStorage, Window
from reshard_cli.weights.live import LiveTensors, place_of, snapshot
from reshard_cli.weights.windows import window_view


def storage(name: str, shape: tuple[int, ...], dtype: str = "float32") -> RankStorage:
    return RankStorage(name, shape, dtype, (), False)


def test_names_lose_what_wrappers_put_before_them():
    live = LiveTensors(
        {"module._orig_mod.a": torch.ones(1), "_fsdp_wrapped_module.b": torch.ones(2), "step": 3}
    )
    assert {name: tuple(one.shape) for name, one in live.now().items()} == {"a": (1,), "b": (2,)}


def test_two_names_that_are_one_without_their_wrappers_are_refused():
    with pytest.raises(WeightsError, match="two are named 'a'"):
        LiveTensors({"module.a": torch.ones(1), "a": torch.ones(1)}).now()


def test_a_module_is_asked_anew_each_time():
    model = nn.Linear(2, 2)
    live = LiveTensors(model)
    first = place_of(live.now())
    assert place_of(live.now()) == first
    model.weight.data = torch.full((2, 2), 7.0)
    assert place_of(live.now()) != first
    assert torch.equal(live.now()["weight"], torch.full((2, 2), 7.0))
    model.weight = nn.Parameter(torch.full((2, 2), 8.0))
    assert torch.equal(live.now()["weight"], torch.full((2, 2), 8.0))


def test_nothing_bound_and_no_mapping_are_told():
    with pytest.raises(WeightsError, match="nothing is bound"):
        LiveTensors(None).now()
    with pytest.raises(WeightsError, match="list is no mapping"):
        LiveTensors(lambda: [torch.ones(1)]).now()  # type: ignore[arg-type, return-value]


def test_everything_that_does_not_fit_is_told_at_once():
    live = LiveTensors(
        {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4), "more": torch.zeros(1)}
    )
    wanted = [storage("a", (2, 3)), storage("b", (5,)), storage("gone", ())]
    with pytest.raises(WeightsError) as caught:
        live.held("train 3", wanted, allow_extra=True)
    told = str(caught.value)
    assert "train 3: the live tensors lack 1 tensor(s): gone" in told
    assert "live tensor 'a' is bfloat16[2, 3], the document says float32[2, 3]" in told
    assert "live tensor 'b' is float32[4], the document says float32[5]" in told
    assert "do not speak of 1 tensor(s): more" in told


def test_extra_tensors_are_left_alone_where_that_is_allowed():
    live = LiveTensors({"a": torch.zeros(2), "more": torch.zeros(1)})
    with pytest.raises(WeightsError, match="more"):
        live.held("infer 0", [storage("a", (2,))], allow_extra=False)
    assert set(live.held("infer 0", [storage("a", (2,))], allow_extra=True)) == {"a"}


def test_a_snapshot_keeps_its_values_and_its_memory():
    tensor = torch.arange(6.0).view(2, 3).T
    first = snapshot({"a": tensor})
    tensor.zero_()
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3).T)
    again = snapshot({"a": tensor}, first)
    assert again["a"].data_ptr() == first["a"].data_ptr()
    wider = snapshot({"a": torch.zeros(3, 2, dtype=torch.float64)}, again)
    assert wider["a"].dtype == torch.float64


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_window_into_a_tensor_with_strides_is_the_window_into_an_equal_one_in_one_piece(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    lo = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    hi = tuple(data.draw(st.integers(low + 1, size)) for low, size in zip(lo, shape, strict=True))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    strides = whole.stride()
    offset = sum(low * stride for low, stride in zip(lo, strides, strict=True))
    # a logical tensor may have its dims in another order than the storage
    turn = data.draw(st.permutations(range(len(shape))))
    window = Window(
        "w",
        tuple(lo[dim] for dim in turn),
        tuple(hi[dim] for dim in turn),
        offset,
        tuple(strides[dim] for dim in turn),
    )
    held = RankStorage("w", shape, "float32", (window,), False)
    room = torch.full([2 * shape[dim] for dim in order], -1.0)[tuple(slice(None, None, 2) for _ in order)]
    laid = room.permute([order.index(dim) for dim in range(len(shape))])
    laid.copy_(whole)
    expected = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))].permute(turn)
    assert torch.equal(window_view(held, window, laid), expected)
    assert torch.equal(window_view(held, window, whole), expected)
    window_view(held, window, laid).fill_(-2.0)
    assert int((laid == -2.0).sum()) == expected.numel()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_window_whose_dims_are_cut_otherwise_is_shown_wherever_torch_has_such_a_view(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def cut():
        """Join runs of the sizes into dims."""
        dims = [1]
        for size in sizes:
            if data.draw(st.booleans()):
                dims.append(1)
            dims[-1] *= size
        return tuple(dims)

    shape, logical = cut(), cut()
    step = data.draw(st.sampled_from([1, 2, 3]))
    gap = data.draw(st.integers(0, len(shape) - 1))
    room = torch.full([step * size if dim == gap else size for dim, size in enumerate(shape)], -1.0)
    laid = room[tuple(slice(None, None, step if dim == gap else 1) for dim in range(len(shape)))]
    laid.copy_(torch.arange(laid.numel(), dtype=torch.float32).view(shape))
    whole = laid.reshape(logical).clone()
    lo = tuple(data.draw(st.integers(0, size - 1)) for size in logical)
    hi = tuple(data.draw(st.integers(low + 1, size)) for low, size in zip(lo, logical, strict=True))
    offset = sum(low * stride for low, stride in zip(lo, whole.stride(), strict=True))
    held = RankStorage("w", shape, "float32", (), False)
    try:
        shown = window_view(held, Window("w", lo, hi, offset, whole.stride()), laid)
    except WeightsError as error:
        assert "make it contiguous" in str(error)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            laid.view(logical)
        return
    assert torch.equal(shown, whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))])
