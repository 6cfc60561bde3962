"""The reference operations: right against plain formulas, and row-invariant to the last bit."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from lampejo import ops
from lampejo.models.config import DeltaNetConfig
from lampejo.ops.reference import KEY_CHUNK, Segment

SHAPES = [(9, 3, 64, 32), (12, 2, 128, 32), (4, 4, 16, 16), (6, 2, 8, 8)]  # Q, G, D, page size


@pytest.mark.parametrize(
    ("num_in", "num_out"), [(576, 1536), (1536, 576), (576, 4096), (33, 47), (48, 80), (1, 3), (64, 1)]
)
def test_linear_gives_a_row_the_same_bits_whatever_its_neighbours(num_in, num_out):
    """Principle 3: BLAS changes its order of summation with the number of rows; this operation must not show it."""
    weight, bias, x = torch.randn(num_out, num_in), torch.randn(num_out), torch.randn(300, num_in)
    whole = ops.linear(x, weight, bias)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 65, 128, 255):
        for start in (0, 1, 13, 44):
            assert torch.equal(ops.linear(x[start : start + num_rows], weight, bias), whole[start : start + num_rows])
    assert torch.allclose(whole, F.linear(x, weight, bias), atol=1e-4)


@pytest.mark.parametrize(
    "function", ["rms_norm", "offset_norm", "rope", "partial_rope", "swiglu", "sigmoid", "softplus", "rope_table"]
)
def test_the_other_operations_give_a_row_the_same_bits_whatever_its_neighbours(function):
    """Principle 3, for everything beside the matrix products, with odd sizes."""
    x, y, cos, sin = torch.randn(70, 6, 34), torch.randn(70, 6, 34), torch.randn(70, 17), torch.randn(70, 17)
    weight = torch.randn(34)

    def apply(rows):
        if function == "rms_norm":
            return ops.rms_norm(x[rows], weight, 1e-5)
        if function == "offset_norm":
            return ops.rms_norm(x[rows], weight, 1e-5, offset=True)
        if function in ("sigmoid", "softplus"):
            return getattr(ops, function)(x[rows])
        if function == "partial_rope":
            return ops.rope(x[rows], cos[rows, :5], sin[rows, :5])
        if function == "swiglu":
            return ops.swiglu(x[rows], y[rows])
        if function == "rope_table":
            return (cos[rows] * 1000).cos()
        return ops.rope(x[rows], cos[rows], sin[rows])

    whole = apply(slice(None))
    for num_rows in (1, 2, 3, 8, 17):
        for start in range(0, 50, 7):
            assert torch.equal(apply(slice(start, start + num_rows)), whole[start : start + num_rows])


def test_the_small_operations_are_what_they_are_called():
    """Fault: a formula of our own that is another one far from zero; a rotation that touches what it should leave."""
    x = torch.tensor([-200.0, -30, -1, -1e-4, 0, 1e-4, 1, 30, 200])
    assert torch.allclose(ops.sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=0)
    assert torch.allclose(ops.softplus(x), F.softplus(x), rtol=1e-6, atol=1e-9)
    weight, x = torch.randn(16), torch.randn(5, 3, 16)
    assert torch.allclose(ops.rms_norm(x, weight - 1, 1e-5, offset=True), F.rms_norm(x, (16,), weight, 1e-5), atol=1e-6)
    cos, sin = torch.randn(5, 3), torch.randn(5, 3)
    rotated = ops.rope(x, cos, sin)
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    assert torch.equal(rotated[..., :6], ops.rope(x[..., :6], cos, sin))


def paged(num_tokens, num_kv, head_dim, page_size):
    """Keys and values [num_tokens, G, D] and the same in shuffled pages, everything else NaN."""
    num_pages = 2 * -(-num_tokens // page_size)
    k, v = torch.randn(num_tokens, num_kv, head_dim), torch.randn(num_tokens, num_kv, head_dim)
    pages = torch.randperm(num_pages)[: num_pages // 2].tolist()
    slots = torch.tensor([pages[p // page_size] * page_size + p % page_size for p in range(num_tokens)])
    caches = [
        torch.full((num_pages, num_kv, head_dim, page_size), math.nan),
        torch.full((num_pages, num_kv, page_size, head_dim), math.nan),
    ]
    ops.write_pages(*caches, k, v, slots)
    return k, v, caches, pages


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [0, 5, 120, KEY_CHUNK - 1, KEY_CHUNK, 300])
def test_paged_attention_equals_attention_and_is_row_invariant(shape, position):
    """Principle 3 and L5: chunks, padding, neighbours and NaN past the end must not show, not even in the last bit."""
    num_heads, num_kv, head_dim, page_size = shape
    length = 150
    k, v, caches, pages = paged(position + length, num_kv, head_dim, page_size)
    q = torch.randn(length, num_heads, head_dim)
    whole = ops.paged_attention(q, *caches, [Segment(0, length, position, pages)])
    visible = torch.arange(position + length)[None] <= position + torch.arange(length)[:, None]
    heads = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True).transpose(0, 1)
    assert torch.allclose(whole, expected, atol=1e-5)
    for start in (0, 1, 7, 120, 127, 149):
        for num_tokens in (1, 2, 3, 8, 17, 64):
            if start + num_tokens > length:
                continue
            part = q[start : start + num_tokens]
            segments = [Segment(0, num_tokens, position + start, pages)]
            assert torch.equal(ops.paged_attention(part, *caches, segments), whole[start : start + num_tokens])


def test_paged_attention_of_several_rows_equals_each_alone():
    """Principle 3: segments of one batch do not see each other."""
    _, _, caches, pages = paged(400, 2, 16, 16)
    q = torch.randn(30, 4, 16)
    segments = [Segment(0, 1, 250, pages), Segment(1, 20, 3, pages), Segment(21, 9, 391, pages)]
    together = ops.paged_attention(q, *caches, segments)
    for s in segments:
        alone = ops.paged_attention(
            q[s.start : s.start + s.length], *caches, [Segment(0, s.length, s.position, s.pages)]
        )
        assert torch.equal(together[s.start : s.start + s.length], alone)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_block_attention_sees_context_and_block_as_the_rules_say(causal, window):
    """FORMATS: block rows see context and block in both directions; causal and window (|q-k| < W) take away."""
    num_kv, group, head_dim, block, num_context = 2, 3, 8, 5, 20
    q, k, v = torch.randn(1, block, num_kv * group, head_dim), *torch.randn(2, 1, block, num_kv, head_dim)
    context_k, context_v = torch.randn(2, num_context, num_kv, head_dim)
    out = ops.block_attention(q, k, v, [context_k], [context_v], causal, window)[0]
    keys, values = torch.cat([context_k, k[0]]), torch.cat([context_v, v[0]])
    for i in range(block):
        for head in range(num_kv * group):
            seen = [
                j
                for j in range(num_context + block)
                if (window is None or abs(num_context + i - j) < window) and not (causal and j > num_context + i)
            ]
            scores = keys[seen, head // group] @ q[0, i, head] / head_dim**0.5
            expected = scores.softmax(0) @ values[seen, head // group]
            assert torch.allclose(out[i, head], expected, atol=1e-5)


def mixture(num_tokens, num_experts=7, hidden=24, inner=40):
    """Tokens, router logits, and the stacked matrices of experts."""
    matrices = torch.randn(num_experts, 2 * inner, hidden) / 5, torch.randn(num_experts, hidden, inner) / 5
    return torch.randn(num_tokens, hidden), torch.randn(num_tokens, num_experts), *matrices


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("num_active", [1, 3, 7])
def test_experts_equal_the_sum_over_each_tokens_best(num_active, normalised):
    """Fault: another expert's matrix, gate and up exchanged, weights of a softmax over the chosen ones alone."""
    x, router, gate_up, down = mixture(30)
    out = ops.experts(x, router, gate_up, down, num_active, normalised)
    for token in range(30):
        probability = router[token].softmax(0)
        best = probability.argsort(descending=True)[:num_active].tolist()
        scale = probability[best].sum() if normalised else 1.0
        expected = torch.zeros(24)
        for expert in best:
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += probability[expert] / scale * (down[expert] @ (F.silu(gate) * up))
        assert torch.allclose(out[token], expected, atol=1e-5)


