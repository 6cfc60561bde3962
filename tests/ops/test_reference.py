"""The reference operations: right against plain formulas, and row-invariant to the last bit."""

import math

import pytest
import torch
import torch.nn.functional as F

from lampejo.ops import reference as ops
from lampejo.ops.reference import KEY_CHUNK, Segment

SHAPES = [(9, 3, 64, 32), (12, 2, 128, 32), (4, 4, 16, 16), (6, 2, 8, 8)]  # Q, G, D, page size


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 1536), (1536, 576), (576, 4096), (33, 47), (48, 80), (1, 3)])
def test_linear_gives_a_row_the_same_bits_whatever_its_neighbours(num_in, num_out):
    """Principle 3: BLAS changes its order of summation with the number of rows; this operation must not show it."""
    weight, bias, x = torch.randn(num_out, num_in), torch.randn(num_out), torch.randn(300, num_in)
    whole = ops.linear(x, weight, bias)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 65, 128, 255):
        for start in (0, 1, 13, 44):
            assert torch.equal(ops.linear(x[start : start + num_rows], weight, bias), whole[start : start + num_rows])
    assert torch.allclose(whole, F.linear(x, weight, bias), atol=1e-4)


@pytest.mark.parametrize("function", ["rms_norm", "rope", "swiglu", "rope_table"])
def test_the_other_operations_give_a_row_the_same_bits_whatever_its_neighbours(function):
    """Principle 3, for everything beside the matrix products, with odd sizes."""
    x, y, cos, sin = torch.randn(70, 6, 34), torch.randn(70, 6, 34), torch.randn(70, 17), torch.randn(70, 17)
    weight = torch.randn(34)

    def apply(rows):
        if function == "rms_norm":
            return ops.rms_norm(x[rows], weight, 1e-5)
        if function == "swiglu":
            return ops.swiglu(x[rows], y[rows])
        if function == "rope_table":
            return (cos[rows] * 1000).cos()
        return ops.rope(x[rows], cos[rows], sin[rows])

    whole = apply(slice(None))
    for num_rows in (1, 2, 3, 8, 17):
        for start in range(0, 50, 7):
            assert torch.equal(apply(slice(start, start + num_rows)), whole[start : start + num_rows])


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
