"""The examples of docs/serving.md run: its Python and its curl commands, against a server that knows what they ask."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from lampejo.answer import style_of
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from page_server import serving
from scripted import ids_of, make_tokenizer, scripted_llm
from server_app import QWEN, saying

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"
SEAS = "The Baltic Sea, the Red Sea, the Coral Sea."
LARGEST = '{"name":"Philippine Sea","area_km2":5695000}'
UMBRELLA = '<tool_call>\n{"name": "weather", "arguments": {"city": "Recife"}}\n</tool_call>'
UMBRELLA = UMBRELLA.replace("\n", "#")  # as ``make_tokenizer`` spells line ends here
ANSWERS = {"largest sea": LARGEST, "umbrella": UMBRELLA, "Count": "One, two, three."}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def curls() -> list[list[str]]:
    """The words of each command."""
    one = re.compile(r"^curl .*?(?=^curl |\Z)", re.MULTILINE | re.DOTALL)
    return [shlex.split(found.replace("\\\n", " ")) for block in blocks("sh") for found in one.findall(block)]


@pytest.fixture(scope="module")
def url():
    """A server that answers by what the last question is about, by the name that the examples use."""
    targets = {tuple(ids_of(topic)): saying(answer) for topic, answer in ANSWERS.items()}
    other = saying(SEAS)

    def target(text: Any) -> Any:
        text = tuple(text)
        for topic, answer in targets.items():
            if any(text[i : i + len(topic)] == topic for i in range(len(text))):
                return answer(text)
        return other(text)

    llm = scripted_llm(target, tokenizer=make_tokenizer("\n"))
    llm.chat_template, llm.style = QWEN, style_of(QWEN)
    with llm, serving(make_app(llm, ServerConfig(names=("coder",)))) as url:
        yield url


@pytest.mark.parametrize("number", range(len(blocks("python"))))
@pytest.mark.filterwarnings("ignore")  # examples leave their clients open
def test_each_python_example_prints_what_was_answered(url, number):
    """C8: as it stands, but for the address."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    code = blocks("python")[number]
    assert ADDRESS in code
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code.replace(ADDRESS, url), f"example {number}", "exec"), {"__name__": "example"})
    assert any(word in out.getvalue() for word in (SEAS, "Philippine", "Recife")), out.getvalue()


@pytest.mark.parametrize("words", curls(), ids=lambda words: words[-1][:40])
def test_each_curl_command_is_answered(url, words):
    """C8: path, header and body."""
    (address,) = [word for word in words if word.startswith("http")]
    headers = dict([words[words.index("-H") + 1].split(": ")])
    body = words[words.index("-d") + 1]
    response = httpx.post(address.replace(ADDRESS, url), content=body, headers=headers)
    assert response.status_code == 200, response.text
    if json.loads(body).get("stream"):
        assert response.text.startswith(("data: ", "event: "))
    else:
        assert response.json()
