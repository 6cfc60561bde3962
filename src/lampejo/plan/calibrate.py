"""Measures this machine in a few seconds: the CPU kernels on a stand-in with the sizes of the model and random weights.

The stand-in has as many layers as do not stay in the processor's caches, and a head of the real size; from it come the
seconds per byte of weights, and per byte of keys and values, by the number of tokens in a pass.
"""

import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lampejo.batch import make_batch
from lampejo.errors import UserError
from lampejo.models.config import ModelConfig, RopeConfig
from lampejo.models.targets import make_target
from lampejo.ops.cpu import instruction_set, set_threads
from lampejo.ops.cpu.fused import PackedLinear, PackedMatrix
from lampejo.ops.cpu.library import LIBRARY, Q4, Q8
from lampejo.ops.stored import Stored
from lampejo.packing import fits_kernels, pack_target
from lampejo.plan.roofline import Seconds, Work
from lampejo.request import Request
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow

TOKENS = (1, 2, 4, 8, 16, 32)  # in a pass, measured
CONTEXTS = (64, 576)  # tokens before them
BEYOND_CACHES = 96 << 20  # bytes of packed weights
LARGEST_HEAD = 64 << 20  # weights; a larger head is measured on a part of its rows
PAGE_SIZE, ROUNDS = 32, 9
# Of the engine beside the model, greedy: per step, and per token of it (docs/performance.md, plain and 15 drafts;
# the arg-max is measured with the head).
STEP_S, TOKEN_S = 50e-6, 40e-6


@dataclass(frozen=True)
class Cpu:
    """What was measured. Rates are seconds per byte by tokens in the pass: of a layer's weights with all that a layer
    does beside attention over its context; of an 8-bit matrix; of keys and values."""

    name: str
    memory: int
    bandwidth: float  # bytes per second of weights, the most that was seen
    operations: float  # per second, the most that was seen
    layer: Mapping[int, float]
    matrix: Mapping[int, float]
    context: Mapping[int, float]

    def seconds(self, work: Work, queries: int) -> Seconds:
        """``queries``: tokens of the pass that share a context."""
        expected = STEP_S + work.tokens * TOKEN_S
        expected += work.dense * at(self.layer, work.tokens) + work.head * at(self.matrix, work.tokens)
        expected += work.context * at(self.context, queries) + work.state / self.bandwidth
        if work.experts:
            expected += work.experts * at(self.layer, work.tokens_per_expert)
        return self._bounded(work, expected)

    def draft_seconds(self, work: Work, queries: int) -> Seconds:
        """A drafter's pass: its matrices are all held in 8 bits."""
        expected = (work.dense + work.head) * at(self.matrix, work.tokens) + work.context * at(self.context, queries)
        return self._bounded(work, expected)

    def _bounded(self, work: Work, expected: float) -> Seconds:
        limit = max(work.bytes / self.bandwidth, work.flops / self.operations)
        return Seconds(min(limit, expected), expected)


def at(rates: Mapping[int, float], tokens: float) -> float:
    """Between the measured points on straight lines; past the last one as its last line goes on."""
    known = sorted(rates)
    tokens = max(tokens, known[0])
    upper = next((n for n in known if n >= tokens), known[-1])
    upper = max(upper, known[1])
    lower = known[known.index(upper) - 1]
    return rates[lower] + (rates[upper] - rates[lower]) * (tokens - lower) / (upper - lower)


def quartile(values: Sequence[float]) -> float:
    """The lower one: whatever else this machine does only ever adds time."""
    return statistics.quantiles(values, n=4)[0]


