"""The GPU ring: models of every architecture on a GPU, in fp32, bf16 and fp16, beside the definition on the CPU.

The tests marked ``gpu`` skip themselves where there is none. Those that need no GPU to be right also run on the CPU,
without its definition of the operations, so that the ring itself is tested everywhere: the operations for other devices
round in half precision there too, and tokens computed alone differ from those of a block.

    python -m pytest -m gpu tests
"""

import math
import random
from typing import Any

import pytest
import torch
from makefiles import write_drafter, write_target

from lampejo import ops
from lampejo.api import LLM
from lampejo.batch import make_batch
from lampejo.bench.ties import TIES, first_difference, gap, logits_after
from lampejo.cache import HybridView
from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.loader import load_model, load_target
from lampejo.ops import device as device_ops
from lampejo.ops.place import Place
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import SamplingParams
from lampejo.scheduler import ScheduledRow
from lampejo.scores import Scores
from lampejo.speculate import NGRAM_MAX_WIDTH, NgramDrafter, Speculator
from lampejo.states import RowState
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.store import find
from lampejo.width import WidthController
from oracle import make_qwen3, make_qwen3_5, make_qwen3_next, save
from ring_checks import Trace, check_divergence, compare_drafted, on_the_definition, put, put_rounded, trace
from scripted import lively_pair
from test_loader import RULES, SIZES, add_tokenizer
from tiny import TINY_TARGETS, ScriptedDrafter, make_engine, make_request, prompt_of, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Median distance of logits from those of the definition in fp32, relative to their length. These models multiply what
# is rounded in their first layers; so do those of `transformers` (the last test).
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.08, torch.float16: 0.01}
LONG = StopParams(max_tokens=64, ignore_eos=True)
SAMPLED = {"temperature": 0.8, "seed": 7}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, or the CPU in its place."""
    if request.param == "cuda":
        return gpu()
    monkeypatch.setattr(ops, "DEFINITION_ON", ())
    return torch.device("cpu")


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return torch.device("cuda:0")


def num_active(architecture: str) -> int:
    experts = TINY_TARGETS[architecture].experts
    return experts.num_active if experts else 0


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Median over rows of the distance, relative to the row's length."""
    return ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


