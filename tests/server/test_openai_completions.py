"""/v1/completions, as lm-eval and other tools send it; /tokenize and /detokenize."""

import math
import re

import pytest
import torch

from lampejo.answer import style_of
from lampejo.api import LLM
from lampejo.cache import CausalView
from lampejo.ops import Segment
from scripted import CONTEXT, ids_of, knowing, make_llm, make_tokenizer
from server_app import ask, client_of, events, model_saying
from tiny import make_engine, make_target

PATH = "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."


def tiny_llm(**config) -> LLM:
    """A random model with weights, so that log probabilities mean something."""
    runner = make_engine(make_target(), max_context=CONTEXT, **config).runner
    return make_llm(runner, max_context=CONTEXT, **config)


def teacher_forced(ids: list[int]) -> torch.Tensor:
    """Log probabilities [T, V] after each token, by one pass over the whole text."""
    engine = make_engine(make_target(), max_context=CONTEXT)
    pages = list(range(-(-len(ids) // engine.page_size)))
    view = CausalView(engine.runner.cache, [Segment(0, len(ids), 0, pages)], torch.arange(len(ids)))
    hidden, _ = engine.runner.target(torch.tensor(ids), torch.arange(len(ids)), view)
    return torch.log_softmax(engine.runner.target.logits(hidden).float(), -1)


@pytest.mark.parametrize("budget", [17, 512])
async def test_an_echoed_prompt_has_the_likelihood_of_each_of_its_tokens(budget):
    """P3 and P2: within 1e-3 of teacher-forced scores, whatever the chunks and however often it is asked."""
    ids = ids_of(TEXT)
    expected = teacher_forced(ids)
    with tiny_llm(token_budget=budget) as llm:
        async with client_of(llm) as client:
            for prompt in ([ids, ids], TEXT):  # the last finds its pages in the prefix cache
                told = (
                    await ask(client, {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1}, PATH)
                ).json()
                for choice in told["choices"]:
                    check_likelihoods(choice, ids, expected)


def check_likelihoods(choice: dict, ids: list[int], expected: torch.Tensor) -> None:
    logprobs = choice["logprobs"]
    assert choice["text"][: len(TEXT)] == TEXT
    assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][: len(ids)] == list(TEXT)
    assert logprobs["text_offset"] == list(range(len(ids) + 1))
    for i in range(1, len(ids)):
        assert math.isclose(logprobs["token_logprobs"][i], expected[i - 1, ids[i]], abs_tol=1e-3)
        assert math.isclose(max(logprobs["top_logprobs"][i].values()), expected[i - 1].max(), abs_tol=1e-3)


async def test_log_probabilities_of_the_prompt_stand_in_each_choice():
    """vLLM's prompt_logprobs, with and without the echo, which asks for fewer alternatives."""
    ids = ids_of(TEXT)
    body = {"prompt": [TEXT, TEXT], "prompt_logprobs": 3, "max_tokens": 1}
    with tiny_llm() as llm:
        async with client_of(llm) as client:
            told = (await ask(client, body, PATH)).json()
            echoed = (await ask(client, body | {"echo": True, "logprobs": 1}, PATH)).json()
            refused = await ask(client, body | {"stream": True}, PATH)
    expected = teacher_forced(ids)
    for choice in (*told["choices"], *echoed["choices"]):
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
        for i, entries in enumerate(choice["prompt_logprobs"][1:], start=1):
            assert len(entries) in (3, 4)
            assert math.isclose(entries[str(ids[i])]["logprob"], expected[i - 1, ids[i]], abs_tol=1e-3)
    assert told["choices"][0]["logprobs"] is None
    assert all(len(top) <= 2 for top in echoed["choices"][0]["logprobs"]["top_logprobs"][1:])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_a_thinking_budget_bounds_what_a_raw_prompt_has_begun():
    """vLLM's name for it."""
    with model_saying("Hm. " * 40, tokenizer=make_tokenizer("\n")) as llm:
        llm.style = style_of("<think>")
        async with client_of(llm) as client:
            body = {"prompt": "assistant:<think>", "max_tokens": 60, "thinking_token_budget": 20}
            told = (await ask(client, body, PATH)).json()
    assert "</think>" in told["choices"][0]["text"]


async def test_nothing_but_the_prompt_can_be_asked_for():
    """lm-eval's older way: no tokens of an answer, the prompt's likelihood alone; without echo nothing is left."""
    with tiny_llm() as llm:
        async with client_of(llm) as client:
            told = (await ask(client, {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 0}, PATH)).json()
            refused = await ask(client, {"prompt": TEXT, "max_tokens": 0}, PATH)
    assert told["choices"][0]["text"] == TEXT and told["choices"][0]["finish_reason"] == "length"
    assert len(told["choices"][0]["logprobs"]["tokens"]) == len(TEXT)
    assert told["usage"]["completion_tokens"] == 0 and told["usage"]["total_tokens"] == len(TEXT)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_a_stream_put_together_equals_the_whole_answer():
    """T1 for several prompts with several answers each, with log probabilities of every token."""
    body = {"prompt": ["One", "Two two"], "n": 2, "max_tokens": 9, "temperature": 0.8, "seed": 5, "logprobs": 1}
    body |= {"echo": True}
    with tiny_llm() as llm:
        async with client_of(llm) as client:
            whole = (await ask(client, body, PATH)).json()
            chunks = await events(client, body, PATH)
    assert chunks[-1] is None and len(whole["choices"]) == 4
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"], "two answers to one prompt, one seed further"


async def test_text_goes_in_as_it_is_and_ids_do_too():
    """Fault: a chat template around a raw prompt."""
    with model_saying("!", [knowing(ids_of("!"))]) as llm:
        async with client_of(llm) as client:
            for prompt in ("assistant:", ids_of("assistant:"), ["assistant:"], [ids_of("assistant:")]):
                told = (await ask(client, {"prompt": prompt}, PATH)).json()
                assert told["choices"][0]["text"] == "!" and told["usage"]["prompt_tokens"] == len("assistant:")


async def test_text_to_ids_and_back():
    """/tokenize of text and of a chat, /detokenize; what is no token is refused."""
    with model_saying("x") as llm:
        async with client_of(llm) as client:
            told = (await ask(client, {"prompt": "Hello"}, "/tokenize")).json()
            assert told == {"count": 5, "max_model_len": CONTEXT, "tokens": ids_of("Hello")}
            back = (await ask(client, {"tokens": told["tokens"]}, "/detokenize")).json()
            assert back["prompt"] == "Hello"
            chat = (await ask(client, {"messages": [{"role": "user", "content": "Hi"}]}, "/tokenize")).json()
            assert make_tokenizer().decode(chat["tokens"]) == "user: Hi\nassistant:".replace("\n", "")
            named = (await ask(client, {"prompt": "Hi", "return_token_strs": True}, "/tokenize")).json()
            assert named["token_strs"] == ["H", "i"]
            last = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
            asked = {"messages": last, "add_generation_prompt": False, "continue_final_message": True}
            told = (await ask(client, asked, "/tokenize")).json()
            assert make_tokenizer().decode(told["tokens"]).endswith("Well")
            for path, body in (
                ("/tokenize", {}),
                ("/tokenize", {"messages": last, "add_special_tokens": True}),
                ("/tokenize", {"prompt": "Hi", "with_pieces": True}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": [10**6]}),
            ):
                assert (await ask(client, body, path)).status_code == 400


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_likelihood_counts_no_generated_token(num_prompts):
    """Fault: each of lm-eval's calls adds a token to /metrics that no response tells of."""
    body = {"prompt": [TEXT] * num_prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    with tiny_llm() as llm:
        async with client_of(llm) as client:
            usage = (await ask(client, body, PATH)).json()["usage"]
            (line,) = re.findall(r"^lampejo:generation_tokens_total.*$", (await client.get("/metrics")).text, re.M)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    assert float(line.split()[-1]) == 0
