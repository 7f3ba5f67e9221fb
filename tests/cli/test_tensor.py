"""`plan --tensor`: who holds one weight, and which part goes where, as the plan that runs has it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from reshard_cli.errors import DocumentError
from reshard_cli.plan.build import build_plan
from reshard_cli.report.tensor_report import tensor_lines, tensor_report
from tests.plan.test_random_pairs import draw_topology, jobs_of
from tests.random_layouts import draw_pair, held_elements
from tests.support import run_cli

QUICKSTART = Path(__file__).parent.parent.parent / "layouts" / "quickstart"
TRAIN, INFER = QUICKSTART / "train.yaml", QUICKSTART / "infer.yaml"


@pytest.mark.parametrize("seed", range(60))
def test_what_is_told_of_a_tensor_is_what_the_ranks_hold_and_brings_each_what_it_lacks(seed):
    random = Random(seed)
    pair = draw_pair(random)
    jobs = jobs_of(pair)
    topology = draw_topology(random, jobs)
    plan = build_plan(jobs.source, jobs.destination, topology, "reshard", staging=1 << 20)
    for name, (shape, _) in pair.shapes.items():
        report = tensor_report(jobs, plan, name)
        numbers = np.arange(int(np.prod(shape))).reshape(shape)

        def elements(box, numbers=numbers):
            return set(numbers[tuple(slice(*edge) for edge in box)].reshape(-1).tolist())

        for side, job in (("source", pair.source), ("destination", pair.destination)):
            held = held_elements(pair, job, name)
            for rank, expected in enumerate(held):
                told = [elements(one["box"]) for one in report[side] if one["rank"] == rank]
                assert set().union(*told) == expected
        brought: dict[int, set[int]] = {}
        for one in report["fragments"]:
            for rank in [one["carrier"], *one["passed_on_to"]]:
                part = elements(one["box"])
                assert not brought.setdefault(rank, set()) & part
                brought[rank] |= part
        for rank, expected in enumerate(held_elements(pair, pair.destination, name)):
            assert brought.get(int(topology.destination[rank]), set()) == expected
        assert tensor_lines(report, jobs, topology.colocated)


def test_one_expert_is_told_of_by_its_own_name():
    done = run_cli("plan", TRAIN, INFER, "--tensor", "model.layers.1.mlp.experts.5.up_proj.weight")
    assert done.returncode == 0
    assert "train 1: [5:6, 0:384, 0:512]" in done.stdout
    assert "rank 1 (train 1) sends it over the network to rank 4 (infer 0)" in done.stdout
    told = run_cli("plan", TRAIN, INFER, "--tensor", "model.norm.weight", "--json", "-")
    assert json.loads(told.stdout)["schema"] == "reshard-cli/tensor/1"


def test_a_name_that_the_plan_lacks_is_refused():
    done = run_cli("plan", TRAIN, INFER, "--tensor", "model.nrom.weight")
    assert done.returncode == DocumentError.exit_code
    assert "no tensor 'model.nrom.weight'" in done.stderr
