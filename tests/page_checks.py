"""What the tests of the page do in it."""

from pathlib import Path

WEB = Path(__file__).parent.parent / "src" / "lampejo" / "web"
DONE = ".message.assistant.last:not(.live)"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 640}


def ask(page, text: str, *, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector(DONE)


def texts(page) -> list[str]:
    return page.locator("#messages .text").all_inner_texts()
