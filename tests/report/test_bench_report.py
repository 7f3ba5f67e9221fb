"""A bench's report: medians, their intervals, and ratios to the limit and to broadcast, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reshard_cli.plan.bound import DomainBound
from reshard_cli.refit.bench_result import BenchResult, ModeResult
from reshard_cli.report.bench_report import bench_report, interval_of_median
from reshard_cli.report.terminal_bench import print_bench


def result_of(*, rates=(100.0, 90.0, 110.0), measured=1030):
    def mode(name, seconds):
        return ModeResult(
            name, digest="d" * 64, network_bytes=1000, busiest_bytes=500, rounds=3, seconds=seconds,
            measured=[measured] * len(seconds), phases=[{"pack": one / 10} for one in seconds],
        )  # fmt: skip

    return BenchResult(
        results=[mode("broadcast", [30.0, 31.0, 29.0]), mode("hybrid", [10.0, 14.0, 11.0])],
        probe_rates=list(rates), bound=DomainBound(take=1000, send=700), model_bytes=2000,
        world={"ranks": 4, "hosts": 2, "source": {"name": "a", "ranks": 2}, "destination": {"name": "b", "ranks": 2}},
        backend="gloo", warmup=2, environment={"torch": "x", "cores": 2}, layouts={"source": "1", "destination": "2"},
    )  # fmt: skip


def test_figures_are_medians_over_the_rate_of_the_same_run():
    report = bench_report(result_of())
    assert report["limit_seconds"] == pytest.approx(1000 / 100)
    broadcast, hybrid = report["modes"]
    assert (broadcast["median"], hybrid["median"]) == (30.0, 11.0)
    assert hybrid["ratio_to_limit"] == pytest.approx(1.1)
    assert hybrid["speedup_over_broadcast"] == pytest.approx(30 / 11)
    assert broadcast["speedup_over_broadcast"] == 1
    assert hybrid["algorithm_bandwidth"] == pytest.approx(2000 / 11)
    assert hybrid["bus_bandwidth"] == pytest.approx(500 / 11)
    assert hybrid["network_bytes_planned"] == 1000
    assert hybrid["network_bytes_measured"] == 1030
    assert hybrid["phases"] == {"pack": pytest.approx(1.1)}
    assert (hybrid["warmup"], hybrid["repeats"]) == (2, 3)
    assert hybrid["ci95"][0] <= hybrid["median"] <= hybrid["ci95"][1]


def test_what_was_not_measured_is_none_and_not_a_number():
    report = bench_report(result_of(rates=(), measured=None))
    assert report["limit_seconds"] is None
    assert all(one["ratio_to_limit"] is None for one in report["modes"])
    assert all(one["network_bytes_measured"] is None for one in report["modes"])


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = interval_of_median(random.normal(5, 1, 25).tolist())
        covered += low <= 5 <= high
    assert 0.88 <= covered / 200 <= 1


def test_the_table_names_every_figure(capsys):
    print_bench(bench_report(result_of()))
    shown = capsys.readouterr().out
    for text in ("broadcast", "hybrid", "11 s", "+3.00%", "1.100 ×", "2.73 ×", "2 host(s)", "3 repeats"):
        assert text in shown, text
