"""``lampejo serve`` as a process: its start, its end by signals, its exit codes; connections that break."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from makefiles import write_target

from lampejo import cli_serve
from lampejo.cli import USER_MISTAKE, main
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig
from scripted import ids_of, knowing
from server_app import chat, listening, model_saying

PATIENCE = 60
STORY = "A flash of light, then another, and so on until the morning came. "
PROGRAM = """
    import sys, time
    from pathlib import Path
    from lampejo.cli import main
    from lampejo.cli_options import ModelOptions
    from scripted import EOS, scripted_llm

    def target(text):
        # An answer goes on, slowly, until there is a file.
        if Path(sys.argv[1]).exists():
            return EOS
        time.sleep(0.01)
        return 60

    llm = scripted_llm(target)
    llm.info.update(
        model="tiny", drafters=[], drafter="none", width="auto", kv_dtype="float32", kv_bytes_per_token=8,
        state_bytes_per_request=0,
    )
    ModelOptions.load = lambda options: llm
    sys.exit(main(["serve", "--port", "0", *sys.argv[2:]]))
"""


class Served:
    """A server of its own process. ``go`` lets answers come to their ends."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.file = folder / "go"
        self.connections: list[http.client.HTTPConnection] = []
        program = textwrap.dedent(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, str(self.file), *flags],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.banner = self.process.stderr.readline() + self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.banner)
        assert found, self.banner + self.process.stderr.read()
        self.port = int(found[1])

    def go(self) -> None:
        self.file.touch()

    def connect(self) -> http.client.HTTPConnection:
        self.connections.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE))
        return self.connections[-1]

    def get(self, path: str) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()

    def ask(self, **fields: Any) -> http.client.HTTPResponse:
        connection = self.connect()
        body = json.dumps(chat(**fields))
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def end(self) -> tuple[int, str]:
        """Exit code and what stood in its log since the start."""
        _, log = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, log


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    started: list[Served] = []

    def start(*flags: str) -> Served:
        started.append(Served(tmp_path, *flags))
        return started[-1]

    yield start
    for served in started:
        served.process.kill()
        served.process.communicate()
        for connection in served.connections:
            connection.close()


def test_told_to_end_it_refuses_new_calls_ends_those_that_run_and_exits_with_0(serve):
    """O1: by SIGTERM, as containers and service managers do it. Connections that clients keep do not hold it up."""
    served = serve("--grace", "50")
    kept = served.connect()
    kept.request("GET", "/health")
    assert json.loads(kept.getresponse().read())["mode"] == "plain decoding"
    assert "the page at /" in served.banner and "no API key" in served.banner
    response = served.ask(stream=True)
    begun = response.readline()
    assert begun.startswith(b"data: ")
    served.process.send_signal(signal.SIGTERM)
    while (status := served.get("/health")[0]) == 200:
        pass
    assert status == 503
    assert served.ask().status == 503
    served.go()
    text = (begun + response.read()).decode()
    assert '"finish_reason":"stop"' in text and text.endswith("data: [DONE]\n\n")
    assert served.end() == (0, "lampejo: ending what runs (1); told again, it is cut off\n")
    with pytest.raises(ConnectionRefusedError):
        served.get("/health")


def test_requests_that_outlast_the_grace_time_are_cut_off(serve):
    """O1: the process is gone within that time, whatever still runs."""
    served = serve("--grace", "0.1")
    response = served.ask(stream=True)
    response.readline()
    served.process.send_signal(signal.SIGINT)
    code, log = served.end()
    assert code == 0 and log.splitlines()[1:] == ["lampejo: after 0.1 seconds, what still runs is cut off"]
    assert b'"message":"The server is shutting down."' in response.read()


def test_told_twice_it_ends_at_once(serve):
    """O1: a person with Ctrl-C need not wait for others' requests."""
    served = serve("--grace", "1000")
    response = served.ask(stream=True)
    response.readline()
    served.process.send_signal(signal.SIGINT)
    while served.get("/health")[0] == 200:
        pass
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0
    assert b'"message":"The server is shutting down."' in response.read()


