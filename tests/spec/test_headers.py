"""Safetensors headers: read like the library reads them, and every malformed one refused with its file."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from reshard_cli.errors import WeightsError
from reshard_cli.spec.headers import index_folder, read_header
from reshard_cli.spec.model_document import read_model


def file_of(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_a_header_is_read_as_the_safetensors_library_reads_it(tmp_path):
    tensors = {
        "a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(True),
        "d": torch.zeros(0, 3), "e": torch.randn(2, 2).to(torch.float8_e4m3fn), "f": torch.arange(3),
    }  # fmt: skip
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path)
    raw = path.read_bytes()
    with safe_open(path, "pt") as reference:
        assert found.keys() == set(reference.keys())
        for name, one in found.items():
            tensor = reference.get_tensor(name)
            assert one.shape == tuple(tensor.shape)
            assert f"torch.{one.dtype}" == str(tensor.dtype)
            data = raw[one.start : one.start + one.num_bytes]
            assert (
                data == bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
                if tensor.numel()
                else not data
            )


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 4, [4])}, b"123", "truncated: tensor 'a' ends"),
        ({"a": entry(0, 4, [4])}, b"12345", "1 bytes lie behind the last tensor"),
        ({"a": entry(0, 4, [5])}, b"1234", "needs 5 bytes, its range has 4"),
        ({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"123456", "'b' overlaps the one before"),
        ({"a": entry(0, 2, [2]), "b": entry(3, 5, [2])}, b"12345", "'b' leaves a hole before it"),
        ({"a": entry(4, 0, [4])}, b"1234", "its range has -4"),
        ({"a": entry(0, 4, [-4])}, b"1234", "no valid shape"),
        ({"a": entry(0, 4, [True])}, b"1234", "no valid shape"),
        ({"a": entry(0, 1, [2**62, 2**62])}, b"1", "its range has 1"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": ["0", 1]}}, b"1", "no valid data_offsets"),
        ({"a": entry(0, 1, [1], "Q7")}, b"1", "dtype 'Q7'"),
        ({"a": {"dtype": "U8"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": 3}, b"", "lacks dtype, shape or data_offsets"),
        (b'{"a": 1, "a": 2}', b"", "names 'a' twice"),
        (b"[1]", b"", "not a JSON object"),
        (b"{", b"", "not JSON"),
        (b"\xff\xff", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
    ],
)
def test_a_malformed_header_is_refused_with_its_file_and_its_fault(tmp_path, header, data, words):
    path = file_of(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 1000])
def test_a_header_that_claims_more_than_the_file_has_is_refused_without_an_allocation(tmp_path, length):
    path = file_of(tmp_path / "bad.safetensors", {}, length=length)
    tracemalloc.start()
    with pytest.raises(WeightsError, match=f"claims {length} bytes"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for name in ("empty.safetensors", "none.safetensors"):
        with pytest.raises(WeightsError, match=name):
            read_header(tmp_path / name)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.binary(max_size=80), st.integers(0, 200) | st.integers(0, 2**64 - 1), st.binary(max_size=8))
def test_no_bytes_do_anything_but_be_refused_or_read(text, length, data):
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder) / "x.safetensors", text, data, length)
        try:
            assert isinstance(read_header(path), dict)
        except WeightsError as error:
            assert str(path) in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__", "weight_map"]), inner, max_size=4
    ),
)  # fmt: skip


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(JSON, st.binary(max_size=8))
def test_no_json_does_anything_but_be_refused_or_read(header, data):
    with tempfile.TemporaryDirectory() as folder:
        file_of(Path(folder) / "model.safetensors", header, data)
        try:
            index_folder(Path(folder))
        except WeightsError as error:
            assert folder in str(error)
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(header))
        try:
            index_folder(Path(folder))
        except WeightsError as error:
            assert folder in str(error)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "is not a file name in this folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not in"),
        ({"weight_map": {"z": "x.safetensors"}}, "'z' is in x.safetensors, which does not hold it"),
        ({"weight_map": ["a"]}, "has no `weight_map`"),
        ([], "has no `weight_map`"),
    ],
)
def test_an_index_that_does_not_agree_with_its_folder_is_refused(tmp_path, index, words):
    file_of(tmp_path / "x.safetensors", {"a": entry(0, 1, [1])}, b"1")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError) as caught:
        index_folder(tmp_path)
    assert words in str(caught.value)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("x.safetensors", "y.safetensors"):
        file_of(tmp_path / name, {"a": entry(0, 1, [1])}, b"1")
    with pytest.raises(WeightsError, match=r"tensor 'a' is also in .*x\.safetensors"):
        index_folder(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\0", "experts.{expert}.w", "a.*"])
def test_a_checkpoint_with_a_name_that_is_none_is_refused_with_its_file(tmp_path, name):
    file_of(tmp_path / "model.safetensors", {name: entry(0, 1, [1])}, b"x")
    with pytest.raises(WeightsError, match="is no tensor's name") as caught:
        read_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors: ")
    assert str(caught.value).isprintable()
