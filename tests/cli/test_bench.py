"""`bench` on loopback: what it reports, what it refuses; and the bound that it is held against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard_cli.plan.bound import domain_bound
from reshard_cli.plan.build import build_plan
from tests.support import make_jobs, model_document, run_cli
from tests.transport.test_emulated import needs_cluster

QUICKSTART = Path(__file__).parent.parent.parent / "layouts" / "quickstart"
TRAIN, INFER = (QUICKSTART / f"{name}.yaml" for name in ("train", "infer"))


def test_it_measures_every_mode_and_reports_the_contracts_fields(tmp_path):
    done = run_cli(
        "bench", TRAIN, INFER, "--repeats", "3", "--warmup", "1", "--verify", "--json", "-", "--csv", tmp_path / "b.csv",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "reshard-cli/bench/1"
    assert [one["mode"] for one in report["modes"]] == ["broadcast", "hybrid-ffn", "reshard", "hybrid"]
    for one in report["modes"]:
        assert len(one["seconds"]) == one["repeats"] == 3
        assert one["warmup"] == 1
        assert min(one["seconds"]) <= one["median"] <= max(one["seconds"])
        assert one["network_bytes_planned"] == 2 * 60467200
        assert one["network_bytes_measured"] is None  # one host: nothing crosses an interface
        assert one["ratio_to_limit"] > 0
        assert one["speedup_over_broadcast"] > 0
        assert one["verified_elements"] == 60510208
        plan = run_cli("plan", TRAIN, INFER, "--mode", one["mode"], "--json", "-")
        assert one["digest"] == json.loads(plan.stdout)["digest"], "it does not depend on the other modes"
    assert report["network_lower_bound_of_a_domain"] == {
        "take": 60467200,
        "send": 30234112,  # the last stage, which has the final norm more
    }
    assert report["environment"]["torch"]
    lines = (tmp_path / "b.csv").read_text().splitlines()
    assert lines[0] == "mode,repeat,seconds"
    assert len(lines) == 1 + 4 * 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--modes", "hybrid,fast"), "'fast' is none of broadcast"),
        (("--modes", ","), "names none"),
        (("--emulate", "four"), "four"),
        (("--emulate", "4x2", "--nic", "fast"), "fast"),
        (("--emulate", "4x2", "--backend", "nccl"), "--emulate"),
        (("--json", "/nowhere/report.json"), "--json"),
        (("--html", "/nowhere/page.html"), "--html"),
        (("--sweep", "1K"), "MIN:MAX"),
        (("--scale", "2"), "between 0 and 1"),
        (("--scale", "0.5", "--emulate", "1x2"), "can have 1, 2, 4"),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(flags, told):
    done = run_cli("bench", TRAIN, INFER, *flags)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_sweep_measures_each_size_and_says_what_does_not_fit(tmp_path):
    done = run_cli(
        "bench", TRAIN, INFER, "--repeats", "2", "--warmup", "1", "--verify", "--json", tmp_path / "b.json", "--csv",
        tmp_path / "b.csv", "--html", tmp_path / "b.html", "--sweep", "1K:1024T:1099511627776",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["schema"] == "reshard-cli/bench/1"
    small, huge = report["sweep"]
    assert (small["bytes"], small["count"], small["skipped"]) == (1024, 512, None)
    assert [one["mode"] for one in small["modes"]] == ["broadcast", "reshard"]
    for one in small["modes"]:
        assert one["repeats"] == 2
        assert one["refits_per_measurement"] > 1
        assert one["verified_elements"] == 512
        assert 0 < one["median"] < 1
    assert small["modes"][1]["network_bytes_planned"] == 1024
    assert (huge["bytes"], huge["modes"]) == (1 << 50, [])
    assert "need" in huge["skipped"]
    assert "1,125,899,906,842,624 bytes: left out" in done.stdout
    lines = (tmp_path / "b.csv").read_text().splitlines()
    assert lines[0] == "bytes,mode,repeat,seconds"
    assert lines[1].startswith("1024,broadcast,0,")
    assert "Sweep over sizes" in (tmp_path / "b.html").read_text()
    assert "#wrong" in done.stdout


def test_a_published_row_scaled_down_runs_here_and_says_what_it_changed(tmp_path):
    row = QUICKSTART.parent / "published" / "qwen3-30b-h100"
    done = run_cli(
        "bench", row / "train.yaml", row / "infer.yaml", "--scale", "0.0002", "--repeats", "2", "--warmup", "1", "--verify",
        "--modes", "broadcast,reshard", "--json", "-", "--html", tmp_path / "b.html",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    changes = {f"{one['where']} {one['what']}": one for one in report["scaled"]["changes"]}
    assert report["scaled"]["factor"] == 0.0002
    assert (changes["train ranks"]["original"], changes["train ranks"]["scaled"]) == (16, 4)
    assert report["world"]["ranks"] == 8
    assert (
        changes["model bytes"]["scaled"]
        == report["model_bytes"]
        <= 0.0002 * changes["model bytes"]["original"]
    )
    assert all(one["verified_elements"] > 0 for one in report["modes"])
    assert "What was scaled down" in (tmp_path / "b.html").read_text()


@needs_cluster
def test_a_published_row_fills_an_emulated_cluster_and_names_the_axes_without_room():
    row = QUICKSTART.parent / "published" / "qwen3-235b-h100"
    done = run_cli(
        "bench", row / "train.yaml", row / "infer.yaml", "--scale", "0.00001", "--emulate", "4x2", "--repeats", "2",
        "--warmup", "1", "--verify", "--modes", "reshard", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["world"]["ranks"], report["world"]["hosts"]) == (8, 4)
    lost = [f"{one['where']} {one['what']}" for one in report["scaled"]["changes"] if one["note"]]
    assert lost == ["train axis dp"]
    only = report["modes"][0]
    assert only["verified_elements"] > 0
    assert 1 < only["network_bytes_measured"] / only["network_bytes_planned"] < 1.1


def bound_of(folder, source, destination):
    model = model_document({"a": ((8, 8), "float32"), "b": ((8, 8), "float32")})
    jobs = make_jobs(folder, model, source, destination)
    return domain_bound(
        build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "broadcast", staging=1 << 20)
    )


def job(ranks, domain, text="replicate"):
    return {"ranks": ranks, "domain": domain, "meshes": {"m": {"r": ranks}},
            "tensors": [{"match": "*", "place": {"r": text}}]}  # fmt: skip


def test_the_bound_of_a_domain_is_what_it_alone_has_to_send_or_take(tmp_path):
    whole = 2 * 8 * 8 * 4
    # everybody wants everything: each domain takes it all; two source domains share sending it once
    assert bound_of(tmp_path, job(4, 2), job(4, 2)).take == whole
    assert bound_of(tmp_path, job(4, 2), job(4, 2)).send == whole // 2
    # a domain that wants a half takes a half
    assert bound_of(tmp_path, job(4, 2), job(4, 2, "shard(0)")).take == whole // 2
    # what only one source domain holds, only it can send: once, for all three domains
    one = bound_of(tmp_path, job(2, 2, "shard(0)"), job(6, 2))
    assert (one.take, one.send, one.most) == (whole, whole, whole)
    pieces = {"ranks": 2, "domain": 1, "pieces": [
        {"tensor": "a", "rank": 0, "box": [[0, 8], [0, 8]]}, {"tensor": "b", "rank": 1, "box": [[0, 2], [0, 8]]},
        {"tensor": "b", "rank": 0, "box": [[2, 8], [0, 8]]},
    ]}  # fmt: skip
    assert bound_of(tmp_path, pieces, job(1, 1)).send == whole - 2 * 8 * 4
