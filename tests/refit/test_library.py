"""Live ranks of two jobs: every element exact however tensors lie, refusals before anything is sent, hooks, versions."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import yaml

from reshard_cli.errors import ReshardError, TransferError, WeightsError
from tests.refit.live_jobs import (
    DESTINATIONS,
    SOURCES,
    Place,
    joined_destination,
    joined_source,
    run_both,
    well,
)
from tests.refit.live_weights import differing, held, layout, poisoned, strided, whole
from tests.support import write_yaml

# ---- exactness -----------------------------------------------------------------------------------------


def send_versions(place: Place, versions: list[int]) -> None:
    live = strided(held(whole(0), 0, place.size, place.rank))
    with joined_source(place) as session:
        session.bind(live)
        for version in versions:
            new = held(whole(version), 0, place.size, place.rank)
            for name, tensor in new.items():
                if version % 2:
                    live[name] = tensor  # bound to another tensor, and contiguous
                elif live[name].numel():
                    live[name] = strided(new)[name]
            session.refit(version)


def take_versions(place: Place, versions: list[int]) -> list[int]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    live = strided(live) if place.rank else live
    seen = []
    with joined_destination(place) as session:
        session.bind(lambda: live)
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            assert (session.version, session.torn) == (version, False)
            seen.append(version)
            if version == versions[1]:  # the engine moves its tensors
                live = strided(poisoned(live))
    return seen


def test_every_element_is_exact_however_the_live_tensors_lie_and_wherever_they_move(tmp_path):
    sources, destinations = run_both(tmp_path, send_versions, take_versions, [1, 2, 3, 4])
    well(sources)
    assert destinations == [[1, 2, 3, 4]] * DESTINATIONS


def test_a_version_may_come_again_and_versions_need_no_order(tmp_path):
    sources, destinations = run_both(tmp_path, send_versions, take_versions, [7, 7, 2, 7])
    well(sources)
    assert destinations == [[7, 7, 2, 7]] * DESTINATIONS


# ---- what does not fit is refused before anything is sent ------------------------------------------------


def send_wrong(place: Place, kind: str, good: int) -> None:
    live = held(whole(1), 0, place.size, place.rank)
    with contextlib.closing(joined_source(place)) as session:
        session.bind(live)
        for version in range(1, good + 1):
            session.refit(version)
        if place.rank == 1:
            spoil(live, kind)
        live["scalar"] = live["scalar"] + 1
        session.refit(good + 1)


def spoil(live: dict[str, torch.Tensor], kind: str) -> None:
    if kind == "dtype":
        live["a.weight"] = live["a.weight"].to(torch.bfloat16)
    elif kind == "shape":
        live["a.weight"] = live["a.weight"][1:]
    elif kind == "missing":
        del live["a.weight"]
    else:
        live["more.weight"] = torch.zeros(2)


def take_until_refused(place: Place, kind: str, good: int) -> None:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    before = {name: one.clone() for name, one in live.items()}
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(live)
        for version in range(1, good + 1):
            assert session.refit() == version
            before = held(whole(1), 1, place.size, place.rank)
        with pytest.raises(ReshardError) as caught:
            session.refit()
        assert not list(differing(live, before)), "something was written"
        assert (session.version, session.torn) == (good or None, False)
        raise caught.value


@pytest.mark.parametrize("good", [0, 2], ids=["at once", "in a loop"])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dtype", "train 1: live tensor 'a.weight' is bfloat16[8, 18], the document says float32[8, 18]"),
        ("extra", "train 1: the documents do not speak of 1 tensor(s): more.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_on_all_ranks_before_anything_is_written(
    tmp_path, kind, told, good
):
    sources, destinations = run_both(tmp_path, send_wrong, take_until_refused, kind, good)
    for one in [*sources, *destinations]:
        assert isinstance(one, (WeightsError, TransferError)), one
        assert told in str(one)


# ---- hooks ------------------------------------------------------------------------------------------------


def send_two(place: Place, *_: Any) -> None:
    live = held(whole(1), 0, place.size, place.rank)
    with contextlib.closing(joined_source(place)) as session:
        session.bind(live)
        session.refit(1)
        live.update(held(whole(2), 0, place.size, place.rank))
        session.refit(2)


def take_with_hooks(place: Place, double_buffer: bool) -> list[tuple[str, int, Any]]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    seen: list[tuple[str, int, Any]] = []

    def what_is_there() -> Any:
        for version in (1, 2):
            if not list(differing(live, held(whole(version), 1, place.size, place.rank))):
                return version
        return None

    with contextlib.closing(joined_destination(place, double_buffer=double_buffer)) as session:
        session.bind(
            live,
            before=lambda version: seen.append(("before", version, what_is_there())),
            after=lambda version: seen.append(("after", version, what_is_there())),
        )
        while session.refit() is not None:
            seen.append(("refit", session.version or 0, what_is_there()))
    return seen


@pytest.mark.parametrize("double_buffer", [False, True])
def test_hooks_are_called_just_before_writing_and_when_all_is_there(tmp_path, double_buffer):
    sources, destinations = run_both(tmp_path, send_two, take_with_hooks, double_buffer)
    well(sources)
    for seen in destinations:
        assert seen == [
            ("before", 1, None), ("after", 1, 1), ("refit", 1, 1),
            ("before", 2, 1), ("after", 2, 2), ("refit", 2, 2),
        ]  # fmt: skip


def take_with_broken_hook(place: Place, hook: str, double_buffer: bool) -> tuple[str, Any, bool, list[str]]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))

    def raises(version: int) -> None:
        if version == 2 and place.rank == 1:
            raise KeyError("the engine is busy")

    with contextlib.closing(joined_destination(place, double_buffer=double_buffer)) as session:
        session.bind(live, **{hook: raises})
        assert session.refit() == 1
        with pytest.raises(TransferError) as caught:
            session.refit()
        version = session.version
        wanted = held(whole(2 if version is None else version), 1, place.size, place.rank)
        return str(caught.value), version, session.torn, list(differing(live, wanted))


def send_to_broken_hook(place: Place, *_: Any) -> str:
    with pytest.raises(TransferError) as caught:
        send_two(place)
    return str(caught.value)


@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_hook_that_raises_ends_the_refit_on_every_rank_and_names_its_own(tmp_path, hook, double_buffer):
    sources, destinations = run_both(
        tmp_path, send_to_broken_hook, take_with_broken_hook, hook, double_buffer
    )
    for told in [*sources, *[one[0] for one in destinations]]:
        assert "infer 1" in told
        assert "KeyError" in told
        assert "the engine is busy" in told
    for told in sources:
        assert ("infer has version 2, and failed after that" in told) == (hook == "after")
        assert ("version 2 did not reach infer" in told) == (hook == "before")
    if hook == "after":  # the version is there, wholly, on every rank
        assert [one[1:] for one in destinations] == [(2, False, [])] * DESTINATIONS
    elif double_buffer:  # nobody has begun to write
        assert [one[1:] for one in destinations] == [(1, False, [])] * DESTINATIONS
    else:
        assert [one[1] for one in destinations if one[2]] == [None] * sum(one[2] for one in destinations)


class Overflow(Exception):
    """Something of the user's own."""


