"""Texts of a model in the page: nothing in them runs, Markdown is shown as it is meant."""

import re

import httpx
import pytest

from page_checks import DONE, WEB, ask

EVIL = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\n\n'
    "</script><svg onload=window.pwned=1>\n\n"
    "[click](javascript:window.pwned=1) ![x](javascript:window.pwned=1)\n\n"
    "[d](data:text/html,<script>pwned=1</script>)\n\n"
    "| <b onclick=window.pwned=1>a</b> | [b](JaVaScRiPt:pwned=1) |\n"
    "|---|---|\n| <iframe src=javascript:pwned=1> | x |\n\n"
    '```html"><img src=x onerror=pwned=1>\n<script>window.pwned=1</script>\n```\n\n<https://example.org/"onclick=pwned=1>'
)


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