def in_pieces(
    runner: Runner, ids: list[int], sizes: list[int], context: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A text in steps of so many tokens, all of them wanted -> logits [T, V], taps [T, taps * H], and the logits of the
    drafter [drafts, V] after every piece, with these taps as its ``context``, or its target's."""
    request = make_request(ids)
    request.pages, request.state = list(range(len(ids) // runner.page_size, -1, -1)), RowState(0)
    logits, taps, drafts = [], [], []
    choose = runner._choose_drafts

    def seen(scores: Scores, *others: Any) -> torch.Tensor:
        drafts.append(scores.logits)
        return choose(scores, *others)

    runner._choose_drafts = seen  # type: ignore[method-assign]
    for size in sizes:
        done = request.num_computed
        request.ids = ids[: done + 1]
        row = ScheduledRow(request, 1, size - 1)
        batch = make_batch([row], [ids[done + 1 : done + size]], runner.page_size, (), runner.device)
        out = runner.verify(batch)
        runner.commit(out, [size], [[]])
        known = out.taps if context is None else context[done : done + size].to(out.taps)
        logits.append(out.logits)
        taps.append(out.taps)
        request.num_computed = done + size
        request.ids = ids[: done + size + 1]
        if runner.drafter is not None:
            runner.append_context(known, batch.positions, batch.slots)
            runner.draft([request], [5])
    found = logits, taps, drafts or [torch.empty(0)]
    return tuple(torch.cat(parts).float().cpu() for parts in found)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_logits_taps_and_drafts_are_those_of_the_reference(device, architecture, dtype):
    """Faults: a layer, an expert or a state in another's place; weights, caches or states on the way to a device. A
    prompt in chunks, tokens alone and in blocks, across pages."""
    pair = lively_pair(TINY_TARGETS[architecture])
    size, ids, sizes = {"num_pages": 9, "page_size": 32, "num_state_slots": 2}, prompt_of(201), [70, 1, 6, 1, 40, 1, 81]
    with on_the_definition():
        rounded = [put_rounded(module, dtype) for module in pair]
        expected = in_pieces(Runner(*rounded, **size), ids, sizes)
    ours = in_pieces(Runner(*(put(module, device, dtype) for module in pair), **size), ids, sizes, expected[1])
    for what, x, y in zip(("logits", "taps", "drafts"), ours, expected, strict=True):
        assert x.shape == y.shape
        error = relative_error(x, y)
        assert error < ERRORS[dtype], f"{what}: {error:.1e}"  # false for a NaN


def plain_trace(target: Any, request: Request) -> Trace:
    return trace(make_engine(target), request)


def half_right(answer: list[int], seed: int) -> ScriptedDrafter:
    rng = random.Random(seed)
    return ScriptedDrafter(
        lambda request, width: [
            token if rng.random() < 0.8 else (token + 1) % 97
            for token in answer[request.num_output : request.num_output + width]
        ]
    )


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [(torch.float32, {}), (torch.float16, {}), (torch.bfloat16, {}), (torch.bfloat16, SAMPLED)],
    ids=["fp32", "fp16", "bf16", "bf16-sampled"],
)
@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_answers_with_drafts_part_from_plain_ones_at_near_ties_alone(device, architecture, dtype, sampling):
    """L7: with drafts right and wrong, in blocks of every length, beside other requests."""
    target = put(lively_pair(TINY_TARGETS[architecture])[0], device, dtype)
    request = make_request(prompt_of(45), LONG, **sampling)
    plain = plain_trace(target, request)
    stats = []

    def drafted(again: Request, answer: list[int]) -> Trace:
        beside = [make_request(prompt_of(n, seed=n), LONG, **sampling) for n in (3, 70)]
        engine = make_engine(target, [half_right(answer, len(stats))], width=6, token_budget=48)
        found = trace(engine, again, beside)
        stats.append(again.stats)
        return found

    num_ties = compare_drafted(plain, request, drafted, dtype, num_active(architecture))
    assert num_ties <= len(plain.ids) // 8
    assert sum(s.num_accepted_draft_tokens for s in stats) > 20


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_drafter_leaves_the_answer_as_it_is(device, dtype):
    """L7: through the DFlash drafter, its context and its pages, on the same device."""
    target, drafter = (put(module, device, dtype) for module in lively_pair())
    request = make_request(prompt_of(45), LONG)
    plain, num_steps = plain_trace(target, request), 0

    def drafted(again: Request, _: list[int]) -> Trace:
        nonlocal num_steps
        found = trace(make_engine(target, drafter=drafter, dflash=True, width=5), again)
        num_steps += again.stats.num_spec_steps
        return found

    assert compare_drafted(plain, request, drafted, dtype) <= 8
    assert num_steps > 20


def test_the_same_request_twice_gives_the_same_answer(device):
    """On any device: what is computed in the same company is the same."""
    target = put(lively_pair()[0], device, torch.bfloat16)
    answers = [run(make_engine(target), [make_request(prompt_of(45), LONG)]) for _ in range(2)]
    assert answers[0] == answers[1]


def test_the_ring_fails_where_blocks_see_what_they_must_not(monkeypatch):
    """L7, the check can fail: a token of a block that sees the draft behind it."""
    monkeypatch.setattr(ops, "DEFINITION_ON", ())
    mask = device_ops.Part.mask

    def leaking(self: Any, group: int) -> torch.Tensor | None:
        seen = mask(self, group)
        return seen if seen is None or self.num_queries > 16 else seen | seen.roll(1, -1)

    target = put(lively_pair()[0], torch.device("cpu"), torch.bfloat16)
    request = make_request(prompt_of(45), LONG)
    plain = plain_trace(target, request)
    monkeypatch.setattr(device_ops.Part, "mask", leaking)
    with pytest.raises(AssertionError, match="from a tie"):
        compare_drafted(
            plain,
            request,
            lambda again, answer: trace(make_engine(target, [half_right(answer, 0)], width=6), again),
            torch.bfloat16,
        )


def test_the_ring_fails_where_a_state_is_not_committed(monkeypatch):
    """L7, the check can fail: accepted drafts that a recurrent state never sees."""
    monkeypatch.setattr(ops, "DEFINITION_ON", ())
    target = put(lively_pair(TINY_TARGETS["qwen3_5"])[0], torch.device("cpu"), torch.bfloat16)
    request = make_request(prompt_of(45), LONG)
    plain = plain_trace(target, request)
    monkeypatch.setattr(HybridView, "commit", lambda *_: None)
    with pytest.raises(AssertionError, match="from a tie"):
        compare_drafted(
            plain,
            request,
            lambda again, answer: trace(make_engine(target, [half_right(answer, 0)], width=6), again),
            torch.bfloat16,
        )


def scripted_pair(scores: list[float], got: int, routers: Any = ((3.0, 2.0, 1.0), (3.0, 2.0, 1.0))) -> Any:
    """Two answers to a request of two tokens that part at their second token, and what they came from."""
    request = make_request([5, 6])
    logits = torch.tensor([*scores, 16.0])  # the last one is the largest in size and never chosen
    logits[-1] *= -1
    traces = []
    for ids, router in zip(([0, 0, 0], [0, got, 0]), routers, strict=True):
        scored = [torch.tensor([9.0, 1.0, 0.0]), torch.tensor(router)]  # two layers with experts
        traces.append(Trace(ids, {2: logits}, dict.fromkeys(range(4), scored)))
    return *traces, request, torch.bfloat16, 1


BF16_TIE = 16.0 * TIES[torch.bfloat16]
FIRST_SECOND = (3.0, 3.0 - BF16_TIE * 0.9, 0.0)


@pytest.mark.parametrize(
    "case",
    [
        scripted_pair(list(FIRST_SECOND), 1),
        scripted_pair([3.0, 3.0, 0.0], 1),
        scripted_pair([9.0, 1.0, 0.0], 1, ((3.0, 2.99, 1.0), (2.99, 3.0, 1.0))),  # another expert, as good as the first
    ],
    ids=["near", "equal", "router"],
)
def test_divergences_at_near_ties_are_excused(case):
    """L7: a gap below the tolerance, or a router's, whatever comes of it."""
    check_divergence(*case)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (scripted_pair([3.0, 3.0 - BF16_TIE * 1.1, 0.0], 1), "token 1 was"),
        (scripted_pair([3.0, 3.0, 0.0], 2), "token 1 was"),  # a tie, but of others
        (scripted_pair([math.nan, 3.0, 0.0], 1), "token 1 was nan"),
        (scripted_pair([9.0, 1.0, 0.0], 1, ((3.0, 2.0, 1.0), (2.0, 3.0, 1.0))), "a router at 0 was"),
        (scripted_pair([3.0, 3.0, 0.0], 1, ((3.0, 2.0, 1.0), (2.0, 3.0, 1.0))), "a router at 0 was"),
    ],
    ids=["wide", "third", "nan", "router", "router before a tie"],
)
def test_any_other_divergence_fails(case, words):
    """L7: by one tenth too wide, to a token that is not among the best, and where a router had no doubt."""
    with pytest.raises(AssertionError, match=words):
        check_divergence(*case)


