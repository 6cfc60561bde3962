"""The sections of a run, all on one loaded target: answers by category, requests beside each other, prompts by length,
the cost of verifying. Arms and peers take turns within each round, so that noise of the machine hits all of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from lampejo.accept import accept
from lampejo.api import LLM, Completion, Prompt
from lampejo.batch import make_batch
from lampejo.bench.arms import SYNTHETIC, RecordingController, SyntheticDrafter
from lampejo.bench.peers import Peer
from lampejo.bench.stats import Sample
from lampejo.bench.ties import TIES, first_difference, gap, logits_after
from lampejo.bench.workloads import CATEGORIES, WARM_UP, Messages, long_prompt, mixed
from lampejo.config import EngineConfig
from lampejo.loader import Loaded
from lampejo.request import Request
from lampejo.scheduler import ScheduledRow
from lampejo.speculate import Speculator
from lampejo.states import RowState

GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
SAMPLED = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 20}
MOST_VERIFIED = 17  # an anchor and 16 drafts
VERIFY_CONTEXT = 128  # tokens before them
SPEED_TOKENS = 128  # of an answer of fixed length
ROUTED = 8  # how much further than a rounding the near-tie of a router moves logits, about


@dataclass(frozen=True)
class Suite:
    """How much of everything. ``seconds`` ends the answers by category early, but each category gets one prompt."""

    num_prompts: int
    num_sampled: int  # of the prompts, also at temperature 0.7
    max_tokens: int
    runs: int
    seconds: float | None
    concurrency: tuple[int, ...] = (1, 4, 8, 16)
    concurrent_tokens: int = 64
    lengths: tuple[int, ...] = (128, 512, 2048)
    rounds: int = 3  # of everything that is not a category
    verify_rounds: int = 20
    starts: int = 3


SUITES = {
    "quick": Suite(
        num_prompts=2,
        num_sampled=1,
        max_tokens=64,
        runs=1,
        seconds=28.0,
        concurrent_tokens=32,
        lengths=(128, 512),
        rounds=1,
        verify_rounds=7,
        starts=1,
    ),
    "full": Suite(num_prompts=8, num_sampled=8, max_tokens=128, runs=1, seconds=None),
}


@dataclass
class Results:
    """What was measured: lists by round, summarised only in the report. Speeds in tokens per second."""

    arms: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    slots: dict[str, list[float]] = field(default_factory=dict)  # arm -> acceptance per slot
    concurrency: dict[int, dict[str, list[float | None]]] = field(default_factory=dict)  # n -> arm or peer -> speeds
    lengths: dict[int, dict[str, list[dict[str, Any] | None]]] = field(default_factory=dict)
    verify: dict[int, list[float]] = field(default_factory=dict)  # tokens -> seconds
    peers: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)  # name -> figure -> speeds
    start_s: list[float] = field(default_factory=list)
    peak_rss_mb: float | None = None
    num_ties: int = 0  # answers that differ from plain's from a near-tie on, where a device may do that
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answers:
    """What one arm gave to the prompts of a round, decoded together."""

    completions: list[Completion]
    seconds: float

    @property
    def tok_per_s(self) -> float:
        return sum(len(c.ids) for c in self.completions) / self.seconds


class Bench:
    """One loaded target and the arms on it. Failures are collected, never timed, and the rest goes on."""

    def __init__(
        self, loaded: Loaded, config: EngineConfig, speculators: Mapping[str, Speculator], results: Results
    ) -> None:
        self.loaded = loaded
        self.config = config
        self.speculators = dict(speculators)
        self.results = results
        self._num_rounds = 0
        self._bar: tqdm | None = None

    @property
    def arms(self) -> list[str]:
        return self.results.arms

    @property
    def few_arms(self) -> list[str]:
        """Plain, and what stands for drafts where not all arms are measured."""
        others = [arm for arm in self.arms if arm not in ("plain", SYNTHETIC)] or self.arms[1:]
        return ["plain", *(["auto"] if "auto" in others else others[-1:])]

    def fail(self, message: str) -> None:
        self.results.failures.append(message)

    def prompt(self, messages: Messages) -> Prompt:
        """Through the model's chat template; models without one continue the plain text."""
        return list(messages) if self.loaded.chat_template else "\n\n".join(m["content"] for m in messages) + "\n\n"

    def engine(self, arm: str) -> LLM:
        """A new engine over the loaded target, with an empty prefix cache. One at a time."""
        return LLM(replace(self.loaded, speculator=self.speculators[arm]), self.config)

    def answer(self, arm: str, prompts: Sequence[Messages], where: str, params: Mapping[str, Any]) -> Answers | None:
        """One arm's answers; None if one of them failed or is empty."""
        if self._bar is not None:
            self._bar.set_description(f"{where}, {arm}", refresh=False)
            self._bar.update()
        try:
            with self.engine(arm) as llm:
                started = time.perf_counter()
                completions = llm.generate([self.prompt(p) for p in prompts], **params)
                answers = Answers(completions, time.perf_counter() - started)
        except Exception as error:  # of whatever kind: it is reported, and ends in the exit code
            self.fail(f"{where}, {arm}: {type(error).__name__}: {error}")
            return None
        if any(not completion.text.strip() for completion in completions):
            self.fail(f"{where}, {arm}: an empty answer")
            return None
        return answers

    def compare(
        self, prompts: Sequence[Messages], arms: Sequence[str], where: str, params: Mapping[str, Any]
    ) -> dict[str, Answers]:
        """One round: every arm answers the same, in an order that turns. What differs from plain has failed, unless the
        policy is lossy, or it first does so at a near-tie on a device that promises no more."""
        real = [arm for arm in arms if arm != SYNTHETIC]
        turn = self._num_rounds % len(real)
        self._num_rounds += 1
        found: dict[str, Answers] = {}
        for arm in real[turn:] + real[:turn] + [arm for arm in arms if arm == SYNTHETIC]:
            if arm == SYNTHETIC:  # last, since it has to know plain's answers
                self._teach(prompts, found.get("plain"))
            answers = self.answer(arm, prompts, where, params)
            if answers is not None:
                found[arm] = answers
        plain = found.get("plain")
        if plain is None:
            return {}
        if self.is_lossy(params):
            return found
        for arm, answers in list(found.items()):
            pairs = zip(prompts, plain.completions, answers.completions, strict=True)
            differing = [(p, one.ids, other.ids) for p, one, other in pairs if one.ids != other.ids]
            if not all(self._parts_at_a_tie(*case, params) for case in differing):
                self.fail(f"{where}, {arm}: the answer differs from plain decoding")
                del found[arm]
        return found

    def is_lossy(self, params: Mapping[str, Any]) -> bool:
        """Whether drafts may change an answer, by ``--policy``."""
        return self.config.drafting.typical is not None and params["temperature"] > 0

    def _parts_at_a_tie(
        self, prompt: Messages, expected: Sequence[int], got: Sequence[int], params: Mapping[str, Any]
    ) -> bool:
        """Whether an answer may differ from plain's as it does, by design principle 3."""
        if self.loaded.info.get("ops") != "device":
            return False
        index = first_difference(expected, got)
        if index is None or index >= min(len(expected), len(got)):
            return False
        with self.engine("plain") as llm:
            request = llm.make_request(self.prompt(prompt), **params)
        ids, runner = request.prompt_ids + list(expected[:index]), self.loaded.runner
        found = gap(logits_after(runner, ids), request.sampling, request.seed, len(ids), [expected[index], got[index]])
        wide = ROUTED if runner.target.config.experts else 1
        is_tie = found <= wide * TIES[runner.target.model.norm.weight.dtype]
        self.results.num_ties += is_tie
        return is_tie

    def _teach(self, prompts: Sequence[Messages], plain: Answers | None) -> None:
        drafter = self.speculators[SYNTHETIC].drafters[0]
        assert isinstance(drafter, SyntheticDrafter)
        drafter.answers.clear()
        if plain is not None:
            with self.engine("plain") as llm:
                for prompt, completion in zip(prompts, plain.completions, strict=True):
                    drafter.answers[tuple(llm.encode(self.prompt(prompt)))] = completion.ids

    def warm_up(self) -> None:
        """First operations are slow, and the width controllers know nothing yet."""
        self.compare([WARM_UP], self.arms, "warm-up", {**GREEDY, "max_tokens": 48})
        for speculator in self.speculators.values():
            if isinstance(speculator.controller, RecordingController):
                speculator.controller.forget_counts()

    def categories(self, names: Sequence[str], suite: Suite) -> None:
        """All arms on every prompt. The first prompt of every category comes before any second one."""
        started = time.perf_counter()
        passes = [(i, sampled) for i in range(suite.num_prompts) for sampled in (False, True)]
        passes = [(i, sampled) for i, sampled in passes if not sampled or i < suite.num_sampled]
        rounds = [(run, i, sampled, name) for run in range(suite.runs) for i, sampled in passes for name in names]
        rounds = [entry for entry in rounds if entry[1] < len(CATEGORIES[entry[3]])]
        self._expect(len(rounds) * len(self.arms))
        for done, (run, i, sampled, name) in enumerate(rounds):
            late = suite.seconds is not None and time.perf_counter() - started > suite.seconds
            if late and (run, i, sampled) != (0, 0, False):
                self.results.notes.append(
                    f"answers by category ended after {suite.seconds:.0f} s: {done} of {len(rounds)} rounds"
                )
                break
            params = {**(SAMPLED if sampled else GREEDY), "max_tokens": suite.max_tokens}
            where = f"{name} {i + 1}{' at 0.7' if sampled else ''}"
            found = self.compare([CATEGORIES[name][i]], self.arms, where, params)
            for arm, answers in found.items():
                one = _sample(answers.completions[0], name, i, sampled, run, arm)
                is_same = answers.completions[0].ids == found["plain"].completions[0].ids
                self.results.samples.append(replace(one, is_same=is_same))
        for arm, speculator in self.speculators.items():
            if isinstance(speculator.controller, RecordingController) and speculator.drafters:
                self.results.slots[arm] = speculator.controller.acceptance_per_slot()

    def concurrency(self, suite: Suite, peers: Sequence[Peer]) -> None:
        """Output tokens per second of n requests at once, prompts included: arms, then peers, in every round."""
        self._expect(len(suite.concurrency) * suite.rounds * len(self.few_arms))
        for n in suite.concurrency:
            found = self.results.concurrency.setdefault(n, {})
            with ExitStack() as stack:
                servers = {}
                for peer in peers:
                    try:
                        servers[peer.name] = stack.enter_context(peer.serving(n))
                    except Exception as error:
                        self.fail(f"{n} at once, {peer.name}: {error}")
                for turn in range(suite.rounds):
                    prompts = mixed(n, skip=turn * n)
                    params = {**GREEDY, "max_tokens": suite.concurrent_tokens}
                    answers = self.compare(prompts, self.few_arms, f"{n} at once", params)
                    for arm in self.few_arms:
                        found.setdefault(arm, []).append(answers[arm].tok_per_s if arm in answers else None)
                    for name, ask in servers.items():
                        if ask is not None:
                            speed = self._peer(f"{n} at once, {name}", ask, prompts, suite.concurrent_tokens)
                            found.setdefault(name, []).append(speed)

    def lengths(self, suite: Suite) -> None:
        """Prefill speed, time to first token and decoding speed by length of the prompt."""
        with self.engine("plain") as llm:
            prompts = {
                n: long_prompt(n, lambda messages: len(llm.encode(self.prompt(messages)))) for n in suite.lengths
            }
            max_context = llm.max_context
        self._expect(len(prompts) * suite.rounds * len(self.few_arms))
        for n, prompt in prompts.items():
            if prompt is None or n + suite.concurrent_tokens > max_context:
                self.results.notes.append(f"no prompt of {n} tokens: the context or the texts are too short")
                continue
            found = self.results.lengths.setdefault(n, {})
            for _ in range(suite.rounds):
                params = {**GREEDY, "max_tokens": suite.concurrent_tokens}
                answers = self.compare([prompt], self.few_arms, f"prompt of {n}", params)
                for arm in self.few_arms:
                    told = None
                    if arm in answers:
                        one = answers[arm].completions[0]
                        told = {**one.timings, "num_prompt_tokens": one.num_prompt_tokens}
                    found.setdefault(arm, []).append(told)

    def verify_cost(self, suite: Suite) -> None:
        """Seconds of one pass of the target over 1 .. 17 tokens after a text, through the engine's runner."""
        with self.engine("plain") as llm:
            text = long_prompt(VERIFY_CONTEXT * 2, lambda messages: len(llm.encode(messages[0]["content"])))
            assert text is not None
            ids = llm.encode(text[0]["content"])[: VERIFY_CONTEXT + MOST_VERIFIED]
        runner, n = self.loaded.runner, VERIFY_CONTEXT
        request = Request(0, ids[: n + 1])
        request.pages = list(range(-(-len(ids) // runner.page_size)))
        request.state = RowState(slot=0)

        def verify(num_known: int, drafts: list[int]) -> float:
            row = ScheduledRow(request, num_known, len(drafts))
            batch = make_batch([row], [drafts], runner.page_size, self.loaded.eos_ids, runner.device)
            started = time.perf_counter()
            out = runner.verify(batch)
            accept(out.scores, batch.verify_rows)
            runner.commit(out, [len(batch.ids)], [()])
            return time.perf_counter() - started

        verify(n, [])
        request.num_computed = n  # the last known token is the anchor
        sizes = list(range(1, MOST_VERIFIED + 1))
        self._expect(suite.verify_rounds)
        for turn in range(suite.verify_rounds + 1):
            for size in sizes if turn % 2 else reversed(sizes):
                seconds = verify(1, ids[n + 1 : n + size])
                if turn:  # the first round warms up
                    self.results.verify.setdefault(size, []).append(seconds)
            if turn and self._bar is not None:
                self._bar.update()

    def peers(self, suite: Suite, peers: Sequence[Peer]) -> None:
        """Plain decoding and prefill, ours and each peer's in turn. Of fixed length, past the end of the answer if need
        be: plain speed does not depend on what is said. With drafts we answer a prompt of our own to its end.
        """
        if not peers:
            return
        rounds = max(3, suite.rounds + 2)
        self._expect(rounds * (2 + len(self.few_arms)) * len(peers))
        with self.engine("plain") as llm:
            prompt = long_prompt(512, lambda messages: len(llm.encode(self.prompt(messages))))
        fixed = {**GREEDY, "max_tokens": SPEED_TOKENS, "ignore_eos": True}
        for peer in peers:
            found = self.results.peers.setdefault(peer.name, {})
            for asked in mixed(rounds):
                plain = self.answer("plain", [WARM_UP], f"beside {peer.name}", fixed)
                ours = plain.completions[0].timings["tok_per_s"] if plain else None
                found.setdefault("our_plain", []).append(ours)
                found.setdefault("plain", []).append(self._peer(f"{peer.name} plain", peer.plain, SPEED_TOKENS))
                if self.few_arms[-1] not in ("plain", SYNTHETIC):
                    params = {**GREEDY, "max_tokens": SPEED_TOKENS}
                    drafted = self.compare([asked], self.few_arms, f"beside {peer.name}", params)
                    answers = drafted.get(self.few_arms[-1])
                    ours = answers.completions[0].timings["tok_per_s"] if answers else None
                    found.setdefault("our_drafts", []).append(ours)
                if prompt is None:
                    continue
                first = self.answer("plain", [prompt], f"beside {peer.name}", {**GREEDY, "max_tokens": 1})
                one = first.completions[0] if first else None
                ours = one.num_prompt_tokens / one.timings["first_token_s"] if one else None
                found.setdefault("our_prefill", []).append(ours)
                found.setdefault("prefill", []).append(self._peer(f"{peer.name} prefill", peer.prefill, 512))

    def _peer(self, where: str, ask: Callable[..., float], *args: Any) -> float | None:
        """A peer's speed; what it cannot do is a failure like our own."""
        try:
            speed = ask(*args)
        except Exception as error:
            self.fail(f"{where}: {type(error).__name__}: {error}")
            return None
        return speed

    def _expect(self, num_answers: int) -> None:
        """Starts the progress bar of a section."""
        self.close()
        self._bar = tqdm(total=num_answers, disable=None, leave=False, dynamic_ncols=True)

    def close(self) -> None:
        """Takes the progress bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _sample(one: Completion, category: str, prompt: int, sampled: bool, run: int, arm: str) -> Sample:
    stats = one.speculation
    steps = stats["num_spec_steps"]
    return Sample(
        category=category,
        prompt=prompt,
        sampled=sampled,
        run=run,
        arm=arm,
        num_tokens=len(one.ids),
        tok_per_s=one.timings["tok_per_s"] or None,
        ttft_s=one.timings["first_token_s"],
        num_spec_steps=steps,
        num_spec_tokens=steps * stats["mean_acceptance_length"] if steps else 0.0,
        num_inexact=stats["num_inexact_tokens"],
    )
