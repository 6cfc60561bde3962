"""What steers an answer over HTTP, streamed and whole (P2), and what is told of it."""

import math
from typing import Any

import pytest
import torch

from lampejo.cache import CausalView
from lampejo.ops import Segment
from lampejo.speculate import NgramDrafter
from scripted import CONTEXT, ids_of, knowing, make_llm, random_target, scripted_llm
from server_app import ask, chat, client_of, events, model_saying, text_of, thinking_model
from tiny import EOS, make_engine, make_target


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"max_tokens": 5}, "One, ", "length"),
        ({"max_completion_tokens": 5}, "One, ", "length"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, "One, ", "length"),
        ({"stop": "thr"}, "One, two, ", "stop"),
        ({"stop": ["four", "two"]}, "One, ", "stop"),
        ({"stop": []}, "One, two, three, four.", "stop"),
        ({"stop": ""}, "One, two, three, four.", "stop"),
        ({"stop_token_ids": ids_of("w")}, "One, t", "stop"),
        ({"ignore_eos": True, "max_tokens": 25, "stop": ["e, f"]}, "One, two, thre", "stop"),
        ({"logit_bias": {str(ids_of("t")[0]): -100}}, None, None),
    ],
)
@pytest.mark.parametrize("width", [0, 6])
async def test_each_field_that_steers_an_answer_does_so_streamed_and_whole(fields, text, reason, width):
    """P2: equal with and without drafts; usage counts the tokens that were decoded."""
    story = "One, two, three, four."
    with model_saying(story, [knowing(ids_of(story))], width=width) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, chat(**{"max_tokens": 40} | fields))).json()
            chunks = await events(client, chat(**{"max_tokens": 40} | fields))
    (choice,) = whole["choices"]
    assert text_of(chunks) == choice["message"]["content"]
    if text is None:
        assert "t" not in choice["message"]["content"]
    else:
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


async def test_answers_of_one_request_are_those_of_its_seeds():
    """P2: n answers with seed, seed + 1, ...; each is what that seed gives alone, streamed or not, and usage counts the
    prompt once."""
    fields = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    with scripted_llm(random_target(), [NgramDrafter(3)], width=4, page_size=8) as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat(n=3, seed=41, **fields))).json()
            alone = [(await ask(client, chat(seed=41 + i, **fields))).json() for i in range(3)]
            chunks = await events(client, chat(n=3, seed=41, stream_options={"include_usage": True}, **fields))
    texts = [choice["message"]["content"] for choice in told["choices"]]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone]
    assert texts == [text_of(chunks, i) for i in range(3)]
    assert len(set(texts)) == 3
    assert told["usage"]["completion_tokens"] == chunks[-2]["usage"]["completion_tokens"] == 60
    assert told["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


async def test_log_probabilities_are_those_of_teacher_forcing_one_per_token():
    """P2: streamed and whole, with drafts, within 1e-3 of one pass over the whole text in fp32; B7."""
    fields = {"logprobs": True, "top_logprobs": 4, "max_tokens": 30, "ignore_eos": True, "seed": 5, "temperature": 0.8}
    runner = make_engine(make_target(), max_context=CONTEXT).runner
    with make_llm(runner, [NgramDrafter(3)], max_context=CONTEXT, width=5) as llm:
        prompt = llm.encode(chat()["messages"])
        async with client_of(llm) as client:
            whole = (await ask(client, chat(**fields, lampejo={"trace": True}))).json()
            chunks = await events(client, chat(**fields))
    entries = whole["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [(e["token"], e["bytes"]) for e in streamed] == [(e["token"], e["bytes"]) for e in entries]
    assert whole["usage"]["completion_tokens"] == len(entries) == 30
    ids = [token["id"] for token in whole["lampejo"]["tokens"]]
    expected = teacher_forced(prompt + ids)[len(prompt) - 1 :]
    for j, (entry, again) in enumerate(zip(entries, streamed, strict=True)):
        assert math.isclose(entry["logprob"], expected[j, ids[j]], abs_tol=1e-3)
        assert math.isclose(entry["logprob"], again["logprob"], abs_tol=1e-3)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert torch.allclose(torch.tensor(tops), expected[j].topk(4).values, atol=1e-3)


def teacher_forced(ids: list[int]) -> torch.Tensor:
    """Log probabilities [T, V] after each token, by one pass."""
    engine = make_engine(make_target(), max_context=CONTEXT)
    pages = list(range(-(-len(ids) // engine.page_size)))
    view = CausalView(engine.runner.cache, [Segment(0, len(ids), 0, pages)], torch.arange(len(ids)))
    hidden, _ = engine.runner.target(torch.tensor(ids), torch.arange(len(ids)), view)
    return torch.log_softmax(engine.runner.target.logits(hidden).float(), -1)


async def test_the_models_own_defaults_hold_where_the_request_says_nothing():
    """P4: generation_config.json, field by field; the request overrides."""
    fields = {"max_tokens": 30, "seed": 9, "ignore_eos": True}
    with scripted_llm(random_target()) as llm:
        async with client_of(llm) as client:

            async def text(**more: Any) -> str:
                response = await ask(client, chat(**fields, **more))
                return response.json()["choices"][0]["message"]["content"]

            greedy, hot, penalised = (
                await text(),
                await text(temperature=1.3),
                await text(temperature=1.3, repetition_penalty=1.5),
            )
            assert len({greedy, hot, penalised}) == 3
            llm.generation_defaults = {"temperature": 1.3, "repetition_penalty": 1.5}
            assert await text() == penalised
            assert await text(repetition_penalty=1) == hot
            assert await text(repetition_penalty=1.0, temperature=0) == greedy


async def test_the_last_message_can_be_continued():
    """P1: the prompt ends with its text, and the answer is what comes after."""
    messages = [*chat("Count.")["messages"], {"role": "assistant", "content": "One, two"}]
    with scripted_llm(lambda text: [*ids_of(", three"), EOS][len(text) - len(prompt)]) as llm:
        prompt = llm.encode(messages, continue_final_message=True)
        assert llm.tokenizer.decode(prompt).endswith("assistant: One, two")
        async with client_of(llm) as client:
            body = {"messages": messages, "continue_final_message": True}
            told = (await ask(client, body)).json()
            assert told["choices"][0]["message"]["content"] == ", three"
            assert told["usage"]["prompt_tokens"] == len(prompt)
            response = await ask(client, body | {"add_generation_prompt": True})
            assert response.json()["error"]["param"] == "continue_final_message"


BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 20},
    {"thinking_budget": 20},
    {"thinking_budget_tokens": 20},
    {"thinking": {"type": "enabled", "budget_tokens": 20}},
    {"chat_template_kwargs": {"thinking_budget": 20}},
    {"thinking_budget": 20, "thinking_token_budget": 20},
]


@pytest.mark.parametrize("fields", [*BUDGETS, {"thinking_budget": -1}, {"thinking_token_budget": 10_000}])
async def test_a_thinking_budget_ends_the_reasoning_by_whatever_name_it_comes(fields):
    """P1. Fault: one of the many names is accepted and ignored."""
    with thinking_model(f"<think>{'Hm. ' * 40}</think> Done.") as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat(max_tokens=400, **fields))).json()
    num_reasoning = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    if fields in BUDGETS:
        assert 20 <= num_reasoning <= 20 + len("\n</think>\n\n")
    else:
        assert num_reasoning == len(f"<think>{'Hm. ' * 40}</think>")
        assert told["choices"][0]["message"]["content"] == "Done."


async def test_two_budgets_that_differ_are_refused():
    with thinking_model("x") as llm:
        async with client_of(llm) as client:
            response = await ask(client, chat(thinking_budget=20, thinking={"type": "enabled", "budget_tokens": 30}))
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking.budget_tokens"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, "unsaid"),
        ({"thinking": {"type": "disabled"}}, "no"),
        ({"thinking": {"type": "enabled"}}, "yes"),
        ({"enable_thinking": False}, "no"),
        ({"reasoning_effort": "none"}, "no"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "no"),
    ],
)
async def test_whether_to_think_goes_to_the_template(fields, thinks):
    """P1: by the names that clients have for it."""
    template = "{{ messages[0].content }}{{ {true: 'yes', false: 'no'}[enable_thinking] or 'unsaid' }}{# <think> #}"
    with thinking_model("x", template) as llm:
        async with client_of(llm) as client:
            told = (await ask(client, chat("", max_tokens=1, **fields))).json()
    assert told["usage"]["prompt_tokens"] == len(thinks)


