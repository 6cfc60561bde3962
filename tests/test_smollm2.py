"""The default model and its drafter as they are: against `transformers`, against plain decoding, against mistakes.

Ten everyday questions are answered once, through the public interface, greedily, with the DFlash drafter.
`transformers` loads the same file and reads question and answer in one pass: each token of ours must be its own first
choice after the tokens before it, which is what greedy decoding means. Its hidden states then serve to draft the same
answers again, with the drafter as it is and with one thing wrong at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import lampejo
from dflash_reference import ReferenceDrafter
from lampejo.api import LLM, Completion
from lampejo.batch import make_batch
from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.loader import build_drafter, load_model
from lampejo.models.config import DrafterConfig, RopeConfig
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import SamplingParams, choose
from lampejo.scheduler import ScheduledRow
from lampejo.speculate import NGRAM_MAX_WIDTH, DFlashDrafter, Drafter, NgramDrafter, Speculator
from lampejo.weights.checkpoint import check_tensors, open_checkpoint
from lampejo.weights.drafters import find_drafter, open_drafter
from lampejo.weights.store import locate
from lampejo.width import WidthController
from oracle import forward
from tiny import make_request, run

QUESTIONS = [
    "Explain to a child why the sky is blue.",
    "Give me a simple recipe for pancakes, step by step.",
    "Write a Python function that reverses a string, and explain how it works.",
    "What should I pack for a week of hiking in the mountains?",
    "Tell me a short story about a fox and a river.",
    "How can I learn to play the guitar by myself?",
    "What are the main differences between cats and dogs as pets?",
    "A train leaves at 14:10 and arrives at 17:45. How long does the journey take? Explain each step.",
    "Write a polite email to my landlord about a broken heater.",
    "What are the causes of the French Revolution?",
]
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]
NUM_TOKENS, WIDTH, PAGE_SIZE = 128, 3, 32
# Where two implementations in fp32 may disagree about the first choice: logits closer than this are a tie.
NEAR_TIE = 1e-3
# Tokens per verify step over these answers, 1.424 as measured with the prototype drafter. A better drafter goes past
# the upper end: then raise both ends, so that the faults below still fall under the lower one.
ACCEPTANCE = (1.37, 1.48)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """In fp32 on the reference operations, so that it can be held against `transformers`."""
    config = EngineConfig(width=WIDTH, max_context=1024, ops="reference")
    with lampejo.load("smollm2", "dflash", config=config) as llm:
        yield llm


@pytest.fixture(scope="module")
def fast_llm() -> Iterator[LLM]:
    """As users run it: on the kernels, where they were built."""
    with lampejo.load("smollm2", "dflash", config=EngineConfig(width=WIDTH, max_context=1024)) as llm:
        yield llm


@dataclass
class Answer:
    """A question with its answer, and what `transformers` makes of it."""

    prompt_ids: list[int]
    completion: Completion
    logits: torch.Tensor  # [answer tokens, V]: what it predicts for each
    states: list[torch.Tensor]  # [l]: the residual stream after layer l, [T, H]; not the last layer, which comes normed

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion.ids


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    path = locate("smollm2")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def answers(llm: LLM, oracle: PreTrainedModel) -> list[Answer]:
    completions = llm.generate(PROMPTS, max_tokens=NUM_TOKENS)
    done = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        prompt_ids = llm.encode(prompt)
        with torch.inference_mode():
            out = oracle(torch.tensor([prompt_ids + completion.ids]), output_hidden_states=True)
        logits = out.logits[0, len(prompt_ids) - 1 : -1].clone()
        done.append(Answer(prompt_ids, completion, logits, [state[0] for state in out.hidden_states[1:-1]]))
    return done


def test_tensors_equal_those_that_transformers_loads_from_the_same_file(oracle: PreTrainedModel):
    """Faults: rows of q and k left in GGUF's order, a block format read wrongly, a name mapped wrongly."""
    expected = {name: tensor for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}
    with open_checkpoint("smollm2") as ours:
        check_tensors(ours, {name: tuple(tensor.shape) for name, tensor in expected.items()})
        assert all(torch.equal(ours.read(name), tensor) for name, tensor in expected.items())
        assert (ours.config.max_context, ours.config.rope.theta, ours.eos_ids) == (8192, 100_000.0, (2,))


