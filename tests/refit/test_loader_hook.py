"""Values that an engine has to change go through its own loader, when every rank has them."""

from __future__ import annotations

import torch

from reshard_cli.plan.build import build_plan
from reshard_cli.refit.ends import LiveEnd
from reshard_cli.refit.prepare import read_jobs
from reshard_cli.weights.live import Hooks, LiveTensors
from tests.support import model_document, write_yaml


def test_the_engines_loader_gets_what_the_engine_does_not_have_by_name(tmp_path):
    write_yaml(
        tmp_path / "model.yaml",
        model_document({"l.weight": ((4, 2), "float32"), "l.A_log": ((4,), "float32")}),
    )
    job = {"model": "model.yaml", "domain": 1}
    source = write_yaml(
        tmp_path / "source.yaml",
        {
            "name": "source", "ranks": 1, **job, "meshes": {"m": {"tp": 1}},
            "tensors": [{"match": "*", "place": {}}],
        },
    )  # fmt: skip
    destination = write_yaml(
        tmp_path / "destination.yaml",
        {
            "name": "destination", "ranks": 2, **job, "meshes": {"m": {"tp": 2}},
            "tensors": [
                {"match": "*.A_log", "place": {}, "route": "broadcast"},
                {"match": "*", "place": {"tp": "shard(0)"}},
            ],
        },
    )  # fmt: skip
    jobs = read_jobs(source, destination)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "hybrid", staging=1 << 20)
    engine = {"l.weight": torch.zeros(2, 2), "A": torch.zeros(2)}
    calls = []

    def load(pairs):
        for name, tensor in pairs:
            calls.append(name)
            engine["A"].copy_(-torch.exp(tensor[2:]))

    end = LiveEnd(LiveTensors(lambda: engine), allow_extra=True, hooks=Hooks(load_weights=load))
    end.check(plan, 1)
    filled, _ = end.begin(plan, 1, 7, torch.device("cpu"))
    assert end.torn
    for storage in filled.storages:
        filled.typed(storage).copy_(torch.arange(4.0) if storage.name == "l.A_log" else torch.ones(2, 2))
    assert calls == []
    end.apply(7)
    assert (end.version, end.torn, calls) == (7, False, ["l.A_log"])
    assert torch.equal(engine["A"], -torch.exp(torch.tensor([2.0, 3.0])))
    assert torch.equal(engine["l.weight"], torch.ones(2, 2))
