"""How tokens are chosen and when an answer ends: fields of OpenAI's bodies, and those that vLLM adds."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from lampejo.errors import shown
from lampejo.server.errors import refused
from lampejo.server.fields import Body, check_names

# How other servers are asked for what response_format asks for here. Ignored, they would give text of any form.
OTHER_FORMATS: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
        *("json_schema", "grammar", "regex", "ebnf"),
    ),
    (),
)
# What vLLM has beyond OpenAI and this server has not.
OF_VLLM: Mapping[str, tuple[Any, ...]] = {
    **OTHER_FORMATS,
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}
# Every field by which any of the APIs changes an answer, with the values that change nothing.
KNOWN: Mapping[str, tuple[Any, ...]] = {
    **OF_VLLM,
    **dict.fromkeys(
        ("messages", "prompt", "input", "instructions", "system", "previous_response_id", "conversation"), ()
    ),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "seed", "prompt_logprobs"), ()),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning_effort", "chat_template", "output_format"), ()),
    **dict.fromkeys(("audio", "web_search_options", "moderation", "background_options", "image"), ()),
    **dict.fromkeys(("container", "diagnostics", "compaction", "thread"), ()),
    **dict.fromkeys(("stop_token_ids", "tools", "functions", "include", "mcp_servers"), ([],)),
    **dict.fromkeys(("logit_bias", "stream_options", "lampejo", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("text", "reasoning", "output_config"), ({},)),
    **dict.fromkeys(("ignore_eos", "continue_final_message", "echo", "background"), (False,)),
    **dict.fromkeys(("include_reasoning", "add_generation_prompt", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (0, 0.0)),
    **dict.fromkeys(("min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"), (-1,)),
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "stop": ("", []),
    "stop_sequences": ([],),
    "suffix": ("",),
    "repetition_penalty": (1, 1.0),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "context_management": ([],),
    "speed": ("standard",),
}
_BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")  # vLLM's, Qwen's, llama.cpp's

# Values of maps, looked at later: here each of thousands would be complained about.
Number = Annotated[Any, WithJsonSchema({"type": "number"})]
Text = Annotated[Any, WithJsonSchema({"type": "string"})]

Kind = TypeVar("Kind", bound=Body)


def complete(kind: type[Kind]) -> type[Kind]:
    """A body that refuses every known field that it has not."""
    others = {name: same for name, same in KNOWN.items() if name not in kind.model_fields}
    kind.refused = {**others, **kind.refused}
    return kind


class OwnBody(Body):
    """What every API has of this server's own."""

    lampejo: dict[str, Any] | None = None

    @property
    def is_traced(self) -> bool:
        """Whether chunks tell each token with its origin: ``lampejo: {"trace": true}``."""
        return self.own("trace", False)

    def own(self, name: str, default: bool) -> bool:
        """A field of ``lampejo``, which no other server has."""
        for other in (self.lampejo or {}).keys() - {"drafts", "trace"}:
            raise refused(f"lampejo.{other}", "there are drafts and trace.")
        value = (self.lampejo or {}).get(name, default)
        if not isinstance(value, bool):
            raise refused(f"lampejo.{name}", "it must be true or false.")
        return value

    def check_untraced(self) -> None:
        """``ApiError`` where it is asked for in an API that has no place for it."""
        if self.is_traced:
            raise refused("lampejo.trace", "this API has no place for it; /v1/chat/completions has.")


