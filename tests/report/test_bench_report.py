"""A bench's report: medians, their intervals, and ratios to the limit and to broadcast, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reshard_cli.plan.bound import DomainBound
from reshard_cli.refit.bench_result import BenchResult, ModeResult, SweepSize
from reshard_cli.report.bench_report import bench_report, interval_of_median
from reshard_cli.report.terminal_bench import print_bench


def result_of(*, rates=(100.0, 90.0, 110.0), measured=1030):
    def mode(name, seconds, order):
        return ModeResult(
            name, digest="d" * 64, network_bytes=1000, busiest_bytes=500, rounds=3, seconds=seconds,
            measured=[measured] * len(seconds), phases=[{"pack": one / 10} for one in seconds], order=order,
        )  # fmt: skip

    return BenchResult(
        results=[mode("broadcast", [30.0, 31.0, 29.0], [0, 3, 4]), mode("hybrid", [10.0, 14.0, 11.0], [1, 2, 5])],
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
    for text in (
        "size", "time", "algbw", "busbw", "broadcast", "hybrid", "11 s", "182 B/s", "45 B/s", "+3.00%", "1.100 ×",
        "2.73 ×", "2 host(s)", "3 repeats", "busiest rank and direction",
    ):  # fmt: skip
        assert text in shown, text


def swept_of(*, verified=None):
    result = result_of()
    kept = result.results
    for one in kept:
        one.seconds, one.refits, one.verified = [value / 1e4 for value in one.seconds], 40, verified
    result.results, result.bound = [], None
    result.sweep = [
        SweepSize(4096, (64, 32), "bfloat16", kept, DomainBound(take=4096, send=2048)),
        SweepSize(1 << 40, (1 << 20, 1 << 19), "bfloat16", skipped="its 4 rank(s) need too much"),
    ]
    return result


def test_a_sweep_has_a_limit_and_ratios_of_its_own_for_every_size():
    report = bench_report(swept_of())
    assert report["modes"] == []
    first, second = report["sweep"]
    assert (first["bytes"], first["count"], first["type"]) == (4096, 2048, "bfloat16")
    assert first["limit_seconds"] == pytest.approx(40.96)
    hybrid = first["modes"][1]
    assert hybrid["algorithm_bandwidth"] == pytest.approx(4096 / 0.0011)
    assert hybrid["bus_bandwidth"] == pytest.approx(500 / 0.0011)
    assert hybrid["speedup_over_broadcast"] == pytest.approx(30 / 11)
    assert (hybrid["refits_per_measurement"], hybrid["repeats"]) == (40, 3)
    assert (second["modes"], second["skipped"]) == ([], "its 4 rank(s) need too much")


@pytest.mark.parametrize(("verified", "wrong"), [(None, "N/A"), (2048, " 0 ")])
def test_the_table_of_a_sweep_has_the_columns_of_nccl_tests(capsys, verified, wrong):
    print_bench(bench_report(swept_of(verified=verified)))
    shown = capsys.readouterr().out
    for text in (
        "size (B)",
        "count",
        "type",
        "time (us)",
        "algbw",
        "busbw",
        "#wrong",
        "network (B)",
        "of limit",
    ):
        assert text in shown, text
    row = next(line for line in shown.splitlines() if "hybrid" in line)
    assert "1100.0" in row
    assert "1000–1400" in row
    assert "40 x 3" in row
    assert wrong in row
    assert "1,099,511,627,776 bytes: left out, its 4 rank(s) need too much" in shown


def test_what_scale_changed_is_a_table_of_its_own(capsys):
    change = {
        "where": "train",
        "what": "axis dp",
        "original": 8,
        "scaled": 1,
        "note": "no room for this axis",
    }
    report = bench_report(result_of(), {"factor": 0.001, "changes": [change]})
    assert report["scaled"]["changes"] == [change]
    print_bench(report)
    row = next(line for line in capsys.readouterr().out.splitlines() if "train: axis dp" in line)
    assert row.split()[3:] == ["8", "1", "no", "room", "for", "this", "axis"]
    assert bench_report(result_of())["scaled"] is None
