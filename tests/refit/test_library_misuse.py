"""What callers of the library get wrong: one message that says what would be right, at once, and the session lives on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import reshard_cli as rs
from reshard_cli.errors import DocumentError, ReshardError, TransferError
from tests.refit.live_jobs import (
    DESTINATIONS,
    SOURCES,
    TIMEOUT,
    Place,
    joined_destination,
    joined_source,
    run_both,
    well,
)
from tests.refit.live_weights import differing, documents, held, poisoned, whole

# ---- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"role": "both"}, "role: 'both' is neither"),
        ({"mode": "fast"}, "mode: 'fast' is none of broadcast, "),
        ({"backend": "mpi"}, "backend: 'mpi' is none of auto, nccl, gloo"),
        ({"domain": 3.5}, "domain: 3.5 is neither a number of ranks nor 'auto'"),
        ({"staging": 0}, "staging: 0 is not a number of bytes"),
        ({"staging": "512"}, "staging: '512' is not"),
        ({"timeout": float("nan")}, "timeout: nan is not a number of seconds"),
        ({"timeout": float("inf")}, "timeout: inf is not"),
        ({"timeout": "5"}, "timeout: '5' is not"),
        ({"token": b"secret"}, "token: the secret is a text, not bytes"),
        ({"token": ""}, "token: jobs that join need a shared secret, which is not empty"),
        ({"token": "\udc80"}, "token: the secret has characters that are no text"),
        ({"rendezvous": None}, "rendezvous: None is not HOST:PORT"),
        ({"rendezvous": ("host", 1)}, "is not HOST:PORT"),
        ({"rendezvous": "http://127.0.0.1:29600"}, "is not HOST:PORT"),
        ({"rank": "0"}, "rank '0' of 2: give both"),
        ({"rank": 2}, "rank 2 of 2: give both"),
        ({"destination": []}, "destination: an empty list lets nobody in"),
        ({"destination": 5}, "a layout is a document's path or a Layout, not int"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anybody_is_waited_for(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    documents(tmp_path, SOURCES, DESTINATIONS)
    given: dict[str, Any] = {
        "source": tmp_path / "train.yaml", "destination": tmp_path / "infer.yaml", "role": "destination",
        "rendezvous": "127.0.0.1:9", "token": "secret", "rank": 0, "world_size": DESTINATIONS, **settings,
    }  # fmt: skip
    with pytest.raises(DocumentError) as caught:
        rs.join(**given)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "environment: RANK is 'first', not a whole number"),
        ({"RANK": "0"}, "environment: WORLD_SIZE is None"),
    ],
)
def test_an_environment_that_torchrun_did_not_set_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    documents(tmp_path, SOURCES, DESTINATIONS)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DocumentError, match=told):
        rs.join(
            None, tmp_path / "infer.yaml", role="destination", rendezvous="127.0.0.1:9", token="secret"
        )  # fmt: skip


# ---- sessions -----------------------------------------------------------------------------------------


def told_by(function: Any, *arguments: Any, **named: Any) -> str:
    """Return what a call that has to be refused says."""
    try:
        return f"no error, but {function(*arguments, **named)!r}"
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def by_two_threads(call: Any) -> list[str]:
    told: list[str] = []
    threads = [threading.Thread(target=lambda: told.append(told_by(call))) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return told


def send_with_mistakes(place: Place) -> list[str]:
    session = joined_source(place)
    session.bind(held(whole(1), 0, place.size, place.rank))
    told = [told_by(session.refit, version) for version in (None, "1", 1.5, True)]
    told.append(told_by(session.refit_async, 1, until="soon"))
    told += by_two_threads(lambda: session.refit(1))
    session.refit(2)
    session.close()
    session.close()
    told += [told_by(session.refit, 3), told_by(session.refit_async, 3, until="snapshot")]
    return told


def take_with_mistakes(place: Place) -> list[str]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    session = joined_destination(place)
    session.bind(live)
    told = [told_by(session.refit, 1), told_by(session.refit_async)]
    told += by_two_threads(session.refit)
    assert session.refit() == 2
    assert not list(differing(live, held(whole(1), 1, place.size, place.rank)))
    assert session.refit() is None
    session.close()
    session.close()
    assert session.version == 2
    return [*told, told_by(session.refit)]


def test_a_wrong_call_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    sources, destinations = run_both(tmp_path, send_with_mistakes, take_with_mistakes)
    well([*sources, *destinations])
    alone = "DocumentError: refit: another thread is in a refit of this session"
    for told in sources:
        for one, value in zip(told[:4], ("None", "'1'", "1.5", "True"), strict=True):
            assert one.startswith("DocumentError: version: the source has to say which version")
            assert one.endswith(f"not {value}")
        assert "until: a source says" in told[4]
        assert sorted(one.startswith(alone) for one in told[5:7]) == [False, True]
        assert "no error, but 1" in told[5:7]
        assert told[7:] == [
            "DocumentError: refit: this session is closed; join again",
            "DocumentError: refit_async: this session is closed; join again",
        ]
    for told in destinations:
        assert "the source says which one comes" in told[0]
        assert "double_buffer=True" in told[1]
        assert sorted(one.startswith(alone) for one in told[2:4]) == [False, True]
        assert told[4] == "DocumentError: refit: this session is closed; join again"


# ---- what a hook cannot do, and interrupts ----------------------------------------------------------------


def send_one(place: Place, *_: Any) -> tuple[str, float]:
    with contextlib.closing(joined_source(place)) as session:
        session.bind(held(whole(1), 0, place.size, place.rank))
        began = time.monotonic()
        return told_by(session.refit, 1), time.monotonic() - began


def take_with_hook(place: Place, kind: str) -> tuple[str, float]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))

    def hook(_: int) -> None:
        if place.rank != 1:
            return
        if kind == "refit":
            session.refit()
        elif kind == "close":
            session.close()
        elif kind == "exit":
            sys.exit(3)
        else:
            raise KeyboardInterrupt

    began = time.monotonic()
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(live, before=hook)
        try:
            told = told_by(session.refit)
        except (KeyboardInterrupt, SystemExit) as error:
            told = f"its own {type(error).__name__}"
    return told, time.monotonic() - began


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("refit", "DocumentError at version 1: refit: called by a hook of the refit that runs"),
        ("close", "DocumentError at version 1: close: called by a hook of the refit that runs"),
        ("exit", "infer 1) raised SystemExit: 3"),
        ("interrupt", "infer 1) raised KeyboardInterrupt"),
    ],
)
def test_a_hook_that_cannot_go_on_is_told_to_all_ranks_at_once(tmp_path: Path, kind: str, told: str) -> None:
    sources, destinations = run_both(tmp_path, send_one, take_with_hook, kind)
    well([*sources, *destinations])
    if kind in ("exit", "interrupt"):
        assert destinations.pop(1)[0].startswith("its own ")
    for text, seconds in [*sources, *destinations]:
        assert text.startswith("TransferError")
        assert told in text
        assert seconds < TIMEOUT  # nobody waited for the rank


def send_different_versions(place: Place) -> tuple[str, float]:
    with contextlib.closing(joined_source(place)) as session:
        session.bind(held(whole(1), 0, place.size, place.rank))
        began = time.monotonic()
        return told_by(session.refit, 1 + place.rank // 2), time.monotonic() - began


def take_none(place: Place) -> None:
    with contextlib.closing(joined_destination(place)) as session:
        session.bind(poisoned(held(whole(0), 1, place.size, place.rank)))
        with pytest.raises(TransferError, match="train 2 is at version 2, rank 0 at 1"):
            session.refit()


def test_ranks_that_are_at_different_versions_are_told_so_at_once(tmp_path: Path) -> None:
    sources, destinations = run_both(tmp_path, send_different_versions, take_none)
    well([*sources, *destinations])
    for text, seconds in sources:
        assert "train 2 is at version 2, rank 0 at 1: all ranks refit in the same order" in text
        assert seconds < TIMEOUT