def send_and_raise(place: Place, guilty: str) -> str:
    live = held(whole(1), 0, place.size, place.rank)
    try:
        with joined_source(place) as session:
            session.bind(live)
            session.refit(1)
            if (guilty, place.rank) == ("train", 1):
                raise Overflow("the loss is not finite")
            session.refit(2)
    except (Overflow, TransferError) as error:
        return str(error)
    return "no error"


def take_and_raise(place: Place, guilty: str) -> tuple[str, int | None]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    session = joined_destination(place)
    try:
        with session:
            session.bind(live)
            session.refit()
            if (guilty, place.rank) == ("infer", 1):
                raise Overflow("the engine is out of pages")
            session.refit()
    except (Overflow, TransferError) as error:
        return str(error), session.version
    return "no error", session.version


@pytest.mark.parametrize(
    ("guilty", "told"), [("train", "the loss is not finite"), ("infer", "the engine is out of pages")]
)
def test_an_exception_between_refits_reaches_every_rank_of_both_jobs(tmp_path, guilty, told):
    sources, destinations = run_both(tmp_path, send_and_raise, take_and_raise, guilty)
    ranks = {"train": sources, "infer": [text for text, _ in destinations]}
    assert ranks[guilty].pop(1) == told  # its own exception is left as it is
    for text in [*ranks["train"], *ranks["infer"]]:
        assert f"{guilty} 1 raised Overflow: {told}" in text
    assert [version for _, version in destinations] == [1] * len(destinations)


def take_with_own_words(place: Place) -> None:
    """Know the source by documents of its own, whose rules and tensors come in another order."""
    theirs = place.folder / f"theirs-{place.rank}"
    theirs.mkdir()
    model = yaml.safe_load((place.folder / "model.yaml").read_text())
    model["tensors"] = dict(reversed(model["tensors"].items()))
    write_yaml(theirs / "model.yaml", model)
    rules = [{"match": "{scalar,bias}"}, {"match": "*", "mesh": "flat", "place": {"x": "shard(0)"}}]
    meshes = {"one": {"a": SOURCES}, "flat": {"x": SOURCES, "one": 1}}
    written = {**layout("trainer", SOURCES, 0), "meshes": meshes, "tensors": rules}
    own = place.folder / "infer.yaml"
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    with place.join("destination", write_yaml(theirs / "train.yaml", written), own, verify=True) as session:
        session.bind(live)
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank)))


def test_sides_that_say_the_same_in_other_words_fit(tmp_path):
    sources, destinations = run_both(tmp_path, send_two, take_with_own_words)
    well([*sources, *destinations])
