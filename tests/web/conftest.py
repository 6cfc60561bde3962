"""A browser for the tests of the page, and what it talks to."""

import os
import shutil
from collections.abc import Iterator

import pytest

from page_checks import WIDE
from page_server import PageServer, serving

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser():
    reason = "the page is tested with playwright, of the dev extra"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium: apt-get install chromium, or name one in CHROMIUM")
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
