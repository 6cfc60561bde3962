"""The CPU kernels against the reference operations, and row invariance, on every instruction set that runs here."""

import math
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_checks import activations_as_kernels_see_them
from lampejo import ops
from lampejo.cache import BlockView, CausalView, PagedCache
from lampejo.errors import UserError
from lampejo.models.dflash import Layer as DraftLayer
from lampejo.models.llama import Layer
from lampejo.ops.cpu import instruction_set, library, set_threads
from lampejo.ops.cpu.arena import CHUNK, Arena
from lampejo.ops.cpu.fused import FusedLayer, FusedNorm, PackedLinear, PackedMatrix
from lampejo.ops.cpu.library import LIBRARY, Q4, Q8
from lampejo.ops.stored import Stored
from lampejo.packing import _pack_modules
from lampejo.weights.gguf import SUPPORTED
from tiny import TINY, TINY_DRAFTER, randomise

if instruction_set() is None:
    pytest.skip("the CPU kernels were not built, or do not know this processor", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(1)


QUANTISED = ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
EXACT = ["Q4_0", "Q4_1", "Q8_0", "Q4_K"]


def gguf_blocks(name, num_rows, num_columns, seed=0):
    """Random but valid blocks of a GGUF type, and their values."""
    kind = gguf.GGMLQuantizationType[name]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_rows, num_columns // length, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
    for at in halves:  # scales and minima are floats: keep them finite and of one size
        values = rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = values[..., None].view(np.uint8)
    raw = raw.reshape(num_rows, -1)
    return int(kind), torch.from_numpy(raw), torch.from_numpy(gguf.dequantize(raw, kind))


@pytest.mark.parametrize("name", QUANTISED)
def test_gguf_blocks_are_packed_as_they_are_or_in_eight_bits(name):
    """4-bit and Q8_0 codes are kept exactly; 5 and 6 bits are rounded to 8."""
    kind, raw, values = gguf_blocks(name, 21, 512)
    packed = PackedMatrix(Stored(kind, (21, 512), lambda: [raw])).rows(torch.arange(21))
    if name in EXACT:
        assert torch.equal(packed, values)
    else:
        largest = values.view(21, -1, 32).abs().amax(-1, keepdim=True)
        assert ((packed - values).view(21, -1, 32).abs() <= largest / 250).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [Q4, Q8])
@pytest.mark.parametrize("shape", [(1, 1), (8, 32), (37, 50), (9, 321)])
def test_floats_are_packed_within_half_a_step(dtype, kind, shape):
    """Quantisation on request: no value is further off than half a step of its group, odd sizes included."""
    weight = torch.randn(shape).to(dtype)
    packed = PackedMatrix(Stored.of(weight), float_kind=kind).rows(torch.arange(shape[0]))
    padded = torch.nn.functional.pad(weight.float(), (0, -shape[1] % 32)).view(shape[0], -1, 32)
    error = torch.nn.functional.pad(packed - weight.float(), (0, -shape[1] % 32)).view(shape[0], -1, 32).abs()
    if kind == Q8:
        step = padded.abs().amax(-1, keepdim=True) / 127
    else:
        step = (padded.amax(-1, keepdim=True) - padded.amin(-1, keepdim=True)) / 15
    assert (error <= 0.51 * step + 2e-3 * padded.abs().amax(-1, keepdim=True)).all()


def test_rows_may_stand_in_another_order_in_the_file():
    """Llama GGUF files interleave the halves of q and k heads; packing puts them right without a second copy,
    a few rows at a time."""
    weight = torch.randn(24, 64)
    order = torch.randperm(24, dtype=torch.int32)
    stored = Stored(0, (24, 64), lambda: weight.view(torch.uint8).split(7), order)
    plain = PackedMatrix(Stored.of(weight)).rows(torch.arange(24))
    assert torch.equal(PackedMatrix(stored).rows(order.long()), plain)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0"])
def test_matrix_products_are_right_and_row_invariant(isa, kind):
    """Principle 3: whatever the number of rows and threads; and close to the product in floats."""
    type_number, raw, weight = gguf_blocks(kind, 45, 768)
    layer = PackedLinear(PackedMatrix(Stored(type_number, (45, 768), lambda: [raw])))
    x = torch.randn(70, 768)
    whole = layer(x)
    expected = activations_as_kernels_see_them(x) @ weight.T
    assert torch.allclose(whole, expected, atol=1e-3 * expected.abs().max().item())
    for threads in (1, 2, 3):
        set_threads(threads)
        for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 31):
            for start in (0, 3, 38):
                assert torch.equal(layer(x[start : start + num_rows]), whole[start : start + num_rows])


