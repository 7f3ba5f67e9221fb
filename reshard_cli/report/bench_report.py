"""The report of a bench: schema reshard-cli/bench/1, with medians and their bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard_cli.refit.bench import BenchResult, ModeResult

__all__ = ["BENCH_SCHEMA", "bench_report", "interval_of_median"]

BENCH_SCHEMA = "reshard-cli/bench/1"
_RESAMPLES = 10_000


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median: percentiles of the medians of resamples."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def bench_report(result: BenchResult) -> dict[str, Any]:
    """Return the report of what was measured.

    `limit_seconds`: the bound's bytes of the busiest domain over the rate that a bare exchange had on the same
    wires in the same run; None where nothing crosses domains.
    """
    rate = float(np.median(result.probe_rates)) if result.probe_rates else None
    limit = result.bound.most / rate if rate and result.bound.most else None
    modes = [_mode(one, limit, result) for one in result.results]
    medians = {one["mode"]: one["median"] for one in modes}
    for one in modes:
        base = medians.get("broadcast")
        one["speedup_over_broadcast"] = base / one["median"] if base and one["median"] else None
    return {
        "schema": BENCH_SCHEMA,
        "modes": modes,
        "model_bytes": result.model_bytes,
        "network_lower_bound_of_a_domain": {"take": result.bound.take, "send": result.bound.send},
        "probe": {"bytes_per_second_of_a_domain": result.probe_rates, "median": rate},
        "limit_seconds": limit,
        "world": result.world,
        "backend": result.backend,
        "layouts": result.layouts,
        "environment": result.environment,
    }


def _mode(one: ModeResult, limit: float | None, result: BenchResult) -> dict[str, Any]:
    median = float(np.median(one.seconds))
    measured = [value for value in one.measured if value is not None]
    names = sorted({name for phases in one.phases for name in phases})
    return {
        "mode": one.mode,
        "warmup": result.warmup,
        "repeats": len(one.seconds),
        "seconds": one.seconds,
        "median": median,
        "ci95": list(interval_of_median(one.seconds)),
        "network_bytes_planned": one.network_bytes,
        "network_bytes_measured": int(np.median(measured)) if measured else None,
        "ratio_to_limit": median / limit if limit else None,
        "speedup_over_broadcast": None,
        "algorithm_bandwidth": result.model_bytes / median if median else None,
        "bus_bandwidth": one.busiest_bytes / median if median else None,
        "phases": {name: float(np.median([p.get(name, 0.0) for p in one.phases])) for name in names},
        "rounds": one.rounds,
        "verified_elements": one.verified,
        "digest": one.digest,
    }
