"""What `plan` shows on request: hardware, tensors by pattern, the classes with both placements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support import run_cli, write_yaml

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
TRAIN, INFER = (str(LAYOUTS / "quickstart" / f"{name}.yaml") for name in ("train", "infer"))


def test_tensors_lists_every_tensor_of_a_pattern_with_both_placements():
    done = run_cli("plan", TRAIN, INFER, "--tensors", "*.0.self_attn.*", "--json", "-")
    listed = json.loads(done.stdout)
    assert listed["schema"] == "reshard-cli/tensors/1"
    found = {one["name"]: one for one in listed["tensors"]}
    assert set(found) == {
        f"model.layers.0.self_attn.{part}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    one = found["model.layers.0.self_attn.q_proj.weight"]
    assert one["source"] == "pp (2): stage, tp (2): shard(0)"
    assert one["destination"] == "tp (2): shard(0)"
    assert one["bytes"] == 512 * 512 * 2
    shown = run_cli("plan", TRAIN, INFER, "--tensors", "*.0.self_attn.*").stdout
    assert all(name in shown for name in found)


def test_a_pattern_without_tensors_is_a_mistake():
    done = run_cli("plan", TRAIN, INFER, "--tensors", "*.nothing.*")
    assert done.returncode == 2
    assert "--tensors" in done.stderr
    assert "nothing" in done.stderr


def test_classes_hold_every_tensor_once_with_its_route_and_reason(tmp_path):
    values = yaml.safe_load(Path(INFER).read_text())
    values["model"] = str(LAYOUTS / "models" / "quickstart-moe.yaml")
    values["tensors"].insert(0, {"match": "*.norm.weight", "route": "broadcast", "why": "a reason of ours"})
    infer = write_yaml(tmp_path / "infer.yaml", values)
    done = run_cli("plan", TRAIN, infer, "--json", "-")
    report = json.loads(done.stdout)
    assert sum(one["tensors"] for one in report["classes"]) == report["model"]["tensors"]
    assert sum(one["bytes"] for one in report["classes"]) == report["model"]["bytes"]
    assert sum(one["share"] for one in report["classes"]) == pytest.approx(1)
    sent_whole = [one for one in report["classes"] if one["route"] == "broadcast"]
    assert [(one["name"], one["why"]) for one in sent_whole] == [("model.norm.weight", "a reason of ours")]
    assert "a reason of ours" in " ".join(run_cli("plan", TRAIN, infer).stdout.split())


def test_hardware_is_a_name_or_a_file_and_decides_the_prediction(tmp_path):
    def predicted(*flags):
        return json.loads(run_cli("plan", TRAIN, INFER, "--json", "-", *flags).stdout)

    own = tmp_path / "slow.yaml"
    own.write_text(
        "name: slow\nnic: 1.0e+9\nnic_achieved: 1.0e+9\nnvlink: 1.0e+9\nmemory: 1.0e+9\n"
        "launch: 0.0\nmessage: 0.0\ntensor: 0.0\n"
    )
    slow, fast = predicted("--hardware", str(own)), predicted()
    assert (slow["predicted"]["hardware"], fast["predicted"]["hardware"]) == ("slow", "dgx-h100")
    assert slow["limit_seconds"] == pytest.approx(50 * fast["limit_seconds"])
    assert slow["predicted"]["seconds"] > fast["predicted"]["seconds"]
    assert slow["digest"] == fast["digest"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("name: x\n", "nic"), ("name: x\nnic: fast\n", "nic"), ("name: x\nspeed: 1.0\n", "speed")],
)
def test_a_wrong_profile_is_told_with_its_key(tmp_path, text, told):
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    done = run_cli("plan", TRAIN, INFER, "--hardware", str(path))
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_profile_is_told_with_the_known_ones():
    done = run_cli("plan", TRAIN, INFER, "--hardware", "dgx-h1000")
    assert done.returncode == 2
    assert "dgx-h100" in done.stderr
    assert "gb200-nvl72" in done.stderr


def test_this_machine_can_be_measured_on_the_spot():
    report = json.loads(run_cli("plan", TRAIN, INFER, "--hardware", "cpu", "--json", "-").stdout)
    assert report["predicted"]["hardware"] == "cpu"
    assert 0 < report["limit_seconds"] <= report["predicted"]["seconds"]


def test_the_schema_of_profiles_is_there_for_editors():
    schema = json.loads(run_cli("schema", "hardware").stdout)
    assert {"nic", "nvlink", "memory"} <= schema["properties"].keys()


def test_m2n_tells_what_it_would_carry_and_why_it_declines_the_rest(tmp_path):
    values = yaml.safe_load(Path(INFER).read_text())
    values["model"] = str(LAYOUTS / "models" / "quickstart-moe.yaml")
    values["tensors"].insert(0, {"match": "model.norm.weight", "route": "broadcast"})
    infer = write_yaml(tmp_path / "infer.yaml", values)
    plain = json.loads(run_cli("plan", TRAIN, infer, "--json", "-").stdout)
    report = json.loads(run_cli("plan", TRAIN, infer, "--m2n", "--json", "-").stdout)
    assert set(plain["routes"]) == {"reshard", "broadcast"}
    assert "m2n" not in plain
    declined = report["m2n"].pop("declined")
    assert declined == [{"reason": "its route is broadcast", "tensors": 1, "bytes": 1024}]
    assert report["m2n"]["tensors"] == report["routes"]["m2n"]["tensors"] == 134
    assert report["m2n"]["bytes"] == report["routes"]["m2n"]["bytes"] == report["model"]["bytes"] - 1024
    assert report["traffic"]["network_bytes"] < plain["traffic"]["network_bytes"]
    assert report["digest"] != plain["digest"]
    shown = " ".join(run_cli("plan", TRAIN, infer, "--m2n", "--html", tmp_path / "plan.html").stdout.split())
    assert "route m2n 134 tensors" in shown
    assert "m2n declines 1 tensors, 1.02 kB: its route is broadcast" in shown
    told = run_cli("plan", TRAIN, infer, "--m2n", "--tensor", "model.layers.0.self_attn.o_proj.weight").stdout
    assert "by NCCL M2N, destination: mesh [2, 2] from rank 4, axis 1 cuts dim 1" in told
