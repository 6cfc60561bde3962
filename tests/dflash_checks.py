"""Real decoding in which every draft is held against the reference's, for drafters and targets of all kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_reference import ReferenceDrafter
from lampejo.batch import Batch
from lampejo.loader import build_drafter
from lampejo.models.dflash import DFlash
from lampejo.models.layers import Target
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import gumbel_noise
from lampejo.speculate import DFlashDrafter
from lampejo.weights.drafters import open_drafter
from oracle import forward
from tiny import is_packed, make_engine, make_request, run

TOLERANCE = 1e-4


@dataclass
class Texts:
    """What a target answers without drafts, and its states over the whole texts, computed anew by layer."""

    target: Target
    prompts: Sequence[list[int]]
    max_tokens: int
    samplings: Sequence[dict[str, Any]] = ()
    page_size: int = 8
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by prompt
    states: dict[tuple[int, ...], Sequence[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samplings = [*self.samplings, *[{}] * (len(self.prompts) - len(self.samplings))]
        answers = run(make_engine(self.target, page_size=self.page_size), self.requests())
        self.answers = {tuple(prompt): answer for prompt, answer in zip(self.prompts, answers, strict=True)}
        if is_packed(self.target):
            return
        layers = tuple(range(self.target.config.num_layers))
        for prompt, answer in self.answers.items():
            self.states[prompt] = forward(self.target, [*prompt, *answer], layers)[1].chunk(len(layers), dim=-1)

    def requests(self) -> list[Request]:
        stops = StopParams(max_tokens=self.max_tokens, ignore_eos=True)
        return [make_request(p, stops, **s) for p, s in zip(self.prompts, self.samplings, strict=True)]


class CheckedDrafter(DFlashDrafter):
    """Holds every draft of ours, made on the cached context, against the reference's on the context recomputed.

    What it then lets the engine verify has another number of right drafts each time, so that every accepted length
    occurs.
    On the kernels, whose states are their own, the context is recomputed from those of the steps that committed its
    tokens. ``tolerance``: of hidden states.
    """

    def __init__(self, runner: Runner, reference: ReferenceDrafter, texts: Texts, tolerance: float = TOLERANCE) -> None:
        super().__init__(runner)
        self.reference, self.answers, self.tolerance = reference, texts.answers, tolerance
        self.num_checked = self.num_ties = 0
        self.accepted_lengths: set[int] = set()
        self.worst = 0.0
        self._turn = 0
        self._taps = {p: torch.cat([states[i] for i in reference.taps], -1) for p, states in texts.states.items()}
        self._seen: dict[int, list[torch.Tensor]] = {}  # by request
        assert runner.drafter is not None
        runner.drafter.register_forward_hook(lambda module, inputs, hidden: setattr(self, "hidden", hidden))

    def observe(self, batch: Batch, taps: torch.Tensor, num_committed: Sequence[int]) -> None:
        super().observe(batch, taps, num_committed)
        if not self._taps:
            for row, segment, count in zip(batch.rows, batch.segments, num_committed, strict=True):
                self._seen.setdefault(row.request.id, []).append(taps[segment.start : segment.start + count].clone())

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        drafts = super().draft(requests, widths)
        hidden = self.hidden.view(len(requests), -1, self.hidden.shape[-1])
        for request, width, draft, ours in zip(requests, widths, drafts, hidden, strict=True):
            self._check(request, width, draft, ours)
        return [self._right_until(request, width) for request, width in zip(requests, widths, strict=True)]

    def _check(self, request: Request, width: int, draft: list[int], ours: torch.Tensor) -> None:
        anchor, anchor_id = len(request.ids) - 1, request.ids[-1]
        taps = self._taps[tuple(request.prompt_ids)] if self._taps else torch.cat(self._seen[request.id])
        assert len(taps) >= anchor
        block = self.reference.block(self.reference.context(taps[:anchor]), anchor_id, anchor)
        self.worst = max(self.worst, float((ours - block).abs().max()))
        assert self.worst < self.tolerance, f"anchor {anchor}: {self.worst}"
        vocabulary = torch.arange(self.runner.target.config.vocab_size)

        def noise(position: int) -> torch.Tensor:
            return gumbel_noise(request.seed, [position], vocabulary)[0]

        expected, gaps = self.reference.draft(block, anchor_id, anchor, request.sampling.temperature, noise)
        assert len(draft) == width
        for token_id, wanted, gap in zip(draft, expected, gaps, strict=False):
            self.num_checked += 1
            if token_id != wanted:  # rounding may decide between equals; what follows hangs on it
                assert gap < self.tolerance * 3, f"anchor {anchor}: {draft} instead of {expected}, gap {gap}"
                self.num_ties += 1
                break

    def _right_until(self, request: Request, width: int) -> list[int]:
        missing = [n for n in range(width + 1) if n not in self.accepted_lengths]
        num_right = missing[-1] if missing else self._turn % (width + 1)
        self._turn += 1
        self.accepted_lengths.add(num_right)
        right = self.answers[tuple(request.prompt_ids)][request.num_output : request.num_output + width]
        vocab_size = self.runner.target.config.vocab_size
        return [t if j < num_right else (t + 1) % vocab_size for j, t in enumerate(right)]


def read_drafter(path: Path, target: Target, packed_pages: int | None = None) -> DFlash:
    return build_drafter(*open_drafter(path, target.config, ""), packed_pages)


def decode_checked(
    path: Path,
    reference: ReferenceDrafter,
    texts: Texts,
    packed_pages: int | None = None,
    tolerance: float = TOLERANCE,
    **config: Any,
) -> CheckedDrafter:
    """Decodes with the drafter in ``path``, whose every draft is checked; the answers must equal those without."""
    drafter = read_drafter(path, texts.target, packed_pages)
    config = {"page_size": texts.page_size, "width": reference.num_drafts, **config}
    engine = make_engine(texts.target, drafter=drafter, **config)
    checked = CheckedDrafter(engine.runner, reference, texts, tolerance)
    engine.speculator.drafters.append(checked)
    assert run(engine, texts.requests()) == list(texts.answers.values())
    return checked


def reference_for(folder: Path, target: Target) -> ReferenceDrafter:
    return ReferenceDrafter(folder, target.model.embed_tokens.weight, target.lm_head.weight)