def test_greedy_answers_equal_those_of_transformers(answers: list[Answer]):
    """128 tokens for ten prompts, drafted and verified in one batch; ties by ``NEAR_TIE`` alone."""
    for question, answer in zip(QUESTIONS, answers, strict=True):
        ids = torch.tensor(answer.completion.ids)
        assert len(ids) == NUM_TOKENS
        assert answer.completion.speculation["num_spec_steps"] > 50
        best = answer.logits.topk(2, dim=-1)
        shortfall = best.values[:, 0] - answer.logits.gather(1, ids[:, None])[:, 0]
        wrong = (ids != best.indices[:, 0]).nonzero().flatten().tolist()
        assert shortfall.max() < NEAR_TIE, f"{question} differs at {wrong}"
        assert len(wrong) <= 1, f"{question} differs at {wrong}: too many for near-ties"


def test_the_text_that_transformers_generates_is_the_same(answers: list[Answer], oracle: PreTrainedModel):
    """Fault: an oracle that reads a text otherwise than it writes one."""
    answer = answers[0]
    ids = torch.tensor([answer.prompt_ids])
    out = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    assert out[0, ids.shape[1] :].tolist() == answer.completion.ids[:32]


def test_logits_and_taps_equal_those_of_transformers_on_the_real_model(llm: LLM, answers: list[Answer]):
    """Dequantisation and head order of a real GGUF file; taps after the layers that they name."""
    answer = answers[0]
    logits, taps = forward(llm.engine.runner.target, answer.ids, tuple(range(29)))
    assert (logits[len(answer.prompt_ids) - 1 : -1] - answer.logits).abs().max() < NEAR_TIE
    for tap, state in zip(taps.chunk(29, dim=-1), answer.states, strict=True):
        assert (tap - state).abs().max() < 1e-4 * state.abs().max()


def only(drafter: Drafter, wanted: Request) -> Drafter:
    """The drafter, but for one request alone."""
    offer = drafter.offer
    drafter.offer = lambda request: offer(request) if request is wanted else None  # type: ignore[method-assign]
    return drafter


def test_512_tokens_with_drafts_of_both_kinds_equal_plain_decoding(fast_llm: LLM):
    """L1: the same question plain, with DFlash and with n-gram, side by side; both have really speculated."""
    runner = fast_llm.engine.runner
    target, drafter = runner.target, runner.drafter
    config = EngineConfig(width=WIDTH, max_context=1024).resolve(8192)
    assert config.num_pages is not None
    runner = Runner(target, drafter, config.num_pages, config.page_size, runner.cache.k.dtype)
    prompt = fast_llm.encode(
        [{"role": "user", "content": "Tell me a long story about a fox who wants to see the sea."}]
    )
    stops = StopParams(max_tokens=512, ignore_eos=True)
    plain, dflash, ngram = (make_request(prompt, stops) for _ in range(3))
    drafters = [only(NgramDrafter(2), ngram), only(DFlashDrafter(runner), dflash)]
    engine = Engine(
        runner, Speculator(drafters, WidthController(NGRAM_MAX_WIDTH, WIDTH)), config, fast_llm.engine.eos_ids
    )
    expected, with_dflash, with_ngram = run(engine, [plain, dflash, ngram], check=False)
    assert len(expected) == 512 and plain.stats.num_spec_steps == 0
    assert with_dflash == expected
    assert with_ngram == expected
    for request, name in ((dflash, "dflash"), (ngram, "ngram")):
        assert request.stats.num_spec_steps > 50
        assert request.origins.count(name) == request.stats.num_accepted_draft_tokens > 20


def test_auto_takes_the_drafter_of_the_package_beside_ngram():
    """The default needs no name and no download."""
    loaded, _ = load_model("smollm2", "auto", EngineConfig(max_context=256), None, None)
    assert loaded.info["drafters"] == ["ngram", "dflash"]
    assert loaded.info["drafter"] == "smollm2-135m-dflash-proto"


# --- the drafter ------------------------------------------------------------------------------------------------------


@dataclass
class DrafterParts:
    folder: Path
    config: DrafterConfig
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def packaged() -> DrafterParts:
    with open_checkpoint("smollm2") as checkpoint:
        folder = find_drafter(checkpoint)
        assert folder is not None
        return DrafterParts(folder, *open_drafter(folder, checkpoint.config, checkpoint.name, None, checkpoint.eos_ids))


