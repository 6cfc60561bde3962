"""Grammars, tool calls and thinking budgets: they hold, and the drafts change nothing.

The target here is a scripted one without rhyme or reason over printable characters and some longer tokens, which end
where the grammars' parts do not.
"""

import asyncio
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch

from lampejo.answer import Style
from lampejo.api import LLM
from lampejo.grammar import Grammar
from lampejo.request import Request
from scripted import EOS, VOCAB, Target, ids_of, make_tokenizer, scripted_llm
from tiny import ScriptedDrafter

# In the places of "#", "$", "%", "&", "'", "(", ")", "*", "+".
LONG = ["\n", "</think>", '>\n{"', '": ', '"}', "<tool_call>\n", "</tool_call>", "k>", "é"]
TOKENS = make_tokenizer(*LONG)
SEEDS = range(4)
SAMPLED = {"temperature": 0.9, "top_p": 0.98, "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["a", "ab", 7, None]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 300}, "maxItems": 3},
    },
    "required": ["kind"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    """With the long tokens, which the tokenizer never makes of text."""
    found = []
    while text:
        token = max((token for token in [*LONG, text[0]] if text.startswith(token)), key=len)
        found += [ids_of("#")[0] + LONG.index(token)] if token in LONG else ids_of(token)
        text = text[len(token) :]
    return found


GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(r"^(yes|no|[0-9]{2,6}/[a-z]+)( ok){0,3}$"),
    "lark": Grammar.lark('start: term ("-" term)*\nterm: NUMBER | "{" start "}"\nNUMBER: /[0-9]{1,3}/'),
}


def whimsical(seed: int = 0) -> Target:
    """A target that is always the same, and sometimes fond of the tokens that close things."""
    base = torch.arange(VOCAB, dtype=torch.long)
    closing = torch.tensor([ids(text)[0] for text in ("}", "]", '"', "</think>", '"}', ">")])

    def target(text: Sequence[int]) -> torch.Tensor:
        key = zlib.crc32(bytes(text), seed)
        logits = ((base * 2654435761 + key) * 40503 % 1009).float() / 150
        logits[closing] += key % 7
        return logits

    return target


def llm_of(seed: int = 0, drafter: ScriptedDrafter | None = None, thinks: bool = False, **config: Any) -> LLM:
    llm = scripted_llm(whimsical(seed), [drafter] if drafter else [], TOKENS, **{"width": 7, **config})
    llm.style = Style("json", thinks)
    return llm


def adversaries(answers: dict[int, list[int]], rng: random.Random) -> dict[str, ScriptedDrafter]:
    """``answers`` by the first token of the prompt, which tells the request."""

    def truth(request: Request, width: int) -> list[int]:
        return answers[request.ids[0]][request.num_output :][:width]

    def often_wrong(request: Request, width: int) -> list[int]:
        return [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in truth(request, width)]

    def and_more(request: Request, width: int) -> list[int]:
        return [*truth(request, width), EOS, 5, 6, 7, 8, 9, 10, 11][:width]

    scripts = {
        "random": lambda request, width: [rng.randrange(VOCAB) for _ in range(width)],
        "right": truth,
        "often wrong": often_wrong,
        "beyond the end": and_more,
        "ends": lambda request, width: [EOS] * width,
        "ragged": lambda request, width: truth(request, rng.randint(0, width)),
    }
    return {name: ScriptedDrafter(script) for name, script in scripts.items()}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("start", ["closed", "open", "maybe"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_drafts_do_not_change_an_answer_by_a_grammar(name, start, sampling):
    """S2: whoever drafts what, at temperature 0 and above, with reasoning before it and without."""
    end = {"closed": "</think>", "open": "<think>", "maybe": ""}[start]
    prompts = [TOKENS.encode(f"{i} {end}") for i in SEEDS]
    params = {"grammar": GRAMMARS[name], "max_tokens": 120, "thinking_budget": 20, **sampling}

    def answers(drafter: ScriptedDrafter | None) -> tuple[list[Any], LLM]:
        with llm_of(3, drafter, thinks=True) as llm:
            if start == "maybe":  # raw prompts are not supposed to
                llm.answer_start = lambda ids, is_chat=True: "maybe"  # type: ignore[method-assign]
            return llm.generate(prompts, **params), llm

    plain, _ = answers(None)
    assert any(answer.finish_reason == "stop" for answer in plain)
    by_prompt = {prompt[0]: answer.ids for prompt, answer in zip(prompts, plain, strict=True)}
    for drafter in adversaries(by_prompt, random.Random(0)).values():
        drafted, llm = answers(drafter)
        assert [(a.ids, a.text, a.finish_reason) for a in drafted] == [(a.ids, a.text, a.finish_reason) for a in plain]
        llm.engine.pool.check_integrity()


def test_right_drafts_are_accepted_under_a_grammar():
    """Fault: a guide that refuses all drafts would pass for exact."""
    with llm_of() as llm:
        prompt = TOKENS.encode("0 ")
        plain = llm.generate(prompt, grammar=GRAMMARS["schema"], max_tokens=120)
    drafter = adversaries({prompt[0]: plain.ids}, random.Random(0))["beyond the end"]
    with llm_of(0, drafter) as llm:
        drafted = llm.generate(prompt, grammar=GRAMMARS["schema"], max_tokens=120)
    assert drafted.ids == plain.ids
    told = drafted.speculation
    assert told["num_draft_tokens"] == told["num_accepted_draft_tokens"] > 0.7 * len(plain.ids)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One that no answer can satisfy for ever."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"] + ["object", "array", "anyOf"] * (
        depth < 2
    )
    kind = rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^\\d{4}-\\d{2}$", "^(ab|c)+?d{1,2}$"])}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 1, 2.5, True, None, [1, "x"], {"a": 1}, 'q"\\'], 3)}
    if kind == "const":
        return {"const": rng.choice(["yes", 0, {"k": [1, 2]}, "é"])}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "b", "name", "a b", "x-y", "é"], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


async def test_500_random_schemas_are_kept_with_drafts():
    """S1: every output parses and validates, and is the one without drafts."""
    rng = random.Random(1)
    schemas = [random_schema(rng) for _ in range(500)]

    async def answers(truth: Sequence[Any]) -> list[Any]:
        by_prompt: dict[int, list[int]] = {}
        drafter = adversaries(by_prompt, rng)["often wrong"] if truth else None
        done: list[Any] = []
        with llm_of(2, drafter, max_rows=16) as llm:
            for first in range(0, 500, 90):
                part = schemas[first : first + 90]
                by_prompt.update({2 + i: answer.ids for i, answer in enumerate(truth[first : first + 90])})
                params = [{"grammar": Grammar.json_schema(schema), "max_tokens": 400} for schema in part]
                done += await asyncio.gather(
                    *(llm.agenerate([2 + i, 2 + first // 90], **param) for i, param in enumerate(params))
                )
        return done

    plain = await answers([])
    drafted = await answers(plain)
    assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
    num_accepted = sum(answer.speculation["num_accepted_draft_tokens"] for answer in drafted)
    assert num_accepted > sum(len(answer.ids) for answer in plain) / 3
    ended = [(s, a) for s, a in zip(schemas, drafted, strict=True) if a.finish_reason == "stop"]
    assert len(ended) > 490
    for schema, answer in ended:
        jsonschema.validate(json.loads(answer.text), schema)
