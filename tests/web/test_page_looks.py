"""How the page looks and is operated: settings, light and dark, a phone, both languages, the keyboard."""

import re

import pytest

from page_checks import DONE, PHONE, WEB, ask, texts

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