def test_a_body_that_never_comes_is_refused_at_the_end_of_the_server(serve):
    """O1. Fault: 500 for its sender, and a traceback in the log."""
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as half:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
        served.get("/health")  # after which the half has arrived too
        served.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: half.recv(65536), b""))
    assert served.end() == (0, "")
    assert answer.startswith(b"HTTP/1.1 503 ") and b"The server is shutting down." in answer


async def test_told_to_end_while_it_starts_it_ends(monkeypatch):
    """O1. Fault: a signal before the loop is known is an AttributeError."""
    with model_saying("Hi") as llm, socket.create_server(("127.0.0.1", 0)) as listener:
        config = ServerConfig()
        server = cli_serve.Server(make_app(llm, config), config)
        load = uvicorn.Config.load

        def told_meanwhile(config: uvicorn.Config) -> None:
            server.handle_exit(signal.SIGTERM, None)
            load(config)

        monkeypatch.setattr(uvicorn.Config, "load", told_meanwhile)
        async with asyncio.timeout(PATIENCE):
            await server.serve([listener])
    assert server.should_exit


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/metrics"])
def test_what_answers_get_answers_head_without_a_body(path):
    """Load balancers and `curl -I` ask so; what follows on the connection is the next answer, not a body."""
    with model_saying("Hi") as llm, listening(llm) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        for method in ("HEAD", "GET"):
            connection.request(method, path)
            response = connection.getresponse()
            length, body = int(response.headers["Content-Length"]), response.read()
            assert (response.status, len(body)) == (200, length if method == "GET" else 0)
            assert length > 0
        connection.close()


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys, monkeypatch):
    """Fault: a traceback after minutes of loading."""
    monkeypatch.setattr(cli_serve, "_load", lambda options: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == USER_MISTAKE
    error = capsys.readouterr().err
    assert f"Port {port} of 127.0.0.1 is taken" in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("models") / "Tiny-Chat", vocab_size=260, hidden_size=32)
    with model_saying("x") as llm:
        llm.tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_a_drafter_that_cannot_be_loaded_stops_the_start_unless_plain_is_allowed(
    tiny_folder, tmp_path, capsys, monkeypatch
):
    """C9: the mode that results is told in the banner."""
    monkeypatch.setattr(cli_serve.Server, "run", lambda *_, **__: None)
    argv = ["serve", str(tiny_folder), "--port", "0", "--drafter", str(tmp_path)]
    assert main(argv) == USER_MISTAKE
    assert "drafter" in capsys.readouterr().err
    assert main([*argv, "--allow-plain"]) == 0
    error = capsys.readouterr().err
    assert "warning: no DFlash drafter: " in error and "drafts by ngram" in error
    missing = ["serve", str(tmp_path), "--port", "0", "--allow-plain"]
    assert main(missing) == USER_MISTAKE, "it was not the drafter that could not be loaded"


def test_a_hundred_connections_that_break_leave_nothing_behind():
    """M6: over TCP, at all places of an answer: no row, no page, no request stays; the next answer is right."""
    llm = model_saying(STORY, [knowing(ids_of(STORY))], width=5, page_size=8, max_rows=2)
    with llm, listening(llm) as (port, service):
        body = json.dumps(chat(stream=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for i in range(100):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
                connection.sendall(request[: len(request) - (i % 10 == 9)])  # now and then not even the whole body
                for _ in range(i % 10 % 9):
                    connection.recv(200)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", json.dumps(chat()), {"Content-Type": "application/json"})
        told = json.loads(connection.getresponse().read())
        connection.close()
        assert told["choices"][0]["message"]["content"] == STORY
        while service.num_active or llm.engine.has_work:
            pass
        llm.engine.pool.check_integrity()
        assert llm.engine.pool.num_free == llm.engine.pool.num_pages
