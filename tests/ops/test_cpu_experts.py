"""Mixtures of experts on the CPU kernels: equal to the reference on what was packed, and row-invariant."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_checks import see_as_kernels
from lampejo.errors import UserError
from lampejo.models.config import ExpertsConfig
from lampejo.models.experts import SparseMLP
from lampejo.models.layers import Layer
from lampejo.ops.cpu import instruction_set, set_threads
from lampejo.ops.cpu.fused import FusedLayer, PackedMatrix
from lampejo.ops.cpu.library import Q4, Q4K, Q8
from lampejo.ops.stored import Stored
from lampejo.packing import _pack_modules
from tiny import TINY_MOE, randomise, reader_of

if instruction_set() is None:
    pytest.skip("the CPU kernels were not built, or do not know this processor", allow_module_level=True)

SIZES = ExpertsConfig(num_experts=16, num_active=4, intermediate_size=40, shared_intermediate_size=56)
WITHOUT_SHARED = replace(SIZES, shared_intermediate_size=0, normalised=False)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)


@dataclass(frozen=True)
class Half:
    """x -> x + experts(norm(x)), on the kernels and as the reference gives it for the matrices that they hold."""

    kernel: Callable[[torch.Tensor], torch.Tensor]
    reference: Callable[[torch.Tensor], torch.Tensor]
    layer: Any  # that of the kernels


def make_half(sizes: ExpertsConfig = SIZES, hidden: int = 72, kind: int = Q8, seed: int = 0) -> Half:
    config = replace(TINY_MOE, hidden_size=hidden)
    layers = [randomise(Layer(config, SparseMLP(hidden, sizes)), seed) for _ in range(2)]
    seen, packed = see_as_kernels(layers[0], kind), layers[1]
    _pack_modules(packed, reader_of(dict(packed.named_parameters())), kind)
    fused = FusedLayer(packed, config.num_heads, config.num_kv_heads)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        fused._mlp_half(fused._mlp_pointer, out.data_ptr(), len(out))
        return out

    return Half(kernel, lambda x: x + seen.mlp(seen.post_attention_layernorm(x)), packed)


@pytest.mark.parametrize("kind", [Q4, Q8])
@pytest.mark.parametrize("sizes", [SIZES, WITHOUT_SHARED], ids=["shared", "not normalised"])
def test_experts_equal_the_reference_on_the_matrices_that_were_packed(isa, kind, sizes):
    """Off by a code of the activations at most, where one lay between two codes."""
    half, x = make_half(sizes, kind=kind), torch.randn(33, 72)
    expected = half.reference(x)
    scale = (expected - x).abs().max()
    assert (half.kernel(x) - expected).abs().max() < 4e-3 * scale
    assert (half.kernel(x) - expected).abs().median() < 1e-6 * scale


def test_a_token_is_computed_alike_whoever_shares_its_experts(isa):
    """Principle 3: alone, in any run of others, beside tokens that all go to the same experts, on any threads."""
    half, x = make_half(), torch.randn(70, 72)
    x[50:] = x[50]
    whole = half.kernel(x)
    assert torch.equal(whole[50:], whole[50].expand(20, -1))
    for threads in (1, 2, 3):
        set_threads(threads)
        for num_rows in (1, 2, 3, 5, 8, 17, 64):
            for start in (0, 3, 40):
                rows = slice(start, start + num_rows)
                assert torch.equal(half.kernel(x[rows]), whole[rows])
    order = torch.randperm(70)
    assert torch.equal(half.kernel(x[order]), whole[order])


@settings(max_examples=25, deadline=None)
@given(
    num_experts=st.integers(1, 40), active=st.integers(1, 8), inner=st.integers(1, 50), shared=st.integers(0, 50),
    hidden=st.integers(1, 90), num_rows=st.integers(1, 9), normalised=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_experts_of_odd_sizes(num_experts, active, inner, shared, hidden, num_rows, normalised, seed):
    """Sizes that fill no block; experts without a token, one expert alone, all of them active."""
    set_threads(1)  # packing hundreds of small matrices is as many meetings of threads
    sizes = ExpertsConfig(num_experts, min(active, num_experts), inner, shared, normalised)
    half = make_half(sizes, hidden, seed=seed)
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(seed))
    expected = half.reference(x)
    assert (half.kernel(x) - expected).abs().max() < 0.02 * (expected - x).abs().max() + 1e-6


def test_of_equally_likely_experts_the_first_are_taken():
    """A tie must not depend on the number of rows, or on the order of a sort."""
    half, x = make_half(WITHOUT_SHARED), torch.randn(9, 72)
    half.layer.mlp.gate.weight.zero_()
    alone = make_half(replace(WITHOUT_SHARED, num_experts=4))
    alone.layer.mlp.gate.weight.zero_()
    for part in ("gate", "up", "down"):
        source, target = getattr(half.layer.mlp.experts, part), getattr(alone.layer.mlp.experts, part)
        target.data.copy_(source.data[: len(target.data)])
    alone.layer.post_attention_layernorm.weight.copy_(half.layer.post_attention_layernorm.weight)
    assert torch.allclose(half.kernel(x) - x, (alone.kernel(x) - x) / 4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e15])
def test_extreme_activations_give_finite_sums(isa, value):
    """Zeros, denormals and huge values, beside a token of usual size."""
    half, x = make_half(), torch.randn(3, 72)
    x[1] = value
    assert half.kernel(x).isfinite().all()
    assert torch.equal(half.kernel(x)[[0, 2]], half.kernel(x[[0, 2]]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_not_routed_into_numbers(isa, value):
    """Fault: a comparison with NaN chooses an expert that is not there, or hides the NaN; neighbours keep theirs."""
    half, x = make_half(), torch.randn(3, 72)
    x[1, 40] = value
    out = half.kernel(x)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], half.kernel(x[[0, 2]]))


def test_overflowing_router_logits_choose_and_weigh(isa):
    """Logits of a hundred million: the softmax is one expert, not NaN."""
    half, x = make_half(), torch.randn(5, 72)
    half.layer.mlp.gate.weight.mul_(1e8)
    out = half.kernel(x)
    assert out.isfinite().all()


def test_matrices_of_unlike_types_are_packed_alike():
    """Fault: an expert that a file holds in another type, read as the first one's."""
    weight = torch.randn(3, 16, 256)
    quantised = torch.randint(0, 256, (16, 144), dtype=torch.uint8)
    quantised[:, 1] = quantised[:, 3] = 0x1C
    parts = [Stored.of(weight[0]), Stored(12, (16, 256), lambda: [quantised]), Stored.of(weight[2].half())]
    matrix = PackedMatrix(parts, Q4)
    assert matrix.c.kind == Q8
    alone = PackedMatrix(parts[1])
    assert alone.c.kind == Q4K
    rows = torch.arange(16)
    assert torch.allclose(matrix.rows(rows, 1), alone.rows(rows), atol=0.02)
    assert torch.allclose(matrix.rows(rows, 2), weight[2], atol=0.03)


def test_a_single_expert_with_nan_is_refused():
    """C6: the last of several."""
    weight = torch.randn(3, 8, 32)
    weight[2, 7, 31] = math.nan
    with pytest.raises(UserError, match="NaN or infinity"):
        PackedMatrix([Stored.of(part) for part in weight])
