"""The GGUF reader against the reference package, hand-written formulas, and files made to hurt."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from makefiles import add_quantised, gguf_bytes, write_gguf

from lampejo.errors import UserError
from lampejo.weights import files
from lampejo.weights.gguf import SUPPORTED, GgufFile, dequantised


def open_bytes(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return GgufFile(path)


def read(file: GgufFile, name: str) -> torch.Tensor:
    entry = file.tensors[name]
    return dequantised(entry.type, file.read_rows(name, 0, entry.num_rows)).view(entry.shape)


def test_metadata_and_tensors_equal_those_of_the_reference_reader(tmp_path):
    """Fault: own walk of the header drifts from the format."""
    path = tmp_path / "all.gguf"
    writer = GGUFWriter(path, "llama")
    values = [
        (GGUFValueType.UINT8, 200), (GGUFValueType.INT8, -3), (GGUFValueType.UINT16, 60000),
        (GGUFValueType.INT16, -300),
        (GGUFValueType.UINT32, 1 << 31), (GGUFValueType.INT32, -(1 << 30)), (GGUFValueType.FLOAT32, 0.5),
        (GGUFValueType.BOOL, True), (GGUFValueType.STRING, "ação 🦊"), (GGUFValueType.UINT64, 1 << 60),
        (GGUFValueType.INT64, -(1 << 60)), (GGUFValueType.FLOAT64, 1e-300),
    ]  # fmt: skip
    for kind, value in values:
        writer.add_key_value(f"x.{kind.name}", value, kind)
    writer.add_array("x.strings", ["a", "", "çé"])
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_array("x.floats", [0.25, -1.5])
    random = np.random.default_rng(1)
    writer.add_tensor("plain", random.standard_normal((3, 32), np.float32))
    for name in SUPPORTED[3:]:
        add_quantised(writer, name, (5, 256), Type[name], random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = GGUFReader(path)
    file = GgufFile(path)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        entry = file.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.type, entry.offset, entry.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
    file.close()


def halves(block: bytes, *at: int) -> list[float]:
    return [float(np.frombuffer(block[i : i + 2], np.float16)[0]) for i in at]


def scalar_q4_1(block: bytes) -> list[float]:
    scale, least = halves(block, 0, 2)
    return [scale * (b & 15) + least for b in block[4:]] + [scale * (b >> 4) + least for b in block[4:]]


def scalar_q8_0(block: bytes) -> list[float]:
    (scale,) = halves(block, 0)
    return [scale * code for code in struct.unpack("<32b", block[2:])]


def scalar_q4_k(block: bytes) -> list[float]:
    """Eight groups of 32; 6-bit scales and minima: low four in bytes 0..7 (all six for groups 0..3), see ggml."""
    scale, least = halves(block, 0, 2)
    s, codes, out = block[4:16], block[16:], []
    for group in range(8):
        if group < 4:
            d, m = s[group] & 63, s[group + 4] & 63
        else:
            d = (s[group + 4] & 15) | (s[group - 4] >> 6) << 4
            m = (s[group + 4] >> 4) | (s[group] >> 6) << 4
        chunk = codes[group // 2 * 32 : group // 2 * 32 + 32]
        out += [scale * d * (b >> 4 if group % 2 else b & 15) - least * m for b in chunk]
    return out


def scalar_q6_k(block: bytes) -> list[float]:
    """Sixteen groups of 16 with 8-bit scales; codes of 4 low bits and 2 high bits, less 32."""
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (scale,) = halves(block, 208)
    out = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                byte = low[half * 64 + i + (quarter & 1) * 32]
                nibble = byte >> 4 if quarter >= 2 else byte & 15
                code = (nibble | (high[half * 32 + i] >> 2 * quarter & 3) << 4) - 32
                at = half * 128 + quarter * 32 + i
                out[at] = scale * scales[at // 16] * code
    return out


@pytest.mark.parametrize(
    ("name", "formula", "num_bytes"),
    [("Q4_1", scalar_q4_1, 20), ("Q8_0", scalar_q8_0, 34), ("Q4_K", scalar_q4_k, 144), ("Q6_K", scalar_q6_k, 210)],
)
def test_dequantised_values_follow_the_formula_of_their_format(tmp_path, name, formula, num_bytes):
    """Fault: codes, scales or groups taken in another order; the output is fluent nonsense."""
    writer = GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = add_quantised(writer, "x", (6, 512), Type[name], np.random.default_rng(2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "q.gguf")
    raw = blocks.tobytes()
    expected = [v for i in range(0, len(raw), num_bytes) for v in formula(raw[i : i + num_bytes])]
    torch.testing.assert_close(read(file, "x").flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    file.close()


@pytest.mark.parametrize("name", sorted(t.name for t in Type if t.name not in SUPPORTED))
def test_other_quantisations_are_refused_by_name(tmp_path, name):
    """C2-like: an unsupported type is found before any work."""
    data = gguf_bytes(tensors=[(b"x", [256], int(Type[name]), 0)], data=b"\0" * 4096)
    with pytest.raises(UserError, match=rf"{name}, which is not supported.*Q4_K"):
        open_bytes(tmp_path / "q.gguf", data)


U32, STRING, ARRAY = (struct.pack("<I", i) for i in (4, 8, 9))
BIG = struct.pack("<Q", 1 << 60)
HOSTILE = {
    "empty": (b"", "does not begin"),
    "another format": (b"PK\3\4" + b"\0" * 100, "does not begin"),
    "version 1": (gguf_bytes(version=1) + b"\0" * 64, "version 1 is not supported"),
    "big-endian": (gguf_bytes(version=3 << 24) + b"\0" * 64, "big-endian"),
    "too many values": (gguf_bytes(counts=(0, 1 << 60)), "claims"),
    "too many tensors": (gguf_bytes(counts=(1 << 60, 0)), "claims"),
    "long key": (gguf_bytes(counts=(0, 1))[:24] + BIG + b"x" * 64, "a metadata key claims"),
    "long string": (gguf_bytes([(b"k", STRING + BIG)], data=b"x" * 64), "claims"),
    "string over the end": (gguf_bytes([(b"k", STRING + struct.pack("<Q", 5000))], data=b"x" * 64), "in the middle"),
    "long array": (gguf_bytes([(b"k", ARRAY + U32 + BIG)], data=b"x" * 64), "claims"),
    "array over the end": (gguf_bytes([(b"k", ARRAY + U32 + struct.pack("<Q", 1 << 20))]), "in the middle"),
    "nested array": (gguf_bytes([(b"k", ARRAY + ARRAY + struct.pack("<Q", 1))], data=b"x" * 64), "unknown type 9"),
    "unknown value type": (gguf_bytes([(b"k", struct.pack("<I", 77))], data=b"x" * 64), "unknown type 77"),
    "key twice": (gguf_bytes([(b"k", U32 + b"abcd")] * 2), "occurs twice"),
    "key not UTF-8": (gguf_bytes([(b"\xff\xfe", U32 + b"abcd")]), "UTF-8"),
    "alignment 0": (gguf_bytes([(b"general.alignment", U32 + struct.pack("<I", 0))]), "alignment"),
    "alignment 33": (gguf_bytes([(b"general.alignment", U32 + struct.pack("<I", 33))]), "alignment"),
    "alignment a text": (gguf_bytes([(b"general.alignment", STRING + struct.pack("<Q", 1) + b"x")]), "alignment"),
    "no dimensions": (gguf_bytes(tensors=[(b"x", [], 0, 0)], data=b"x" * 64), "claims 0 dimensions"),
    "many dimensions": (gguf_bytes(tensors=[(b"x", [1] * 5, 0, 0)], data=b"x" * 64), "claims 5 dimensions"),
    "dimension 0": (gguf_bytes(tensors=[(b"x", [0], 0, 0)], data=b"x" * 64), "impossible"),
    "dimensions that overflow": (gguf_bytes(tensors=[(b"x", [1 << 32] * 2, 0, 0)], data=b"x" * 64), "ends at byte"),
    "broken block": (gguf_bytes(tensors=[(b"x", [33], int(Type.Q8_0), 0)], data=b"x" * 64), "impossible"),
    "unknown tensor type": (gguf_bytes(tensors=[(b"x", [32], 999, 0)], data=b"x" * 64), "unknown type 999"),
    "offset over the end": (gguf_bytes(tensors=[(b"x", [8], 0, 1 << 40)], data=b"x" * 64), "ends at byte"),
    "offset not aligned": (gguf_bytes(tensors=[(b"x", [8], 0, 4)], data=b"x" * 64), "impossible"),
    "overlap": (gguf_bytes(tensors=[(b"x", [16], 0, 0), (b"y", [8], 0, 32)], data=b"x" * 64), "overlaps"),
    "tensor twice": (gguf_bytes(tensors=[(b"x", [8], 0, 0), (b"x", [8], 0, 32)], data=b"x" * 64), "occurs twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_and_cost_nothing(tmp_path, monkeypatch, case):
    """C7: counts, lengths and offsets that lie; no crash, no allocation beyond the file's own size."""
    data, message = HOSTILE[case]
    allocated = watch_allocations(monkeypatch)
    with pytest.raises(UserError, match=message) as caught:
        open_bytes(tmp_path / "bad.gguf", data)
    assert "bad.gguf" in caught.value.message and caught.value.remedy
    assert max(allocated, default=0) <= len(data)


