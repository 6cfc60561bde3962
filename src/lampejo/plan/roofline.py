"""The work of one step, and the time that a GPU needs for it at least.

A pass reads every dense weight once, whatever the number of tokens; of routed experts those that any token goes to; for
each request its keys and values once and its recurrent state once, which is also written. Activations, some
megabytes, are left out.
"""

from dataclasses import dataclass

from lampejo.models.config import ModelConfig
from lampejo.plan.hardware import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    LAYER_S,
    SHARED_LAYER_S,
    Device,
)
from lampejo.plan.sizes import DrafterSizes, Parts, active_share, context_bytes, num_active
from lampejo.weights.describe import state_bytes

# Neighbouring tokens of a text share experts. Measured elsewhere: two neighbours on GLM-4.7-Flash need 1.74 times the
# experts of one (github.com/ml-explore/mlx-lm pull request 1485), four on Cohere's Command 2.5 times (cohere.com/blog,
# "Why MoE models get more from speculative decoding"): each further token counts for 0.74 and 0.5 of a new one.
NEW_SHARE = {"independent": 1.0, "correlated": 0.7}


def distinct_share(active: float, tokens: float) -> float:
    """Of all experts, the expected share that ``tokens`` tokens go to when each picks ``active`` of them on its own."""
    return 1 - (1 - active) ** tokens


@dataclass(frozen=True)
class Work:
    """One pass. Bytes read and written, floating point operations."""

    tokens: int  # over all requests
    dense: float  # bytes: everything but the following
    head: float
    experts: float
    context: float
    state: float
    flops: float
    layers: int
    expert_share: float = 0.0  # of each layer's experts, those read
    tokens_per_expert: float = 0.0  # of those read

    @property
    def bytes(self) -> float:
        return self.dense + self.head + self.experts + self.context + self.state


@dataclass(frozen=True)
class Model:
    """A target as it is held: parameters and bytes by part. ``kind``: what is computed in."""

    config: ModelConfig
    parameters: Parts
    bytes: Parts
    kind: str

    @property
    def head_bytes(self) -> float:
        return self.bytes.head or self.bytes.embedding


def verify_work(model: Model, requests: int, width: int, context: int, routing: str = "independent") -> Work:
    """The target over the anchor and ``width`` drafts of each of ``requests`` requests behind ``context`` tokens."""
    config, parameters = model.config, model.parameters
    tokens = requests * (width + 1)
    active = active_share(config)
    share = distinct_share(active, requests * (1 + width * NEW_SHARE[routing]))
    through = num_active(config, parameters) - (parameters.embedding if parameters.head else 0)
    attention = 4 * config.num_attention_layers * config.num_heads * config.head_dim * context
    recurrence = 0
    if config.delta_net is not None:
        net = config.delta_net
        recurrence = 6 * len(net.layers) * net.num_value_heads * net.key_head_dim * net.value_head_dim
    return Work(
        tokens=tokens,
        dense=model.bytes.mixers + model.bytes.mlp,
        head=model.head_bytes,
        experts=model.bytes.experts * share,
        context=context_bytes(config) * (requests * context + tokens),
        state=2 * requests * state_bytes(config),
        flops=tokens * (2 * through + attention + recurrence),
        layers=config.num_layers,
        expert_share=share,
        tokens_per_expert=tokens * active / share if active else 0.0,
    )


def draft_work(
    drafter: DrafterSizes, layers: int, block: int, model: Model, requests: int, context: int, bits: float = 16.0
) -> Work:
    """The drafter's pass over a block per request, and entering the last step's tokens into its context."""
    rows = requests * block
    share = 0.0 if drafter.head else drafter.head_rows / model.config.vocab_size
    head = drafter.head + share * (model.parameters.head or model.parameters.embedding)
    return Work(
        tokens=rows,
        dense=(drafter.layers + drafter.head) * bits / 8,
        head=model.head_bytes * share,
        experts=0.0,
        context=requests * drafter.context_read(context),
        state=0.0,
        flops=2.0 * rows * (drafter.layers + head),
        layers=layers,
    )


@dataclass(frozen=True)
class Seconds:
    """``limit``: no engine can be faster; ``expected``: what a good one should take."""

    limit: float
    expected: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.limit + other.limit, self.expected + other.expected)


def seconds(work: Work, device: Device, num_devices: int, kind: str, kv_heads: int) -> Seconds:
    """On ``num_devices`` devices that share every matrix; heads of keys and values go to one device each at most."""
    context = work.context * max(1 / num_devices, 1 / kv_heads)
    read = (work.bytes - work.context) / num_devices + context
    reading, computing = read / device.bandwidth, work.flops / num_devices / device.compute(kind)
    fixed = work.layers * (LAYER_S if num_devices == 1 else SHARED_LAYER_S)
    return Seconds(
        limit=max(reading, computing),
        expected=max(reading / BANDWIDTH_SHARE, computing / COMPUTE_SHARE) + fixed,
    )


def committed(acceptance_length: float, max_drafts: int, width: int) -> float:
    """Tokens committed per step at ``width`` of a drafter whose full block of ``max_drafts`` commits
    ``acceptance_length``.

    Assumes that every draft is right with the same probability a, given that those before it were: the full block
    commits 1 + a + ... + a^max_drafts, a narrower one the first terms of it.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sum(middle, max_drafts + 1) < acceptance_length else (low, middle)
    return _sum(low, width + 1)


def _sum(rate: float, terms: int) -> float:
    return sum(rate**k for k in range(terms))
