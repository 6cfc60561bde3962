"""Gated DeltaNet on the CPU kernels: equal to the reference, and the same bits however a text is cut."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_checks import see_as_kernels
from lampejo import ops
from lampejo.models.config import DeltaNetConfig
from lampejo.models.layers import Layer
from lampejo.models.qwen3_5 import DeltaNet
from lampejo.ops.cpu import delta, instruction_set, set_threads
from lampejo.ops.cpu.delta import FusedDeltaNet
from lampejo.ops.cpu.library import Q8
from lampejo.packing import _pack_modules
from tiny import TINY_HYBRID, randomise, reader_of

if instruction_set() is None:
    pytest.skip("the CPU kernels were not built, or do not know this processor", allow_module_level=True)

# Columns in fours and single ones, and a head whose last vector is not full
SIZES = DeltaNetConfig((0,), num_key_heads=2, num_value_heads=6, key_head_dim=24, value_head_dim=44, conv_size=4)
NUM_SLOTS = 5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)


def make_inputs(num_tokens: int, sizes: DeltaNetConfig = SIZES, seed: int = 0) -> Inputs:
    """mixed, log_decay, beta, conv_weight."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, sizes.num_channels, generator=generator)
    log_decay = -torch.rand(num_tokens, sizes.num_value_heads, generator=generator)
    beta = torch.rand(num_tokens, sizes.num_value_heads, generator=generator)
    return mixed, log_decay, beta, torch.randn(sizes.num_channels, sizes.conv_size, generator=generator)


