"""``lampejo serve``: every flag reaches the server, and what is unsafe is refused before a model is loaded."""

from collections.abc import Callable
from typing import Any

import pytest

from lampejo import cli_serve
from lampejo.cli import USER_MISTAKE, main
from lampejo.cli_serve import ServeOptions
from lampejo.server.config import Security, ServerConfig
from scripted import EOS, scripted_llm


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeOptions]:
    """What a command line asks for; nothing is loaded."""
    asked: list[ServeOptions] = []
    monkeypatch.delenv("LAMPEJO_API_KEY", raising=False)
    monkeypatch.setattr(cli_serve, "serve", lambda options: asked.append(options) or 0)

    def run(*argv: str) -> ServeOptions:
        assert main(["serve", *argv]) == 0
        return asked.pop()

    return run


def test_without_flags_only_this_machine_is_served(serve):
    """O3: the default is the safe one, and the model answers to the name that was typed."""
    options = serve("smollm2")
    assert options.server == ServerConfig(names=("smollm2",))
    assert (options.server.host, options.server.security) == ("127.0.0.1", Security())
    assert not options.access_log


def test_every_flag_of_the_network_reaches_the_server(serve, tmp_path, monkeypatch):
    """Security and observability."""
    file = tmp_path / "keys"
    file.write_text("sk-file\n", "utf-8")
    monkeypatch.setenv("LAMPEJO_API_KEY", "sk-environment")
    flags = "--host 0.0.0.0 --port 0 --name coder --name chat --metrics-compat vllm --access-log --cors https://a.org"
    options = serve("smollm2", *flags.split(), "--api-key", "sk-flag", "--api-key-file", str(file))
    assert options.access_log
    assert options.server == ServerConfig(
        host="0.0.0.0",
        port=0,
        names=("coder", "chat", "smollm2"),
        vllm_metrics=True,
        security=Security(("sk-flag", "sk-environment", "sk-file"), ("https://a.org",)),
    )
    assert "sk-" not in repr(options)
    assert serve("--host", "0.0.0.0", "--insecure").server.security == Security(insecure=True)


def test_a_server_that_is_open_to_others_says_so(monkeypatch):
    """O3: --insecure was typed once and is forgotten by the next day."""
    monkeypatch.setattr(cli_serve, "drafting_mode", lambda info: "plain decoding")
    monkeypatch.setattr(cli_serve, "memory_words", lambda info: "")
    with scripted_llm(lambda text: EOS) as llm:
        llm.info["model"] = "tiny"
        for config, words in (
            (ServerConfig(), "(no API key)"),
            (ServerConfig(security=Security(("k1", "k2"))), "(2 API keys)"),
            (ServerConfig(security=Security(insecure=True)), "(no API key)"),
            (ServerConfig(host="::", security=Security(insecure=True)), "(no API key: open to all who can reach it)"),
        ):
            lines = cli_serve.banner(llm, config, "http://x")
            assert words in lines[0]
            assert "k1" not in "".join(lines)


def test_a_path_of_this_machine_is_no_name(serve, tmp_path):
    """Fault: /v1/models that tells strangers where things lie."""
    assert serve(str(tmp_path)).server.names == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--host", "0.0.0.0"], "no API key is set"),
        (["--host", "::"], "no API key is set"),
        (["--cors", "example.org"], "--cors"),
        (["--api-key", ""], "API key is empty"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read"),
        (["--port", "70000"], "--port"),
    ],
)
def test_what_is_unsafe_or_cannot_work_is_one_line_before_any_model_is_loaded(argv, message, serve: Any, capsys):
    """O3: also for a person who did not read the manual."""
    assert main(["serve", *argv]) == USER_MISTAKE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
