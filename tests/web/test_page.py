"""The page at / in headless Chromium: it streams, stops, retries, remembers, and tells what goes wrong."""

import json

from page_checks import DONE, ask, texts
from page_server import PLAIN


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