def test_experts_give_a_token_the_same_bits_whatever_its_neighbours():
    """Principle 3: how many tokens an expert gets depends on the neighbours; no last bit may."""
    x, router, gate_up, down = mixture(200)
    whole = ops.experts(x, router, gate_up, down, 3, True)
    for num_rows in (1, 2, 3, 7, 8, 9, 17, 64, 100):
        for start in (0, 1, 50, 99):
            rows = slice(start, start + num_rows)
            assert torch.equal(ops.experts(x[rows], router[rows], gate_up, down, 3, True), whole[rows])
    shuffled = torch.randperm(200)
    assert torch.equal(ops.experts(x[shuffled], router[shuffled], gate_up, down, 3, True), whole[shuffled])
    assert ops.experts(x[:0], router[:0], gate_up, down, 3, True).shape == (0, 24)


DELTA_SIZES = [(2, 4, 16, 24), (3, 3, 8, 8), (1, 5, 24, 10)]  # Hk, Hv, Dk, Dv


def recurrence(num_tokens, shape, kernel=4, tiled=False):
    """Arguments of ``delta_net`` in the midst of a text."""
    sizes = DeltaNetConfig((), *shape, conv_size=kernel, tiled=tiled)
    num_values, key_dim, value_dim = shape[1:]
    return (
        torch.randn(num_tokens, sizes.num_channels),
        -torch.rand(num_tokens, num_values) * torch.tensor([10.0, 0.01, 1.0, 0.1, 5.0])[:num_values],
        torch.rand(num_tokens, num_values),
        torch.randn(sizes.num_channels, kernel),
        sizes,
        torch.randn(sizes.num_channels, kernel - 1),
        torch.randn(num_values, key_dim, value_dim),
    )


