"""Casts in blocks: the values and scales of DeepSeek-V3's rule, worked out here block by block."""

from __future__ import annotations

import pytest
import torch

from reshard_cli.errors import WeightsError
from reshard_cli.weights.quantise import Made, QuantisingSource, quantise
from tests.support import WholeTensors

E4M3 = torch.float8_e4m3fn


def by_hand(values, block, dtype=E4M3):
    """Return (float8, scales) of a matrix, one block after the other."""
    rows, columns = values.shape
    largest = torch.finfo(dtype).max
    cast = torch.empty(rows, columns, dtype=dtype)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            inside = values[part].float()
            most = inside.abs().max()
            scales[i, j] = most / largest if most > 0 else 1.0
            cast[part] = (inside / scales[i, j]).clamp(-largest, largest).to(dtype)
    return cast, scales


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 5), (1, 1), (127, 129)])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_values_and_scales_are_those_of_every_block_by_itself(shape, dtype):
    torch.manual_seed(0)
    values = (torch.randn(shape) * torch.rand(shape).exp()).to(torch.bfloat16)
    cast, scales = quantise(values, 128, dtype)
    expected, expected_scales = by_hand(values, 128, dtype)
    assert torch.equal(bits(cast), bits(expected))
    assert torch.equal(scales, expected_scales)
    # what an engine reads back is off by at most half a step of the format
    back = (
        cast.float() * scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    )
    step = 2**-4 if dtype == E4M3 else 2**-3
    assert torch.all((back - values.float()).abs() <= values.float().abs() * step + scales.max() * 2**-9)


def test_a_block_of_zeros_has_scale_one_and_a_spoiled_block_spoils_no_other():
    values = torch.ones(8, 8)
    values[:4, :4] = 0
    values[4:, :4] = float("nan")
    cast, scales = quantise(values, 4, E4M3)
    assert scales[0, 0] == 1
    assert torch.all(cast[:4, :4].float() == 0)
    assert torch.isnan(scales[1, 0])
    assert torch.all(cast[:, 4:].float() == 448)
    assert torch.equal(scales[:, 1], torch.full((2,), 1 / 448))


def test_any_box_that_is_asked_for_is_a_part_of_the_whole():
    torch.manual_seed(1)
    whole = torch.randn(3, 22, 13).to(torch.bfloat16)
    made = {
        "w": Made("w", (3, 22, 13), "float8_e4m3fn", 4, scales=False),
        "w_scale_inv": Made("w", (3, 22, 13), "float8_e4m3fn", 4, scales=True),
    }
    source = QuantisingSource(WholeTensors({"w": whole}), made)
    parts = [by_hand(matrix, 4) for matrix in whole]
    truth = {
        "w": torch.stack([bits(cast) for cast, _ in parts]),
        "w_scale_inv": torch.stack([scales for _, scales in parts]),
    }
    generator = torch.Generator().manual_seed(2)
    for name, expected in truth.items():
        for _ in range(60):
            edges = [
                sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist())
                for size in expected.shape
            ]
            if any(a == b for a, b in edges):
                continue
            lo, hi = tuple(a for a, _ in edges), tuple(b for _, b in edges)
            got = torch.full(expected.shape, 77, dtype=expected.dtype)
            for part_lo, part_hi, values in source.windows(name, lo, hi):
                box = tuple(slice(a, b) for a, b in zip(part_lo, part_hi, strict=True))
                got[box] = bits(values).view(got[box].shape) if name == "w" else values
            box = tuple(slice(a, b) for a, b in edges)
            assert torch.equal(got[box], expected[box])


def test_a_part_of_a_block_is_not_taken_for_the_whole():
    class Half(WholeTensors):
        def windows(self, name, lo, hi):
            for own_lo, own_hi, values in super().windows(name, lo, hi):
                yield own_lo, (own_hi[0] - 1, *own_hi[1:]), values[:-1]

    made = {"w": Made("w", (8, 8), "float8_e4m3fn", 4, scales=False)}
    source = QuantisingSource(Half({"w": torch.ones(8, 8)}), made)
    with pytest.raises(WeightsError, match="whole blocks of 4"):
        list(source.windows("w", (0, 0), (8, 8)))
