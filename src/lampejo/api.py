"""The Python interface: ``lampejo.load(...)`` gives an ``LLM`` with ``generate`` and ``stream``, and async variants."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard, cast

from lampejo.accept import TokenLogprobs
from lampejo.answer import Start, start_of, style_of
from lampejo.chat import check_template_kwargs, check_that_all_is_told, render_chat
from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.errors import PromptTooLong, UserError, shown
from lampejo.frontend import AsyncOutbox, Frontend, SyncOutbox
from lampejo.grammar import Grammar
from lampejo.grammar_compiler import Grammars
from lampejo.loader import Loaded, load_model, with_thinking
from lampejo.prompt_bound import PromptBound
from lampejo.request import Request, StopParams, TokenDelta, seed_or_drawn
from lampejo.sampling import SamplingParams, check_number
from lampejo.text import TextStream

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages

_BYTES = (bytes, bytearray, memoryview)
_PROMPT_REMEDY = "Give text, a list of token ids, or a list of messages."
_SAMPLING_NAMES = tuple(f.name for f in fields(SamplingParams))
_STOP_NAMES = tuple(f.name for f in fields(StopParams))


@dataclass(frozen=True)
class Completion:
    """A finished answer. ``ids``, ``logprobs`` (if asked for) and ``origins`` have one entry per token.

    ``origins`` tells who proposed a token: "target", "dflash" or "ngram". ``timings`` in seconds from submission to
    the step that committed the token, however late it is read; ``speculation`` is the statistics object of its drafts.
    ``stop_match`` is the stop string before which the text was cut, None if it was not. ``prompt_logprobs`` (if asked
    for, else empty) has one entry per token of the prompt after the first.
    """

    text: str
    ids: list[int]
    finish_reason: str
    stop_match: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprobs]
    origins: list[str]
    timings: dict[str, float]
    speculation: dict[str, Any]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": len(self.ids),
            "total_tokens": self.num_prompt_tokens + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True)
class Chunk:
    """What one step added to an answer. The last one has ``finish_reason`` and the whole ``completion``.

    ``ids``, ``origins`` and ``logprobs`` (if asked for, else empty) have one entry per token. ``text`` may lag behind
    them: it is held back while it may still become a stop string, or while a character is incomplete.
    """

    text: str
    ids: list[int]
    origins: list[str]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    completion: Completion | None = None


@dataclass
class Progress:
    """Folds a request's deltas into chunks, and at the end into its completion."""

    request: Request
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None

    def chunk(self, delta: TokenDelta) -> Chunk:
        request, now = self.request, delta.committed_at
        if self.first_token_at is None:
            self.first_token_at = now
        self.texts.append(delta.text)
        if not delta.finish_reason:
            return Chunk(delta.text, delta.ids, delta.origins, delta.logprobs)
        decode_s = now - self.first_token_at
        timings = {
            "first_token_s": self.first_token_at - request.submitted_at,
            "total_s": now - request.submitted_at,
            # Of decoding alone; an answer that came in one step has no decoding time to divide by.
            "tok_per_s": (request.num_output - 1) / decode_s if request.num_output > 1 and decode_s > 0 else 0.0,
        }
        completion = Completion(
            text="".join(self.texts),
            ids=request.output_ids,
            finish_reason=delta.finish_reason,
            stop_match=request.text.stop_match if request.text else None,
            num_prompt_tokens=request.num_prompt,
            num_cached_tokens=request.num_cached or 0,
            logprobs=request.logprobs,
            origins=request.origins,
            timings=timings,
            speculation=request.stats.as_dict(),
            prompt_logprobs=request.of_prompt,
        )
        return Chunk(delta.text, delta.ids, delta.origins, delta.logprobs, delta.finish_reason, completion)