def total_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.inference_mode()
def calibrate(config: ModelConfig, layer_bits: float, threads: int | None = None) -> Cpu:
    """Measures with ``threads`` threads (None: PyTorch's choice). ``layer_bits``: per weight of the layers."""
    _check(config)
    kind = Q4 if layer_bits < 7 else Q8
    set_threads(threads or torch.get_num_threads())
    runner = _stand_in(config, kind)
    layers = _layer_bytes(runner.target.config, kind)
    rows = min(config.vocab_size, max(LARGEST_HEAD // config.hidden_size, 1))
    head = PackedLinear(PackedMatrix(_random((rows, config.hidden_size)), Q8))
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as beside the engine
    try:
        passes, heads = _measure(runner, head, config.hidden_size)
    finally:
        torch.set_num_threads(torch_threads)
    short, long = CONTEXTS
    sizes = runner.target.config
    kv_bytes = 4 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
    context = {n: max(passes[n, long] - passes[n, short], 1e-9) / (kv_bytes * (long - short)) for n in TOKENS}
    layer = {n: max(passes[n, short] - context[n] * kv_bytes * (short + n), 1e-9) / layers for n in TOKENS}
    matrix = {n: heads[n] / head.matrix.data.numel() for n in TOKENS}
    weights = layers * 8 / (5.0 if kind == Q4 else 8.5)
    return Cpu(
        name=f"this CPU ({instruction_set()}, {LIBRARY.lampejo_get_threads() if LIBRARY else 1} threads)",
        memory=total_memory(),
        bandwidth=1 / min(*layer.values(), *matrix.values()),
        operations=max(2 * weights * n / (layer[n] * layers) for n in TOKENS),
        layer=layer,
        matrix=matrix,
        context=context,
    )


def _check(config: ModelConfig) -> None:
    if LIBRARY is None or instruction_set() is None:
        raise UserError(
            "The CPU kernels are not there to measure this machine with.",
            "Install lampejo where a C++ compiler is at hand, or plan for a --gpu.",
        )
    if not fits_kernels(config.head_dim, PAGE_SIZE):
        raise UserError(f"The CPU kernels do not know heads of {config.head_dim}.", "Plan for a --gpu.")


def _random(shape: tuple[int, int]) -> Stored:
    generator = torch.Generator().manual_seed(0)
    return Stored.of(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)


def _mlp_size(config: ModelConfig) -> int:
    """Of a dense MLP with as many weights as a token goes through."""
    if config.experts is None:
        return config.intermediate_size
    return config.experts.num_active * config.experts.intermediate_size + config.experts.shared_intermediate_size


def _layer_bytes(config: ModelConfig, kind: int) -> int:
    """Of all layers of a dense stand-in, packed."""
    assert LIBRARY is not None
    hidden, q = config.hidden_size, config.num_heads * config.head_dim
    kv, mlp = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (mlp, hidden), (mlp, hidden), (hidden, mlp)]
    return config.num_layers * sum(LIBRARY.lampejo_packed_bytes(kind, *shape) for shape in shapes)


def _stand_in(config: ModelConfig, kind: int) -> Runner:
    sizes = ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=config.hidden_size,
        intermediate_size=_mlp_size(config),
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(theta=10_000.0),
        max_context=CONTEXTS[-1] * 2,
        tie_word_embeddings=False,
    )
    needed = math.ceil(BEYOND_CACHES / _layer_bytes(sizes, kind))
    sizes = replace(sizes, num_layers=max(1, min(needed, config.num_layers)))
    with torch.device("meta"):
        target = make_target(sizes)
    vectors = {name: torch.ones(p.shape) for name, p in target.named_parameters() if p.ndim == 1}
    target.load_state_dict(vectors, strict=False, assign=True)
    shapes = {name: (p.shape[0], p.shape[1]) for name, p in target.named_parameters() if p.ndim == 2}
    made = {shape: _random(shape) for shape in set(shapes.values())}  # layers may be alike
    pack_target(target, lambda name: made[shapes[name]], kind)
    return Runner(target, None, -(-(CONTEXTS[-1] + TOKENS[-1]) // PAGE_SIZE) + 1, PAGE_SIZE, torch.float16)


def _measure(runner: Runner, head: PackedLinear, hidden: int) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    """Seconds of a pass over the layers by (tokens, context), and of the head with its arg-max by tokens.

    Both take turns, so that the head's weights are as far from the caches as within a real step.
    """
    request = Request(0, [1] * (CONTEXTS[-1] + TOKENS[-1] + 1))
    request.pages = list(range(len(request.ids) // PAGE_SIZE + 1))
    batch = make_batch([ScheduledRow(request, CONTEXTS[-1], 0)], [[]], PAGE_SIZE, (), runner.device)
    runner.verify(batch)  # fills the keys and values
    passes: dict[tuple[int, int], list[float]] = {}
    heads: dict[int, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for n in TOKENS:
            x = torch.ones(n, hidden)
            for context in CONTEXTS:
                request.num_computed = context
                row = ScheduledRow(request, 1, n - 1)
                batch = make_batch([row], [[1] * (n - 1)], PAGE_SIZE, (), runner.device)
                started = time.perf_counter()
                runner.verify(batch)
                between = time.perf_counter()
                head(x).argmax(-1)
                ended = time.perf_counter()
                if turn:  # the first round warms up
                    passes.setdefault((n, context), []).append(between - started)
                    heads.setdefault(n, []).append(ended - between)
    return (
        {key: quartile(values) for key, values in passes.items()},
        {key: quartile(values) for key, values in heads.items()},
    )
