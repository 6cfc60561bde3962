"""The one decode loop. Plain decoding is width 0, prefill verifies known tokens: there is no second path."""

import time
from collections.abc import Sequence

from lampejo.accept import Verdict, accept
from lampejo.batch import Batch, make_batch
from lampejo.config import EngineConfig
from lampejo.pages import PagePool
from lampejo.request import DraftStats, Request, TokenDelta, advance
from lampejo.runner import Runner, VerifyOutput
from lampejo.scheduler import Scheduler
from lampejo.speculate import Speculator
from lampejo.states import Save, StatePool

# On a CPU, tokens of prompts in a step that also decodes. Larger chunks prefill no faster there, and streams wait for
# each: at 1.5 billion weights on two cores 0.7 seconds for 64 tokens, 6 for 512.
CPU_CHUNK_BESIDE = 64


class Engine:
    """Ids in, ids out. Not thread-safe: one thread owns it (``frontend``)."""

    def __init__(self, runner: Runner, speculator: Speculator, config: EngineConfig, eos_ids: Sequence[int]) -> None:
        assert config.max_context is not None and config.num_pages is not None, "config.resolve() comes first"
        self.runner = runner
        self.speculator = speculator
        self.max_context = config.max_context
        self.page_size = config.page_size
        self.eos_ids = tuple(eos_ids)
        num_slots = runner.num_state_slots
        assert num_slots == 0 or num_slots >= config.max_rows, (num_slots, config.max_rows)
        self.pool = PagePool(config.num_pages, config.page_size, StatePool(num_slots) if num_slots else None)
        chunk_beside = CPU_CHUNK_BESIDE if runner.device.type == "cpu" else None
        self.scheduler = Scheduler(self.pool, config.max_rows, config.token_budget, config.max_context, chunk_beside)
        self.stats = DraftStats()  # of all requests

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        if request.typical is not None:
            self.stats.policy = request.stats.policy

    def abort(self, request: Request) -> None:
        """Ends a request at once; its pages are free again. Unknown or finished requests are ignored."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._forget(request)

    def step(self) -> list[TokenDelta]:
        """One step for every scheduled row; returns what was committed."""
        plan = self.scheduler.schedule(self.speculator.widths)
        drafts = self.speculator.draft(plan)
        batch = make_batch(plan, drafts, self.page_size, self.eos_ids, self.runner.device)
        started = time.perf_counter()
        out = self.runner.verify(batch)
        verdicts = accept(out.scores, batch.verify_rows)
        verify_seconds = time.perf_counter() - started
        self._tell_prompts(batch, out)
        deltas, num_committed, saves = self._advance(batch, verdicts)
        started = time.perf_counter()
        self.runner.commit(out, num_committed, saves)
        verify_seconds += time.perf_counter() - started
        self.speculator.observe(batch, out.taps, verdicts, num_committed, verify_seconds)
        for delta in deltas:
            if delta.finish_reason:
                self._forget(delta.request)
        return deltas

    def _advance(
        self, batch: Batch, verdicts: list[Verdict]
    ) -> tuple[list[TokenDelta], list[int], list[Sequence[Save]]]:
        """Commits every row's part. Returns the deltas, and per row how many tokens of its segment are committed and
        which recurrent states are to be saved."""
        deltas, num_committed, saves = [], [], []
        remaining = iter(verdicts)
        for row, draft in zip(batch.rows, batch.drafts, strict=True):
            request, before = row.request, row.request.num_computed
            if row.wants_logits:
                name = self.speculator.drafter_of(request)
                verdict = next(remaining)
                delta = advance(request, verdict, name, len(draft), self.eos_ids, self.max_context)
                if draft:
                    num_accepted = sum(origin != "target" for origin in delta.origins)
                    self.stats.observe(len(draft), num_accepted, len(delta.ids), delta.num_inexact)
                deltas.append(delta)
            else:
                request.num_computed += row.num_known
            num_committed.append(request.num_computed - before)
            saves.append(self.scheduler.committed(row, num_committed[-1]))
        return deltas, num_committed, saves

    def _tell_prompts(self, batch: Batch, out: VerifyOutput) -> None:
        """Log probabilities of prompts, chunk by chunk; a second time after preemption, when they are there already."""
        for row, segment in zip(batch.rows, batch.segments, strict=True):
            request, first = row.request, segment.position
            if request.prompt_logprobs is None:
                continue
            wanted = range(max(first, len(request.of_prompt)), min(first + row.num_known, request.num_prompt - 1))
            if wanted:
                hidden = out.hidden[segment.start + wanted.start - first : segment.start + wanted.stop - first]
                next_ids = request.ids[wanted.start + 1 : wanted.stop + 1]
                request.of_prompt += self.runner.logprobs_after(hidden, next_ids, request.prompt_logprobs)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.speculator.forget(request)
