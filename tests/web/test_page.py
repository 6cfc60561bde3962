"""The page at / in headless Chromium: it streams, stops, remembers, runs nothing that a model wrote, and shows how
tokens came."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lampejo.runner import Runner
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from lampejo.speculate import DFlashDrafter, NgramDrafter
from page_server import PLAIN, PageServer, serving
from scripted import lively_pair, make_llm

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright, of the dev extra")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip(
        "the page is tested in Chromium: apt-get install chromium, or name one in CHROMIUM", allow_module_level=True
    )

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
WEB = Path(__file__).parent.parent.parent / "src" / "lampejo" / "web"
DONE = ".message.assistant.last:not(.live)"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 640}
EVIL = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\n\n'
    "</script><svg onload=window.pwned=1>\n\n"
    "[click](javascript:window.pwned=1) ![x](javascript:window.pwned=1)\n\n"
    "[d](data:text/html,<script>pwned=1</script>)\n\n"
    "| <b onclick=window.pwned=1>a</b> | [b](JaVaScRiPt:pwned=1) |\n"
    "|---|---|\n| <iframe src=javascript:pwned=1> | x |\n\n"
    '```html"><img src=x onerror=pwned=1>\n<script>window.pwned=1</script>\n```\n\n<https://example.org/"onclick=pwned=1>'
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[PageServer, str]]:
    server = PageServer()
    with serving(server.app) as url:
        yield server, url


@pytest.fixture
def server(running) -> PageServer:
    """The scripted server, as new."""
    server, _ = running
    server.__dict__.update(answers={}, thoughts={}, bodies=[], key=None, failure=None)
    server.__dict__.update(differs_without_drafts=False, finish_reason="stop", num_gone=0, pace=0.001)
    return server


@pytest.fixture
def open_page(browser, running, server):
    """Opens the page in a browser that knows nothing yet; afterwards nothing may have gone wrong in it."""
    contexts, faults = [], []

    def open_page(url: str | None = None, **options):
        context = browser.new_context(**{"viewport": WIDE, "locale": "en-US", "reduced_motion": "reduce", **options})
        context.set_default_timeout(8000)
        contexts.append(context)
        page = context.new_page()
        page.faults = faults
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(url or running[1])
        page.wait_for_selector("#examples li")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A request that fails is always logged by the browser.
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []


def ask(page, text: str, *, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector(DONE)


def texts(page) -> list[str]:
    return page.locator("#messages .text").all_inner_texts()


def test_an_answer_streams_and_tells_its_speed(open_page, server):
    """The page shows text while it is written, as markdown, and then how many tokens it took."""
    page = open_page()
    ask(page, "wait for it", wait=False)
    page.wait_for_selector(".message.assistant:has-text('word3')")
    assert page.locator(".message.live").count() == 1
    page.press("#message", "Escape")
    page.wait_for_selector(DONE)
    ask(page, "What is the answer?")
    page.wait_for_selector("text=8 tokens")
    assert page.inner_text(".last .text") == "The answer is 42, as ever."
    assert page.inner_text(".last .text strong") == "42"
    assert page.locator(".last .actions").inner_text().startswith("8 tokens")
    body = server.bodies[-1]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "scripted" and body["lampejo"] == {"trace": False, "drafts": True}
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_stop_ends_the_request_and_keeps_what_came(open_page, server):
    """Fault: a stop button that hides the text while the server goes on."""
    page = open_page()
    ask(page, "wait", wait=False)
    page.wait_for_selector(".message.assistant:has-text('word2')")
    page.click("#stop")
    page.wait_for_selector("text=Stopped.")
    assert texts(page)[-1].startswith("word0 word1 word2")
    while not server.num_gone:
        page.wait_for_timeout(10)
    assert page.is_visible("#send") and not page.is_visible("#stop")


def test_retry_asks_the_same_again(open_page, server):
    """The new answer takes the place of the old one, which the model does not see."""
    page = open_page()
    ask(page, "Question")
    server.answers["Question"] = "Another answer."
    page.click(".last .retry")
    page.wait_for_selector("text=Another answer.")
    assert texts(page) == ["Question", "Another answer."]
    assert server.bodies[0]["messages"] == server.bodies[1]["messages"]


def test_the_last_message_can_be_edited(open_page, server):
    """The edited message takes the place of the old one and of what came after it; Esc leaves everything as it was."""
    page = open_page()
    ask(page, "First")
    ask(page, "Secnd")
    page.press("#message", "ArrowUp")
    assert page.input_value("#message") == "Secnd"
    page.press("#message", "Escape")
    assert page.input_value("#message") == ""
    page.press("#message", "ArrowUp")
    ask(page, "Second", wait=False)
    page.wait_for_selector("text=Second")
    page.wait_for_selector(DONE)
    assert texts(page)[::2] == ["First", "Second"]
    assert [m["content"] for m in server.bodies[-1]["messages"] if m["role"] == "user"] == ["First", "Second"]


def test_conversations_survive_a_reload(open_page):
    """Several conversations, each with its messages and its system prompt; the one that was open is open again."""
    page = open_page()
    ask(page, "About cats")
    page.click("#new-chat")
    page.click("#settings-button")
    page.fill("#system", "Be brief.")
    ask(page, "About dogs")
    page.reload()
    page.wait_for_selector(DONE)
    assert page.locator("#conversation-list .open").all_inner_texts() == ["About dogs", "About cats"]
    assert texts(page) == ["About dogs", "The answer is 42, as ever."]
    assert page.input_value("#system") == "Be brief."
    other = page.context.new_page()
    other.goto(page.url)
    other.hover("#conversation-list li:has-text('dogs')")
    other.click("[aria-label='Delete “About dogs”']")
    page.wait_for_selector("#hello h2")  # what is deleted in one tab is gone in the other
    page.click("text=About cats")
    assert texts(page)[0] == "About cats" and page.input_value("#system") == ""
    assert page.title() == "About cats · lampejo"


def test_a_reload_in_the_middle_keeps_what_came(open_page):
    """Fault: a conversation that is kept only when its answer is complete."""
    page = open_page()
    ask(page, "wait", wait=False)
    page.wait_for_selector(".message.assistant:has-text('word2')")
    page.reload()
    page.wait_for_selector(DONE)
    assert texts(page)[0] == "wait" and "word2" in texts(page)[1] and page.is_visible("text=Stopped.")


def test_deleting_can_be_undone_and_what_is_exported_can_be_imported(open_page):
    """Fault: a slip of the finger that costs a conversation."""
    page = open_page()
    ask(page, "Keep me")
    page.hover("#conversation-list li")
    page.click("[aria-label='Delete “Keep me”']")
    assert page.locator("#conversation-list li").count() == 0 and page.is_visible("#hello")
    page.click("#toast >> text=Undo")
    assert texts(page)[0] == "Keep me"
    with page.expect_download() as download:
        page.click("#export-all")
    exported = json.loads(download.value.path().read_text("utf-8"))
    assert [m["content"] for m in exported["conversations"][0]["messages"]] == ["Keep me", PLAIN]
    page.click("#delete-all")
    page.reload()
    page.wait_for_selector("#hello h2")
    assert page.locator("#conversation-list li").count() == 0
    page.set_input_files("#import-file", download.value.path())
    page.wait_for_selector(DONE)
    assert texts(page)[0] == "Keep me" and page.locator("#conversation-list li").count() == 1
    page.set_input_files("#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": b'{"a": [1]}'})
    page.wait_for_selector("text=no conversations that were exported here")


def test_damaged_and_full_storage_are_told_and_cost_nothing_else(open_page):
    """Fault: one entry that cannot be read, or a storage that is full, and the page is blank."""
    page = open_page()
    ask(page, "Good one")
    page.evaluate('localStorage.setItem(\'lampejo.chat.x\', \'{"messages": [{"role": "user"\')')
    page.evaluate("localStorage.setItem('lampejo.chat.y', JSON.stringify({messages: [{role: 'user', content: 7}]}))")
    page.evaluate("localStorage.setItem('lampejo.settings', '[[[')")
    page.reload()
    page.wait_for_selector("text=could not be read")
    assert page.locator("#conversation-list .open").all_inner_texts() == ["Good one"]
    assert page.evaluate("localStorage.getItem('lampejo.broken.x')").startswith('{"messages"')
    page.click("[aria-label='Dismiss']")
    page.evaluate(
        "for (let n = 5e6; n >= 1; n = Math.floor(n / 2)) for (let i = 0; i < 9; i++) try {"
        "localStorage.setItem(`fill${n}.${i}`, 'x'.repeat(n)) } catch { break }"
    )
    ask(page, "One more")
    page.wait_for_selector("text=no room left")
    assert texts(page)[-2:] == ["One more", "The answer is 42, as ever."]


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


def test_nothing_that_a_model_writes_becomes_markup(open_page, server):
    """Cross-site scripting by an answer, its thoughts, a message, a title, a token: all of it stays text."""
    page = open_page()
    title = "</script><img src=x onerror=window.pwned=1>"
    server.answers[title] = server.thoughts[title] = EVIL
    ask(page, title)
    page.reload()
    page.wait_for_selector(DONE)
    page.click("#tab-speculation")
    page.fill("#trial-prompt", title)
    page.click("#trial-run")
    page.wait_for_selector("#trial-run:visible")
    page.wait_for_timeout(50)
    assert page.evaluate("window.pwned") is None
    assert page.locator("#main img, #main script, #main iframe, #main b, #menu img").count() == 0
    links = page.locator("#main a").evaluate_all("all => all.map((a) => a.protocol + a.rel)")
    assert set(links) == {"https:noopener noreferrer nofollow"}
    assert "<script>window.pwned=1</script>" in page.locator("#runs").inner_text()


def test_the_policy_blocks_what_is_not_of_the_server(open_page, running):
    """The content policy: no inline script, no inline handler, no foreign request, no frame around the page."""
    page = open_page()
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.pwned = 1";
          const image = document.createElement("img");
          image.setAttribute("onerror", "window.pwned = 1");
          image.src = "data:broken";
          document.body.append(script, image);
        }"""
    )
    assert page.evaluate("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'blocked')") == "blocked"
    page.wait_for_timeout(50)
    assert page.evaluate("window.pwned") is None
    blocked = [fault for fault in page.faults if "Content Security Policy" in fault]
    assert len(blocked) >= 3, page.faults
    page.faults.clear()


