"""The published rows, planned: bytes at the bound, balanced, and what the published policy receives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard_cli.refit.prepare import read_jobs
from reshard_cli.report.plan_report import plan_report
from reshard_cli.spec.hardware_profile import read_hardware

PUBLISHED = Path(__file__).parent.parent.parent / "layouts" / "published"
# seconds of the network's limit at 400 Gb/s per GPU, each domain fed once, as far as they are known
LIMITS = {
    "qwen3-235b-h100": 1.2,
    "deepseek-v3-h100": 0.84,
    "deepseek-v3-gb200": 0.42,
    "nemotron-ultra-gb200": 0.34,
}


def report_of(row: str, mode: str):
    jobs = read_jobs(PUBLISHED / row / "train.yaml", PUBLISHED / row / "infer.yaml")
    topology = jobs.topology(None, False)
    hardware = read_hardware(None, int(np.bincount(topology.domain).max()))
    return plan_report(jobs, topology, mode, hardware, staging=512 << 20)[0]


@pytest.mark.parametrize("row", sorted(path.name for path in PUBLISHED.iterdir()))
def test_a_published_row_moves_the_least_possible_in_balance(row):
    report = report_of(row, "reshard")
    assert report["traffic"]["network_bytes"] == report["traffic"]["network_lower_bound"]
    assert all(value <= 1.02 for value in report["balance"].values())
    seconds = {one["mode"]: one["predicted_seconds"] for one in report["compare"]}
    # cuts are rounded to whole rows, a few kilobytes of gigabytes
    assert seconds["hybrid"] <= 1.0001 * min(seconds["hybrid-ffn"], seconds["reshard"])
    assert report["limit_seconds"] <= seconds["reshard"]
    if row in LIMITS:
        assert report["limit_seconds"] == pytest.approx(LIMITS[row], rel=0.03)


def test_in_the_published_policy_the_broadcast_part_is_44_percent_of_what_a_deepseek_rank_receives():
    report = report_of("deepseek-v3-h100", "hybrid-ffn")
    ranks = report["per_rank"]
    received = [
        network + domain
        for network, domain in zip(ranks["receive_network"], ranks["receive_domain"], strict=True)
    ]
    whole = report["routes"]["broadcast"]["bytes"]
    for one in received[256:]:
        assert whole / one == pytest.approx(0.44, abs=0.01)
    assert report["routes"]["reshard"]["share"] == pytest.approx(0.9763, abs=0.0001)