@pytest.mark.parametrize("ids", [[0], [0, 0, 0, 0], []])
def test_an_answer_of_another_length_fails(ids):
    """L7: equal as far as it goes is not equal."""
    expected, got, *rest = scripted_pair([3.0, 3.0, 0.0], 1)
    got.ids = ids
    with pytest.raises(AssertionError, match="ends before"):
        check_divergence(expected, got, *rest)


def test_a_comparison_goes_on_behind_a_near_tie():
    """Fault: the first near-tie ends the comparison, and a later fault goes unseen."""
    expected, _, request, dtype, active = scripted_pair([3.0, 3.0, 0.0], 1)
    expected.logits |= {3: expected.logits[2]}
    asked = []

    def drafted(again: Request, answer: list[int]) -> Trace:
        asked.append((again.prompt_ids, answer))
        return Trace([1, *answer[1:]] if len(asked) > 1 else [0, 1, 0], {}, expected.routers)

    assert compare_drafted(expected, request, drafted, dtype, active) == 2
    assert asked == [([5, 6], [0, 0, 0]), ([5, 6, 0, 0], [0])]


def test_first_differences_and_gaps():
    """Of what ``lampejo bench`` tells about answers on a GPU."""
    assert first_difference([1, 2], [1, 2]) is None
    assert [first_difference([1, 2, 3], got) for got in ([1, 5, 3], [1], [1, 2, 3, 4])] == [1, 1, 3]
    logits = torch.tensor([4.0, 3.0, -8.0])
    assert gap(logits, SamplingParams(), 0, 5, [0, 1]) == pytest.approx(1 / 8)
    assert gap(logits, SamplingParams(), 0, 5, [0]) == 0
    # Whatever the noise chooses is no gap at all.
    params = SamplingParams(temperature=5.0)
    gaps = [min(gap(logits, params, 3, position, [i]) for i in range(3)) for position in range(20)]
    assert gaps == [0] * 20
    assert len({max(range(3), key=lambda i: -gap(logits, params, 3, p, [i])) for p in range(20)}) == 3


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5_moe"])
def test_logits_after_a_text_are_those_of_the_engine(architecture):
    """Fault: a check that looks at other logits than those that chose."""
    target = lively_pair(TINY_TARGETS[architecture])[0]
    request = make_request(prompt_of(45), LONG)
    engine = make_engine(target)
    found = trace(engine, request)
    for index in (0, 7):
        ids = request.ids[: 45 + index]
        assert torch.equal(logits_after(engine.runner, ids), found.logits[44 + index])


