"""The Python interface: what goes in is checked before any work, and every way of asking gives the same answer."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lampejo.api import LLM, Chunk, Completion, load
from lampejo.errors import DamagedModel, UserError
from scripted import answering, ids_of, knowing, random_target, scripted_llm
from tiny import EOS, ScriptedDrafter


@pytest.fixture
def llm() -> Iterator[LLM]:
    a = ids_of("a")[0]
    with scripted_llm(random_target(), [ScriptedDrafter(lambda r, w: [a] * w)], width=3, max_rows=4) as llm:
        yield llm


def test_the_answer_in_pieces_joins_to_the_answer_as_a_whole(llm):
    """B7, T1: ids, origins, text, usage, statistics; generate is a fold over the same chunks."""
    whole = llm.generate("a prompt", max_tokens=60, ignore_eos=True, logprobs=1)
    chunks = list(llm.stream("a prompt", max_tokens=60, ignore_eos=True, logprobs=1))
    last = chunks[-1].completion
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert isinstance(last, Completion)
    for done in (whole, last):
        assert done.ids == [i for chunk in chunks for i in chunk.ids]
        assert done.origins == [o for chunk in chunks for o in chunk.origins]
        assert done.text == "".join(chunk.text for chunk in chunks) == llm.tokenizer.decode(done.ids)
        assert done.logprobs == whole.logprobs == [entry for chunk in chunks for entry in chunk.logprobs]
        assert (len(done.ids), done.finish_reason, chunks[-1].finish_reason) == (60, "length", "length")
        assert done.speculation == whole.speculation
        assert done.speculation["num_spec_steps"] > 0
    assert whole.usage == {
        "prompt_tokens": 8,
        "completion_tokens": 60,
        "total_tokens": 68,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_timings_count_from_submission_and_a_one_token_answer_has_no_rate(llm):
    """V3: no division by a time of zero; the first token comes before the last."""
    long, short = llm.generate("a prompt", max_tokens=60), llm.generate("a prompt", max_tokens=1)
    for done in (long, short):
        assert 0 < done.timings["first_token_s"] <= done.timings["total_s"] < 60
    assert long.timings["tok_per_s"] > 0
    assert short.timings["tok_per_s"] == 0


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_every_piece_has_the_log_probabilities_of_its_tokens(llm, logprobs):
    """Fault: a stream gave them only at its end. Asked for none, there are none."""
    for chunk in llm.stream("a prompt", max_tokens=30, ignore_eos=True, logprobs=logprobs):
        assert [entry.token_id for entry in chunk.logprobs] == ([] if logprobs is None else chunk.ids)
        assert all(len(entry.top) == logprobs for entry in chunk.logprobs)


def test_the_stop_string_that_ended_an_answer_is_told():
    """Fault: it is not in the text, so that nobody could tell which of several it was, or whether it was EOS."""
    answer = [*ids_of("some words to stop at"), EOS]
    with scripted_llm(answering(2, answer), [knowing(answer)], width=4) as llm:
        assert llm.generate("p:", stop=["never", "to", "at"]).stop_match == "to"
        *_, last = llm.stream("p:", stop=["at", "s to"])
        assert (last.completion.text, last.completion.stop_match) == ("some word", "s to")
        for params in ({}, {"stop": "never"}, {"stop": "at", "max_tokens": 5}):
            assert llm.generate("p:", **params).stop_match is None


def test_answers_decoded_together_have_their_own_rates(llm, monkeypatch):
    """Fault: time was taken as answers were read, one after another; those after the first came "at once"."""
    verify = llm.engine.runner.verify
    monkeypatch.setattr(llm.engine.runner, "verify", lambda batch: (time.sleep(0.002), verify(batch))[1])
    for done in llm.generate(["one prompt", "two", "three"], max_tokens=80, ignore_eos=True):
        num_steps = len(done.ids) - done.speculation["num_accepted_draft_tokens"]
        assert done.timings["total_s"] - done.timings["first_token_s"] > 0.002 * (num_steps - 1)
        assert 0 < done.timings["tok_per_s"] < 80 / (0.002 * (num_steps - 1))


def test_a_slow_reader_does_not_slow_the_times_that_are_told(llm):
    """Fault: the timings of an answer told how long the caller took to read it."""
    started = time.perf_counter()
    stream = llm.stream("a prompt", max_tokens=60, ignore_eos=True)
    next(stream)
    while llm.engine.has_work:
        time.sleep(0.001)
    most = time.perf_counter() - started
    time.sleep(0.01)
    *_, last = stream
    assert 0 < last.completion.timings["first_token_s"] < last.completion.timings["total_s"] < most


def test_several_prompts_are_decoded_together_and_returned_in_order(llm):
    """Texts and messages may be mixed in one list."""
    prompts: list[Any] = ["one", [{"role": "user", "content": "two"}], "three", "four", "five"]
    together = llm.generate(prompts, max_tokens=30)
    assert isinstance(together, list)
    num_steps = llm.engine.runner.num_steps
    alone = [llm.generate(prompt, max_tokens=30) for prompt in prompts]
    assert [done.ids for done in together] == [done.ids for done in alone]
    assert num_steps < llm.engine.runner.num_steps - num_steps, "they were decoded one after another"


def test_messages_go_through_the_chat_template_and_text_does_not(llm):
    """The prompt of a chat is what the template makes of it, and nothing else."""
    messages = [{"role": "user", "content": "hi"}]
    assert llm.tokenizer.decode(llm.encode("user: hi")) == "user: hi"
    assert llm.tokenizer.decode(llm.encode(messages)).endswith("assistant:")
    assert llm.encode(messages) != llm.encode("hi")
    llm.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        llm.generate(messages)


def test_a_prompt_may_be_token_ids(llm):
    """Fault: what is measured or trained on ids (vLLM's TokensPrompt, lm-eval) had to go through text, and changed."""
    expected = llm.generate(["a prompt", "another"], max_tokens=20)
    ids = [ids_of("a prompt"), ids_of("another")]
    assert llm.encode(ids[0]) == ids[0]
    alone = llm.generate(ids[0], max_tokens=20)
    assert (alone.ids, alone.text, alone.num_prompt_tokens) == (expected[0].ids, expected[0].text, 8)
    assert [done.ids for done in llm.generate(ids, max_tokens=20)] == [done.ids for done in expected]
    mixed = llm.generate([tuple(ids[0]), "another"], max_tokens=20)
    assert [done.ids for done in mixed] == [done.ids for done in expected]
    assert [i for chunk in llm.stream(ids[1], max_tokens=20) for i in chunk.ids] == expected[1].ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 97], "token id 97; this model has ids from 0 to 96"),
        ([-1], "token id -1"),
        ([5, "a"], "begins with token ids, but has 'a'"),
        ([5, None], "has None"),
        ([5, 1.0], "has 1.0"),
        ([True], "has True"),
        ([5] * 512, "512 tokens"),
        (["a", 5], "cannot be int"),
        ([5.0], "cannot be float"),
        ([[5], []], "prompt is empty"),
        ([], "There is no prompt"),
        (b"bytes", "There is no prompt"),
        ([b"bytes"], "cannot be bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_token_ids_that_are_none_are_refused_in_so_many_words(llm, prompt, message):
    """Fault: "messages[0] is not an object" for a list of numbers, or an index error deep in the model."""
    with pytest.raises(UserError, match=message):
        llm.generate(prompt)
    assert llm.engine.runner.num_steps == 0


NO_PROMPTS: list[Any] = [5, [97], b"x", [[]], [{}], ["a", None], None, "", [], [""], {"role": "user"}, "\ud800",
                         [{"role": "user"}], [{"role": "user", "content": 5}]]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=lambda prompt: repr(prompt)[:30])
