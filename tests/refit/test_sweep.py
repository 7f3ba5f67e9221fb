"""`--sweep`: which sizes, which tensor, which cuts; what fits a machine; how many refits make a measurement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard_cli.errors import DocumentError
from reshard_cli.refit.bench_result import sweep_sizes
from reshard_cli.refit.sweep import SWEPT, MemoryNeed, lacking, refits_of, sweep_jobs, sweep_shape
from tests.support import make_jobs, model_document, refit_in_process


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:16K", [1 << 10, 4 << 10, 16 << 10]),
        ("1k:1M:32", [1 << 10, 1 << 15, 1 << 20]),
        ("64:200:2", [64, 128]),
        ("1KiB:4KiB:2", [1024, 2048, 4096]),
        ("2G:2G", [2 << 30]),
    ],
)
def test_sizes_are_those_of_nccl_tests(text, sizes):
    assert list(sweep_sizes(text)) == sizes


@pytest.mark.parametrize(
    "text", ["", "1K", "1K:", "1K:1M:1", "1M:1K", "1:1K", "1K:1M:4:5", "1K:1M:x", "train.yaml"]
)
def test_other_texts_are_refused_with_the_form(text):
    with pytest.raises(DocumentError, match="--sweep"):
        sweep_sizes(text)


@given(power=st.integers(6, 40), ranks=st.sampled_from([1, 2, 4, 8, 16]))
def test_a_power_of_two_is_met_exactly_and_divides_over_as_many_ranks(power, ranks):
    rows, columns = sweep_shape(1 << power, ranks)
    assert rows * columns * 2 == 1 << power
    assert columns % ranks == 0


@given(size=st.integers(64, 1 << 40), ranks=st.integers(1, 300))
def test_any_size_is_met_as_nearly_as_whole_rows_can(size, ranks):
    rows, columns = sweep_shape(size, ranks)
    assert columns % ranks == 0
    assert abs(rows * columns - size // 2) <= columns
    assert rows >= columns // 4 or columns == ranks


def job(ranks, domain):
    return {"ranks": ranks, "domain": domain, "meshes": {"m": {"r": ranks}}, "tensors": [{"match": "*"}]}


@pytest.mark.parametrize(
    ("source", "destination", "num_bytes"), [(4, 4, 4096), (3, 2, 1000), (2, 5, 64), (1, 3, 2048)]
)
def test_the_tensor_arrives_in_columns_on_the_documents_ranks_and_domains(
    tmp_path, source, destination, num_bytes
):
    documents = make_jobs(
        tmp_path, model_document({"a": ((8,), "float32")}), job(source, 2), job(destination, 2)
    )
    shape = sweep_shape(num_bytes, destination)
    jobs = sweep_jobs(documents, shape)
    assert (jobs.source.num_ranks, jobs.destination.num_ranks) == (source, destination)
    assert jobs.topology(None, False).domain.tolist() == documents.topology(None, False).domain.tolist()
    whole = torch.randn(shape).to(torch.bfloat16)
    for mode in ("reshard", "broadcast"):
        result = refit_in_process(jobs, {SWEPT: whole}, mode=mode, from_storages=True)
        held = [one[SWEPT] for one in result.storages]
        assert torch.equal(torch.cat(held, 1), whole)
    sent = refit_in_process(jobs, {SWEPT: whole}, from_storages=True).plan.network_bytes
    assert sent == math.prod(shape) * 2  # every byte crosses once


def test_ranks_of_one_machine_share_its_memory():
    alone = [MemoryNeed("a", 70, 100), MemoryNeed("b", 70, 100)]
    assert lacking(alone) is None
    together = [MemoryNeed("a", 50, 10**9), MemoryNeed("a", 10**9, 10**9)]
    assert lacking(together) == "its 2 rank(s) on one machine need 1.00 GB, 1.00 GB are free"


@pytest.mark.parametrize(
    ("seconds", "refits"), [(10.0, 1), (0.1, 1), (0.03, 4), (0.001, 100), (1e-6, 200), (0.0, 200)]
)
def test_a_short_refit_is_repeated_in_one_measurement_until_a_clock_can_tell(seconds, refits):
    assert refits_of(seconds) == refits
