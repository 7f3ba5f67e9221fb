"""Memory that tensors have not, or share: told by name, exactly, whatever their strides."""

from __future__ import annotations

from random import Random

import pytest
import torch

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