async def test_log_probabilities_of_the_prompt_are_told_as_vllm_does():
    """P2: those of teacher forcing, one entry per token of the rendered prompt; not in streams."""
    with make_llm(make_engine(make_target(), max_context=CONTEXT).runner, max_context=CONTEXT) as llm:
        prompt = llm.encode(chat()["messages"])
        async with client_of(llm) as client:
            told = (await ask(client, chat(prompt_logprobs=2, max_tokens=1))).json()["prompt_logprobs"]
            refused = await ask(client, chat(prompt_logprobs=2, stream=True))
    expected = teacher_forced(prompt)
    assert told[0] is None and len(told) == len(prompt)
    for i in range(1, len(prompt)):
        own = told[i][str(prompt[i])]
        assert math.isclose(own["logprob"], expected[i - 1, prompt[i]], abs_tol=1e-3)
        assert own["decoded_token"] == llm.tokenizer.token_text(prompt[i]).text
        ranked = {entry["rank"]: entry["logprob"] for entry in told[i].values() if entry["rank"]}
        tops = expected[i - 1].topk(2).values.tolist()
        assert ranked.keys() == {1, 2} and math.isclose(ranked[2], tops[1], abs_tol=1e-3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_each_response_tells_how_its_tokens_were_speculated():
    """V2: whole, and in the last chunk of a stream, with usage in a chunk of its own or without; the same numbers."""
    story = "It goes on and on, and then it ends. "
    with model_saying(story, [knowing(ids_of(story))], width=4) as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, chat())).json()
            chunks = await events(client, chat())
            counted = await events(client, chat(stream_options={"include_usage": True}))
    told = whole["metrics"]["speculative_decoding"]
    names = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"}
    assert names | {"num_accepted_draft_tokens", "num_draft_tokens"} <= told.keys()
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) > 5
    assert told["mean_acceptance_length"] > 4
    assert [c["metrics"]["speculative_decoding"] for c in chunks[:-1] if "metrics" in c] == [told]
    assert [c["metrics"]["speculative_decoding"] for c in counted[:-1] if "metrics" in c] == [told]
    assert "metrics" in chunks[-2] and "metrics" in counted[-2]


async def test_the_fingerprint_stays_while_the_same_seed_gives_the_same():
    """P2: drafts are not part of it, since they never change an answer."""
    with model_saying("x") as llm, model_saying("x", [knowing([EOS])], width=3) as drafting:
        async with client_of(llm) as one, client_of(drafting) as other:
            told = [(await ask(client, chat())).json()["system_fingerprint"] for client in (one, one, other)]
    assert len(set(told)) == 1 and told[0].startswith("fp_")
