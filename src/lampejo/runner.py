"""All that touches the device: the target's forward, the drafter's forward, and their caches.

Shape legend: T tokens of a step, L tokens with logits, R rows, B block length, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lampejo import ops
from lampejo.accept import TokenLogprobs, token_logprobs
from lampejo.batch import Batch
from lampejo.cache import BlockView, CausalView, HybridView, PagedCache, StateCache
from lampejo.models.dflash import DFlash
from lampejo.models.layers import Target
from lampejo.request import Request
from lampejo.scores import Draw, Scores, make_scores
from lampejo.states import Save

LOGPROB_ROWS = (
    64  # of a prompt whose log probabilities are computed at once: a row takes some bytes per vocabulary entry
)


@dataclass(frozen=True)
class VerifyOutput:
    scores: Scores  # of L tokens
    taps: torch.Tensor  # [T, num_taps * H]
    hidden: torch.Tensor  # [T, H], after the last norm
    view: HybridView | None = None  # of a target with recurrent layers: what a commit needs

    @property
    def logits(self) -> torch.Tensor:
        """[L, V], fp32."""
        return self.scores.logits


class Runner:
    """Target and drafter with their caches on one device."""

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        num_pages: int,
        page_size: int,
        kv_dtype: torch.dtype | None = None,
        num_state_slots: int = 1,
    ) -> None:
        """``kv_dtype``: of cached keys and values, None: as the weights. ``num_state_slots``: for the states of rows
        and for snapshots, if the target has recurrent layers."""
        self.target = target
        self.drafter = drafter
        weight = target.model.norm.weight
        self.device = weight.device
        kv_dtype = kv_dtype or weight.dtype
        self.page_size = page_size
        config = target.config
        self.cache = PagedCache(
            config.num_attention_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype,
            self.device,
        )
        delta_net = config.delta_net
        self.states = (
            None if delta_net is None else StateCache(delta_net, num_state_slots, self.device, target.recurrence)
        )
        if drafter is None:
            return
        draft = drafter.config
        self.context_cache = PagedCache(
            draft.num_layers, num_pages, page_size, draft.num_kv_heads, draft.head_dim, kv_dtype, self.device
        )
        self.draft_token_ids = torch.arange(config.vocab_size, device=self.device)
        if draft.draft_vocab_size:
            self.draft_token_ids = drafter.draft_token_ids.long()
        self.draft_embed = target.embed if drafter.embed_tokens is None else drafter.embed_tokens
        if drafter.lm_head is not None:
            self.draft_head = drafter.lm_head
        else:
            self.draft_head = target.lm_head.select(self.draft_token_ids) if draft.draft_vocab_size else target.lm_head
        # Position of each target id in the draft vocabulary; the last draft id stands for every other token.
        self.to_draft_id = torch.full((config.vocab_size,), len(self.draft_token_ids), device=self.device)
        self.to_draft_id[self.draft_token_ids] = torch.arange(len(self.draft_token_ids), device=self.device)

    @property
    def bytes_per_token(self) -> int:
        """What a token of context takes: the target's keys and values, and the drafter's."""
        drafter_bytes = self.context_cache.bytes_per_token if self.drafter else 0
        return self.cache.bytes_per_token + drafter_bytes

    @property
    def num_state_slots(self) -> int:
        """For the states of recurrent layers, 0 if the target has none."""
        return self.states.num_slots if self.states else 0

    @property
    def bytes_per_state(self) -> int:
        """What a request takes beside its tokens, and each snapshot in the prefix cache: recurrent layers' state."""
        return self.states.bytes_per_slot if self.states else 0

    @torch.inference_mode()
    def verify(self, batch: Batch) -> VerifyOutput:
        """One pass of the target over all tokens of a step; writes their keys and values. Recurrent states move along
        with rows without drafts, which are committed whole; the others wait for ``commit``."""
        tap_layers = self.drafter.config.target_layer_ids if self.drafter else ()
        hybrid = HybridView(self.cache, self.states, batch) if self.states else None
        view = hybrid or CausalView(self.cache, batch.segments, batch.slots)
        hidden, taps = self.target(batch.ids, batch.positions, view, tap_layers)
        if len(batch.logit_index) == 0:
            return VerifyOutput(Scores(hidden.new_empty(0, self.target.config.vocab_size)), taps, hidden, hybrid)
        return VerifyOutput(make_scores(self.target.lm_head, hidden[batch.logit_index]), taps, hidden, hybrid)

    @torch.inference_mode()
    def logprobs_after(self, hidden: torch.Tensor, next_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """hidden [T, H] and the tokens that follow [T] -> how likely each was, a few rows of logits at a time."""
        entries: list[TokenLogprobs] = []
        for start in range(0, len(next_ids), LOGPROB_ROWS):
            rows = slice(start, start + LOGPROB_ROWS)
            entries += token_logprobs(self.target.logits(hidden[rows]), next_ids[rows], num_top)
        return entries

    @torch.inference_mode()
    def commit(self, out: VerifyOutput, num_committed: Sequence[int], saves: Sequence[Sequence[Save]]) -> None:
        """After ``verify``: the first ``num_committed[i]`` tokens of row i count, and their states go to ``saves[i]``.
        For keys and values there is nothing to do: their commit is a length."""
        if out.view is not None:
            out.view.commit(num_committed, saves)

    @torch.inference_mode()
    def append_context(self, taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Enters committed tokens into the drafter's context. taps [T, num_taps * H], positions and slots [T]."""
        assert self.drafter is not None
        view = CausalView(self.context_cache, (), slots)
        self.drafter.store_context(self.drafter.context(taps), positions, view)

    @torch.inference_mode()
    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        """One pass of the drafter: the first ``widths[i]`` slots of a block after each request's anchor."""
        assert self.drafter is not None
        config = self.drafter.config
        num_rows, block = len(requests), config.block_size
        num_slots = max(widths)
        assert num_slots <= config.max_drafts, (num_slots, config.max_drafts)
        anchors = [len(request.ids) - 1 for request in requests]
        anchor_ids = torch.tensor([request.ids[-1] for request in requests], device=self.device)
        ids = torch.full((num_rows, block), config.mask_token_id, device=self.device)
        ids[:, 0] = anchor_ids
        positions = torch.tensor(anchors, device=self.device)[:, None] + torch.arange(block, device=self.device)

        segments = [
            ops.Segment(i * block, block, anchor, request.pages)
            for i, (request, anchor) in enumerate(zip(requests, anchors, strict=True))
        ]
        view = BlockView(self.context_cache, segments, config.causal, config.windows)
        hidden = self.drafter(self.draft_embed(ids.flatten()), positions.flatten(), view)
        first = 0 if config.sample_from_anchor else 1  # row i predicts the token at row i; or else the one after it
        hidden = hidden.view(num_rows, block, -1)[:, first : first + num_slots]
        chosen = self._choose_drafts(make_scores(self.draft_head, hidden.flatten(0, 1)), requests, anchor_ids, anchors)
        return [ids[:width] for ids, width in zip(chosen.tolist(), widths, strict=True)]

    def _choose_drafts(
        self, scores: Scores, requests: Sequence[Request], anchor_ids: torch.Tensor, anchors: Sequence[int]
    ) -> torch.Tensor:
        """Scores of R * slots tokens -> target ids [R, slots], with the same noise that the target will use."""
        assert self.drafter is not None
        num_slots = len(scores) // len(requests)
        draws = [
            [Draw(request.sampling.temperature, request.seed, anchor + 1 + slot) for slot in range(num_slots)]
            for request, anchor in zip(requests, anchors, strict=True)
        ]
        if self.drafter.markov_head is None:
            chosen = scores.draw([draw for row in draws for draw in row], self.draft_token_ids)
            return self.draft_token_ids[chosen].view(len(requests), num_slots)
        logits = scores.logits.view(len(requests), num_slots, -1)
        previous, ids = anchor_ids, []
        for slot in range(num_slots):
            biased = scores.of(logits[:, slot] + self.drafter.markov_head(self.to_draft_id[previous]))
            previous = self.draft_token_ids[biased.draw([row[slot] for row in draws], self.draft_token_ids)]
            ids.append(previous)
        return torch.stack(ids, dim=1)