class Redrafting:
    """Drafts known answers again with a drafter that sees the states of `transformers`; nothing is verified."""

    def __init__(
        self, llm: LLM, answers: Sequence[Answer], config: DrafterConfig, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.answers = answers
        self.num_pages = max(-(-len(answer.ids) // PAGE_SIZE) for answer in answers)
        drafter = build_drafter(config, tensors)
        self.runner = Runner(llm.engine.runner.target, drafter, len(answers) * self.num_pages, PAGE_SIZE)
        whole = [self.request(i, len(answer.ids)) for i, answer in enumerate(answers)]
        rows = [ScheduledRow(request, len(request.ids), 0) for request in whole]
        batch = make_batch(rows, [[] for _ in rows], PAGE_SIZE, (), self.runner.device)
        taps = [torch.cat([answer.states[i] for i in config.target_layer_ids], dim=-1) for answer in answers]
        self.runner.append_context(torch.cat(taps), batch.positions, batch.slots)

    def request(self, i: int, num_known: int, **sampling: Any) -> Request:
        """Answer i, committed up to ``num_known`` tokens."""
        request = make_request(self.answers[i].ids[:num_known], **sampling)
        request.pages = list(range(i * self.num_pages, (i + 1) * self.num_pages))
        return request

    def run(self) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
        """Goes through all answers as the engine does: per answer the acceptance histogram, and every draft made.

        Drafts by answer and length of the text before them.
        """
        known = [len(answer.prompt_ids) + 1 for answer in self.answers]  # the prefill gives a token
        histograms = [[0] * (WIDTH + 1) for _ in self.answers]
        made = {}
        while live := [i for i, answer in enumerate(self.answers) if known[i] < len(answer.ids) - 1]:
            drafts = self.runner.draft([self.request(i, known[i]) for i in live], [WIDTH] * len(live))
            for i, draft in zip(live, drafts, strict=True):
                made[i, known[i]] = draft
                truth = self.answers[i].ids[known[i] : -1]  # the last token is never drafted: it would be the bonus
                accepted = 0
                while accepted < min(len(truth), WIDTH) and draft[accepted] == truth[accepted]:
                    accepted += 1
                histograms[i][accepted] += 1
                known[i] += accepted + 1
        return histograms, made


def acceptance_length(histograms: Sequence[Sequence[int]]) -> float:
    num_steps = sum(map(sum, histograms))
    return sum((j + 1) * n for histogram in histograms for j, n in enumerate(histogram)) / num_steps


@pytest.fixture(scope="module")
def redrafted(
    llm: LLM, answers: list[Answer], packaged: DrafterParts
) -> tuple[float, dict[tuple[int, int], list[int]]]:
    """Acceptance length and drafts of the drafter as it is."""
    histograms, made = Redrafting(llm, answers, packaged.config, packaged.tensors).run()
    return acceptance_length(histograms), made


def test_acceptance_of_the_packaged_drafter_stays_within_its_band(answers: list[Answer], redrafted: tuple[float, Any]):
    """L8: in the engine; and the same when it drafts the answers again from the states of `transformers`."""
    measured = acceptance_length([answer.completion.speculation["acceptance_histogram"] for answer in answers])
    assert ACCEPTANCE[0] < measured < ACCEPTANCE[1]
    assert redrafted[0] == pytest.approx(measured, abs=0.01)


def test_acceptance_on_the_kernels_stays_within_the_same_band(fast_llm: LLM):
    """L8: rounding to 8 bits, packed heads and fused drafter layers cost the drafter nothing."""
    completions = fast_llm.generate(PROMPTS, max_tokens=NUM_TOKENS)
    histograms = [completion.speculation["acceptance_histogram"] for completion in completions]
    assert ACCEPTANCE[0] < acceptance_length(histograms) < ACCEPTANCE[1]


Change = Callable[[DrafterConfig, dict[str, torch.Tensor]], tuple[DrafterConfig, dict[str, torch.Tensor]]]


def configured(**changes: Any) -> Change:
    return lambda config, tensors: (replace(config, **changes), tensors)


def taps_one_layer_late(config: DrafterConfig, tensors: dict[str, torch.Tensor]):
    return replace(config, target_layer_ids=tuple(i + 1 for i in config.target_layer_ids)), tensors


def taps_reversed(config: DrafterConfig, tensors: dict[str, torch.Tensor]):
    return replace(config, target_layer_ids=config.target_layer_ids[::-1]), tensors


def first_rows_of_the_head(config: DrafterConfig, tensors: dict[str, torch.Tensor]):
    return config, tensors | {"draft_token_ids": torch.arange(len(tensors["draft_token_ids"]), dtype=torch.int32)}


def without_markov_head(config: DrafterConfig, tensors: dict[str, torch.Tensor]):
    return replace(config, markov_rank=None), {k: t for k, t in tensors.items() if not k.startswith("markov")}


PLAIN_FAULTS: dict[str, Change] = {
    "taps in the wrong order": taps_reversed,
    "another mask token": configured(mask_token_id=0),
    "positions stretched": configured(rope=RopeConfig(1e5, "linear", 4.0)),
    "a window of 8": configured(windows=(8, 8)),
    "other rows of the head": first_rows_of_the_head,
    "no Markov head": without_markov_head,
}
# The prototype hardly cares: neighbouring layers tell it nearly the same, it reads far context little. The acceptance
# does not show these faults, the drafts themselves do.
SUBTLE_FAULTS: dict[str, Change] = {
    "taps one layer late": taps_one_layer_late,
    "another theta": configured(rope=RopeConfig(1e4)),
    "causal blocks": configured(causal=(True, True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN_FAULTS | SUBTLE_FAULTS)
def test_each_fault_of_a_drafter_shows(
    llm: LLM, answers: list[Answer], packaged: DrafterParts, redrafted: tuple[float, Any], name: str
):
    """L8: the band would be left; or, where this drafter is too weak for that, its drafts are others."""
    change = (PLAIN_FAULTS | SUBTLE_FAULTS)[name]
    histograms, made = Redrafting(llm, answers, *change(packaged.config, packaged.tensors)).run()
    if name in PLAIN_FAULTS:
        assert acceptance_length(histograms) < ACCEPTANCE[0]
    common = redrafted[1].keys() & made.keys()
    same = sum(made[key] == redrafted[1][key] for key in common) / len(common)
    assert same < 0.95, "the next test could not tell this drafter from a right one"


def test_drafts_of_the_packaged_drafter_equal_those_of_a_second_implementation(
    llm: LLM, answers: list[Answer], packaged: DrafterParts, redrafted: tuple[float, Any]
):
    """Every fifth draft, from the files and the states of `transformers` alone; only ties may be decided otherwise."""
    target = llm.engine.runner.target
    reference = ReferenceDrafter(packaged.folder, target.model.embed_tokens.weight, target.lm_head.weight)
    contexts = [reference.context(torch.cat([answer.states[i] for i in reference.taps], dim=-1)) for answer in answers]
    made = list(redrafted[1].items())[::5]
    num_ties = 0
    for (i, known), draft in made:
        anchor, anchor_id = known - 1, answers[i].ids[known - 1]
        expected, gaps = reference.draft(reference.block(contexts[i], anchor_id, anchor), anchor_id, anchor)
        differing = [j for j in range(WIDTH) if draft[j] != expected[j]]
        if differing:
            num_ties += 1
            assert gaps[differing[0]] < NEAR_TIE, f"answer {i} at {anchor}: {draft} instead of {expected}"
    assert len(made) > 150 and num_ties < 0.01 * len(made)


def test_noise_shared_with_the_target_makes_drafts_right_more_often(
    llm: LLM, answers: list[Answer], packaged: DrafterParts
):
    """Design principle 2 at temperature 0.7: the same places drafted with the target's noise, and with other noise.

    A pair counts where one of the two drafts is right and the other is not; were sharing worthless, either would be as
    likely, so the surplus is held against three standard deviations (4 to 5 as measured with the prototype drafter).
    """
    redrafting = Redrafting(llm, answers, packaged.config, packaged.tensors)
    sampling, seeds = SamplingParams(temperature=0.7), range(6)
    won = lost = 0
    for offset in range(2, NUM_TOKENS - 1, 4):
        known = [len(answer.prompt_ids) + offset for answer in answers]
        requests = [
            redrafting.request(i, n, temperature=0.7, seed=seed + other)
            for other in (0, 1000)
            for seed in seeds
            for i, n in enumerate(known)
        ]
        drafts = [draft[0] for draft in redrafting.runner.draft(requests, [1] * len(requests))]
        logits = torch.stack([answer.logits[offset] for answer in answers])
        own = [token_id for seed in seeds for token_id in choose(logits, sampling, seed, known).tolist()]
        for right, coupled, independent in zip(own, drafts[: len(own)], drafts[len(own) :], strict=True):
            won += coupled == right != independent
            lost += independent == right != coupled
    assert won - lost > 3 * (won + lost) ** 0.5, f"{won} won, {lost} lost"
