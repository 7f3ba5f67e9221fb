"""Checkpoints whose tensors start at odd bytes: read right, and not kept as copies by who keeps views."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from reshard_cli.plan.build import build_plan
from reshard_cli.refit.endpoints import open_source
from tests.support import make_jobs, model_document


@pytest.mark.parametrize(("padding", "in_place"), [(0, True), (1, False)])
def test_a_tensor_at_an_odd_byte_is_no_view_of_the_file(tmp_path, padding, in_place):
    names = ["experts.0.w", "experts.1.w", "w"]
    values = {name: torch.randn(4, 4) for name in names}
    header = {
        name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i, 64 * i + 64]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    (tmp_path / "checkpoint").mkdir()
    data = b"".join(values[name].numpy().tobytes() for name in names)
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    model = model_document(dict.fromkeys(names, ((4, 4), "float32")))
    job = {"ranks": 1, "tensors": [{"match": "*"}]}
    jobs = make_jobs(tmp_path, model, job, job)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)
    source, _ = open_source(str(tmp_path / "checkpoint"), plan, [0], 1, allow_extra=False)
    assert {pair.name for pair in plan.pairs} == {"experts.{expert}.w", "w"}
    for pair in plan.pairs:
        assert source.in_place(pair.name) is in_place
    ((_, _, view),) = source.windows("w", (1, 0), (3, 4))
    assert torch.equal(view, values["w"][1:3])
    experts = list(source.windows("experts.{expert}.w", (0, 0, 0), (2, 4, 4)))
    assert torch.equal(
        torch.cat([view for _, _, view in experts]), torch.stack([values[one] for one in names[:2]])
    )
