"""FSDP2 trains a tiny Qwen3 of transformers; a TP2 job, started by itself, has every version, exactly.

Both are the jobs of tests/examples, run through their own loops.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import reshard_cli as rs
from tests.refit.live_jobs import Place, jobs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

STEPS = 5


def train(place: Place, rebind: bool) -> None:
    """Train as the example does; keep the whole model of every version, gathered by torch."""
    own_group(place)
    from tests.examples.fsdp2_trainer import Trainer

    training = Trainer()
    layout = rs.Layout.of(training.state_dict(), name="train", domain=2)
    with place.join("source", layout, None, verify=True) as session:
        session.bind(training.model)
        for step in range(1, STEPS + 1):
            training.step()
            if rebind:
                rebind_all(training.model)
            session.refit(version=step)
            whole = {name: one.full_tensor().clone() for name, one in training.state_dict().items()}
            if place.rank == 0:
                torch.save(whole, place.folder / f"trained-{step}.pt")
    training.close()


def rebind_all(model: torch.nn.Module) -> None:
    """Give every parameter's local shard other memory, as some optimizers and offloaders do."""
    for parameter in model.parameters():
        parameter.data = torch.nn.Parameter(parameter.detach().clone())


def roll_out(place: Place) -> list[int | None]:
    """Take versions as the example does; keep the shards and the logits of each."""
    own_group(place)
    from tests.examples.tp_rollout import PROMPT, Rollout

    engine = Rollout()
    for tensor in engine.state_dict().values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float("nan"))
    layout = rs.Layout.of(engine.state_dict(), name="rollout", domain=2)
    versions: list[int | None] = []
    with place.join("destination", None, layout, verify=True) as session:
        session.bind(engine.state_dict, before=engine.before, after=engine.after)
        while (version := session.refit()) is not None:
            versions.append(version)
            assert (session.version, session.torn, engine.version) == (version, False, version)
            engine.step()
            shards = {
                name: (one.to_local() if isinstance(one, DTensor) else one).clone()
                for name, one in engine.state_dict().items()
            }
            logits = engine.model(PROMPT).logits
            told = {"shards": shards, "logits": logits, "text": engine.text}
            torch.save(told, place.folder / f"served-{version}-{place.rank}.pt")
    engine.close()
    return versions


def own_group(place: Place) -> None:
    """Be a rank as torchrun makes one; each job has a default process group of its own."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place.rank), str(place.size)
    store = torch.distributed.FileStore(str(place.folder / f"{place.job}.store"), place.size)
    torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)


def cut_by_hand(name: str, whole: Tensor, rank: int) -> Tensor:
    """Return what a TP2 rank holds: rows of the first linears, columns of the second, the rest whole."""
    projection = name.split(".")[-2]
    if projection in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
        return whole.chunk(2, 0)[rank]
    return whole.chunk(2, 1)[rank] if projection in ("o_proj", "down_proj") else whole


@pytest.mark.parametrize("first", ["train", "rollout"])
def test_a_tp2_job_serves_every_version_of_an_fsdp2_trainer_exactly(tmp_path, first):
    from tests.examples.tiny_qwen3 import tiny_qwen3
    from tests.examples.tp_rollout import PROMPT

    programs = {"train": (train, first == "train"), "rollout": (roll_out,)}
    second = next(name for name in programs if name != first)
    with jobs(tmp_path) as started:
        started.start(first, 2, *programs[first])
        time.sleep(1.0)
        started.start(second, 2, *programs[second])
        found = started.all_well()
    assert found["rollout", 0] == found["rollout", 1] == list(range(1, STEPS + 1))

    reference = tiny_qwen3(seed=9).eval()
    seen = []
    for version in range(1, STEPS + 1):
        whole = torch.load(tmp_path / f"trained-{version}.pt")
        reference.load_state_dict(whole)
        with torch.no_grad():
            logits = reference(PROMPT).logits
            text = reference.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        for rank in range(2):
            served = torch.load(tmp_path / f"served-{version}-{rank}.pt")
            assert served["shards"].keys() == whole.keys()
            for name, tensor in whole.items():
                assert torch.equal(served["shards"][name], cut_by_hand(name, tensor, rank)), (version, name)
            # TP adds up halves in another order: the weights are exact, the arithmetic is not the same
            torch.testing.assert_close(served["logits"], logits, rtol=1e-4, atol=1e-4)
            assert served["text"] == text.tolist()
        # where the arithmetic is the same the logits are: a whole model of the served shards
        shards = [torch.load(tmp_path / f"served-{version}-{rank}.pt")["shards"] for rank in range(2)]
        reference.load_state_dict({name: put_together(name, shards) for name in whole})
        with torch.no_grad():
            assert torch.equal(reference(PROMPT).logits, logits)
        seen.append(logits)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(seen))


def put_together(name: str, shards: list[dict[str, Tensor]]) -> Tensor:
    """Return the whole of what two TP ranks hold."""
    own = [one[name] for one in shards]
    projection = name.split(".")[-2]
    if projection in ("o_proj", "down_proj"):
        return torch.cat(own, 1)
    return torch.cat(own, 0) if projection.endswith("_proj") or projection == "lm_head" else own[0]
