"""Verification of live ranks by checksums, where one destination rank's values are spoilt; and what ends hold."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from reshard_cli.errors import VerifyError
from reshard_cli.plan.build import build_plan
from reshard_cli.refit.ends import MemoryEnd
from reshard_cli.refit.pair import Pair
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.weights.tensors import raw
from tests.refit.live_jobs import Place, jobs, joined_destination, joined_source, run_both, well
from tests.refit.live_weights import TENSORS, documents, held, poisoned, whole
from tests.support import model_document, write_yaml


def send(place: Place, *_: Any) -> str:
    live = held(whole(1), 0, place.size, place.rank)
    with contextlib.closing(joined_source(place)) as session:
        session.bind(live)
        session.refit(1)
        with pytest.raises(VerifyError, match="verification failed") as caught:
            session.refit(2)
        return str(caught.value)


def spoil(live: dict[str, torch.Tensor], fault: str) -> None:
    if fault == "last bit":
        raw(live["c.weight"]).view(-1)[-1] ^= 1
    elif fault == "swapped":
        kept = live["a.weight"].clone()
        live["a.weight"].copy_(live["c.weight"])
        live["c.weight"].copy_(kept)
    elif fault == "swapped rows":
        live["a.weight"].copy_(live["a.weight"].flip(0))
    elif fault == "cast":
        live["head.weight"].copy_(live["head.weight"].to(torch.bfloat16))
    elif fault == "scalar":
        live["scalar"].neg_()
    else:
        live["flags.weight"].logical_not_()


def take_spoilt(place: Place, fault: str) -> tuple[str, Any, bool]:
    live = poisoned(held(whole(1), 1, place.size, place.rank))
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(live)
        assert session.refit() == 1  # the control: unspoilt values pass
        rounds = Pair._rounds

        def spoilt(self: Pair, *arguments: Any) -> dict[int, int]:
            sent = rounds(self, *arguments)
            if place.rank == 1:
                spoil(live, fault)
            return sent

        Pair._rounds = spoilt  # type: ignore[method-assign]
        with pytest.raises(VerifyError) as caught:
            session.refit()
        return str(caught.value), session.version, session.torn


@pytest.mark.parametrize(
    ("fault", "tensor", "piece"),
    [
        ("last bit", "c.weight", "[16:24, 9:18]"),
        ("swapped", "a.weight", "[0:8, 9:18]"),
        ("swapped rows", "a.weight", "[0:8, 9:18]"),
        ("cast", "head.weight", "[0:4, 2:4]"),
        ("scalar", "scalar", "[]"),
        ("flags", "flags.weight", "[0:2, 2:4]"),
    ],
)
def test_a_wrong_value_is_found_named_and_not_committed(tmp_path, fault, tensor, piece):
    sources, destinations = run_both(tmp_path, send, take_spoilt, fault)
    well([*sources, *destinations])
    for told in [*sources, *[one[0] for one in destinations]]:
        assert "infer 1" in told
        assert f"tensor {tensor!r}" in told
        assert f"piece {piece}" in told
    assert [one[1:] for one in destinations] == [(None, True)] * len(destinations)


def send_untied(place: Place, wrong: str) -> str:
    live = held(whole(1), 0, place.size, place.rank)
    with contextlib.closing(joined_source(place)) as session:
        session.bind(live)
        session.refit(1)
        if place.rank == 1:
            raw(live[wrong]).view(-1)[-1] ^= 1
        with pytest.raises(VerifyError) as caught:
            session.refit(2)
        return str(caught.value)


def take_untied(place: Place, _: str) -> tuple[str, Any, bool]:
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(poisoned(held(whole(1), 1, place.size, place.rank)))
        assert session.refit() == 1
        with pytest.raises(VerifyError) as caught:
            session.refit()
        return str(caught.value), session.version, session.torn


@pytest.mark.parametrize("wrong", ["embed.weight", "head.weight"])
def test_live_tied_tensors_that_differ_on_a_rank_end_the_refit_on_all(tmp_path, wrong):
    sources, destinations = run_both(tmp_path, send_untied, take_untied, wrong)
    well([*sources, *destinations])
    for told in [*sources, *[one[0] for one in destinations]]:
        assert "element [7, 3] of 'embed.weight' differs from that of 'head.weight'" in told
        assert "train 1" in told
        assert "nothing was committed" in told
    assert [one[1:] for one in destinations] == [(None, True)] * len(destinations)


# the embedding lies on the first stage and the head on the last: no rank has both
STAGED = {
    "name": "train", "model": "model.yaml", "ranks": 2, "alias": {"embed.weight": "head.weight"},
    "meshes": {"all": {"pp": 2}}, "pipeline": {"first": ["embed.weight"], "last": ["head.weight", "bias"]},
    "tensors": [{"match": "*", "place": {"pp": "stage"}}],
}  # fmt: skip
TAKING = {
    "name": "infer", "model": "model.yaml", "ranks": 1, "alias": {"embed.weight": "head.weight"},
    "tensors": [{"match": "*"}],
}  # fmt: skip


def of_stages(version: int, *stages: int) -> dict[str, torch.Tensor]:
    names = (["embed.weight"], ["head.weight", "bias"])
    values = whole(version)
    return {name: values[name] for stage in stages for name in names[stage]}


def send_staged(place: Place) -> str:
    live = of_stages(1, place.rank)
    with contextlib.closing(joined_source(place)) as session:
        session.bind(live)
        session.refit(1)
        if place.rank == 0:
            live["embed.weight"][3, 1] = 7.0
        with pytest.raises(VerifyError) as caught:
            session.refit(2)
        return str(caught.value)


def take_staged(place: Place) -> tuple[str, Any, bool]:
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(poisoned(of_stages(1, 0, 1)))
        assert session.refit() == 1
        with pytest.raises(VerifyError) as caught:
            session.refit()
        return str(caught.value), session.version, session.torn


def test_live_tied_tensors_that_differ_between_stages_are_found(tmp_path):
    tied = dict.fromkeys(("embed.weight", "head.weight"), TENSORS["head.weight"])
    write_yaml(tmp_path / "model.yaml", model_document({**tied, "bias": TENSORS["bias"]}))
    write_yaml(tmp_path / "train.yaml", STAGED)
    write_yaml(tmp_path / "infer.yaml", TAKING)
    with jobs(tmp_path) as started:
        started.start("train", 2, send_staged)
        started.start("infer", 1, take_staged)
        found = started.all_well()
    told, version, torn = found["infer", 0]
    for one in (told, found["train", 0], found["train", 1]):
        assert "tensor 'head.weight'" in one
        assert "its checksum is not that of train" in one
    assert (version, torn) == (None, True)


# ---- memory -----------------------------------------------------------------------------------------------


def value_of(end: MemoryEnd) -> int | None:
    return None if end.held is None else int(end.held.buffers["bias"][0])


def fill(end: MemoryEnd, plan: Any, version: int) -> None:
    destination, _ = end.begin(plan, 0, version, torch.device("cpu"))
    destination.buffers["bias"].fill_(version)


@pytest.mark.parametrize("double", [False, True])
def test_memory_holds_the_last_committed_version_whole_or_says_that_it_is_torn(tmp_path, double):
    documents(tmp_path)
    both = read_jobs(tmp_path / "train.yaml", tmp_path / "infer.yaml")
    plan = build_plan(both.source, both.destination, both.topology(None, False), "reshard", staging=1 << 20)
    end = MemoryEnd(double_buffer=double)
    assert (end.version, end.torn, value_of(end)) == (None, False, None)
    for version in (1, 2, 3):
        fill(end, plan, version)
        assert end.torn is not double
        assert value_of(end) == (version - 1 or None if double else None)
        end.apply(version)
        assert (end.version, end.torn, value_of(end)) == (version, False, version)
    fill(end, plan, 4)
    end.discard()
    assert (end.torn, value_of(end)) == ((False, 3) if double else (True, None))
    end.discard()  # of a refit that failed before it began to write
    assert (end.torn, value_of(end)) == ((False, 3) if double else (True, None))
    fill(end, plan, 5)
    end.apply(5)
    assert value_of(end) == 5
