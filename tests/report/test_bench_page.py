"""The page of a bench: needs nothing but itself, shows what the report says, and no name in it becomes markup."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser

import pytest

from reshard_cli.refit.bench_result import ModeResult, SweepSize
from reshard_cli.report.bench_page import bench_page
from reshard_cli.report.bench_report import bench_report
from reshard_cli.report.page_bench import hue_of
from reshard_cli.report.page_svg import Axis, linear_axis, log_axis, nice_ticks, seconds_text
from tests.report.test_bench_report import result_of

HOSTILE = "</title><script>alert('1')</script><img src=x onerror=alert(2)>&amp;\"'"
SCALED = {"factor": 0.001, "changes": [
    {"where": "train", "what": "axis dp", "original": 8, "scaled": 1, "note": "no room for this axis"},
    {"where": "model", "what": "bytes", "original": 2_000_000_000, "scaled": 1_500_000, "note": ""},
]}  # fmt: skip


class Page(HTMLParser):
    """Collects a page's elements, what they refer to, and its numbers by attribute."""

    def __init__(self, text):
        super().__init__()
        self.names, self.references, self.handlers, self.classes = [], [], [], []
        self.open, self.texts, self.boxes, self.outside = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.names.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        self.handlers += [name for name in values if name.startswith("on")]
        self.classes += (values.get("class") or "").split()
        if tag == "svg":
            self.boxes.append([float(one) for one in values["viewbox"].split()])
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            if name in values and self.boxes:
                most = self.boxes[-1][2 if "x" in name else 3]
                if not -0.5 <= float(values[name]) <= most + 0.5:
                    self.outside.append((tag, name, values[name]))

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def swept(name, base, order):
    return ModeResult(
        name, "d" * 64, 4096, 2048, 1, seconds=[base, base * 1.1, base * 0.9], measured=[None] * 3,
        phases=[{"network": base}] * 3, order=order, refits=9,
    )  # fmt: skip


def sweep_result():
    result = result_of()
    result.results, result.bound = [], None
    for num_bytes in (1024, 65536, 1 << 22):
        modes = [
            swept("broadcast", num_bytes / 1e8 + 1e-3, [0, 3, 4]),
            swept("reshard", num_bytes / 2e8 + 2e-3, [1, 2, 5]),
        ]
        result.sweep.append(SweepSize(num_bytes, (num_bytes // 64, 32), "bfloat16", modes))
    result.sweep.append(
        SweepSize(1 << 40, (1 << 20, 1 << 19), "bfloat16", skipped="it needs 9 GB, 1 GB are free")
    )
    return result


PAGES = {
    "modes": lambda: bench_report(result_of()),
    "modes scaled": lambda: bench_report(result_of(), SCALED),
    "nothing crosses": lambda: bench_report(result_of(rates=(), measured=None)),
    "sweep": lambda: bench_report(sweep_result()),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_needs_nothing_else_and_draws_inside_its_pictures(name):
    text = bench_page(PAGES[name]())
    page = Page(text)
    assert page.references == page.handlers == []
    assert "script" not in page.names
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert page.names.count("svg") >= 2
    assert page.outside == []


def test_it_shows_every_repeat_of_every_mode_and_all_figures():
    text = bench_page(bench_report(result_of(), SCALED))
    for mode, seconds in (("broadcast", [30.0, 31.0, 29.0]), ("hybrid", [10.0, 14.0, 11.0])):
        for repeat, value in enumerate(seconds):
            # once among the seconds, once over the run
            assert text.count(f"{mode}, repeat {repeat + 1}: {value:.4f} s") == 2
    for shown in (
        "11 s",
        "1.100 ×",
        "2.73 ×",
        "+3.00%",
        "1.03 kB",
        "no room for this axis",
        "2.00 GB",
        "1.50 MB",
        "d" * 64,
    ):
        assert shown in text, shown


def test_a_sweep_has_curves_a_table_and_says_what_was_left_out():
    text = bench_page(bench_report(sweep_result()))
    for shown in (
        "1,099,511,627,776 bytes: left out, it needs 9 GB",
        "reshard, 65,536 bytes",
        "4,194,304",
        "9 x 3",
        "N/A",
    ):
        assert shown in text, shown
    assert text.count("<polyline") == 4  # time and bandwidth, two modes


def test_a_sweep_inside_one_domain_draws_what_it_has():
    result = sweep_result()
    for size in result.sweep:
        for one in size.results:
            one.network_bytes = one.busiest_bytes = 0
    result.probe_rates = []
    text = bench_page(bench_report(result))
    assert "Algorithm bandwidth" in text
    assert text.count("<polyline") == 4


def test_what_was_not_measured_is_not_drawn():
    text = bench_page(PAGES["nothing crosses"]())
    assert "not counted" in text
    assert "Time over the limit" not in text
    assert 'class="limit"' not in text


def test_no_name_becomes_markup():
    result = result_of()
    result.world["source"]["name"] = HOSTILE
    result.environment["torch"] = HOSTILE
    scaled = copy.deepcopy(SCALED)
    scaled["changes"][0]["where"] = HOSTILE
    page = Page(bench_page(bench_report(result, scaled)))
    assert "script" not in page.names
    assert "img" not in page.names
    assert sum(HOSTILE in text for text in page.texts) >= 3


def test_a_mode_has_the_same_colour_and_mark_on_every_page():
    assert [hue_of(mode) for mode in ("broadcast", "hybrid-ffn", "reshard", "hybrid")] == [0, 1, 2, 3]
    assert "mode-2" not in Page(bench_page(bench_report(result_of()))).classes
    assert "mode-2" in Page(bench_page(bench_report(sweep_result()))).classes


def test_axes_place_values_and_mark_round_ones():
    assert Axis(0, 10, 100, 200).at(5) == 150
    assert Axis(1, 100, 0, 10, logarithmic=True).at(10) == pytest.approx(5)
    assert nice_ticks(0.68, 0.75, 4) == pytest.approx([0.68, 0.7, 0.72, 0.74])
    axis = linear_axis([3.0, 3.0], 0, 1)
    assert axis.low < 3 < axis.high
    assert log_axis([2, 3000], 0, 1).ticks() == [10, 100, 1000]
    assert [seconds_text(one) for one in (1.5, 0.0123, 4.2e-5, 0)] == ["1.5 s", "12.3 ms", "42 µs", "0"]
