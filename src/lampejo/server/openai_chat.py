"""/v1/chat/completions: OpenAI's chat, stream or not. What is not streamed is a fold over the same pieces.

Beyond OpenAI: ``reasoning_content`` in messages and deltas (as vLLM and DeepSeek have it); ``metrics`` with the
statistics of speculation, in the last chunk of a stream; and a field ``lampejo`` of the request: ``{"drafts": false}``
decodes plainly, ``{"trace": true}`` adds ``lampejo: {"step": n, "tokens": [{"id", "text", "origin"}]}`` to the chunks,
where origin is "target" or the drafter that proposed the token.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lampejo.accept import TokenLogprobs
from lampejo.answer import Content, Event, Reasoning, ToolArguments, ToolStart
from lampejo.api import Chunk
from lampejo.server.chat_job import Chat, chat_job_of
from lampejo.server.errors import ApiError, refused
from lampejo.server.fields import read, schema_of
from lampejo.server.http import DONE, event
from lampejo.server.models_info import ModelName, fingerprint
from lampejo.server.respond import prompt_logprobs, respond
from lampejo.server.sampling_fields import ThinkingBody, complete
from lampejo.server.service import Answers, Piece, Service
from lampejo.tokenizer import Tokenizer


@complete
class ChatBody(ThinkingBody):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"add_special_tokens": (False,)}
    places: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("input", "prompt", "instructions", "system"), "messages"),
        "max_output_tokens": "max_completion_tokens",
        "stop_sequences": "stop",
        **dict.fromkeys(("text", "output_format"), "response_format"),
        **dict.fromkeys(("reasoning", "output_config"), "reasoning_effort"),
    }

    def chat(self) -> Chat:
        params = self.sampling()
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        elif self.max_tokens is not None:
            params["max_tokens"] = self.max_tokens
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "it needs logprobs to be true.")
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        if self.prompt_logprobs is not None:
            if self.stream:
                raise refused("prompt_logprobs", "they are not told in streams.")
            params["prompt_logprobs"] = self.prompt_logprobs
        kwargs, budget = self.thoughts(self.reasoning_effort, "reasoning_effort")
        if budget is not None:
            names["thinking_budget"], params["thinking_budget"] = budget
        if self.add_generation_prompt is not None:
            kwargs["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise refused("continue_final_message", "a message is continued without add_generation_prompt.")
            kwargs["continue_final_message"] = True
        return Chat(
            self.messages,
            params,
            self.answers,
            self.tools or [],
            self.tool_choice,
            self.parallel_tool_calls is not False,
            self.response_format,
            kwargs,
            names,
        )


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    system_fingerprint = fingerprint(service.llm)

    @router.post("/v1/chat/completions", tags=["openai"], openapi_extra=schema_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """An answer to a chat, whole or as server-sent events."""
        body = await read(request, ChatBody, service.config.max_body_bytes)
        name = names.check(body.model)
        body.check_stream()
        job = await chat_job_of(body, service.style)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "model": name, "system_fingerprint": system_fingerprint}
        writer = ChatWriter(service.llm.tokenizer, body, head)
        return await respond(request, service, job, writer, body.stream)

    return router


class ChatWriter:
    """Pieces of answers in OpenAI's shape."""

    def __init__(self, tokenizer: Tokenizer, body: ChatBody, head: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.head = head

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        try:
            for index in range(len(answers.requests)):
                yield self._event(answers, [_choice(index, {"role": "assistant", "content": ""})])
            left, steps = len(answers.requests), [0] * len(answers.requests)
            async for piece in answers:
                left -= piece.finish_reason is not None
                for chunk in self._chunks(piece, steps):
                    yield self._event(answers, **chunk)
                if piece.finish_reason is not None:
                    is_last = not left and not self.body.includes_usage
                    more = {"metrics": answers.metrics} if is_last else {}
                    yield self._event(answers, [_choice(piece.index, {}, piece.finish_reason)], **more)
            if self.body.includes_usage:
                yield self._event(answers, [], usage=answers.usage, metrics=answers.metrics)
        except ApiError as error:
            yield event(error.openai())
        finally:
            answers.close()
        yield DONE

    async def whole(self, answers: Answers) -> dict[str, Any]:
        messages = [_Message() for _ in answers.requests]
        try:
            async for piece in answers:
                messages[piece.index].add(piece)
        finally:
            answers.close()
        return await asyncio.to_thread(self._told, answers, messages)  # log probabilities take their time

    def _told(self, answers: Answers, messages: Sequence["_Message"]) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(messages):
            logprobs = self._logprobs(message.logprobs) if self.body.logprobs else None
            choice = {"index": index, "message": message.as_dict(), "logprobs": logprobs}
            choices.append({**choice, "finish_reason": message.finish_reason})
        told = {**self._head(answers, "chat.completion", choices), "usage": answers.usage, "metrics": answers.metrics}
        if self.body.prompt_logprobs is not None:
            request = answers.requests[0]
            told["prompt_logprobs"] = prompt_logprobs(self.tokenizer, request, self.body.prompt_logprobs)
        if self.body.is_traced:
            told["lampejo"] = {"tokens": [token for m in messages for token in self.trace(m.ids, m.origins)]}
        return told

    def _head(self, answers: Answers, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": kind, "created": answers.created, "choices": choices}

    def _event(self, answers: Answers, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self.body.includes_usage:
            more.setdefault("usage", answers.usage if self.body.counts_along else None)  # OpenAI: null till the last
        return event({**self._head(answers, "chat.completion.chunk", choices), **more})

    def _chunks(self, piece: Piece, steps: list[int]) -> list[dict[str, Any]]:
        """One chunk per event; the first carries what belongs to the tokens of the step."""
        deltas = [delta for delta in map(_delta, piece.events) if delta]
        logprobs = self._logprobs(piece.chunk.logprobs) if self.body.logprobs and piece.chunk.ids else None
        is_traced = self.body.is_traced and bool(piece.chunk.ids)
        if (logprobs or is_traced) and not deltas:
            deltas = [{}]
        chunks: list[dict[str, Any]] = [{"choices": [_choice(piece.index, delta)]} for delta in deltas]
        if logprobs:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        if is_traced:
            tokens = self.trace(piece.chunk.ids, piece.chunk.origins)
            chunks[0]["lampejo"] = {"step": steps[piece.index], "tokens": tokens}
            steps[piece.index] += 1
        return chunks

    def trace(self, ids: Sequence[int], origins: Sequence[str]) -> list[dict[str, Any]]:
        return [self._traced(token_id, origin) for token_id, origin in zip(ids, origins, strict=True)]

    def _traced(self, token_id: int, origin: str) -> dict[str, Any]:
        """A token that holds a part of a character only has its bytes too."""
        piece = self.tokenizer.piece(token_id)
        raw = piece.encode() if isinstance(piece, str) else piece
        text = raw.decode("utf-8", "replace")
        told = {"id": token_id, "text": text, "origin": origin}
        return told if text.encode() == raw else {**told, "bytes": list(raw)}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for entry in entries:
            top = [self._logprob(token_id, logprob) for token_id, logprob in entry.top]
            content.append({**self._logprob(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.tokenizer.token_text(token_id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}


class _Message:
    """An answer put together from its pieces."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.origins: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        chunk: Chunk = piece.chunk
        self.ids += chunk.ids
        self.origins += chunk.origins
        self.logprobs += chunk.logprobs
        self.finish_reason = piece.finish_reason
        for part in piece.events:
            if isinstance(part, Content):
                self.texts.append(part.text)
            elif isinstance(part, Reasoning):
                self.thoughts.append(part.text)
            elif isinstance(part, ToolStart):
                self.calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
            elif isinstance(part, ToolArguments):
                self.calls[part.index]["function"]["arguments"] += part.text

    def as_dict(self) -> dict[str, Any]:
        text = "".join(self.texts)
        told: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not text else text}
        told["refusal"] = None
        if self.thoughts:
            told["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            told["tool_calls"] = self.calls
        return told


def _choice(index: int, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _delta(part: Event) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolStart):
        call = {"index": part.index, "id": part.id, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": part.name, "arguments": ""}}]}
    if isinstance(part, ToolArguments):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    return {}
