"""Jobs that join with layouts of their live tensors instead of documents: casts that are asked for, and refusals."""

from __future__ import annotations

import pytest
import torch

import reshard_cli as rs
from reshard_cli.errors import DocumentError, WeightsError
from tests.refit.live_jobs import Place, jobs

TENSORS = {"a.weight": torch.float32, "norm.weight": torch.float32, "steps": torch.int64}
HELD = {**TENSORS, "a.weight": torch.bfloat16}


def tensors(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return the source's values in these dtypes."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(8, 6, generator=generator).mul(100).to(one) for name, one in dtypes.items()}


def send(place: Place) -> None:
    live = tensors(TENSORS)
    with place.join("source", rs.Layout.of(live), None, verify=True) as session:
        session.bind(live)
        session.refit(5)


def take(place: Place, cast: bool) -> bool:
    live = {name: torch.zeros_like(one) for name, one in tensors(HELD).items()}
    layout = rs.Layout.of(live, name="infer", cast=cast)
    with place.join("destination", None, layout, verify=True) as session:
        session.bind(live)
        assert session.refit() == 5
    return all(torch.equal(live[name], one) for name, one in tensors(HELD).items())


def test_a_destination_has_the_sources_values_cast_to_what_it_holds_where_it_asks_for_it(tmp_path):
    with jobs(tmp_path) as both:
        both.start("train", 1, send)
        both.start("infer", 1, take, True)
        found = both.all_well()
    assert found["infer", 0] is True


def test_other_dtypes_are_refused_where_no_cast_is_asked_for_and_the_mend_is_told(tmp_path):
    with jobs(tmp_path) as both:
        both.start("train", 1, send)
        both.start("infer", 1, take, False)
        told = both.running["infer", 0][1]
        assert told.poll(60)
        refused = told.recv()  # the source goes on waiting for a job that fits
    assert isinstance(refused, WeightsError)
    assert "'a.weight'" in str(refused)
    assert "Layout.of of its live tensors: cast=True" in str(refused)


def test_a_layout_that_no_document_could_be_is_refused_before_anybody_is_joined():
    layout = rs.Layout.of(tensors(TENSORS), name="infer", domain=0)
    with pytest.raises(DocumentError, match=r"the Layout of 'infer'.*domain"):
        rs.join(
            None, layout, role="destination", rendezvous="127.0.0.1:1", token="shared", rank=0, world_size=1
        )
