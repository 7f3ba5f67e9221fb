"""A live engine's tensors: what its own streams do with them is over before they are written, and what is written is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from reshard_cli.errors import TransferError, WeightsError
from reshard_cli.plan.build import build_plan
from reshard_cli.refit import ends
from reshard_cli.refit.ends import LiveEnd
from reshard_cli.refit.executor import RankExecutor
from reshard_cli.refit.joined import Joined
from reshard_cli.refit.m2n import _in_place
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.weights.live import Hooks, LiveTensors
from tests.refit.live_weights import documents
from tests.weights.test_pinned import OnGpu

CPU = torch.device("cpu")


@pytest.fixture(name="plan")
def planned(tmp_path):
    documents(tmp_path)
    both = read_jobs(tmp_path / "train.yaml", tmp_path / "infer.yaml")
    return build_plan(both.source, both.destination, both.topology(None, False), "reshard", staging=1 << 20)


def engine_of(plan) -> dict[str, torch.Tensor]:
    made = ends.MemoryEnd(double_buffer=False).begin(plan, 0, 1, CPU)[0]
    return {one.name: torch.zeros_like(made.typed(one)) for one in made.storages}


@pytest.mark.parametrize("double", [False, True])
def test_the_engines_streams_are_waited_for_before_and_after_its_tensors_are_written(
    plan, monkeypatch, double
):
    engine, told = engine_of(plan), []
    monkeypatch.setattr(ends, "settle", lambda device: told.append((device, int(engine["bias"].sum()) > 0)))
    hooks = Hooks(before=lambda _: told.append("before"))
    end = LiveEnd(LiveTensors(engine), allow_extra=True, double_buffer=double, hooks=hooks)
    end.check(plan, 0)
    filled = end.begin(plan, 0, 1, CPU)[0]
    if not double:
        assert told == ["before", (CPU, False)]
        return
    assert told == []
    (bias,) = (one for one in filled.storages if one.name == "bias")
    filled.typed(bias).fill_(1)
    end.prepare(1)
    end.apply(1)
    assert told == ["before", (CPU, False), (CPU, True)]


def test_memory_that_is_shared_is_refused_before_anything_is_written(plan):
    engine = engine_of(plan)
    engine["bias"] = engine["bias"].flatten()[:1].expand(engine["bias"].shape)
    end = LiveEnd(LiveTensors(engine), allow_extra=True)
    with pytest.raises(WeightsError, match=r"infer 0: live tensor 'bias' has several elements in one place"):
        end.check(plan, 0)
    assert not end.torn


def test_what_lies_on_another_gpu_is_not_sent_from_its_place():
    view = torch.zeros(4).as_subclass(OnGpu)
    held = SimpleNamespace(in_place=lambda _: True, windows=lambda *_: [((0,), (4,), view)])
    assert _in_place(held, "w", (0,), (4,), "float32", torch.device("cuda", 0)) is view
    assert _in_place(held, "w", (0,), (4,), "float32", torch.device("cuda", 1)) is None


@pytest.mark.parametrize(("gpu", "in_place"), [(0, True), (1, False)])
def test_a_fragment_on_another_gpu_goes_through_the_staging(monkeypatch, gpu, in_place):
    view = torch.zeros(16, dtype=torch.uint8).as_subclass(OnGpu)
    monkeypatch.setattr("reshard_cli.refit.executor.contiguous_bytes", lambda *_: view)
    one = object.__new__(RankExecutor)
    one.rank, one.source, one._device = 0, SimpleNamespace(in_place=lambda _: True), torch.device("cuda", gpu)
    one._dtypes = [("w", "uint8")]
    block = SimpleNamespace(relay=False, big=[SimpleNamespace(tensor=0)])
    transfer = SimpleNamespace(part=0, origin=0, blocks=(block,), fragments=[], num_bytes=16)
    assert (one._slot(transfer, 0, 0).place is view) is in_place


def test_a_joined_session_that_failed_gives_up_what_is_in_flight_before_it_is_closed():
    calls: list[str] = []
    pair = SimpleNamespace(abort=lambda: calls.append("abort"), close=lambda: calls.append("close"))
    control = SimpleNamespace(
        fail=lambda _: calls.append("told") or True, failure=lambda: None, store=None, timeout=1.0
    )
    one = object.__new__(Joined)
    one.watchdog = SimpleNamespace(remove=lambda _: None)
    one.gate = SimpleNamespace(will=lambda *_: None)
    one._failed(control, pair, TransferError("lost", 1))
    assert calls == ["told", "abort", "close"]