class LLM:
    """A loaded model with its engine. A context manager; ``close`` ends its thread, and so does dropping the model.

    A prompt is text or a list of token ids, taken as it is, or a list of ``{"role", "content"}`` messages, which goes
    through the model's chat template. Keyword arguments are the fields of ``SamplingParams`` and ``StopParams``, and
    those of ``make_request``; what is not given comes from the model's ``generation_config.json``.
    """

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.generation_defaults = loaded.generation_defaults
        self.template_defaults = loaded.template_defaults
        self.info = loaded.info
        self.load_s = loaded.load_s
        self.max_context = config.max_context or 0
        self._bound = PromptBound(loaded.tokenizer, self.max_context)
        self._typical = config.drafting.typical if loaded.speculator.drafters else None
        self.engine = Engine(loaded.runner, loaded.speculator, config, loaded.eos_ids)
        self._vocab_size = loaded.runner.target.config.vocab_size
        self.style = style_of(loaded.chat_template)  # how it marks up reasoning and tool calls
        self._grammars = Grammars(loaded.tokenizer, self._vocab_size, loaded.eos_ids)
        self._ids = itertools.count()
        self.frontend = Frontend(self.engine)  # for those who submit requests themselves
        # Whoever drops the model frees it. The end of the process is the frontend's own matter.
        weakref.finalize(self, self.frontend.stop).atexit = False

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what runs and ends the engine's thread."""
        self.frontend.close()

    def generate(self, prompt: Prompt | Sequence[Prompt], **params: Any) -> Any:
        """The answer as a ``Completion``; for a list of prompts a list of them, decoded together."""
        prompts, single = _as_prompts(prompt)
        requests = [self.make_request(p, **params) for p in prompts]
        outboxes = [SyncOutbox() for _ in requests]
        try:
            for request, outbox in zip(requests, outboxes, strict=True):
                self.frontend.submit(request, outbox)
            done = [_fold(self._chunks(r, outbox)) for r, outbox in zip(requests, outboxes, strict=True)]
        except BaseException:
            for request in requests:
                self.frontend.abort(request)
            raise
        return done[0] if single else done

    def stream(self, prompt: Prompt, **params: Any) -> Generator[Chunk, None, None]:
        """The answer in pieces, as steps commit them. Work begins with the first; closing the iterator aborts it."""
        return self._stream(self.make_request(prompt, **params))

    async def agenerate(self, prompt: Prompt | Sequence[Prompt], **params: Any) -> Any:
        """``generate`` for a running event loop."""
        prompts, single = _as_prompts(prompt)
        requests = [await asyncio.to_thread(self.make_request, p, **params) for p in prompts]
        try:
            done = await asyncio.gather(*(self._agenerate(request) for request in requests))
        except BaseException:
            for request in requests:
                self.frontend.abort(request)
            raise
        return done[0] if single else list(done)

    async def astream(self, prompt: Prompt, **params: Any) -> AsyncGenerator[Chunk, None]:
        """``stream`` for a running event loop. Mistakes are told with the first piece; cancelling aborts."""
        request = await asyncio.to_thread(self.make_request, prompt, **params)  # encoding and grammars take their time
        async with aclosing(self._achunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def make_request(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        drafts: bool = True,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        thinking_budget: int | None = None,
        **params: Any,
    ) -> Request:
        """Checks everything about a request before any work; ``UserError`` names what is wrong.

        drafts False: it is decoded plainly. prompt_logprobs: how many alternatives to tell beside each token of the
        prompt. grammar: what the answer has to look like, after its reasoning. thinking_budget: tokens of reasoning
        after which its end is written for the model.
        """
        unknown = [name for name in params if name not in _SAMPLING_NAMES + _STOP_NAMES]
        if unknown:
            known = ", ".join(_SAMPLING_NAMES + _STOP_NAMES)
            raise UserError(f"Unknown parameter {shown(unknown[0])}.", f"Known: {known}.")
        given = {name: value for name, value in params.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name in ("stop", "stop_token_ids"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        template_kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
        check_template_kwargs(template_kwargs)
        sampling_given = self.generation_defaults | {k: v for k, v in given.items() if k in _SAMPLING_NAMES}
        sampling = SamplingParams(**sampling_given)
        stops = StopParams(**{k: v for k, v in given.items() if k in _STOP_NAMES})
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", stops.stop_token_ids)):
            outside = [i for i in ids if i >= self._vocab_size]
            if outside:
                message = f"{name} has token id {outside[0]}; this model has ids below {self._vocab_size}."
                raise UserError(message, field=name)
        prompt_ids = self._encode(prompt, template_kwargs, is_bounded=True)
        if not prompt_ids:
            raise UserError("The prompt is empty.", "Give at least one word.")
        if len(prompt_ids) >= self.max_context:
            raise PromptTooLong(str(len(prompt_ids)), self.max_context)
        is_chat = not (isinstance(prompt, str) or _is_ids(prompt) or template_kwargs.get("continue_final_message"))
        continued = () if is_chat else prompt_ids
        text = TextStream(self.tokenizer, stops.stop, continued, stops.min_tokens)
        if prompt_logprobs is not None:
            check_number("prompt_logprobs", prompt_logprobs, 0, 20, whole=True)
        return Request(
            next(self._ids),
            prompt_ids,
            sampling,
            stops,
            text,
            drafts=drafts,
            typical=self._typical if drafts and sampling.temperature > 0 else None,
            prompt_logprobs=prompt_logprobs,
            guide=self._grammars.guide(self.answer_start(prompt_ids, is_chat), grammar, thinking_budget),
        )

    def another(self, request: Request, seed: int | None) -> Request:
        """A request for another answer to the same prompt. None draws a seed."""
        assert isinstance(request.text, TextStream)
        SamplingParams(seed=seed)  # its check
        made = Request(
            next(self._ids),
            request.prompt_ids,
            request.sampling,
            request.stops,
            request.text.fresh(),
            drafts=request.drafts,
            typical=request.typical,
            prompt_logprobs=request.prompt_logprobs,
            guide=request.guide.fresh() if request.guide else None,
        )
        made.seed = seed_or_drawn(seed)
        return made

    def answer_start(self, prompt_ids: Sequence[int], is_chat: bool = True) -> Start:
        """Whether the answer to a prompt begins with reasoning; one to a raw prompt only where the prompt says so."""
        end = self.tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False)
        start = start_of(end, self.style)
        return start if is_chat or start == "open" else "closed"

    def encode(self, prompt: Prompt, **template_kwargs: Any) -> list[int]:
        """Prompt ids of text or token ids (as they are) or messages (through the chat template, whose arguments by
        default are ``template_defaults``)."""
        return self._encode(prompt, template_kwargs)

    def _encode(self, prompt: Prompt, template_kwargs: Mapping[str, Any], is_bounded: bool = False) -> list[int]:
        # is_bounded: what certainly has no room in the context is refused before the work of encoding it
        if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
            raise UserError(f"A prompt cannot be {type(prompt).__name__}.", _PROMPT_REMEDY)
        if _is_ids(prompt) or not prompt:
            return self._checked(cast(Sequence[int], prompt))
        text = prompt
        if not isinstance(text, str):
            messages, kwargs = cast(Messages, prompt), {**self.template_defaults, **template_kwargs}
            text = render_chat(self.chat_template, messages, self.tokenizer, **kwargs)
            check_that_all_is_told(self.chat_template or "", messages, self.tokenizer, **kwargs)
        if is_bounded:
            self._bound.check(text)
        try:
            return self.tokenizer.encode(text, add_special_tokens=isinstance(prompt, str))
        except UserError as error:
            field = "prompt" if isinstance(prompt, str) else "messages"
            raise UserError(f"{field}: {error.message}", error.remedy, field=field) from error

    def _checked(self, ids: Sequence[int]) -> list[int]:
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                message = f"The prompt begins with token ids, but has {shown(token_id)} among them."
                raise UserError(message, _PROMPT_REMEDY)
            if not 0 <= token_id < self._vocab_size:
                raise UserError(
                    f"The prompt has token id {token_id}; this model has ids from 0 to {self._vocab_size - 1}."
                )
        return list(ids)

    def _stream(self, request: Request) -> Generator[Chunk, None, None]:
        outbox = SyncOutbox()
        self.frontend.submit(request, outbox)
        yield from self._chunks(request, outbox)

    def _chunks(self, request: Request, outbox: SyncOutbox) -> Generator[Chunk, None, None]:
        progress = Progress(request)
        try:
            for delta in outbox:
                yield progress.chunk(delta)
        finally:
            self.frontend.abort(request)

    async def _achunks(self, request: Request) -> AsyncGenerator[Chunk, None]:
        outbox, progress = AsyncOutbox(asyncio.get_running_loop()), Progress(request)
        self.frontend.submit(request, outbox)
        try:
            while True:
                chunk = progress.chunk(await outbox.get())
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            self.frontend.abort(request)

    async def _agenerate(self, request: Request) -> Completion:
        last = None
        async for chunk in self._achunks(request):
            last = chunk.completion
        assert last is not None
        return last


def load(
    model: str = "smollm2",
    drafter: str = "auto",
    *,
    config: EngineConfig | None = None,
    threads: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    thinking: bool | None = None,
) -> LLM:
    """Loads a model and starts its engine.

    model: an alias, a hub repository id, a folder of safetensors or a GGUF file. drafter: "auto" (n-gram where the text
    repeats itself, and the DFlash drafter that belongs to the model, if there is one: whichever pays), "ngram",
    "dflash", "none", or the folder or repository of a DFlash drafter. threads: of the CPU operations, None keeps
    torch's choice. thinking: whether answers begin with reasoning, None leaves it to the chat template; a request's own
    word goes first.
    """
    for name, value in (("model", model), ("drafter", drafter)):
        if not isinstance(value, str | Path):
            raise UserError(f"{name} must be a name or a path, not {value!r}.", 'For example: lampejo.load("smollm2").')
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise UserError(f"config must be an EngineConfig, not {config!r}.", "Import it from lampejo, or leave it out.")
    loaded, config = load_model(model, drafter, config, threads, target_layer_ids)
    return LLM(loaded if thinking is None else with_thinking(loaded, thinking), config)


def _is_ids(prompt: Any) -> TypeGuard[Sequence[int]]:
    """Whether it is meant as token ids. Bytes look like them, and are more likely text that was not decoded."""
    return (
        isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES) and bool(prompt) and isinstance(prompt[0], int)
    )


def _as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether one alone was given: text, or a list of token ids or of mappings."""
    if isinstance(prompt, str):
        return [prompt], True
    if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES) or not prompt:
        raise UserError("There is no prompt.", f"{_PROMPT_REMEDY} Or give a list of such prompts.")
    if _is_ids(prompt) or isinstance(prompt[0], Mapping):
        return [prompt], True  # type: ignore[list-item]
    return list(prompt), False  # type: ignore[arg-type]


def _fold(chunks: Iterable[Chunk]) -> Completion:
    last = None
    for chunk in chunks:
        last = chunk.completion
    assert last is not None
    return last
