"""Relays pass on what they keep: a destination that widens values has not the bytes that travelled."""

from __future__ import annotations

import pytest
import torch

from reshard_cli.plan.build import build_plan
from tests.support import make_jobs, model_document, refit_in_process


def jobs_of(folder, source_dtypes, dtype, names=("a", "b")):
    """Return one source node of two ranks and three destination nodes that all want everything."""
    tensors = {name: ((512, 512), kind) for name, kind in zip(names, source_dtypes, strict=True)}
    one = {
        "ranks": 2,
        "domain": 2,
        "meshes": {"m": {"r": 2}},
        "tensors": [{"match": "*", "place": {"r": "shard(0)"}}],
    }
    other = {
        "ranks": 6, "domain": 2, "meshes": {"m": {"dp": 3, "tp": 2}},
        "tensors": [{"match": "*", "place": {"tp": "shard(0)"}, **({"dtype": dtype} if dtype else {})}],
    }  # fmt: skip
    return make_jobs(folder, model_document(tensors), one, other)


def relayed(jobs):
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=64 << 20)
    return plan.streams.longest_lag > 0


@pytest.mark.parametrize(
    ("kinds", "dtype", "relays"),
    [
        (("bfloat16", "bfloat16"), None, True),
        (("float32", "float32"), "bfloat16", True),  # the sender narrows: what travels is what is kept
        (("bfloat16", "bfloat16"), "float32", False),
        (("float16", "float16"), "float32", False),
    ],
    ids=str,
)
def test_relays_are_used_where_what_travels_is_what_is_kept(tmp_path, kinds, dtype, relays):
    assert relayed(jobs_of(tmp_path, kinds, dtype)) is relays


def test_values_that_widening_does_not_give_back_arrive_exact_in_every_domain(tmp_path):
    jobs = jobs_of(tmp_path, ("float16", "float16"), "float32")
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = {name: patterns.repeat(4).view(512, 512) for name in ("a", "b")}  # every NaN among them
    result = refit_in_process(jobs, values, staging=64 << 20)
    for held in result.storages:
        for name, tensor in values.items():
            halves = [half.to(torch.float32).view(torch.int32) for half in tensor.chunk(2)]
            got = held[name].view(torch.int32)
            assert any(torch.equal(got, half) for half in halves)
