"""The commands beside refit: inspect, schema, plan's report, help; and that they start fast, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from reshard_cli.spec.model_document import read_model
from tests.support import run_cli

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
TRAIN, INFER = LAYOUTS / "quickstart" / "train.yaml", LAYOUTS / "quickstart" / "infer.yaml"


def test_inspect_prints_the_tensors_and_writes_a_document_that_reads_back(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for part in range(2):
        tensors = {f"layers.{part}.experts.{e}.w": torch.zeros(3, 4) for e in range(2)}
        save_file({**tensors, f"t{part}.bias": torch.zeros(5).half()}, folder / f"m-{part}.safetensors")
    done = run_cli("inspect", folder, "--write", tmp_path / "model.yaml", "--name", "small")
    assert done.returncode == 0, done.stderr
    assert "layers.{layer}.experts.{expert}.w" in done.stdout
    assert "6 tensors, 58 parameters" in done.stdout
    written, original = read_model(tmp_path / "model.yaml"), read_model(folder)
    assert written.name == "small"
    assert set(written.tensors) == set(original.tensors)
    report = json.loads(run_cli("inspect", folder, "--json", "-").stdout)
    assert report["model"]["tensors"] == 6


def test_inspect_of_a_folder_without_weights_ends_with_three(tmp_path):
    done = run_cli("inspect", tmp_path)
    assert done.returncode == 3
    assert done.stderr == f"error: {tmp_path}: holds no *.safetensors file\n"


@pytest.mark.parametrize(
    ("kind", "documents"),
    [("layout", [TRAIN, INFER]), ("model", [LAYOUTS / "models" / "quickstart-moe.yaml"])],
)
def test_schema_prints_a_json_schema_that_knows_every_key_of_the_shipped_documents(kind, documents):
    schema = json.loads(run_cli("schema", kind).stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    for document in documents:
        assert yaml.safe_load(document.read_text()).keys() <= schema["properties"].keys()


def test_plan_reports_every_field_of_its_schema_and_nothing_else_on_standard_output():
    done = run_cli("plan", TRAIN, INFER, "--json", "-")
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert report["schema"] == "reshard-cli/plan/1"
    assert report["model"] == {
        "name": "quickstart-moe",
        "tensors": 135,
        "parameters": 30233600,
        "bytes": 60467200,
    }
    assert report["source"] == {"name": "train", "ranks": 4, "domains": 2}
    assert report["destination"] == {"name": "infer", "ranks": 4, "domains": 2}
    assert report["mode"] == "hybrid"
    assert report["routes"]["reshard"] == {"tensors": 135, "bytes": 60467200, "share": 1.0}
    assert report["routes"]["broadcast"] == {"tensors": 0, "bytes": 0, "share": 0.0}
    assert report["traffic"]["network_bytes"] == report["traffic"]["network_lower_bound"] == 2 * 60467200
    assert report["traffic"].keys() == {
        "network_bytes", "domain_bytes", "local_bytes", "network_lower_bound", "conventional_network_bytes",
    }  # fmt: skip
    for name in ("send_network", "receive_network", "send_domain", "receive_domain"):
        assert len(report["per_rank"][name]) == 8
    assert all(1.0 <= value <= 1.05 for value in report["balance"].values())
    assert report["balance"].keys() == {"send_max_over_best", "receive_max_over_best"}
    assert report["messages"] > 0
    assert report["rounds"] == 1  # 30 MB of the busiest rank, 32 MiB at least in each
    # each side's fullest rank: two stages of two tensor-parallel ranks, then whole layers cut in two
    assert report["memory"] == {
        "staging_bytes": 512 << 20, "source_bytes": 15128064, "destination_bytes": 30255104,
        "landing_bytes": 0,
    }  # fmt: skip
    assert 0 < report["limit_seconds"] <= report["predicted"]["seconds"]
    assert report["predicted"].keys() == {"seconds", "bottleneck", "hardware", "parts"}
    assert report["predicted"]["hardware"] == "dgx-h100"
    assert sum(one["tensors"] for one in report["classes"]) == 135
    assert len(report["largest"]) == 10
    assert [one["mode"] for one in report["compare"]] == ["broadcast", "hybrid-ffn", "reshard", "hybrid"]
    assert report["plan_seconds"] > 0
    assert len(report["digest"]) == 64


def test_plan_writes_the_report_to_a_file_and_the_table_to_standard_output(tmp_path):
    done = run_cli("plan", TRAIN, INFER, "--json", tmp_path / "plan.json", "--mode", "broadcast")
    assert json.loads((tmp_path / "plan.json").read_text())["mode"] == "broadcast"
    assert "network" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["schema"], ["plan", str(TRAIN), str(INFER)], ["inspect", str(LAYOUTS / "models" / "quickstart-moe.yaml")]],
    ids=["help", "schema", "plan", "inspect"],
)  # fmt: skip
def test_it_starts_without_torch(arguments):
    code = (
        "import sys; from reshard_cli.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_names_the_commands_and_the_version_is_told():
    text = run_cli("--help").stdout
    assert all(command in text for command in ("plan", "refit", "inspect", "schema"))
    assert run_cli("--version").stdout.startswith("reshard-cli 0.")
    assert run_cli("refit", "--help").stdout.count("--") >= 14
