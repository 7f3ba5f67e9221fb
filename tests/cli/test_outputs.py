"""Where reports go: files that are refused before any work, and standard output for one report alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import run_cli

QUICKSTART = Path(__file__).parent.parent.parent / "layouts" / "quickstart"
TRAIN, INFER = QUICKSTART / "train.yaml", QUICKSTART / "infer.yaml"


@pytest.mark.parametrize("command", ["plan", "refit", "bench"])
@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_report_that_cannot_be_written_is_refused_before_any_work(command, flag, tmp_path):
    for file in (tmp_path, tmp_path / "none" / "report"):
        done = run_cli(command, TRAIN, INFER, flag, file)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {flag}: {file} cannot be written")


@pytest.mark.parametrize("command", ["plan", "refit", "bench"])
def test_only_one_report_can_have_standard_output(command):
    done = run_cli(command, TRAIN, INFER, "--json", "-", "--html", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --json and --html: only one of them can have standard output\n"


@pytest.mark.parametrize("command", ["plan", "refit", "bench"])
def test_two_reports_are_not_one_file(command, tmp_path):
    file, same = tmp_path / "report", f"{tmp_path}/../{tmp_path.name}/report"
    done = run_cli(command, TRAIN, INFER, "--json", file, "--html", same)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: --json and --html: both would write {file}\n"
    assert run_cli("plan", TRAIN, INFER, "--json", "/dev/null", "--html", "/dev/null").returncode == 0
    file.write_text("")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    for same in (tmp_path / "link", tmp_path / "hard"):
        done = run_cli("plan", TRAIN, INFER, "--json", file, "--html", same)
        assert (done.returncode, done.stderr) == (2, f"error: --json and --html: both would write {file}\n")
    done = run_cli("plan", TRAIN, INFER, "--json", "-", "--html", "/dev/stdout")
    assert (done.returncode, done.stdout) == (2, "")


def test_metrics_are_a_file():
    done = run_cli("refit", TRAIN, INFER, "--metrics", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has to be a file" in done.stderr


@pytest.mark.parametrize(("command", "flags"), [("plan", ()), ("refit", ("--iterations", "2"))])
def test_a_page_on_standard_output_is_alone_there(command, flags, tmp_path):
    done = run_cli(command, TRAIN, INFER, "--html", "-", "--json", tmp_path / "report.json", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<!DOCTYPE html>")
    assert done.stdout.rstrip().endswith("</html>")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["digest"] in done.stdout or report["digest"][:16] in done.stdout


def test_bench_takes_one_mode_as_the_other_commands_do():
    done = run_cli(
        "bench", TRAIN, INFER, "--mode", "reshard", "--repeats", "1", "--warmup", "0", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    assert [one["mode"] for one in json.loads(done.stdout)["modes"]] == ["reshard"]
    done = run_cli("bench", TRAIN, INFER, "--mode", "reshard", "--modes", "hybrid")
    assert (done.returncode, done.stderr) == (2, "error: --mode and --modes: give one of them\n")
