"""Refits on an emulated cluster against the network bound: `python -m tests.benchmarks.emulated` (root, iproute2).

Five pairs of layouts, models of 256 MiB and more, nodes of two ranks with NICs of 1 Gbit/s. For each pair one
`reshard-cli bench` runs all modes interleaved; the limit is the bound over the rate of a bare exchange in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "name": "dense-256m", "dtype": "bfloat16", "ranges": {"layer": 16},
    "tensors": {
        "model.layers.{layer}.self_attn.qkv_proj.weight": [3072, 1024],
        "model.layers.{layer}.self_attn.o_proj.weight": [1024, 1024],
        "model.layers.{layer}.mlp.{gate,up}_proj.weight": [1536, 1024],
        "model.layers.{layer}.mlp.down_proj.weight": [1024, 1536],
        "model.layers.{layer}.input_layernorm.weight": [1024],
    },
}  # fmt: skip
MIXTURE = {
    "name": "mixture-256m", "dtype": "bfloat16", "ranges": {"layer": 8, "expert": 16},
    "tensors": {
        "model.layers.{layer}.self_attn.qkv_proj.weight": [1536, 512],
        "model.layers.{layer}.self_attn.o_proj.weight": [512, 512],
        "model.layers.{layer}.mlp.gate.weight": [16, 512],
        "model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight": [640, 512],
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": [512, 640],
        "model.layers.{layer}.input_layernorm.weight": [512],
    },
}  # fmt: skip


def tensor_parallel(ranks: int, tp: int) -> dict[str, Any]:
    """Return a job of ranks / tp replicas of tp ranks."""
    return {
        "ranks": ranks, "meshes": {"m": {"dp": ranks // tp, "tp": tp}},
        "tensors": [
            {"match": "*.{qkv,gate,up}_proj.weight", "place": {"tp": "shard(0)"}},
            {"match": "*.{o,down}_proj.weight", "place": {"tp": "shard(1)"}},
            {"match": "*"},
        ],
    }  # fmt: skip


def sharded(ranks: int, text: str) -> dict[str, Any]:
    """Return a job that cuts every tensor the same way."""
    rule = {"match": "*", "place": {"dp": text}}
    return {"ranks": ranks, "meshes": {"m": {"dp": ranks}}, "tensors": [rule]}


def expert_stages() -> dict[str, Any]:
    """Return PP2 x EP2."""
    return {
        "ranks": 4, "meshes": {"m": {"pp": 2, "ep": 2}}, "pipeline": {"layers": [4, 4]},
        "tensors": [
            {"match": "*.experts.{expert}.*", "place": {"pp": "stage", "ep": "expert"}},
            {"match": "*", "place": {"pp": "stage"}},
        ],
    }  # fmt: skip


# name: model, source, destination, nodes
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "TP4 -> TP2 x DP2": (MODEL, tensor_parallel(4, 4), tensor_parallel(4, 2), 4),
    "FSDP4 -> TP4": (MODEL, sharded(4, "shard(0)"), tensor_parallel(4, 4), 4),
    "PP2 x EP2 -> TP2 x DP2, MoE": (MIXTURE, expert_stages(), tensor_parallel(4, 2), 4),
    "TP2 -> TP2 x DP3, 1+3 nodes": (MODEL, tensor_parallel(2, 2), tensor_parallel(6, 2), 4),
    "DP4 -> replicated": (MODEL, sharded(4, "replicate"), sharded(4, "replicate"), 4),
}


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nic", default="1gbit")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--modes", default="broadcast,hybrid-ffn,reshard,hybrid")
    flags = parser.parse_args()
    print(
        "| row | mode | median s | 95 % | of limit | counted | speed-up |\n|---|---|---:|---:|---:|---:|---:|"
    )
    for name, row in ROWS.items():
        if flags.rows not in name:
            continue
        report = bench(row, flags)
        for one in report["modes"]:
            low, high = one["ci95"]
            counted = one["network_bytes_measured"] / one["network_bytes_planned"] - 1
            speed = one["speedup_over_broadcast"]
            print(
                f"| {name} | {one['mode']} | {one['median']:.3f} | {low:.3f}–{high:.3f} | {one['ratio_to_limit']:.3f} "
                f"| {counted:+.2%} | {'' if speed is None else f'{speed:.2f}'} |",
                flush=True,
            )


def bench(
    row: tuple[dict[str, Any], dict[str, Any], dict[str, Any], int], flags: argparse.Namespace
) -> dict[str, Any]:
    """Run one bench; return its report."""
    model, source, destination, nodes = row
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, values in (("model", model), ("train", source), ("infer", destination)):
            more = {} if name == "model" else {"name": name, "domain": 2}
            paths[name] = Path(folder) / f"{name}.yaml"
            paths[name].write_text(yaml.safe_dump({**values, **more}, sort_keys=False), encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable, "-m", "reshard_cli", "bench", paths["train"], paths["infer"], "--model", paths["model"],
                "--emulate", f"{nodes}x2", "--nic", flags.nic, "--repeats", str(flags.repeats), "--verify",
                "--modes", flags.modes, "--json", "-",
            ],
            capture_output=True, text=True, check=False, timeout=1800,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