@settings(max_examples=60, deadline=None)
@given(
    num_out=st.integers(1, 70), num_in=st.integers(1, 130), num_rows=st.integers(0, 19), kind=st.sampled_from([Q4, Q8]),
    bias=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_matrix_products_of_odd_sizes(num_out, num_in, num_rows, kind, bias, seed):
    """Sizes that fill no block, and no rows at all."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(num_out, num_in, generator=generator), torch.randn(num_rows, num_in, generator=generator)
    bias_values = torch.randn(num_out, generator=generator) if bias else None
    matrix = PackedMatrix(Stored.of(weight), kind, bias_values)
    expected = activations_as_kernels_see_them(x) @ matrix.rows(torch.arange(num_out)).T
    expected = expected + bias_values if bias else expected
    assert torch.allclose(PackedLinear(matrix)(x), expected, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-20, 1e15, -1e15])
def test_extreme_activations_give_finite_products(isa, value):
    """Zeros, denormals and huge values: no NaN from a scale of zero, no overflow of codes."""
    weight = torch.randn(16, 64)
    x = torch.full((3, 64), value)
    x[1] = torch.randn(64)
    out = PackedLinear(PackedMatrix(Stored.of(weight)))(x)
    assert out.isfinite().all()
    assert torch.allclose(out[1], activations_as_kernels_see_them(x)[1] @ weight.T, atol=0.3)
    assert torch.allclose(out[0] / max(abs(value), 1e-30), x[0] @ weight.T / max(abs(value), 1e-30), atol=0.3)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 99, 576])
def test_rms_norm_equals_the_reference(isa, size, offset):
    """Sizes with and without a rest."""
    module = type("Norm", (), {"weight": torch.randn(size), "eps": 1e-5, "offset": offset})()
    x = torch.randn(5, size)
    expected = ops.rms_norm(x, module.weight, module.eps, offset)
    assert torch.allclose(FusedNorm(module)(x), expected, rtol=1e-5, atol=1e-6)


SHAPES = [(9, 3, 64, 32), (12, 2, 128, 32), (4, 4, 16, 16), (6, 2, 8, 8), (5, 1, 24, 64)]  # Q, G, D, page size


def native_attention(q, cache, segments):
    """lampejo_paged_attention over layer 0 of a cache."""
    from lampejo.ops.cpu.fused import _Step

    view = CausalView(cache, segments, None)
    step = _Step(view, (torch.zeros(1, 0), torch.zeros(1, 0)), len(q))
    q = q.contiguous()
    out = torch.empty_like(q)
    num_kv, head_dim = cache.k.shape[2:4]
    LIBRARY.lampejo_paged_attention(
        step.pointer, q.data_ptr(), step.k, step.v, q.shape[1], num_kv, head_dim, out.data_ptr()
    )
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [0, 5, 31, 32, 130, 1000])
def test_attention_over_pages_equals_the_reference_and_is_row_invariant(isa, shape, position):
    """Principle 3 and L5: grouped heads, chunks, neighbours, NaN past the end, threads that share a context."""
    num_heads, num_kv, head_dim, page_size = shape
    length = 75
    num_pages = 2 * -(-(position + length) // page_size)
    cache = PagedCache(1, num_pages, page_size, num_kv, head_dim, torch.float16, torch.device("cpu"))
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    pages = torch.randperm(num_pages)[: num_pages // 2].tolist()
    slots = torch.tensor([pages[p // page_size] * page_size + p % page_size for p in range(position + length)])
    k, v = torch.randn(2, position + length, num_kv, head_dim)
    CausalView(cache, (), slots).store(0, k, v)
    q = torch.randn(length, num_heads, head_dim)
    whole = native_attention(q, cache, [ops.Segment(0, length, position, pages)])
    expected = ops.paged_attention(q, cache.k[0], cache.v[0], [ops.Segment(0, length, position, pages)])
    assert torch.allclose(whole, expected, atol=2e-5)
    for num_tokens in (1, 2, 3, 4, 5, 17):
        for start in (0, 1, 29, 58):
            part = native_attention(
                q[start : start + num_tokens], cache, [ops.Segment(0, num_tokens, position + start, pages)]
            )
            assert torch.equal(part, whole[start : start + num_tokens])
    segments = [ops.Segment(0, 9, position, pages), ops.Segment(9, 20, position + 30, pages)]
    together = native_attention(torch.cat([q[:9], q[30:50]]), cache, segments)
    assert torch.equal(together, torch.cat([whole[:9], whole[30:50]]))


def packed_layer(layer, num_heads, num_kv, block=None):
    weights = {name: p.clone() for name, p in layer.named_parameters()}
    _pack_modules(layer, lambda name: Stored.of(weights[name]), Q8)
    return FusedLayer(layer, num_heads, num_kv, block)


def test_a_fused_layer_equals_the_layer_it_stands_for(isa):
    """Both halves in one: norms, biases, RoPE, cache, attention, MLP; off by the rounding to 8 bits alone."""
    from dataclasses import replace

    from lampejo.models.layers import Rope

    config = replace(TINY, qkv_bias=True)
    layers = [randomise(Layer(config), 3) for _ in range(2)]
    fused = packed_layer(layers[1], config.num_heads, config.num_kv_heads)
    rotation = Rope(config.rope, config.head_dim)(torch.arange(50))
    x, outputs, caches = torch.randn(50, config.hidden_size), [], []
    for layer, dtype in ((layers[0], torch.float32), (fused, torch.float16)):
        cache = PagedCache(1, 8, 16, config.num_kv_heads, config.head_dim, dtype, torch.device("cpu"))
        slots = torch.tensor([[5, 2, 7, 0][p // 16] * 16 + p % 16 for p in range(50)])
        view = CausalView(cache, [ops.Segment(0, 50, 0, [5, 2, 7, 0])], slots)
        outputs.append(layer(x.clone(), rotation, 0, view))
        caches.append(cache)
    scale = outputs[0].abs().max()
    assert (outputs[1] - outputs[0]).abs().max() < 0.03 * scale
    assert (outputs[1] - outputs[0]).abs().mean() < 0.005 * scale
    used = [5, 2, 7]
    for a, b in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        assert (a[:, used] - b[:, used].float()).abs().max() < 0.03 * a[:, used].abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 200])
@pytest.mark.parametrize("num_context", [0, 1, 16, 37])
def test_a_fused_drafter_layer_equals_the_layer_it_stands_for(isa, causal, window, num_context):
    """Context and block in both directions, causality and windows, q and k norms; and the context's keys and values."""
    from lampejo.models.layers import Rope

    config, block = TINY_DRAFTER, TINY_DRAFTER.block_size
    layers = [randomise(DraftLayer(config), 4) for _ in range(2)]
    fused = packed_layer(layers[1], config.num_heads, config.num_kv_heads, (block, causal, window))
    rope = Rope(config.rope, config.head_dim)
    ctx, x = torch.randn(num_context, config.hidden_size), torch.randn(2 * block, config.hidden_size)
    page_tables, outputs = [[3, 1, 6], [0, 2, 5]], []
    for layer, dtype in ((layers[0], torch.float32), (fused, torch.float16)):
        cache = PagedCache(1, 8, 16, config.num_kv_heads, config.head_dim, dtype, torch.device("cpu"))
        cache.k.fill_(math.nan)
        cache.v.fill_(math.nan)
        for pages in page_tables if num_context else []:
            slots = torch.tensor([pages[p // 16] * 16 + p % 16 for p in range(num_context)])
            layer.store_context(ctx, rope(torch.arange(num_context)), 0, CausalView(cache, (), slots))
        segments = [ops.Segment(r * block, block, num_context, pages) for r, pages in enumerate(page_tables)]
        positions = (num_context + torch.arange(block)).repeat(2)
        view = BlockView(cache, segments, (causal,), (window,))
        outputs.append(layer(x.clone(), rope(positions), 0, view))
    scale = outputs[0].abs().max()
    assert (outputs[1] - outputs[0]).abs().max() < 0.04 * scale
    assert (outputs[1] - outputs[0]).abs().mean() < 0.006 * scale


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_in_activations_are_not_made_into_numbers(isa, value):
    """Fault: a model gone wrong that goes on talking, because rounding to codes hides it."""
    x = torch.randn(3, 64)
    x[1, 40] = value
    out = PackedLinear(PackedMatrix(Stored.of(torch.randn(16, 64))))(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", [Q4, Q8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_with_nan_or_infinity_is_refused(kind, value):
    """C6: fault: a damaged file that loads and talks nonsense."""
    weight = torch.randn(9, 40)
    weight[7, 33] = value
    with pytest.raises(UserError, match="NaN or infinity"):
        PackedMatrix(Stored.of(weight), kind)


@pytest.mark.parametrize("name", EXACT)
def test_a_damaged_scale_is_refused(name):
    """C7: an f16 scale of infinity in a GGUF block."""
    type_number, raw, _ = gguf_blocks(name, 8, 256)
    raw[5, 0:2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    with pytest.raises(UserError, match="NaN or infinity"):
        PackedMatrix(Stored(type_number, (8, 256), lambda: [raw]))


def test_every_type_that_the_readers_accept_can_be_packed():
    """Fault: three lists of types that agree by hand."""
    for name in SUPPORTED:
        kind = gguf.GGMLQuantizationType[name]
        length, size = gguf.GGML_QUANT_SIZES[kind]
        raw = torch.zeros(8, 256 // length * size, dtype=torch.uint8)
        assert PackedMatrix(Stored(int(kind), (8, 256), partial(raw.split, 3))).rows(torch.arange(8)).isfinite().all()


def test_a_library_of_other_sources_is_refused(monkeypatch):
    """Fault: structs that Python and an old library lay out differently."""
    monkeypatch.setattr(library, "ABI", -1)
    with pytest.raises(ImportError, match="install lampejo again"):
        library._open()


def test_matrices_of_a_model_share_mappings_and_keep_apart():
    """Fault: neighbours that overlap, memory that is not zero, or a mapping that outlives its matrices."""
    arena = Arena()
    taken = [arena.zeros(n) for n in (1, 64, 100, CHUNK - 300, CHUNK + 1, 5)]
    for i, memory in enumerate(taken):
        assert not memory.any() and memory.data_ptr() % 64 == 0
        memory.fill_(i + 1)
    assert all((memory == i + 1).all() for i, memory in enumerate(taken))
    assert taken[1].data_ptr() == taken[0].data_ptr() + 64, "small ones lie side by side"
    assert arena.zeros(0).numel() == 0
