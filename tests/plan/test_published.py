"""The published rows, planned: bytes at the bound, balanced, what the published policy receives, and the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_cli.spec.hardware_profile import read_hardware
from tests.benchmarks.published import PUBLISHED, ROWS, fitted_seconds_of_a_tensor, report_of, table_row

README = Path(__file__).parent.parent.parent / "README.md"
# seconds of the network's limit at 400 Gb/s per GPU, each domain fed once, as far as they are known
LIMITS = {
    "qwen3-235b-h100": 1.2,
    "deepseek-v3-h100": 0.84,
    "deepseek-v3-gb200": 0.42,
    "nemotron-ultra-gb200": 0.34,
}


def test_every_row_is_there():
    assert {path.name for path in ROWS.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("row", PUBLISHED)
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
    assert table_row(row, report) in README.read_text(encoding="utf-8"), (
        "python -m tests.benchmarks.published"
    )


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


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72"])
def test_the_seconds_of_a_tensor_are_those_that_fit_the_published_times(name):
    assert read_hardware(name, 8).tensor == pytest.approx(fitted_seconds_of_a_tensor(), rel=0.01)
