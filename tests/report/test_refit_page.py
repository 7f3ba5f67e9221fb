"""The page of a refit: needs nothing but itself, shows what the report says, and no name in it becomes markup."""

from __future__ import annotations

import re

import pytest

from reshard_cli.report.refit_page import refit_page
from tests.report.test_bench_page import HOSTILE, Page


def report_of(seconds: list[float], **more: object) -> dict[str, object]:
    refits = [
        {
            "version": 7 + number, "seconds": one, "network_bytes": 1030, "domain_bytes": 2_000_000,
            "phases": {"bind": one / 10, "network": one / 2, "commit": 0.0},
        }
        for number, one in enumerate(seconds)
    ]  # fmt: skip
    return {
        "world": {"ranks": 6, "source": {"name": "train", "ranks": 2}, "destination": {"name": "infer", "ranks": 4}},
        "backend": "gloo", "mode": "hybrid", "digest": "d" * 64, "iterations": refits, "verified": None,
        "verified_elements": 0, "peak_staging_bytes": 4_340_000, "casts": [], "extra": [], "state_dict": "",
        "environment": {"torch": "2.13.0", "fabric": None, "settings": {"GLOO_SOCKET_IFNAME": "eth7"}},
    } | more  # fmt: skip


@pytest.mark.parametrize("seconds", [[], [0.5], [0.5, 0.7, 0.6], [0.0, 0.0], [0.1 * (n % 7 + 1) for n in range(1501)]],
                         ids=["none", "one", "three", "no time", "many"])  # fmt: skip
def test_the_page_needs_nothing_else_and_draws_inside_its_pictures(seconds):
    text = refit_page(report_of(seconds))
    page = Page(text)
    assert page.references == page.handlers == []
    assert "script" not in page.names
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert page.names.count("svg") == min(len(seconds), 2)
    assert page.outside == []


def test_it_shows_every_refit_and_all_figures():
    text = refit_page(
        report_of(
            [0.5, 0.9, 0.6], verified=True, verified_elements=12345, casts=["float32 -> bfloat16"],
            extra=["left.behind"], state_dict="ema",
        )
    )  # fmt: skip
    for version, seconds in ((7, 0.5), (8, 0.9), (9, 0.6)):
        assert f"Version {version}: {seconds:.4f} s" in text
        assert f'<td class="number">{seconds:.4f}</td>' in text
    for shown in ("600 ms", "From 500 ms to 900 ms", "1.03 kB", "2.00 MB", "4.34 MB", "12,345 elements", "2 → 4 ranks", "eth7",
                  "float32 -&gt; bfloat16", "left.behind", "ema", "d" * 64):  # fmt: skip
        assert shown in text, shown


def test_of_many_refits_it_draws_runs_and_lists_the_last():
    text = refit_page(report_of([0.1] * 1400 + [9.0] + [0.1] * 99))
    assert "median of 8 refits in a row" in text
    assert "The last 200 of 1,500 refits" in text
    assert text.count("<tr>") == 1 + 200
    assert "From 100 ms to 9 s" in text
    assert text.count('class="soft mode-2"') == 188


def test_no_name_becomes_markup():
    report = report_of([0.5, 0.6])
    report["world"] = {name: {"name": HOSTILE, "ranks": 1} for name in ("source", "destination")}
    report |= {"extra": [HOSTILE], "state_dict": HOSTILE, "casts": [HOSTILE]}
    page = Page(refit_page(report))
    assert "script" not in page.names
    assert "img" not in page.names
    assert page.handlers == []
