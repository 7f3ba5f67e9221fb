"""The report of a bench: schema reshard-cli/bench/1, with medians and their bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard_cli.plan.bound import DomainBound
from reshard_cli.refit.bench_result import BenchResult, ModeResult, SweepSize

__all__ = ["BENCH_SCHEMA", "bench_report", "interval_of_median"]

BENCH_SCHEMA = "reshard-cli/bench/1"
_RESAMPLES = 10_000


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median: percentiles of the medians of resamples."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def bench_report(result: BenchResult, scaled: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the report of what was measured; `scaled`: what `--scale` changed.

    `limit_seconds`: the bound's bytes of the busiest domain over the rate that a bare exchange had on the same
    wires in the same run; None where nothing crosses domains.
    """
    rate = float(np.median(result.probe_rates)) if result.probe_rates else None
    limit = _limit(result.bound, rate)
    least = None if result.bound is None else {"take": result.bound.take, "send": result.bound.send}
    return {
        "schema": BENCH_SCHEMA,
        "modes": _modes(result.results, limit, result.model_bytes, result.warmup),
        "sweep": [_size(one, rate, result.warmup) for one in result.sweep],
        "scaled": scaled,
        "model_bytes": result.model_bytes,
        "network_lower_bound_of_a_domain": least,
        "probe": {"bytes_per_second_of_a_domain": result.probe_rates, "median": rate},
        "limit_seconds": limit,
        "world": result.world,
        "backend": result.backend,
        "layouts": result.layouts,
        "environment": result.environment,
    }


def _limit(bound: DomainBound | None, rate: float | None) -> float | None:
    return bound.most / rate if rate and bound is not None and bound.most else None


def _size(one: SweepSize, rate: float | None, warmup: int) -> dict[str, Any]:
    """Return one size of a sweep: nccl-tests' size, count and type, and the modes."""
    limit = _limit(one.bound, rate)
    return {
        "bytes": one.num_bytes,
        "count": math.prod(one.shape),
        "shape": list(one.shape),
        "type": one.dtype,
        "limit_seconds": limit,
        "skipped": one.skipped,
        "modes": _modes(one.results, limit, one.num_bytes, warmup),
    }


def _modes(
    results: Sequence[ModeResult], limit: float | None, num_bytes: int, warmup: int
) -> list[dict[str, Any]]:
    modes = [_mode(one, limit, num_bytes, warmup) for one in results]
    base = next((one["median"] for one in modes if one["mode"] == "broadcast"), None)
    for one in modes:
        one["speedup_over_broadcast"] = base / one["median"] if base and one["median"] else None
    return modes


def _mode(one: ModeResult, limit: float | None, num_bytes: int, warmup: int) -> dict[str, Any]:
    median = float(np.median(one.seconds))
    measured = [value for value in one.measured if value is not None]
    names = sorted({name for phases in one.phases for name in phases})
    return {
        "mode": one.mode,
        "warmup": warmup,
        "repeats": len(one.seconds),
        "refits_per_measurement": one.refits,
        "seconds": one.seconds,
        "order": one.order,
        "median": median,
        "ci95": list(interval_of_median(one.seconds)),
        "network_bytes_planned": one.network_bytes,
        "network_bytes_measured": int(np.median(measured)) if measured else None,
        "ratio_to_limit": median / limit if limit else None,
        "speedup_over_broadcast": None,
        "algorithm_bandwidth": num_bytes / median if median else None,
        "bus_bandwidth": one.busiest_bytes / median if median else None,
        "phases": {name: float(np.median([p.get(name, 0.0) for p in one.phases])) for name in names},
        "rounds": one.rounds,
        "verified_elements": one.verified,
        "digest": one.digest,
    }