def test_what_is_no_prompt_is_refused_before_any_work(llm, prompt):
    """Bad input: also one bad prompt in a list of good ones, which are not started."""
    for call in (llm.generate, llm.stream, lambda prompt: asyncio.run(anext(llm.astream(prompt)))):
        with pytest.raises(UserError):
            call(prompt)
    with pytest.raises(UserError):
        llm.generate(["good", prompt])
    assert llm.engine.runner.num_steps == 0


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1.0}, "Unknown parameter 'temprature'.*temperature"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [97]}, "stop_token_ids has token id 97"),
    ({"logit_bias": {97: 1.0}}, "logit_bias has token id 97"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs cannot set 'self'"),
    ({"chat_template_kwargs": {"prompt": 1}}, "chat_template_kwargs cannot set 'prompt'"),
    ({"chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs cannot set 'template'"),
    ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs cannot set 'tokenizer'"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set 'messages'"),
    ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs has the key 5"),
    ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs has tools"),
    ({"chat_template_kwargs": {"tools": "a tool"}}, "chat_template_kwargs has tools"),
    ({"chat_template_kwargs": {"tools": [5]}}, "chat_template_kwargs has tools"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"temperature": float("nan")}, "temperature"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"seed": "7"}, "seed"),
]


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS, ids=str)
def test_a_bad_parameter_is_refused_by_name_before_any_work(llm, params, message):
    """P1, O5: never accepted and ignored, never another exception than UserError."""
    for call in (llm.generate, llm.stream, lambda *a, **k: asyncio.run(anext(llm.astream(*a, **k)))):
        with pytest.raises(UserError, match=message):
            call("a prompt", **params)
    assert llm.engine.runner.num_steps == 0