def split(inputs, first, last):
    """The same for some of the tokens."""
    return *(x[first:last] for x in inputs[:3]), *inputs[3:5]


@pytest.mark.parametrize("form", [ops.delta_net, ops.delta_net_chunked])
@pytest.mark.parametrize("shape", DELTA_SIZES)
@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta_net_equals_that_of_transformers(form, shape, tiled):
    """Faults: a tap of the convolution in the wrong place, a value head with another's keys, decay after the update,
    queries not scaled."""
    num_tokens, (num_keys, num_values, key_dim, value_dim) = 150, shape
    mixed, log_decay, beta, weight, _, window, state = inputs = recurrence(num_tokens, shape, tiled=tiled)
    text = torch.cat([window, mixed.T], dim=1)[None]
    convolved = F.silu(F.conv1d(text, weight[:, None], groups=len(weight)))[0].T
    heads = [num_keys * key_dim, num_keys * key_dim, num_values * value_dim]
    q, k, v = (x.reshape(1, num_tokens, n, -1) for x, n in zip(
        convolved.split(heads, dim=-1), (num_keys, num_keys, num_values), strict=True
    ))  # fmt: skip
    group = num_values // num_keys
    q, k = (x.repeat(1, 1, group, 1) if tiled else x.repeat_interleave(group, dim=2) for x in (q, k))
    options = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, last = torch_recurrent_gated_delta_rule(q, k, v, log_decay[None], beta[None], **options)
    out, next_window, next_state = form(*inputs)
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert torch.allclose(next_state, last[0], atol=1e-5)
    assert torch.equal(next_window, text[0, :, -3:])


@pytest.mark.parametrize("shape", DELTA_SIZES)
def test_gated_delta_net_gives_a_token_the_same_bits_however_its_text_is_split(shape):
    """Principle 3: verified in a block or decoded alone, and the states after it too; fewer tokens than taps."""
    inputs = recurrence(60, shape, kernel=5)
    whole = ops.delta_net(*inputs)
    for size in (1, 2, 3, 5, 8, 17, 40):
        outs, kept = [], inputs[5:]
        for first in range(0, 60, size):
            out, *kept = ops.delta_net(*split(inputs, first, first + size), *kept)
            outs.append(out)
        assert torch.equal(torch.cat(outs), whole[0])
        assert torch.equal(kept[0], whole[1]) and torch.equal(kept[1], whole[2])


@pytest.mark.parametrize("shape", DELTA_SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63, 64, 65, 128, 200])
def test_the_chunked_form_equals_the_recurrent_one(num_tokens, shape):
    """Fault: padding that decays the state, a chunk that starts from the wrong one."""
    inputs = recurrence(num_tokens, shape)
    for ours, expected in zip(ops.delta_net_chunked(*inputs), ops.delta_net(*inputs), strict=True):
        assert ours.shape == expected.shape and torch.allclose(ours, expected, atol=1e-5)


def test_gated_delta_net_forgets_all_and_nothing_without_a_nan():
    """Fault: a difference of decays that overflows, in the chunked form above all."""
    inputs = list(recurrence(130, (2, 4, 16, 24)))
    inputs[1] = torch.tensor([-300.0, 0.0, -1e-9, -60.0]).expand(130, 4)
    inputs[2] = torch.tensor([1.0, 1e-3, 0.0, 1.0]).expand(130, 4)
    for ours, expected in zip(ops.delta_net_chunked(*inputs), ops.delta_net(*inputs), strict=True):
        assert expected.isfinite().all() and torch.allclose(ours, expected, atol=1e-5)


def test_gated_delta_net_leaves_what_it_was_given():
    """Fault: a state changed in place, though the drafts that changed it may be rejected."""
    inputs = recurrence(70, (2, 4, 16, 24))
    before = [x.clone() for x in inputs[5:]]
    for form in (ops.delta_net, ops.delta_net_chunked):
        form(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(inputs[5:], before, strict=True))