class SamplingBody(OwnBody):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Number] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    model: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of ``LLM.make_request``; what is not given comes from the model's own defaults."""
        params = self.given(
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
        )
        if self.top_k is not None:
            params["top_k"] = max(self.top_k, 0)  # -1 is how vLLM says off
        if self.logit_bias is not None:
            try:
                params["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
            except ValueError:
                raise refused("logit_bias", "its keys are token ids.") from None
        if params.get("stop") in ("", []):
            del params["stop"]
        if not self.own("drafts", True):
            params["drafts"] = False
        return params

    def budget(self, **others: Any) -> tuple[str, Any] | None:
        """By which name reasoning is bounded, and to how many tokens. others: fields that can say so too, with ``__``
        for a dot."""
        given = self.given(*_BUDGETS)
        given |= {name.replace("__", "."): value for name, value in others.items() if value is not None}
        for name, value in given.items():
            first = next(iter(given))
            if value != given[first]:
                raise refused(name, f"it is another number than {first}. Leave one of them out.")
        return next((pair for pair in given.items() if pair[1] != -1), None)  # -1: without bound

    @property
    def answers(self) -> int:
        """How many to each prompt."""
        if self.n is not None and not 1 <= self.n <= 128:
            raise refused("n", f"it is {self.n}; it must be from 1 to 128.")
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream tells usage in its last chunk."""
        return self._option("include_usage")

    @property
    def counts_along(self) -> bool:
        """Whether every chunk tells the usage so far: vLLM's ``continuous_usage_stats``, which benchmarks ask for."""
        return self.includes_usage and self._option("continuous_usage_stats")

    def check_stream(self) -> None:
        """``ApiError`` for options of a stream that is none, or that this server does not have."""
        for name in self.stream_options or {}:
            if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
                raise refused(f"stream_options.{name}", "this server does not have it. Leave it out.")
        if self._option("include_obfuscation"):
            raise refused("stream_options.include_obfuscation", "this server does not support it. Leave it out.")
        if self.stream_options and not self.stream:
            raise refused("stream_options", "it is for streams. Leave it out, or set stream.")

    def _option(self, name: str) -> bool:
        value = (self.stream_options or {}).get(name, False)
        if value is not None and not isinstance(value, bool):
            raise refused(f"stream_options.{name}", "it must be true or false.")
        return bool(value)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of all APIs; a template may know fewer


def tell_effort(value: Any, field: str, kwargs: dict[str, Any]) -> None:
    """Adds to the template's arguments how much a model is to think; what they have goes first. ``field``: where the
    API that was called has it, for errors."""
    if value is None:
        return
    if value not in EFFORTS:
        raise refused(field, f"the effort is {shown(value)}; there are {', '.join(EFFORTS)}.")
    kwargs.setdefault("reasoning_effort", value)
    if value == "none":
        kwargs.setdefault("enable_thinking", False)


class ThinkingBody(SamplingBody):
    """What OpenAI's chats have in common: how they say whether, and how long, a model thinks."""

    thinking: dict[str, Any] | None = None  # of DeepSeek, Z.ai, Kimi and, with a budget, litellm
    enable_thinking: bool | None = None  # of Qwen
    chat_template_kwargs: dict[str, Any] | None = None

    def thoughts(self, effort: Any, field: str) -> tuple[dict[str, Any], tuple[str, Any] | None]:
        """What the template is told, and ``budget``. field: where the effort stands."""
        kwargs = dict(self.chat_template_kwargs or {})
        budget = self.budget(
            thinking__budget_tokens=self._thinking(kwargs),
            chat_template_kwargs__thinking_budget=kwargs.get("thinking_budget"),
        )
        if self.enable_thinking is not None:
            kwargs.setdefault("enable_thinking", self.enable_thinking)
        tell_effort(effort, field, kwargs)
        return kwargs, budget

    def _thinking(self, kwargs: dict[str, Any]) -> Any:
        """The budget that ``thinking`` has, if any; whether there is to be reasoning goes to the template."""
        thinking = self.thinking or {}
        check_names(thinking, "thinking", ("type", "budget_tokens"))
        kind = thinking.get("type")
        if kind not in (None, "enabled", "adaptive", "auto", "disabled"):
            raise refused("thinking.type", f"it is {shown(kind)}; there are enabled, adaptive, auto and disabled.")
        if kind is not None and kind != "auto":
            kwargs.setdefault("enable_thinking", kind != "disabled")
        return thinking.get("budget_tokens")
