"""The safetensors reader against the reference library, and files made to hurt."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makefiles import HF_CONFIG, random_tensors, safetensors_bytes, target_shapes, write_folder
from safetensors.torch import load_file, save_file

from lampejo.errors import UserError
from lampejo.weights.safetensors import SafetensorsFile, SafetensorsFolder


def open_bytes(path: Path, data: bytes) -> SafetensorsFile:
    path.write_bytes(data)
    return SafetensorsFile(path)


def test_tensors_equal_those_of_the_reference_library(tmp_path):
    """Fault: own reader drifts from the format; scalars and empty tensors included."""
    tensors = {
        "f32": torch.randn(3, 4), "f16": torch.randn(5).half(), "bf16": torch.randn(2, 3, 4).bfloat16(),
        "i32": torch.arange(7, dtype=torch.int32), "i64": torch.arange(3), "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, expected in load_file(tmp_path / "x.safetensors").items():
        found = file.read(name)
        assert found.dtype == expected.dtype and found.is_contiguous() and torch.equal(found, expected)
    file.close()


def test_shards_are_read_as_one(tmp_path):
    """Fault: a tensor taken from the wrong shard."""
    tensors = random_tensors(target_shapes())
    folder = SafetensorsFolder(write_folder(tmp_path / "m", tensors, HF_CONFIG, shards=3))
    assert set(folder.tensors) == set(tensors)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    folder.close()


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DEEP = b"[" * 100_000
HOSTILE = {
    "empty": (b"", "too few"),
    "header longer than the file": (struct.pack("<Q", 1 << 60) + b"{}" * 8, "claims"),
    "header of 5 GB in a small file": (struct.pack("<Q", 5 << 30) + b"{}" * 8, "claims"),
    "not JSON": (safetensors_bytes(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff\xff": 1}'), "not valid JSON"),
    "JSON too deep": (safetensors_bytes(b'{"a":' + DEEP + b"}"), "not valid JSON"),
    "huge number": (safetensors_bytes(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a list": (safetensors_bytes(b"[1, 2, 3]"), "not a JSON object"),
    "name twice": (safetensors_bytes(b'{"a": 1, "a": 2}'), "twice"),
    "entry a number": (safetensors_bytes({"x": 1}), "malformed"),
    "no offsets": (safetensors_bytes({"x": {"dtype": "F32", "shape": [1]}}), "malformed"),
    "three offsets": (safetensors_bytes({"x": entry(offsets=(0, 4, 8))}, b"x" * 8), "malformed"),
    "shape a text": (safetensors_bytes({"x": {**entry(), "shape": "2"}}, b"x" * 8), "malformed"),
    "negative size": (safetensors_bytes({"x": entry(shape=(-2,))}, b"x" * 8), "malformed"),
    "size true": (safetensors_bytes({"x": entry(shape=(True, 2))}, b"x" * 8), "malformed"),
    "size overflow": (safetensors_bytes({"x": entry(shape=(1 << 47, 1 << 47))}, b"x" * 8), "has the range"),
    "unknown type": (safetensors_bytes({"x": entry("F7")}, b"x" * 8), "unknown type 'F7'"),
    "type and range disagree": (safetensors_bytes({"x": entry("F16")}, b"x" * 8), "has the range"),
    "range reversed": (safetensors_bytes({"x": entry(offsets=(8, 0))}, b"x" * 8), "has the range"),
    "over the end": (safetensors_bytes({"x": entry(shape=(4,), offsets=(0, 16))}, b"x" * 8), "need"),
    "a hole": (safetensors_bytes({"x": entry(offsets=(8, 16))}, b"x" * 16), "does not begin where"),
    "overlap": (safetensors_bytes({"x": entry(), "y": entry(offsets=(4, 12))}, b"x" * 12), "does not begin where"),
    "bytes left over": (safetensors_bytes({"x": entry()}, b"x" * 9), "need"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, case):
    """C7: lengths, types and ranges that lie."""
    data, message = HOSTILE[case]
    with pytest.raises(UserError, match=message) as caught:
        open_bytes(tmp_path / "bad.safetensors", data)
    assert "bad.safetensors" in caught.value.message and caught.value.remedy


def test_types_that_we_do_not_compute_with_are_refused_by_name(tmp_path):
    """Fault: fp8 codes taken for numbers."""
    file = open_bytes(tmp_path / "x.safetensors", safetensors_bytes({"x": entry("F8_E4M3", offsets=(0, 2))}, b"xx"))
    with pytest.raises(UserError, match="F8_E4M3, which is not supported"):
        file.read("x")
    file.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "x.safetensors"
    save_file({"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16()}, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "flipped.safetensors"


def test_a_file_cut_anywhere_is_refused(sound, scratch):
    """C7: an interrupted download."""
    for length in range(len(sound)):
        with pytest.raises(UserError):
            open_bytes(scratch, sound[:length])


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 250), st.integers(0, 255)), min_size=1, max_size=3))
def test_flipped_bytes_give_a_clear_error_or_a_readable_file(sound, scratch, flips):
    """C7: damage anywhere."""
    data = bytearray(sound)
    for at, value in flips:
        data[at % len(data)] = value
    try:
        file = open_bytes(scratch, bytes(data))
    except UserError:
        return
    try:
        for name, stored in file.tensors.items():
            assert file.read(name).shape == stored.shape
    except UserError as error:
        assert "not supported" in error.message
    finally:
        file.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(header=st.dictionaries(st.text(max_size=4), json_values | st.fixed_dictionaries(
    {"dtype": json_values, "shape": json_values, "data_offsets": json_values}), max_size=3))  # fmt: skip
def test_any_json_as_header_never_crashes(scratch, header):
    """C7: nothing but a UserError may come out."""
    try:
        open_bytes(scratch, safetensors_bytes(header, b"x" * 8)).close()
    except UserError:
        return


INDEXES = {
    "leaves the folder": ({"weight_map": {"x": "../model.safetensors"}}, "not the name of"),
    "absolute": ({"weight_map": {"x": "/etc/passwd.safetensors"}}, "not the name of"),
    "not a text": ({"weight_map": {"x": 7}}, "not the name of"),
    "a pickle": ({"weight_map": {"x": "pytorch_model.bin"}}, "not the name of"),
    "no map": ({"metadata": {}}, "weight_map"),
    "missing shard": ({"weight_map": {"x": "model-2.safetensors"}}, "is missing"),
    "tensor in no shard": ({"weight_map": {"x": "model-1.safetensors", "y": "model-1.safetensors"}}, "'y' is not in"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_refused(tmp_path, case):
    """C7: shard names from outside the folder, missing shards, tensors that are nowhere."""
    index, message = INDEXES[case]
    save_file({"x": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """C7: which of the two is meant?"""
    for name in ("model-1", "model-2"):
        save_file({"x": torch.zeros(2), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"x": "model-1.safetensors", "model-2": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match="'x' lies in"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path):
    """O4: no pickle is ever loaded."""
    with pytest.raises(UserError, match="holds no safetensors"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="never loads pickles"):
        SafetensorsFolder(tmp_path)
    for name in "ab":
        save_file({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="several safetensors"):
        SafetensorsFolder(tmp_path)
