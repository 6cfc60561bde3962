"""Tensors by our names, whatever the layout of the files: read, packed, and never held twice."""

import pytest
import torch
from makefiles import HF_CONFIG, random_tensors, target_shapes, write_folder, write_gguf

from lampejo.loader import load_target
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.library import Q8
from lampejo.weights import files, tensors
from lampejo.weights.checkpoint import open_checkpoint

needs_kernels = pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")


def test_tensors_are_fresh_contiguous_and_of_the_asked_type(tmp_path):
    """Fault: a view of a mapped file that keeps it open."""
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        first, second = checkpoint.read(name), checkpoint.read(name, torch.bfloat16)
    assert first.is_contiguous() and first.shape == (32, 32) and second.dtype == torch.bfloat16
    first.zero_()
    assert second.abs().sum() > 0


def test_a_tensor_larger_than_one_chunk_is_read_whole(tmp_path, monkeypatch):
    """Fault: rows at the seams between chunks lost or repeated; llama's order of q and k rows included."""
    quantised = {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0"}
    folder = write_folder(tmp_path / "m", random_tensors(target_shapes()), HF_CONFIG)
    for path in (write_gguf(tmp_path / "m.gguf", quantised), folder):
        with open_checkpoint(path) as checkpoint:
            names = checkpoint.tensor_names()
            whole = {name: checkpoint.read(name) for name in names}
            rows = {name: torch.cat(list(checkpoint.stored(name).chunks())) for name in names if whole[name].ndim == 2}
            monkeypatch.setattr(tensors, "_CHUNK", 32 * 5)
            assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in whole.items())
            for name, expected in rows.items():
                chunks = list(checkpoint.stored(name).chunks())
                assert len(chunks) > 1 and torch.equal(torch.cat(chunks), expected)
            monkeypatch.undo()


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_kernels)])
def test_a_load_reads_a_few_rows_at_a_time(tmp_path, monkeypatch, packed):
    """Fault: a second copy of the largest matrix, which decides how much memory a load takes."""
    sizes = []
    read_bytes = files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda *a: sizes.append(a[3]) or read_bytes(*a))
    monkeypatch.setattr(tensors, "_CHUNK", 4 * 64)
    folder = write_folder(tmp_path / "m", random_tensors(target_shapes(), torch.float32), HF_CONFIG)
    for path in (write_gguf(tmp_path / "m.gguf"), folder):
        with open_checkpoint(path) as checkpoint:
            load_target(checkpoint, Q8 if packed else None)
    assert len(sizes) > 100 and max(sizes) <= 4 * 64 * 4
