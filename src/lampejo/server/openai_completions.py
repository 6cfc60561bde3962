"""/v1/completions: text as it is, without a chat template. Prompts as text or token ids, one or many; ``echo`` with log
probabilities of the prompt, which is how likelihoods are measured."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lampejo.accept import TokenLogprobs
from lampejo.answer import Content
from lampejo.request import Request as EngineRequest
from lampejo.server.errors import ApiError, refused
from lampejo.server.fields import read, schema_of
from lampejo.server.http import DONE, event
from lampejo.server.models_info import ModelName, fingerprint
from lampejo.server.respond import prompt_logprobs, respond
from lampejo.server.sampling_fields import SamplingBody, complete
from lampejo.server.service import Answers, Job, Piece, Service
from lampejo.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@complete
class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "parallel_tool_calls": (True, False),  # without tools there are no calls
    }
    places: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("messages", "tools", "tool_choice", "response_format"), "/v1/chat/completions"),
        **dict.fromkeys(("thinking", "enable_thinking", "reasoning_effort"), "/v1/chat/completions"),
        "chat_template_kwargs": "/v1/chat/completions",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
        "input": "prompt",
    }

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def job(self) -> Job:
        params = self.sampling()
        self.check_untraced()
        longest = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if longest == 0 and not self.echo:
            raise refused("max_tokens", "it is 0, which leaves nothing to answer unless echo is set.")
        params["max_tokens"] = longest or 1  # of nothing but the prompt: one token is decoded, and left out
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
            if self.echo:
                params["prompt_logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            if self.stream:
                raise refused("prompt_logprobs", "they are not told in streams.")
            params["prompt_logprobs"] = max(self.prompt_logprobs, params.get("prompt_logprobs", 0))
        names = {"messages": "prompt"}
        if (budget := self.budget()) is not None:
            names["thinking_budget"], params["thinking_budget"] = budget
        return Job(self.prompts, params, self.answers, names=names, only_prompt=longest == 0)


def routes(service: Service, names: ModelName) -> APIRouter:
    router = APIRouter()
    system_fingerprint = fingerprint(service.llm)

    @router.post("/v1/completions", tags=["openai"], openapi_extra=schema_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """Texts continued, whole or as server-sent events."""
        body = await read(request, CompletionBody, service.config.max_body_bytes)
        name = names.check(body.model)
        body.check_stream()
        job = body.job()
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "model": name}
        writer = CompletionWriter(service.llm.tokenizer, body, {**head, "system_fingerprint": system_fingerprint})
        return await respond(request, service, job, writer, body.stream)

    return router


class CompletionWriter:
    """Pieces of answers in OpenAI's shape."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody, head: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.head = head
        self._is_echo_alone = body.max_tokens == 0

    async def stream(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        offsets = [0] * len(answers.requests)
        left = len(answers.requests)
        try:
            async for piece in answers:
                left -= piece.finish_reason is not None
                choice = await self._choice(piece, answers.requests[piece.index], piece.index not in begun, offsets)
                begun.add(piece.index)
                if not (choice["text"] or choice["logprobs"] or choice["finish_reason"]):
                    continue
                is_last = not left and not self.body.includes_usage
                more = {"metrics": answers.metrics} if is_last else {}
                yield self._event(answers, [choice], **more)
            if self.body.includes_usage:
                yield self._event(answers, [], usage=answers.usage, metrics=answers.metrics)
        except ApiError as error:
            yield event(error.openai())
        finally:
            answers.close()
        yield DONE

    async def whole(self, answers: Answers) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [{} for _ in answers.requests]
        offsets = [0] * len(answers.requests)
        try:
            async for piece in answers:
                whole = choices[piece.index]
                part = await self._choice(piece, answers.requests[piece.index], not whole, offsets)
                if not whole:
                    whole.update(part)
                    continue
                whole["text"] += part["text"]
                whole["finish_reason"] = part["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    whole["logprobs"][name] += values
        finally:
            answers.close()
        if self.body.prompt_logprobs is not None:
            for choice, request in zip(choices, answers.requests, strict=True):
                choice["prompt_logprobs"] = await asyncio.to_thread(
                    prompt_logprobs, self.tokenizer, request, self.body.prompt_logprobs
                )
        return {**self._head(answers, choices), "usage": answers.usage, "metrics": answers.metrics}

    def _head(self, answers: Answers, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "created": answers.created, "choices": choices}

    def _event(self, answers: Answers, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self.body.includes_usage:
            more.setdefault("usage", answers.usage if self.body.counts_along else None)
        return event({**self._head(answers, choices), **more})

    async def _choice(self, piece: Piece, request: EngineRequest, is_first: bool, offsets: list[int]) -> dict[str, Any]:
        """What a piece adds; the prompt before the first, if it is to be echoed."""
        text, logprobs = "", None
        if is_first and self.body.echo:
            text = self.tokenizer.decode(request.prompt_ids)
            if self.body.logprobs is not None:
                logprobs = await asyncio.to_thread(self._of_prompt, request, piece.index, offsets)
        finish_reason = piece.finish_reason
        if self._is_echo_alone:
            finish_reason = finish_reason and "length"
        else:
            text += "".join(part.text for part in piece.events if isinstance(part, Content))
            if self.body.logprobs is not None:
                added = self._logprobs(piece.chunk.logprobs, piece.index, offsets)
                logprobs = added if logprobs is None else {name: logprobs[name] + added[name] for name in added}
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _of_prompt(self, request: EngineRequest, index: int, offsets: list[int]) -> dict[str, list[Any]]:
        """Nothing comes before a prompt's first token, so nothing tells how likely it was."""
        first = self._token(request.prompt_ids[0])
        offsets[index] = len(first)
        rest = self._logprobs(request.of_prompt, index, offsets)
        before: dict[str, list[Any]] = {
            "tokens": [first],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        return {name: before[name] + rest[name] for name in before}

    def _logprobs(self, entries: Sequence[TokenLogprobs], index: int, offsets: list[int]) -> dict[str, list[Any]]:
        tokens = [self._token(entry.token_id) for entry in entries]
        starts = []
        for token in tokens:
            starts.append(offsets[index])
            offsets[index] += len(token)
        tops = [
            {self._token(i): logprob for i, logprob in entry.top[: self.body.logprobs]} | {token: entry.logprob}
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": starts,
        }

    def _token(self, token_id: int) -> str:
        """Its text; one that is not whole characters as ``bytes:\\xe2``, as OpenAI writes it."""
        text, raw = self.tokenizer.token_text(token_id)
        return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
