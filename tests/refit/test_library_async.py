"""Refits beside training: the version's own values arrive, whatever the trainer does to its tensors meanwhile."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.refit import library
from reshard_cli.weights.tensors import raw
from tests.refit.live_jobs import DESTINATIONS, Place, joined_destination, joined_source, run_both, well
from tests.refit.live_weights import differing, held, poisoned, whole


def spoil(live: dict[str, torch.Tensor]) -> None:
    """Go on training: write over every element."""
    for tensor in live.values():
        raw(tensor).bitwise_xor_(1) if tensor.dtype == torch.bool else raw(tensor).bitwise_not_()


def fill(live: dict[str, torch.Tensor], version: int, place: Place) -> None:
    for name, tensor in held(whole(version), 0, place.size, place.rank).items():
        raw(live[name]).copy_(raw(tensor))


def train_meanwhile(place: Place, until: Any) -> None:
    live = held(whole(0), 0, place.size, place.rank)

    def named() -> dict[str, torch.Tensor]:
        assert threading.current_thread() is threading.main_thread(), "looked up beside the training"
        return live

    with joined_source(place) as session:
        session.bind(named)
        for version in (1, 2, 3):
            fill(live, version, place)
            handle = session.refit_async(version, until=until)
            if until == "snapshot":
                spoil(live)  # at once; the first time before the destination is there at all
                place.mark(f"spoilt-{place.rank}")
            else:
                place.mark(f"spoilt-{place.rank}")
                handle.wait_released()
                spoil(live)
            assert handle.wait() == version
            assert handle.done


def take_meanwhile(place: Place, until: Any) -> list[int]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    for rank in range(3):
        place.wait_for(f"spoilt-{rank}")
    seen = []
    with joined_destination(place) as session:
        session.bind(live)
        while (version := session.refit()) is not None:
            assert not list(differing(live, held(whole(version), 1, place.size, place.rank))), version
            seen.append(version)
    return seen


@pytest.mark.parametrize("until", ["snapshot", "packed"])
def test_what_training_does_meanwhile_does_not_reach_the_destination(tmp_path, until):
    sources, destinations = run_both(tmp_path, train_meanwhile, take_meanwhile, until)
    well(sources)
    assert destinations == [[1, 2, 3]] * DESTINATIONS


def train_with_errors(place: Place) -> list[str]:
    live = held(whole(1), 0, place.size, place.rank)
    told = []
    with contextlib.closing(joined_source(place)) as session:
        with pytest.raises(DocumentError, match="'packed' or 'snapshot'"):
            session.refit_async(1)
        session.bind(live)
        session.refit(1)
        handle = session.refit_async(2, until="snapshot")
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                handle.wait()
            told.append(str(caught.value))
        place.mark(f"failed-{place.rank}")
        place.wait_for("again-0")
        place.wait_for("again-1")
        fill(live, 3, place)
        session.refit_async(3, until="packed")  # nobody waits for this one's handle
        with pytest.raises(TransferError) as caught:
            session.refit(4)
        told.append(str(caught.value))
    return told


def fail_and_come_again(place: Place) -> list[Any]:
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    seen = []

    def raises(version: int) -> None:
        if version > 1 and place.rank == 1:
            raise ValueError("no memory left")

    for good in (1, 0):
        with contextlib.closing(joined_destination(place)) as session:
            session.bind(live, before=raises)
            if not good:
                place.mark(f"again-{place.rank}")
            for _ in range(good):
                seen.append(session.refit())
            with pytest.raises(
                TransferError, match="infer 1: its hook `before` raised ValueError at version"
            ):
                session.refit()
        place.wait_for(f"failed-{place.rank}")
    return seen


def test_errors_are_raised_where_the_handle_is_waited_for_else_once_at_the_next_refit(tmp_path):
    sources, destinations = run_both(tmp_path, train_with_errors, fail_and_come_again)
    well([*sources, *destinations])
    for told in sources:
        assert told[0] == told[1]
        assert "version 2 did not reach infer: infer 1: its hook" in told[0]
        assert "version 3 did not reach infer: infer 1: its hook" in told[2]
    assert destinations == [[1], [1]]


def train_slowly(place: Place) -> None:
    live = held(whole(1), 0, place.size, place.rank)
    with joined_source(place) as session:
        session.bind(live)
        for version in (1, 2, 3):
            fill(live, version, place)
            session.refit(version)


def serve_meanwhile(place: Place) -> list[Any]:
    """Look at the tensors all the time, but for when the hooks say that they are being written."""
    live = poisoned(held(whole(0), 1, place.size, place.rank))
    wanted = {version: held(whole(version), 1, place.size, place.rank) for version in (1, 2, 3)}
    written = threading.Lock()
    served, seen = 0, []
    with joined_destination(place, double_buffer=True) as session:
        session.bind(live, before=lambda _: written.acquire(), after=lambda _: written.release())
        while True:
            handle = session.refit_async()
            while not handle.done:
                with written:
                    if session.version is not None:
                        assert not list(differing(live, wanted[session.version]))
                        served += 1
            version = handle.wait()
            if version is None:
                break
            seen.append(version)
    assert served
    return seen


def test_with_a_double_buffer_the_old_version_is_served_whole_while_the_next_arrives(tmp_path):
    sources, destinations = run_both(tmp_path, train_slowly, serve_meanwhile)
    well(sources)
    assert destinations == [[1, 2, 3]] * DESTINATIONS


def serve_without_double_buffer(place: Place) -> None:
    with contextlib.closing(joined_destination(place)) as session:
        with pytest.raises(DocumentError, match="double_buffer=True"):
            session.refit_async()
        session.bind(poisoned(held(whole(0), 1, place.size, place.rank)))
        while session.refit() is not None:
            pass


def test_a_destination_without_a_double_buffer_cannot_be_refitted_beside_what_it_does(tmp_path):
    well([one for ranks in run_both(tmp_path, train_slowly, serve_without_double_buffer) for one in ranks])


def test_a_refit_beside_training_comes_after_what_the_callers_stream_was_given(monkeypatch):
    """A thread has a current stream of its own, which knows nothing of the trainer's."""
    local = threading.local()
    local.stream = "the trainer's"

    @contextlib.contextmanager
    def stream(one):
        local.stream = one
        yield

    cuda = library.torch.cuda
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "stream", stream)
    monkeypatch.setattr(cuda, "current_stream", lambda *_: getattr(local, "stream", "the default one"))
    assert library.Handle(lambda _: cuda.current_stream()).wait() == "the trainer's"
