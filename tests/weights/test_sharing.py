"""Memory that tensors have not, or share: told by name, exactly, whatever their strides."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from reshard_cli.errors import WeightsError
from reshard_cli.layout.storage import RankStorage, Window
from reshard_cli.weights.live import LiveTensors, snapshot
from reshard_cli.weights.sharing import memory_fault, sharing_faults


def storage(name: str, tensor: torch.Tensor, logical: str | None = None) -> RankStorage:
    shape = tuple(tensor.shape)
    window = Window(logical or name, (0,) * len(shape), shape, 0, tuple(tensor.stride()))
    return RankStorage(name, shape, str(tensor.dtype).removeprefix("torch."), (window,), False)


def faults(tensors: dict[str, torch.Tensor], tied: dict[str, str] | None = None) -> list[str]:
    return sharing_faults(
        [storage(name, one, (tied or {}).get(name)) for name, one in tensors.items()], tensors
    )


def places(tensor: torch.Tensor) -> list[int]:
    """Return the address of every element."""
    found = [tensor.data_ptr()]
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = [at + index * step * tensor.element_size() for at in found for index in range(size)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_views_of_one_buffer_share_exactly_where_two_elements_have_a_place(seed):
    random = Random(seed)
    buffer = torch.zeros(60)
    tensors = {}
    for name in "abc":
        size, step = (
            (random.randint(1, 4), random.randint(1, 3)),
            (random.randint(1, 12), random.randint(1, 3)),
        )
        tensors[name] = buffer.as_strided(size, step, random.randint(0, 10))
    held = {name: places(one) for name, one in tensors.items()}
    alone = all(len(set(one)) == len(one) for one in held.values())
    apart = all(not set(held[one]) & set(held[other]) for one, other in (("a", "b"), ("a", "c"), ("b", "c")))
    if alone:
        assert (not faults(tensors)) == apart
    else:
        assert faults(tensors)


def test_columns_of_one_buffer_are_apart():
    fused = torch.zeros(8, 6)
    assert faults({"a": fused[:, :2], "b": fused[:, 2:]}) == []
    assert len(faults({"a": fused[:, :3], "b": fused[:, 2:]})) == 1


def test_tied_parameters_need_a_document_that_ties_them():
    tensor = torch.zeros(4, 4)
    (told,) = faults({"embed": tensor, "head": tensor})
    assert "'embed' and 'head' share memory" in told
    assert "alias" in told
    assert faults({"embed": tensor, "head": tensor}, tied={"head": "embed"}) == []


def test_one_element_held_twice_in_one_place_is_right_and_another_one_is_not():
    fused = torch.zeros(6, 4)
    part = Window("e", (0, 0), (3, 4), 0, (4, 1))
    both = RankStorage("f", (6, 4), "float32", (part, Window("x", (0, 0), (3, 4), 12, (4, 1))), False)
    transposed = RankStorage("t", (4, 3), "float32", (Window("e", (0, 0), (3, 4), 0, (1, 3)),), False)
    alone = storage("e", fused[:3])
    for right in ({"e": fused[:3]}, {"t": fused[:3].t()}):
        storages = [both, alone if "e" in right else transposed]
        assert sharing_faults(storages, {"f": fused, **right}) == []
    assert sharing_faults([alone, transposed], {"e": fused[:3], "t": fused[:3].t()}) == []
    for wrong in ({"e": fused[3:]}, {"e": fused[1:4]}, {"t": fused[:4, :3]}):
        storages = [both, alone if "e" in wrong else transposed]
        assert len(sharing_faults(storages, {"f": fused, **wrong})) == 1
    padded = RankStorage("p", (8, 4), "float32", (part,), False)
    room = torch.zeros(10, 4)
    assert len(sharing_faults([padded, storage("q", room[5:9])], {"p": room[:8], "q": room[5:9]})) == 1
    twin = RankStorage("head", (8, 4), "float32", (part,), False)
    assert sharing_faults([padded, twin], {"p": room[:8], "head": room[:8]}) == []


def test_strides_that_are_no_multiples_are_counted():
    assert faults({"a": torch.zeros(40).as_strided((3, 4), (4, 3))}) == []
    assert len(faults({"a": torch.zeros(40).as_strided((4, 5), (4, 3))})) == 1
    row = torch.zeros(8)
    pair = {"a": row.as_strided((1, 8), (8, 1)), "b": row.as_strided((1, 8), (1, 1))}
    assert faults(pair, tied={"b": "a"}) == []


def test_an_expanded_tensor_is_one_place_for_several_elements():
    (told,) = faults({"a": torch.zeros(1, 4).expand(3, 4)})
    assert "several elements in one place" in told
    assert faults({"a": torch.zeros(1, 4).expand(1, 4), "b": torch.zeros(0)}) == []


def test_freed_memory_and_none_are_told():
    freed = torch.ones(10)[2:]
    assert memory_fault(freed) is None
    freed.untyped_storage().resize_(8)
    assert "has 8 bytes of memory, and needs 40" in str(memory_fault(freed))
    assert "meta" in str(memory_fault(torch.zeros(3, device="meta")))
    with pytest.raises(WeightsError, match="'w' has 8 bytes"):
        snapshot({"w": freed})
    with pytest.raises(WeightsError, match="infer 0: live tensor 'w' has 8 bytes"):
        LiveTensors({"w": freed}).held("infer 0", [storage("w", freed)], allow_extra=False)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(4, 4).to_sparse(), "is no dense tensor (sparse_coo)"),
        (torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged), "is no dense tensor (jagged)"),
        (torch.ones(2, dtype=torch.complex64).conj(), "is a lazy conjugate"),
        (TwoTensor(torch.ones(4), torch.zeros(4)), "it is a TwoTensor; bind the tensors that hold its values"),
        (FakeTensorMode().from_tensor(torch.ones(3)), "it is a FakeTensor"),
    ],
    ids=["sparse", "nested", "conjugate", "wrapper", "fake"],
)  # fmt: skip
def test_tensors_whose_values_are_not_what_lies_in_their_memory_are_refused(tensor, told):
    assert told in str(memory_fault(tensor))
    with pytest.raises(WeightsError, match=re.escape(told)):
        snapshot({"a": tensor})


@pytest.mark.parametrize(
    "make", [torch.nn.Parameter, torch.nn.Buffer, lambda one: one.t(), lambda one: one[1:, ::2]]
)
def test_plain_tensors_and_their_views_are_taken(make):
    assert memory_fault(make(torch.ones(4, 4))) is None
