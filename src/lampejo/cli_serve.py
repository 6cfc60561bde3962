"""`lampejo serve`: a model behind HTTP, until somebody ends it."""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from lampejo.api import LLM
from lampejo.cli_options import ModelOptions
from lampejo.errors import UserError, why
from lampejo.server import access_log
from lampejo.server.app import make_app
from lampejo.server.config import ServerConfig, is_loopback
from lampejo.server.service import Service
from lampejo.terminal import drafting_mode, memory_words


@dataclass(frozen=True)
class ServeOptions:
    """allow_plain: serve without the drafter if it cannot be loaded; access_log: a line of JSON per call."""

    model: ModelOptions
    server: ServerConfig
    allow_plain: bool = False
    access_log: bool = False


def serve(options: ServeOptions) -> int:
    """Returns the exit code: 0 when it was told to end, 1 when the engine failed."""
    with _listen(options.server) as listener:
        host, port = listener.getsockname()[:2]
        with _load(options) as llm:
            if options.access_log:
                access_log.enable()
            logging.basicConfig(format="lampejo: %(message)s", level=logging.WARNING)
            app = make_app(llm, options.server)
            service: Service = app.state.service
            server = Server(app, options.server)
            for line in banner(llm, options.server, f"http://{f'[{host}]' if ':' in host else host}:{port}"):
                print(line, file=sys.stderr, flush=True)
            server.run(sockets=[listener])
            return 1 if service.error is not None else 0


def banner(llm: LLM, config: ServerConfig, url: str) -> list[str]:
    """What a person wants to know at the start, above all how it decodes."""
    info = llm.info
    names = [*config.names, info["model"]]
    keys = len(config.security.api_keys)
    access = f"{keys} API key{'s' if keys > 1 else ''}" if keys else "no API key"
    if not keys and not is_loopback(config.host):
        access += ": open to all who can reach it"
    return [
        f"lampejo: {names[0]} at {url} ({access}): the page at /, OpenAI's API at /v1, Anthropic's at /v1/messages",
        f"lampejo: {drafting_mode(info)}; context of {llm.max_context:,} tokens, "
        f"{llm.engine.scheduler.max_rows} requests at once; {memory_words(info)}",
    ]


def _listen(config: ServerConfig) -> socket.socket:
    """Before the model is loaded: a port that is taken is told at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {config.port} of {config.host} is taken.", "End what listens there, or choose another --port."
            ) from None
        raise UserError(f"Nothing can listen at {config.host}, port {config.port}: {why(error)}.") from None
    return listener


def _load(options: ServeOptions) -> LLM:
    try:
        return options.model.load()
    except UserError as error:
        if not options.allow_plain or options.model.drafter in ("none", "ngram"):
            raise
        plain = options.model.without_dflash()
        llm = plain.load()  # or it was not the drafter
        print(f"lampejo: warning: no DFlash drafter: {error}", file=sys.stderr)
        return llm


class Server(uvicorn.Server):
    """Ends in order: told to end, it refuses new requests, ends those that run, and goes; told again, it cuts them
    off, as it does when the grace time is over."""

    def __init__(self, app: object, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                lifespan="off",
            )
        )
        self._service: Service = app.state.service  # type: ignore[attr-defined]
        self._grace_s = config.grace_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        todo = self._cut_off if self._service.draining else self._begin_to_drain
        self._service.draining = True
        self._loop.call_soon_threadsafe(todo)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()  # before signals are listened to
        await super().serve(sockets)

    def _begin_to_drain(self) -> None:
        self._service.ending.set()
        self._draining = self._loop.create_task(self._drain())

    def _cut_off(self) -> None:
        self._service.llm.frontend.stop()  # whoever waits for an answer hears of it

    async def _drain(self) -> None:
        idle, num_active = self._service.idle, self._service.num_active
        if num_active:
            print(f"lampejo: ending what runs ({num_active}); told again, it is cut off", file=sys.stderr)
        if not await _within(self._grace_s, idle.wait()):
            print(f"lampejo: after {self._grace_s:g} seconds, what still runs is cut off", file=sys.stderr)
            self._cut_off()
            await _within(1, idle.wait())
        self.should_exit = True


async def _within(seconds: float, work: Awaitable[object]) -> bool:
    """Whether it came to its end in time."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True
