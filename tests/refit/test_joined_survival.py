"""A source goes on when a destination job dies in mid-refit: the job comes again, and nothing of the dead ones stays."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from random import Random
from typing import Any

import torch

from reshard_cli.errors import TransferError
from tests.refit.joined_harness import (
    RANKS,
    Case,
    Fault,
    Seam,
    cut,
    free_port,
    join,
    left_behind,
    opened,
    rank_process,
    start,
    write_documents,
)

LIVES = int(os.environ.get("RESHARD_LIVES", "5"))
POINTS = (
    "connecting",
    "bind",
    "pack",
    "network",
    "domain",
    "verify",
    "before complete/{v}",
    "after complete/{v}",
)


def source_process(case: Case, job: str, rank: int) -> None:
    """Refit until told to stop; write down each turn's end and what this process holds."""
    torch.set_num_threads(1)
    Seam(case, job, rank).install()
    if rank == 0:
        opened(case)
    session = join(case, job, rank, timeout=20)
    live: dict[str, Any] = {}
    session.bind(live)
    turns = []
    version = 0
    while version < case.refits:
        version += 1
        live.update(cut(version, job, rank))
        error = ""
        try:
            session.refit(version=version)
        except TransferError as told:
            error = str(told)
        turns.append((error, len(os.listdir("/proc/self/fd")), threading.active_count()))
    source = session._source
    assert source is not None
    held = len(source._lost) + len(source.sessions) + len(source._seen)
    (case.folder / f"turns-{rank}.json").write_text(json.dumps({"turns": turns, "held": held}))
    session.close()


def test_a_source_outlives_its_destinations_and_the_next_one_gets_the_next_version(tmp_path: Path) -> None:
    random = Random(5)
    write_documents(tmp_path)
    port = free_port()
    # a life takes one refit, in which it dies; the last one lives to the end
    sources = [
        start(Case(tmp_path, port, refits=LIVES + 3), "train", rank, source_process) for rank in range(RANKS)
    ]
    try:
        for life in range(LIVES):
            guilty = random.randrange(RANKS)
            fault = Fault("infer", guilty, random.choice(POINTS).format(v=life + 1), 1)
            folder = tmp_path / str(life)
            folder.mkdir()
            write_documents(folder)
            ranks = [start(Case(folder, port, fault=fault), "infer", rank) for rank in range(RANKS)]
            for one in ranks:
                one.join(40)
                one.kill()
            told = json.loads((folder / f"infer-{1 - guilty}.json").read_text())
            assert f"infer {guilty}" in told["error"], told
        last = tmp_path / "last"
        last.mkdir()
        write_documents(last)
        ranks = [start(Case(last, port), "infer", rank, rank_process) for rank in range(RANKS)]
        for one in [*ranks, *sources]:
            one.join(40)
        for rank in range(RANKS):
            told = json.loads((last / f"infer-{rank}.json").read_text())
            assert (told["error"], told["whole"]) == (None, True)
            assert told["committed"] == [LIVES + 1, LIVES + 2, LIVES + 3]
            wrote = json.loads((tmp_path / f"turns-{rank}.json").read_text())
            errors = [bool(error) for error, _, _ in wrote["turns"]]
            assert errors == [True] * LIVES + [False] * 3, wrote
            first, end = wrote["turns"][0], wrote["turns"][-1]
            assert end[1] - first[1] <= 8
            assert end[2] == first[2]
            assert wrote["held"] <= 3
    finally:
        for one in sources:
            one.kill()
            one.join()
    assert left_behind(Case(tmp_path, port)) == []
