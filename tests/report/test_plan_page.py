"""The page of a plan: needs nothing but itself, shows what the report says, and no name in it becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reshard_cli.refit.prepare import read_jobs
from reshard_cli.report.plan_page import plan_page
from reshard_cli.report.plan_report import plan_report
from reshard_cli.spec.hardware_profile import read_hardware
from tests.support import make_jobs, model_document, run_cli

LAYOUTS = Path(__file__).parent.parent.parent / "layouts"
HOSTILE = "w.</script><script>alert('1')</script><img src=x onerror=alert(2)>&amp;\"'"


class Page(HTMLParser):
    """Collects a page's elements, what they refer to, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.names and self.names[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def page_of(jobs, mode="hybrid", staging=1 << 29):
    topology = jobs.topology(None, False)
    report, plan = plan_report(jobs, topology, mode, read_hardware("dgx-h100", 8), staging=staging)
    return report, plan_page(report, plan, jobs, False)


def row_jobs(row):
    folder = LAYOUTS / "published" / row
    return read_jobs(folder / "train.yaml", folder / "infer.yaml")


def test_the_page_needs_nothing_else():
    _, text = page_of(read_jobs(LAYOUTS / "quickstart" / "train.yaml", LAYOUTS / "quickstart" / "infer.yaml"))
    page = Page(text)
    assert page.references == page.handlers == []
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(page.scripts) == 2


@pytest.mark.parametrize("mode", ["hybrid", "broadcast"])
def test_pictures_add_up_to_the_report(mode):
    jobs = read_jobs(LAYOUTS / "quickstart" / "train.yaml", LAYOUTS / "quickstart" / "infer.yaml")
    report, text = page_of(jobs, mode, staging=1 << 22)
    data, ranks = Page(text).data, report["per_rank"]
    assert sum(data["matrix"]["network"]["bytes"]) == report["traffic"]["network_bytes"]
    assert sum(data["matrix"]["inside"]["bytes"]) == report["traffic"]["domain_bytes"]
    sending, receiving = data["loads"]["nic"]
    # what is broadcast is also gathered at ranks of the source, and sent on by ranks of the destination
    assert sum(sending["busiest"]) == sum(receiving["busiest"]) == report["traffic"]["network_bytes"]
    assert sending["busiest"][:4] == ranks["send_network"][:4]
    assert receiving["busiest"][-4:] == ranks["receive_network"][4:]
    assert report["rounds"] > 1
    assert sum(data["rounds"]["total"]) == report["traffic"]["network_bytes"]
    assert sum(row[1] for row in data["tensors"]) == report["model"]["tensors"]
    assert sum(row[6] for row in data["tensors"]) == report["model"]["bytes"]
    matrix = data["matrix"]["network"]
    by_sender = [0] * len(matrix["rows"]["names"])
    for cell, amount in zip(matrix["cells"], matrix["bytes"], strict=True):
        by_sender[cell // len(matrix["columns"]["names"])] += amount
    assert by_sender == [*ranks["send_network"][:4], *(one for one in ranks["send_network"][4:] if one)]


def test_hundreds_of_ranks_are_shown_by_domain_and_the_page_stays_small():
    report, text = page_of(row_jobs("deepseek-v3-h100"))
    assert len(text.encode()) < 2_000_000
    data = Page(text).data
    matrix = data["matrix"]["network"]
    assert len(matrix["rows"]["names"]) == len(matrix["columns"]["names"]) == 32
    assert sum(matrix["bytes"]) == report["traffic"]["network_bytes"]
    assert data["rounds"]["count"] == report["rounds"]


def test_relays_are_senders_too(tmp_path):
    jobs = make_jobs(
        tmp_path,
        model_document({f"w{i}": ((1024, 1024), "float32") for i in range(8)}),
        {"ranks": 2, "domain": 2, "meshes": {"m": {"r": 2}}, "tensors": [{"match": "*", "place": {"r": "shard(0)"}}]},
        {"ranks": 6, "domain": 2, "meshes": {"m": {"dp": 3, "tp": 2}},
         "tensors": [{"match": "*", "place": {"tp": "shard(0)"}}]},
    )  # fmt: skip
    report, text = page_of(jobs)
    data = Page(text).data
    assert report["relays"]["network_bytes"] > 0
    assert sum(data["matrix"]["network"]["bytes"]) == report["traffic"]["network_bytes"]
    assert sum(data["loads"]["nic"][0]["busiest"]) == report["traffic"]["network_bytes"]
    assert sum(data["rounds"]["total"]) == report["traffic"]["network_bytes"]


def test_no_name_becomes_markup(tmp_path):
    jobs = make_jobs(
        tmp_path,
        model_document({HOSTILE: ((4, 4), "float32"), "plain": ((2,), "float32")}, name=HOSTILE),
        {"name": HOSTILE, "ranks": 1, "tensors": [{"match": "*"}]},
        {"name": "infer", "ranks": 2, "domain": 1, "tensors": [{"match": "*"}]},
    )
    _, text = page_of(jobs)
    page = Page(text)
    assert page.names.count("script") == 2
    assert "img" not in page.names
    assert page.handlers == []
    assert page.data["tensors"][0][0] == HOSTILE
    assert page.data["source"] == HOSTILE


def test_the_command_writes_it_and_refuses_a_place_that_cannot_be_written(tmp_path):
    train, infer = LAYOUTS / "quickstart" / "train.yaml", LAYOUTS / "quickstart" / "infer.yaml"
    assert run_cli("plan", train, infer, "--html", tmp_path / "plan.html").returncode == 0
    assert Page((tmp_path / "plan.html").read_text()).data["source"] == "train"
    refused = run_cli("plan", train, infer, "--html", tmp_path / "missing" / "plan.html")
    assert refused.returncode == 2
    assert "--html" in refused.stderr
    assert "Traceback" not in refused.stderr