BAD_LOADS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model must be a name or a path, not None"),
    ({"model": 5}, "model must be a name or a path, not 5"),
    ({"drafter": None}, "drafter must be a name or a path, not None"),
    ({"model": "smollm2", "config": 5}, "config must be an EngineConfig, not 5"),
    ({"model": "smollm2", "config": 0}, "config must be an EngineConfig, not 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_LOADS, ids=str)
def test_what_cannot_be_loaded_is_refused_by_name(arguments, message):
    """Fault: a traceback from the depths for a variable that was not set."""
    with pytest.raises(UserError, match=message):
        load(**arguments)


def test_a_model_that_computes_no_numbers_fails_every_request():
    """Fault: empty text and no word of it. The engine is over, as after any error of its own."""
    with scripted_llm(lambda text: [float("nan")] * 97) as llm:
        with pytest.raises(DamagedModel, match="logits are not numbers"):
            llm.generate(["one", "two"])
        with pytest.raises(RuntimeError, match="load the model again"):
            llm.generate("three")


def test_a_parameter_that_is_none_is_not_given(llm):
    """P4: None means the default, so that callers can pass on what they were not given."""
    names = ("temperature", "top_k", "stop", "max_tokens", "seed", "logprobs", "ignore_eos", "chat_template_kwargs")
    given = dict.fromkeys(names)
    assert llm.generate("a prompt", **given).ids == llm.generate("a prompt").ids


def test_the_models_generation_defaults_hold_where_the_request_says_nothing(llm):
    """P4: generation_config.json gives the defaults; the request overrides, with zero too."""
    greedy = llm.generate("a prompt", max_tokens=30).ids
    sampled = llm.generate("a prompt", max_tokens=30, temperature=2.0, seed=5).ids
    assert greedy != sampled
    llm.generation_defaults = {"temperature": 2.0, "top_p": 1.0}
    assert llm.generate("a prompt", max_tokens=30, seed=5).ids == sampled
    assert llm.generate("a prompt", max_tokens=30, temperature=0, seed=5).ids == greedy


def test_a_seed_repeats_an_answer_and_none_varies_it(llm):
    params = {"max_tokens": 30, "temperature": 3.0, "ignore_eos": True}
    assert llm.generate("p", seed=1, **params).ids == llm.generate("p", seed=1, **params).ids
    assert llm.generate("p", seed=1, **params).ids != llm.generate("p", seed=2, **params).ids
    assert len({tuple(llm.generate("p", **params).ids) for _ in range(4)}) == 4


def test_stop_may_be_a_string_or_a_list(llm):
    """P2."""
    answer = ids_of("some words to stop at")
    with scripted_llm(answering(2, answer), [knowing(answer)], width=4) as llm:
        for stop in ("to", ["to"], ("to", "never")):
            done = llm.generate("p:", stop=stop)
            assert (done.text, done.finish_reason) == ("some words ", "stop")


def test_origins_say_who_proposed_each_token(llm):
    """The tokens that the drafter proposed and the target confirmed bear the drafter's name, the others "target"."""
    answer = [*ids_of("abcdefgh"), EOS]
    with scripted_llm(answering(2, answer), [knowing(answer)], width=2) as llm:
        origins = llm.generate("p:").origins
    assert origins == ["target", "scripted", "scripted"] * 3


def test_a_second_answer_on_the_same_prompt_tells_how_much_was_cached(llm):
    """M1: usage.prompt_tokens_details.cached_tokens."""
    prompt = "x" * 100
    assert llm.generate(prompt, max_tokens=2).usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert llm.generate(prompt, max_tokens=2).usage["prompt_tokens_details"] == {"cached_tokens": 96}


def test_results_are_frozen_and_the_model_closes_with_its_context():
    with scripted_llm(random_target()) as llm:
        done = llm.generate("p", max_tokens=2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            done.text = "other"
        assert dataclasses.is_dataclass(Chunk)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("p")
