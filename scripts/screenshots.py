"""Takes the pictures of the page in docs/images: starts `lampejo serve` with the default model, asks as a person would.

    python scripts/screenshots.py [--model MODEL]

Needs Chromium (CHROMIUM names another than /usr/bin/chromium) and playwright, of the dev extra. What the pictures show
is what the model wrote and how fast it was on this machine at that time.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MAX_BYTES = 200_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
DONE = ".message.assistant.last:not(.live)"
WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US"}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 1.5, "has_touch": True}
QUESTION = "Write a Python function that adds two numbers, then a test for it."
POEM = "Write a short poem about the sea."


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "lampejo", "serve", model, "--port", str(port)])
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def take(page: Page, name: str) -> None:
    """Writes docs/images/NAME.png."""
    page.mouse.move(640, 5)
    page.wait_for_timeout(900)  # until what moves has come to rest
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path.relative_to(IMAGES.parent.parent)}: {path.stat().st_size:,} bytes")
    assert path.stat().st_size < MAX_BYTES


def open_page(browser: Browser, url: str, **options: Any) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_selector("#examples li")
    return page


def ask(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.click("#send")
    page.wait_for_selector(DONE)


def limit(page: Page, max_tokens: int) -> None:
    page.click("#settings-button")
    page.fill("#field-max_tokens", str(max_tokens))
    page.click("[data-close=settings]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with serving(args.model) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=FLAGS)

        page = open_page(browser, url, **WIDE)
        limit(page, 200)
        ask(page, "What is a rainbow? Answer in two sentences.")
        page.click("#new-chat")
        ask(page, QUESTION)
        page.locator("#scroll").evaluate("(node) => { node.scrollTop = 0; }")
        take(page, "page-chat")

        page.click("#tab-speculation")
        page.fill("#trial-prompt", POEM)
        page.click("#trial-run")
        page.wait_for_selector("#survival svg")
        take(page, "page-speculation")
        page.click("#theme")
        page.click("#trial-compare")
        page.wait_for_selector("#verdict:visible")
        page.locator("#speculation .scroll").evaluate("(node) => { node.scrollTop = 150; }")
        take(page, "page-compare")

        page = open_page(browser, url, **PHONE, locale="pt-BR", color_scheme="dark")
        limit(page, 160)
        ask(page, QUESTION)
        take(page, "page-phone")
        browser.close()


if __name__ == "__main__":
    main()