def make_states(sizes: DeltaNetConfig = SIZES, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
    windows = torch.randn(NUM_SLOTS, sizes.num_channels, sizes.conv_size - 1, generator=generator)
    return windows, torch.randn(NUM_SLOTS, *heads, generator=generator)


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # outputs, windows, states


def through(
    kernel: Any, inputs: Inputs, runs: Sequence[ops.Run], sizes: DeltaNetConfig = SIZES, states: Any = None
) -> Result:
    windows, states = (x.clone() for x in states or make_states(sizes))
    plan = kernel.plan_runs(torch.device("cpu"), runs)
    return kernel.delta_net_runs(*inputs, sizes, windows, states, plan), windows, states


def assert_close(ours: Result, expected: Result, tolerance: float = 2e-5) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


RUNS = [
    ops.Run(0, 70, None, [(1, 2), (33, 3), (70, 0), (70, 4)]),  # a beginning that leaves states on its way
    ops.Run(70, 9, 1, []),  # a block: its state waits
    ops.Run(79, 1, 1, [(1, 1)]),  # a single step, in place
]


@pytest.mark.parametrize("tiled", [False, True])
def test_runs_equal_the_reference(isa, tiled):
    """Outputs, windows and states: of a row that begins, of a block, of a step; in both orders of heads."""
    sizes, inputs = replace(SIZES, tiled=tiled), make_inputs(80)
    assert_close(through(delta, inputs, RUNS, sizes), through(ops, inputs, RUNS, sizes))


@settings(max_examples=60, deadline=None)
@given(
    key_heads=st.integers(1, 3), group=st.integers(1, 3), key_dim=st.integers(1, 40), value_dim=st.integers(1, 70),
    conv_size=st.integers(2, 6), length=st.integers(1, 40), tiled=st.booleans(), new=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_runs_of_odd_sizes_equal_the_reference(
    key_heads, group, key_dim, value_dim, conv_size, length, tiled, new, seed
):
    """Heads that fill no vector, runs shorter than the convolution, chunks that are not full."""
    sizes = DeltaNetConfig((0,), key_heads, key_heads * group, key_dim, value_dim, conv_size, tiled)
    inputs = make_inputs(length + 3, sizes, seed)
    runs = [ops.Run(3, length, None if new else 2, [(max(1, length // 2), 4), (length, 2)])]
    assert_close(through(delta, inputs, runs, sizes), through(ops, inputs, runs, sizes), 1e-4)


def test_a_text_gives_the_same_bits_however_it_is_cut(isa):
    """Principle 3, L4: single steps, blocks, and the whole, beside other rows, on any number of threads."""
    inputs, num_tokens = make_inputs(75), 75
    whole = through(delta, inputs, [ops.Run(0, num_tokens, 1, [(num_tokens, 1)])])
    for threads in (1, 2, 3):
        set_threads(threads)
        for size in (1, 2, 5, 31, 32, 33, 64):
            states, outs = make_states(), []
            for start in range(0, num_tokens, size):
                length = min(size, num_tokens - start)
                other = ops.Run(max(0, start - 3), 2, 3, [(2, 3)])
                runs = [other, ops.Run(start, length, 1, [(length, 1)])]
                out, *states = through(delta, inputs, runs, states=states)
                outs.append(out[2:])
            assert torch.equal(torch.cat(outs), whole[0])
            assert torch.equal(states[0][1], whole[1][1]) and torch.equal(states[1][1], whole[2][1])


def test_what_is_stored_on_the_way_is_the_state_of_a_shorter_run(isa):
    """M2: after every number of tokens, less than the convolution sees included, bit for bit."""
    inputs = make_inputs(40)
    for end in (1, 2, 3, 4, 31, 32, 39, 40):
        _, windows, states = through(delta, inputs, [ops.Run(0, 40, 1, [(end, 3), (40, 1)])])
        _, short_windows, short_states = through(delta, inputs, [ops.Run(0, end, 1, [(end, 3)])])
        assert torch.equal(windows[3], short_windows[3]) and torch.equal(states[3], short_states[3])


def test_a_run_without_stores_leaves_every_state_as_it_is():
    """L5: a block that waits for its commit."""
    windows, states = make_states()
    _, ours, our_states = through(delta, make_inputs(9), [ops.Run(0, 9, 1, [])])
    assert torch.equal(ours, windows) and torch.equal(our_states, states)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_row(value):
    """L5: of one row, and in the slots of no row."""
    inputs = make_inputs(12)
    runs = [ops.Run(0, 6, 1, [(6, 1)]), ops.Run(6, 6, 2, [(6, 2)])]
    expected = through(delta, inputs, runs)
    states = make_states()
    states[0][[0, 3, 4]], states[1][[0, 3, 4]] = value, value
    inputs[0][2] = value
    out, windows, after = through(delta, inputs, runs, states=states)
    assert out[2:6].isnan().all() and after[1].isnan().all()
    assert torch.equal(out[:2], expected[0][:2]) and torch.equal(out[6:], expected[0][6:])
    assert torch.equal(windows[2], expected[1][2]) and torch.equal(after[2], expected[2][2])


def test_extreme_gates_and_empty_keys_equal_the_reference(isa):
    """A state forgotten at once or never, nothing or all learnt, keys of length zero, values beyond f16."""
    mixed, log_decay, beta, conv_weight = make_inputs(8)
    log_decay[0], log_decay[1], log_decay[2] = -200.0, 0.0, -1e-7
    beta[3], beta[4] = 0.0, 1.0
    mixed[5] = 0.0
    mixed[6] *= 1e5
    inputs, runs = (mixed, log_decay, beta, conv_weight), [ops.Run(0, 8, 1, [(8, 1)])]
    assert_close(through(delta, inputs, runs), through(ops, inputs, runs))


class RowOfRuns:
    """A view that moves one row's state along, in slot 0."""

    def __init__(self, sizes: DeltaNetConfig, kernel: Any) -> None:
        self.states, self.sizes, self.kernel, self.is_new = make_states(sizes), sizes, kernel, True

    def recur(
        self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, conv_weight: Any
    ) -> Any:
        run = ops.Run(0, len(mixed), None if self.is_new else 0, [(len(mixed), 0)])
        self.is_new = False
        plan = self.kernel.plan_runs(mixed.device, [run])
        return self.kernel.delta_net_runs(mixed, log_decay, beta, conv_weight, self.sizes, *self.states, plan)


def make_halves(sizes: DeltaNetConfig = SIZES, hidden: int = 72) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """x, view -> x + delta_net(norm(x)): on the kernels, by the reference on what was packed; and the packed layer."""
    config = replace(TINY_HYBRID, hidden_size=hidden, delta_net=sizes)
    layers = [randomise(Layer(config, linear_attn=DeltaNet(config)), 5) for _ in range(2)]
    seen, packed = see_as_kernels(layers[0]), layers[1]
    _pack_modules(packed, reader_of(dict(packed.named_parameters())), Q8)

    def kernel(x: torch.Tensor, view: Any) -> torch.Tensor:
        out = x.clone()
        FusedDeltaNet(packed.input_layernorm, packed.linear_attn)(out, 0, view)
        return out

    def reference(x: torch.Tensor, view: Any) -> torch.Tensor:
        return x + seen.linear_attn(seen.input_layernorm(x), None, 0, view)

    return kernel, reference, packed


@pytest.mark.parametrize("num_value_heads", [2, 6, 10])
def test_a_layer_equals_the_reference_on_the_matrices_that_were_packed(isa, num_value_heads):
    """Norm with offset, projections, gates, gated norm, output; off by a code of the activations at most."""
    sizes, x = replace(SIZES, num_value_heads=num_value_heads), torch.randn(33, 72)
    kernel, reference, _ = make_halves(sizes)
    ours, expected = kernel(x, RowOfRuns(sizes, delta)), reference(x, RowOfRuns(sizes, ops))
    scale = (expected - x).abs().max()
    assert (ours - expected).abs().max() < 4e-3 * scale
    assert (ours - expected).abs().median() < 1e-6 * scale


@pytest.mark.parametrize("step", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_gates_of_any_size_equal_the_reference(step):
    """A softplus that overflows, or vanishes; its smallest values are what long memories are made of."""
    kernel, _, packed = make_halves()
    seen_gates: list[torch.Tensor] = []

    class View:
        def recur(
            self, layer: int, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, weight: Any
        ) -> Any:
            seen_gates.extend((log_decay.clone(), beta.clone()))
            return torch.zeros(len(mixed), SIZES.num_value_heads, SIZES.value_head_dim)

    packed.linear_attn.dt_bias.fill_(step)
    x = torch.randn(17, 72)
    kernel(x, View())
    normed = ops.rms_norm(x, packed.input_layernorm.weight, packed.input_layernorm.eps)
    part = packed.linear_attn
    log_decay = -part.A_log.exp() * ops.softplus(normed @ part.in_proj_a.weight.T + part.dt_bias)
    assert torch.allclose(seen_gates[0], log_decay, rtol=1e-4, atol=1e-30)
    assert torch.allclose(seen_gates[1], ops.sigmoid(normed @ part.in_proj_b.weight.T), rtol=1e-4)


def test_a_layer_gives_the_same_bits_however_a_text_is_cut(isa):
    """Principle 3: projections and gates too."""
    kernel, _, _ = make_halves()
    x = torch.randn(40, 72)
    whole = kernel(x, RowOfRuns(SIZES, delta))
    for size in (1, 3, 8, 17):
        view = RowOfRuns(SIZES, delta)
        assert torch.equal(torch.cat([kernel(part, view) for part in x.split(size)]), whole)
