"""What the GPU ring is held to: models on a device beside the same ones on the definition, and divergences that are
excused at near-ties alone.

Where experts are chosen, a near-tie of a router moves the logits by more than a rounding. So both runs are traced, and
the first thing that went another way, a router's choice or a token's, has to be a near-tie.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from lampejo import ops
from lampejo.bench.ties import TIES, first_difference, gap
from lampejo.engine import Engine
from lampejo.loader import IN_FP32
from lampejo.request import Request
from tiny import make_request, run

ROUTER_TIES = 2  # a router's scores are smaller than logits and as noisy as the numbers that they come from


def put(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """The module there in this type, as ``loader`` puts it."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(device, torch.float32 if name.endswith(IN_FP32) else dtype)
    return module.to(device)


def put_rounded(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module on the CPU in fp32, its weights rounded to ``dtype``."""
    return put(put(module, torch.device("cpu"), dtype), torch.device("cpu"), torch.float32)


@contextmanager
def on_the_definition() -> Iterator[None]:
    """The CPU computes by the definition, even where a test took it away."""
    with mock.patch.object(ops, "DEFINITION_ON", ("cpu",)):
        yield


@dataclass
class Trace:
    """What a request's answer came from: by position, the logits [V] after it, and each router's scores [E] of it."""

    ids: list[int] = field(default_factory=list)  # of the answer
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    routers: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def trace(engine: Engine, request: Request, beside: Sequence[Request] = ()) -> Trace:
    """Decodes a request, beside others. What was computed for a position last is what counts of it."""
    found, verify, experts = Trace(), engine.runner.verify, ops.experts

    def tracing(batch: Any) -> Any:
        scores: list[torch.Tensor] = []

        def routed(x: torch.Tensor, router_logits: torch.Tensor, *others: Any) -> torch.Tensor:
            scores.append(router_logits.float().cpu())
            return experts(x, router_logits, *others)

        with mock.patch.object(ops, "experts", routed):
            out = verify(batch)
        for row, segment in zip(batch.rows, batch.segments, strict=True):
            if row.request is not request:
                continue
            for i in range(segment.length):
                found.routers[segment.position + i] = [s[segment.start + i] for s in scores]
            for token, logits in zip(batch.logit_index.tolist(), out.logits.float().cpu(), strict=True):
                if segment.start <= token < segment.start + segment.length:
                    found.logits[segment.position + token - segment.start] = logits
        return out

    engine.runner.verify = tracing  # type: ignore[method-assign]
    run(engine, [request, *beside])
    found.ids = request.output_ids
    return found


def check_divergence(expected: Trace, got: Trace, request: Request, dtype: torch.dtype, num_active: int = 0) -> None:
    """The first difference between two answers to ``request`` is at a near-tie of a router or of the tokens."""
    index = first_difference(expected.ids, got.ids)
    assert index is not None and index < min(len(expected.ids), len(got.ids)), "one answer ends before the other"
    position = request.num_prompt + index
    for p in range(position):
        for one, other in zip(expected.routers[p], got.routers[p], strict=True):
            mine, theirs = (set(scores.topk(num_active).indices.tolist()) for scores in (one, other))
            if mine != theirs:
                apart = (one[list(mine - theirs)].max() - one[list(theirs - mine)].min()) / one.abs().max()
                assert apart <= ROUTER_TIES * TIES[dtype], f"a router at {p} was {apart:.4f} from a tie"
                return
    found = gap(
        expected.logits[position - 1],
        request.sampling,
        request.seed,
        position,
        [expected.ids[index], got.ids[index]],
    )
    assert found <= TIES[dtype], f"token {index} was {found:.4f} from a tie"


def compare_drafted(
    plain: Trace,
    request: Request,
    drafted: Callable[[Request, Sequence[int]], Trace],
    dtype: torch.dtype,
    num_active: int = 0,
) -> int:
    """Holds drafted answers against the plain one to ``request``. After each near-tie the next one begins behind it,
    with all that plain said so far as its prompt. ``drafted``: a request and its expected answer -> what comes of it.
    Returns how many near-ties there were.
    """
    num_ties, done = 0, 0
    while done < len(plain.ids):
        rest = Trace(plain.ids[done:], plain.logits, plain.routers)
        stops = {"max_tokens": len(rest.ids), "ignore_eos": True}
        again = make_request(
            request.prompt_ids + plain.ids[:done], type(request.stops)(**stops), **vars(request.sampling)
        )
        again.seed = request.seed
        got = drafted(again, rest.ids)
        if got.ids == rest.ids:
            break
        check_divergence(rest, got, again, dtype, num_active)
        num_ties += 1
        index = first_difference(rest.ids, got.ids)
        assert index is not None
        done += index + 1
    return num_ties