@pytest.mark.parametrize(
    "path", ["/", *(f"/web/{file.name}" for file in sorted(WEB.iterdir()) if file.suffix in (".js", ".css", ".svg"))]
)
def test_every_part_has_its_type_and_its_policy(running, path):
    """Fault: a part that a browser may take for something else, or one without the policy."""
    response = httpx.get(running[1] + path)
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200 and policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy and "base-uri 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}.get(
        path.rpartition(".")[2], "text/html"
    )
    assert response.headers["content-type"].startswith(kind)
    again = httpx.get(running[1] + path, headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_the_page_has_no_way_to_write_html():
    """Text is never injected as HTML, there is nothing inline, and no address of another server."""
    for file in WEB.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser",
            file.read_text("utf-8"),
        ), file
    page = (WEB / "index.html").read_text("utf-8")
    assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=|https?:", page)


def test_code_blocks_and_answers_can_be_copied(open_page, server, running):
    """Copies the text as the model wrote it, not as it is shown."""
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=running[1])
    server.answers["code"] = 'Here:\n\n```python\nif a < b:\n    print("&amp;")\n```\n\nDone.'
    ask(page, "code")
    assert page.inner_text(".code figcaption span") == "python"
    page.click(".code [aria-label='Copy code']")
    page.wait_for_selector(".code [aria-label='Copied']")
    assert page.evaluate("navigator.clipboard.readText()") == 'if a < b:\n    print("&amp;")'
    page.click(".last .actions [aria-label='Copy']")
    page.wait_for_selector(".last .actions [aria-label='Copied']")
    assert page.evaluate("navigator.clipboard.readText()") == server.answers["code"]


