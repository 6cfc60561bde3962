"""An answer that its grammar ends with an error ends so whatever else is decoded, before it or beside it.

Limits are tiny here, so that answers meet them.
"""

import random
from typing import Any

import pytest
from llguidance import LLParserLimits

from lampejo import grammar_compiler
from lampejo.api import LLM
from lampejo.errors import UserError
from lampejo.grammar import Grammar
from scripted import VOCAB
from test_grammar import TOKENS, ids, llm_of
from tiny import ScriptedDrafter

ORDINARY = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,
    "max_items_in_row": 1_000,
    "max_grammar_size": 50_000,
    "max_lexer_states": 50_000,
}
COUNTING = Grammar.regex("(a|b)*a(a|b){40}")  # a state for each thing that the last forty letters may be
BRACKETS = Grammar.lark('start: s "!"{90}\ns: s s | "a" | "b" s "b" | "ab"')  # ever more ways to read it
TINY = {
    "states": (COUNTING, {"max_lexer_states": 100}),
    "fuel of a step": (COUNTING, {"step_lexer_fuel": 200}),
    "items of a step": (BRACKETS, {"step_max_items": 100}),
    "items of a row": (BRACKETS, {"max_items_in_row": 15}),
}


@pytest.fixture(params=TINY)
def grammar(request, monkeypatch) -> Grammar:
    grammar, limits = TINY[request.param]
    monkeypatch.setattr(grammar_compiler, "LIMITS", LLParserLimits(**{**ORDINARY, **limits}, verbose_errors=False))
    return grammar


def told(llm: LLM, prompt: str, grammar: Grammar, seed: int = 0) -> tuple[str, str]:
    """The text of an answer and how it ended."""
    text, stream = "", llm.stream(TOKENS.encode(prompt), grammar=grammar, max_tokens=90, temperature=1.0, seed=seed)
    try:
        for chunk in stream:
            text += chunk.text
            end = chunk.finish_reason
    except UserError as error:
        end = str(error)
    return text, str(end)


PROMPTS = [str(i) for i in range(6)]


def alone(grammar: Grammar) -> list[tuple[str, str]]:
    answers = []
    for prompt in PROMPTS:
        with llm_of() as llm:
            answers.append(told(llm, prompt, grammar))
    return answers


def test_the_tiny_limits_end_answers_at_different_places(grammar):
    """What the other tests rest upon."""
    answers = alone(grammar)
    assert len({len(text) for text, end in answers if "cannot go on" in end}) > 1, answers


def test_answers_before_and_beside_it_do_not_end_an_answer(grammar):
    """They share what a lexer has met, but for what ends an answer."""
    plain = alone(grammar)
    with llm_of(max_rows=8) as llm:
        for _ in range(2):
            assert [told(llm, prompt, grammar) for prompt in PROMPTS] == plain
        streams = [
            llm.stream(TOKENS.encode(prompt), grammar=grammar, max_tokens=90, temperature=1.0, seed=0)
            for prompt in PROMPTS
        ]
        together: list[list[Any]] = [["", None] for _ in PROMPTS]
        left = list(range(len(PROMPTS)))
        while left:
            for i in list(left):
                try:
                    chunk = next(streams[i])
                    together[i][0] += chunk.text
                    together[i][1] = chunk.finish_reason
                except StopIteration:
                    left.remove(i)
                except UserError as error:
                    together[i][1] = str(error)
                    left.remove(i)
        assert [tuple(answer) for answer in together] == plain


@pytest.mark.parametrize("kind", ["right", "often wrong", "random letters"])
def test_drafts_do_not_end_an_answer_nor_keep_it_from_ending(grammar, kind):
    """S2: neither by what a lexer meets along rejected drafts nor by what it has met there when it comes there."""
    plain = alone(grammar)
    rng = random.Random(0)
    truth = {TOKENS.encode(p)[0]: ids(text) for p, (text, _) in zip(PROMPTS, plain, strict=True)}

    def script(request, width):
        right = truth[request.ids[0]][request.num_output :][:width]
        if kind == "right":
            return [*right, *ids("ab" * width)][:width]
        if kind == "often wrong":
            return [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in right]
        return rng.choices(ids("ab"), k=width)

    drafter = ScriptedDrafter(script)
    with llm_of(0, drafter, max_rows=8) as llm:
        assert [told(llm, prompt, grammar) for prompt in PROMPTS] == plain
        llm.engine.pool.check_integrity()