@pytest.mark.gpu
def test_a_model_is_loaded_onto_a_gpu_and_answers(tmp_path):
    """From files to text, by the flags that people give."""
    gpu()
    target = add_tokenizer(write_target(tmp_path / "Tiny-Chat", **SIZES, eos_token_id=256))
    drafter = write_drafter(tmp_path / "d", **SIZES, dflash_config=RULES)
    for dtype, name in (("auto", None), ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        loaded, config = load_model(
            str(target), str(drafter), EngineConfig(device="cuda", dtype=dtype, width=3), None, None
        )
        info = loaded.info
        assert (info["device"], info["ops"]) == ("cuda:0", "device") and info["device_name"]
        assert name in (None, info["dtype"])
        with LLM(loaded, config) as llm:
            answer = llm.generate("Once upon a time", max_tokens=40, ignore_eos=True)
        assert len(answer.ids) == 40 and answer.speculation["num_spec_steps"] > 0


@pytest.mark.gpu
def test_the_default_model_on_a_gpu_parts_at_near_ties_alone():
    """L7, on real weights, if they were fetched: its own drafter and n-gram drafts, 256 tokens, in bf16."""
    gpu()
    if find("smollm2") is None:
        pytest.skip("the default model is not in the cache")
    config = EngineConfig(max_context=1024, device="cuda", dtype="bf16", width=3)
    loaded, config = load_model("smollm2", "dflash", config, None, None)
    with LLM(loaded, config) as llm:
        ids = llm.encode([{"role": "user", "content": "Write a Python function that adds two numbers, then a test."}])
    request = make_request(ids, StopParams(max_tokens=256, ignore_eos=True))

    def engine(*drafters: Any) -> Engine:
        controller = WidthController(NGRAM_MAX_WIDTH, 3 if drafters else 0)
        return Engine(loaded.runner, Speculator(drafters, controller), config, loaded.eos_ids)

    plain = trace(engine(), request)
    drafters = NgramDrafter(3), *loaded.speculator.drafters
    assert compare_drafted(plain, request, lambda r, _: trace(engine(*drafters), r), torch.bfloat16) <= 32


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_5, make_qwen3_next], ids=["qwen3", "qwen3_5", "qwen3_next"])
def test_half_precision_is_as_near_to_fp32_as_that_of_transformers(device, make, tmp_path):
    """Fault: a sum in 16 bits, or a number rounded too often. Both read the same files of bf16 weights."""
    errors = []
    for seed in range(3):
        ids, folder = prompt_of(150, seed, vocab_size=131), tmp_path / str(seed)
        exact = save(make(seed=seed), folder, torch.bfloat16)
        half = type(exact).from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()
        with torch.inference_mode():
            expected, theirs = (model(torch.tensor([ids])).logits[0].float() for model in (exact, half))
        with open_checkpoint(folder) as checkpoint:
            target = load_target(checkpoint, place=Place(device, torch.bfloat16))
        ours = in_pieces(Runner(target, None, 5, 32, num_state_slots=1), ids, [len(ids)])[0]
        errors.append([relative_error(x, expected) for x in (ours, theirs)])
    ours_in_all, theirs_in_all = map(sum, zip(*errors, strict=True))
    assert ours_in_all < 1.5 * theirs_in_all, errors