def test_markdown_is_shown_as_it_is_meant(open_page, server):
    """Headings, nested lists, quotes, tables, emphasis, links; and what only looks like markdown stays text."""
    page = open_page()
    server.answers["md"] = (
        "# Title #\n\nOne *two* **three** `f(*x)` snake_case_name 2 * 3 * 4 ~~gone~~\nnext line\n\n"
        "3. three\n   - inner\n     more\n4. four\n\n> quoted\n> on\n\n| a | b |\n|---|--:|\n| `x|y` | 1 |\n\n---\n\n"
        "See https://example.org/a_b_c. And [this](https://example.org/x_(y)) or "
        "<https://example.org>, not [that](x).\n\n"
        "```\nopen fence"
    )
    ask(page, "md")
    prose = page.locator(".last .text")
    assert prose.locator("h3").inner_text() == "Title"
    assert [prose.locator(tag).first.inner_text() for tag in ("em", "strong", "p code", "del")] == [
        "two",
        "three",
        "f(*x)",
        "gone",
    ]
    first = prose.locator("p").first.inner_text()
    assert first == "One two three f(*x) snake_case_name 2 * 3 * 4 gone\nnext line"
    assert prose.locator("ol").get_attribute("start") == "3" and prose.locator("ol > li").count() == 2
    assert prose.locator("ol ul li").inner_text() == "inner\nmore"
    assert prose.locator("blockquote").inner_text() == "quoted\non"
    assert prose.locator("th").all_inner_texts() == ["a", "b"] and prose.locator("td").count() == 2
    hrefs = prose.locator("a").evaluate_all("all => all.map((a) => a.href)")
    assert hrefs == ["https://example.org/a_b_c", "https://example.org/x_(y)", "https://example.org/"]
    assert "not [that](x)." in prose.inner_text() and prose.locator("hr").count() == 1
    assert prose.locator("pre").inner_text() == "open fence"