def watch_allocations(monkeypatch) -> list[int]:
    sizes: list[int] = []
    empty = torch.empty

    def counting(*shape, **kwargs):
        sizes.append(int(np.prod(shape)))
        return empty(*shape, **kwargs)

    monkeypatch.setattr(files.torch, "empty", counting)
    return sizes


def test_a_file_cut_anywhere_is_refused(tmp_path):
    """C7: an interrupted download."""
    data = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": "Q8_0"}).read_bytes()
    header = data.index(b"blk.1.ffn_up.weight")
    for length in [*range(0, 600), *range(600, header + 64, 7), *range(header, len(data) - 32, 997)]:
        with pytest.raises(UserError, match=r"cut\.gguf"):
            open_bytes(tmp_path / "cut.gguf", data[:length])


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("sound") / "m.gguf", {"blk.0.ffn_down.weight": "Q4_1"}).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "flipped.gguf"


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_give_a_clear_error_or_a_readable_file(sound, scratch, flips):
    """C7: damage anywhere in the header."""
    data = bytearray(sound)
    for at, value in flips:
        data[at % len(data)] = value
    try:
        file = open_bytes(scratch, bytes(data))
    except UserError:
        return
    try:
        for name, entry in file.tensors.items():
            assert read(file, name).shape == entry.shape
    finally:
        file.close()


def test_a_file_of_another_name_is_not_called_damaged(tmp_path):
    """Fault: who names the wrong file is told to delete it."""
    path = tmp_path / "notes.txt"
    with pytest.raises(UserError, match="is not a GGUF file") as caught:
        open_bytes(path, b"All that I know. " * 9)
    assert "delete" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(tail=st.binary(max_size=300), counts=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_random_bytes_after_the_magic_never_crash(scratch, tail, counts):
    """C7: nothing but a UserError may come out."""
    data = b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail
    try:
        open_bytes(scratch, data).close()
    except UserError:
        return


def test_a_file_that_shrinks_while_open_is_an_error_and_not_a_crash(tmp_path):
    """C7: with a mapped file this would be a SIGBUS."""
    path = write_gguf(tmp_path / "m.gguf")
    file = GgufFile(path)
    with path.open("r+b") as other:
        other.truncate(4096)
    with pytest.raises(UserError, match="became shorter"):
        read(file, "output_norm.weight")
        read(file, "blk.1.ffn_up.weight")
    file.close()
