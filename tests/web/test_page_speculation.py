"""Speculation in the page: who proposed each token, blocks, survival, and texts with and without drafts."""

from collections.abc import Iterator

import pytest

from lampejo.runner import Runner
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.speculate import DFlashDrafter, NgramDrafter
from page_checks import ask
from page_server import PLAIN, serving
from scripted import lively_pair, make_llm


@pytest.fixture(scope="module")
def real_server() -> Iterator[str]:
    """The server itself, with a tiny random model, a tiny drafter and n-grams."""
    target, drafter = lively_pair()
    config = {"max_context": 1024, "num_pages": 128, "page_size": 16, "width": 4}
    runner = Runner(target, drafter, config["num_pages"], config["page_size"])
    llm = make_llm(runner, [NgramDrafter(6), DFlashDrafter(runner)], **config)
    with llm, serving(make_app(llm, ServerConfig())) as url:
        yield url


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_the_real_server_answers_the_same_with_and_without_drafts(open_page, real_server, temperature):
    """L1 as a person sees it: drafts of both kinds were accepted, and both texts are the same in every token."""
    page = open_page(real_server)
    page.click("#settings-button")
    page.fill("#field-temperature", "" if temperature is None else str(temperature))
    page.fill("#field-max_tokens", "96")
    page.click("#tab-speculation")
    page.fill("#trial-prompt", "Say something.")
    page.click("#trial-compare")
    page.wait_for_selector("#verdict:visible")
    assert "Identical" in page.inner_text("#verdict"), page.inner_text("#trial-notice")
    traces = page.locator("#runs .trace").all_inner_texts()
    assert traces[0] == traces[1] and len(traces[0]) > 8
    drafted, plain = page.locator("#runs .run").all()
    assert drafted.locator(".token.dflash, .token.ngram").count() > 0
    assert plain.locator(".token:not(.target)").count() == 0
    assert page.locator("#survival svg").count() == 1
    page.click("#tab-chat")
    ask(page, "And in the chat?")
    assert " tokens" in page.inner_text(".last .actions")


def test_speculation_shows_who_proposed_each_token_and_how_many_survive(open_page, server):
    """Tokens by origin, one group and one bar for each step, the numbers of the response, the survival curve."""
    server.pace = 0.05
    page = open_page()
    page.click("#tab-speculation")
    page.click("#trial-run")
    page.wait_for_selector("#survival svg")
    origins = page.locator("#runs .token").evaluate_all("all => all.map((n) => n.classList[1])")
    assert origins == ["dflash", "ngram", "target"] * 2 + ["dflash", "target"]
    assert page.locator("#runs .step").count() == 3 and page.locator("#blocks rect").count() == 8
    assert page.locator("#runs .trace").inner_text() == PLAIN
    tiles = dict(
        zip(page.locator("#runs dt").all_inner_texts(), page.locator("#runs dd").all_inner_texts(), strict=True)
    )
    assert (
        tiles["tokens per step"] == "2.7" and tiles["acceptance length"] == "2.50" and tiles["drafts accepted"] == "60%"
    )
    assert float(tiles["tokens/s"].replace(",", "")) > 0
    assert page.get_attribute("#survival svg", "aria-label").endswith("1: 75%, 2: 25%")
    body = server.bodies[-1]
    assert body["lampejo"] == {"trace": True, "drafts": True} and body["seed"] == 1 and body["max_tokens"] == 256
    page.click(".trial label.switch")
    page.click("#trial-run")
    page.wait_for_selector("#runs h2:has-text('Without drafts')")
    page.wait_for_selector("#trial-run:visible")
    assert server.bodies[-1] == {**body, "lampejo": {"trace": True, "drafts": False}}
    assert page.locator("#runs .token:not(.target)").count() == 0


def test_a_character_of_several_tokens_is_shown_whole(open_page):
    """Fault: an emoji as three signs of replacement."""
    steps = [
        [{"text": "a"}, {"text": "\ufffd", "bytes": [0xF0, 0x9F]}],
        [{"text": "\ufffd", "bytes": [0x8E, 0x89]}, {"text": "é"}],
    ]
    shown = open_page().evaluate(
        """async (steps) => {
          const { Trace } = await import("./web/trace.js");
          const trace = new Trace(document.createElement("div"));
          trace.show(steps);
          return trace.root.textContent;
        }""",
        steps,
    )
    assert shown == "a🎉é"


def test_compare_finds_texts_identical_or_marks_the_first_difference(open_page, server):
    """Fault: a comparison that always says yes."""
    page = open_page()
    page.click("#tab-speculation")
    page.click("#trial-compare")
    page.wait_for_selector("#verdict.good")
    assert "Both texts agree in all 8 tokens" in page.inner_text("#verdict")
    server.differs_without_drafts = True
    page.click("#trial-compare")
    page.wait_for_selector("#verdict.bad")
    assert "first difference is at token 7" in page.inner_text("#verdict")
    assert page.locator(".differs").all_inner_texts() == [" eve", " nev"]
    page.fill("#trial-prompt", "wait")
    page.click("#trial-compare")
    page.wait_for_selector("#trial-stop:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#verdict:has-text('Not compared')")