def test_markdown_that_would_take_long_does_not(open_page, server):
    """Fault: an answer of brackets and stars on which a page hangs; the browser itself would give up."""
    page = open_page()
    for mark in ("[", "*", "**a ", "`", "_a", "> ", "- ", "| ", "<https://", "![](", "#" * 6 + " "):
        seconds = page.evaluate(
            """async (text) => {
              const { Markdown } = await import("./web/markdown.js");
              const start = performance.now();
              new Markdown(document.createElement("div")).show(text);
              return (performance.now() - start) / 1000;
            }""",
            mark * (20_000 // len(mark)),
        )
        assert seconds < 5, mark


def test_reasoning_is_folded(open_page, server):
    """Thoughts are there for who opens them, and are not sent back to the model."""
    page = open_page()
    server.thoughts["Hard"] = "Let me think about it."
    ask(page, "Hard")
    assert not page.is_visible("text=Let me think")
    page.click("text=Thoughts")
    assert page.is_visible("text=Let me think")
    page.click("#menu [data-language=pt]")
    assert page.is_visible("text=Let me think")
    ask(page, "Next")
    assert {"role": "assistant", "content": PLAIN} in server.bodies[-1]["messages"]


def test_settings_are_sent_checked_and_kept(open_page, server):
    """Only what is filled in is sent; what is not valid is told beside its field and left out."""
    page = open_page()
    page.click("#settings-button")
    for name, value in {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "max_tokens": "64",
        "seed": "7",
    }.items():
        page.fill(f"#field-{name}", value)
    page.select_option("#thinking", "off")
    page.click("label.switch:has(#drafts)")
    page.reload()
    page.wait_for_selector("#settings[open]")
    page.fill("#field-top_p", "7")
    assert page.inner_text("#field-top_p-hint") == "From 0.01 to 1."
    page.fill("#field-top_k", "1.5")
    assert page.inner_text("#field-top_k-hint") == "Whole numbers only."
    ask(page, "Hello")
    body = server.bodies[-1]
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    assert {name: body[name] for name in names if name in body} == {
        "temperature": 0.7,
        "min_p": 0.05,
        "max_tokens": 64,
        "seed": 7,
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["lampejo"]["drafts"] is False
    page.click("#reset")
    page.click(".last .retry")
    page.wait_for_selector(DONE)
    assert not set(names) & set(server.bodies[-1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(open_page, scheme):
    """Light and dark, by the system or by the switch, which is remembered."""
    page = open_page(color_scheme=scheme)
    luminance = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    is_dark = page.evaluate(luminance) < 200
    assert is_dark == (scheme == "dark")
    page.click("#theme")
    assert (page.evaluate(luminance) < 200) != is_dark
    page.reload()
    assert (page.evaluate(luminance) < 200) != is_dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(open_page, server, scheme):
    """WCAG AA: a contrast of 4.5 to 1 for every text that is shown, in both themes and both views."""
    page = open_page(color_scheme=scheme)
    server.answers["all"] = "# T\n\na `b` [c](https://example.org)\n\n> q\n\n```\nd\n```\n\n| e |\n|---|\n| f |"
    server.differs_without_drafts = True
    ask(page, "all")
    page.click("#settings-button")
    weak = page.evaluate(CONTRAST)
    server.failure = (429, "Too many requests.")
    ask(page, "again", wait=False)
    page.wait_for_selector(".problem")
    weak += page.evaluate(CONTRAST)
    page.click("#tab-speculation")
    page.click("#trial-compare")
    page.wait_for_selector("#verdict:visible")
    weak += page.evaluate(CONTRAST)
    assert weak == []


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, under) => top.slice(0, 3).map((part, i) => (part * top[3] + under[i] * (255 - top[3])) / 255);
  const light = (rgb) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const own = rgba(getComputedStyle(node).backgroundColor);
    return own[3] === 255 || !node.parentElement ? own.slice(0, 3) : over(own, ground(node.parentElement));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const weak = [];
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest(".offscreen, .skip, noscript, option")) continue;
    const style = getComputedStyle(node);
    const color = rgba(node.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(over(color, ground(node))), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push(`${text.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return weak;
}"""


@pytest.mark.parametrize("locale", ["en-US", "pt-BR"])
def test_a_phone_of_360_pixels_needs_no_sideways_scrolling(open_page, server, locale):
    """Both languages, all views and drawers, with long words, wide code and wide tables."""
    page = open_page(viewport=PHONE, locale=locale, has_touch=True)
    cells = "| " + " | ".join(f"column{i}" for i in range(9)) + " |\n"
    server.answers["wide"] = (
        f"{'long' * 60}\n\n```\n{'code ' * 60}\n```\n\n{cells}{'|---' * 9}|\n{cells}\n`{'x' * 200}`"
    )
    seen = {}

    def look(name: str) -> None:
        boxes = "[...document.querySelectorAll('html, body, .page, .view, .scroll, dialog[open]')]"
        widths = f"{boxes}.filter((n) => n.checkVisibility())"
        seen[name] = page.evaluate(f"Math.max(...{widths}.map((n) => n.scrollWidth - n.clientWidth))")
        outside = "[...document.querySelectorAll('button, input, select, textarea')].filter((n) => n.checkVisibility())"
        assert (
            page.evaluate(f"{outside}.filter((n) => n.getBoundingClientRect().right > innerWidth + 1).length") == 0
        ), name

    look("empty")
    page.fill("#message", "wide")
    page.click("#send")
    page.wait_for_selector(DONE)
    look("answer")
    page.click("#settings-button")
    look("settings")
    page.keyboard.press("Escape")
    page.click("#menu-button")
    look("menu")
    page.mouse.click(350, 300)
    assert not page.is_visible("#menu")
    server.failure = (500, "x" * 300)
    page.click(".last .retry")
    page.wait_for_selector(".problem")
    look("problem")
    page.click("#tab-speculation")
    page.fill("#trial-prompt", "wide")
    page.click("#trial-compare")
    page.wait_for_selector("#verdict:visible")
    look("speculation")
    assert set(seen.values()) == {0}, seen


def test_both_languages_say_everything(open_page):
    """The browser's language first, then the one that was chosen; no word is missing in either."""
    page = open_page(locale="pt-BR")
    assert page.get_attribute("html", "lang") == "pt-BR"
    assert page.inner_text("#tab-chat") == "Conversa" and page.get_attribute("#send", "aria-label") == "Enviar"
    ask(page, "Oi")
    page.click("#menu [data-language=en]")
    assert page.inner_text("#tab-chat") == "Chat" and texts(page)[1] == "The answer is 42, as ever."
    page.reload()
    assert page.inner_text("#tab-chat") == "Chat"
    both = page.evaluate(
        """async () => {
          const { STRINGS } = await import("./web/strings.js");
          const kind = (word) => (typeof word === "string" ? "text" : `${typeof word} ${word.length}`);
          const shape = (words) => Object.entries(words).map(([name, word]) => `${name} ${kind(word)}`);
          const isSaid = (word) => word.length > 0 || typeof word === "function";
          return [shape(STRINGS.en), shape(STRINGS.pt), Object.values(STRINGS.pt).every(isSaid)];
        }"""
    )
    assert both[0] == both[1] and both[2]
    used = set(re.findall(r'data-(?:t|label|hint|placeholder)="(\w+)"', (WEB / "index.html").read_text("utf-8")))
    for file in WEB.glob("*.js"):
        used |= set(re.findall(r'\bt\("(\w+)"', file.read_text("utf-8")))
    assert used - {line.split()[0] for line in both[0]} == set()


FAILURES = {
    400: ("top_p is 7; it must be at most 1.", "Change the message or the settings"),
    404: ("The model 'x' is not here.", "Load the page again"),
    413: ("The body is longer than 16,000,000 bytes.", "Shorten the message"),
    429: ("9 requests are running or waiting; try again later.", "Try again in 7 s."),
    500: ("The engine has failed: out of memory", "start the server anew"),
    503: ("The server is shutting down.", "Wait until the server is back"),
}


def test_what_goes_wrong_is_told_with_the_remedy(open_page, server):
    """Every refusal shows the server's words and what to do; the message is not lost, and trying again works."""
    page = open_page()
    ask(page, "Question", wait=False)
    page.wait_for_selector(DONE)
    for status, (message, remedy) in FAILURES.items():
        server.failure = (status, message)
        page.click(".retry")
        page.wait_for_selector(".problem")
        assert message in page.inner_text(".problem") and remedy in page.inner_text(".problem")
        assert texts(page) == ["Question"]
    page.click(".problem .retry")
    page.wait_for_selector(DONE)
    assert texts(page) == ["Question", "The answer is 42, as ever."]


def test_the_end_of_an_answer_takes_nothing_out_of_the_hands(open_page, server):
    """Fault: a selection, or a field that somebody is writing in, that is lost when an answer ends."""
    page = open_page()
    ask(page, "Question")
    page.click("#settings-button")
    ask(page, "wait", wait=False)
    page.wait_for_selector(".message.live:has-text('word')")
    page.focus("#field-temperature")
    page.keyboard.type("0.")
    page.evaluate("document.querySelector('#stop').click()")
    page.wait_for_selector("text=Stopped.")
    page.keyboard.type("5")
    assert page.input_value("#field-temperature") == "0.5"
    page.click(".last .retry")
    page.wait_for_selector(".message.live:has-text('word')")
    page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('.text.prose')[0])")
    page.evaluate("document.querySelector('#stop').click()")
    page.wait_for_selector("text=Stopped.")
    assert page.evaluate("getSelection().toString()").strip() == "The answer is 42, as ever."


def test_a_stream_that_fails_or_breaks_off_keeps_its_text(open_page, server, running):
    """Fault: half an answer that looks like a whole one. And the server that cannot be reached at all."""
    page = open_page()
    ask(page, "fail midway")
    assert "The engine has failed: out of luck" in page.inner_text(".problem") and len(texts(page)) == 2
    ask(page, "break off")
    page.wait_for_selector(".problem >> text=broke off")
    assert texts(page)[-1] == "The"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "nobody there", wait=False)
    page.wait_for_selector(".problem >> text=cannot be reached")
    assert "lampejo serve" in page.inner_text(".problem")


def test_an_answer_cut_at_its_limit_says_so(open_page, server):
    """finish_reason "length" is not an end that the model chose."""
    page = open_page()
    server.finish_reason = "length"
    ask(page, "Long")
    assert "Cut at the limit of tokens" in page.inner_text(".last")


def test_a_server_with_a_key_is_asked_with_one(open_page, server):
    """401 opens a dialog; the key is kept for the tab alone, not beside the conversations; the question goes on."""
    server.key = "s3cret"
    page = open_page()
    page.wait_for_selector("#key[open]")
    page.keyboard.press("Escape")
    ask(page, "Question", wait=False)
    page.wait_for_selector("#key[open]")
    page.fill("#key-value", "wrong")
    page.press("#key-value", "Enter")
    page.wait_for_selector("#key-wrong:visible")
    page.fill("#key-value", "s3cret")
    page.press("#key-value", "Enter")
    page.wait_for_selector(DONE)
    assert texts(page) == ["Question", "The answer is 42, as ever."]
    assert "s3cret" not in page.evaluate("JSON.stringify(localStorage)") and "s3cret" not in page.content()
    page.reload()
    ask(page, "Again")
    assert len(texts(page)) == 4


def test_everything_is_within_reach_of_the_keyboard(open_page, server):
    """Enter, Shift+Enter, Esc, the shortcuts and their list; every control has a name, and focus is to be seen."""
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#message") == "one\ntwo"
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    assert server.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    page.keyboard.press("Control+Shift+Enter")
    page.wait_for_selector(DONE)
    assert len(server.bodies) == 2
    page.keyboard.press("Control+/")
    assert page.locator("#shortcuts dt").count() == page.locator("#shortcuts dd").count() == 9
    page.keyboard.press("Escape")
    assert not page.is_visible("#shortcuts")
    page.keyboard.press("Control+,")
    assert page.evaluate("document.activeElement.id") == "system"
    page.keyboard.press("Control+,")
    page.keyboard.press("Control+Shift+O")
    assert page.is_visible("#hello") and page.evaluate("document.activeElement.id") == "message"
    page.keyboard.press("Control+Shift+V")
    assert page.is_visible("#speculation") and page.url.endswith("#speculation")
    page.focus("#tab-speculation")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#chat") and page.evaluate("document.activeElement.id") == "tab-chat"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    nameless = """[...document.querySelectorAll('button, input, select, textarea, dialog')].filter(
      (n) => !(n.ariaLabel || n.textContent.trim() || n.labels?.length || n.getAttribute('aria-labelledby')))"""
    assert page.evaluate(f"{nameless}.map((node) => node.outerHTML)") == []
    assert page.get_attribute("#status", "role") == "status"
    assert page.inner_text("#status").startswith("The answer is complete. The answer is")


def test_an_answer_goes_on_while_another_conversation_is_read(open_page):
    """Fault: words of one conversation in another."""
    page = open_page()
    ask(page, "wait in the back", wait=False)
    page.wait_for_selector(".message.live:has-text('word')")
    page.click("#new-chat")
    ask(page, "Question")
    assert texts(page) == ["Question", "The answer is 42, as ever."]
    page.click("text=wait in the back")
    page.wait_for_selector(".message.live:has-text('word9')")
    page.click("#stop")
    page.wait_for_selector("text=Stopped.")


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
