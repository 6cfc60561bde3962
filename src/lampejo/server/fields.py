"""Bodies of requests: JSON into typed fields. What is wrong with one is told with the name of the field."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema
from starlette.requests import Request

from lampejo.errors import shown
from lampejo.server.errors import BAD_REQUEST, NOT_JSON, TOO_LARGE, ApiError, refused, shutting_down
from lampejo.server.http import unless

_LONG = 50_000  # bytes; a body beyond is parsed in another thread
# Brackets, colons and commas of a body outside of its texts. Parsing one takes half a microsecond, in which no other
# thread of Python runs; 80,000 messages or the bias of a vocabulary have less.
MAX_MARKS = 250_000
_MARKS = (b"[", b"{", b":", b",")


def _fail_fast(schema: Any) -> None:
    """Of a list the first wrong item is told; to tell each of 250,000 takes seconds."""
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _fail_fast(part)


class Body(BaseModel):
    """Fields of one API. Values of the wrong type, NaN and infinity are refused; unknown fields are accepted.

    ``refused`` are fields that the API has and this server does not: they are accepted only with a value that changes
    nothing. ``places`` tells for some of them where this API has the same.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    places: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields that have a value."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


Kind = TypeVar("Kind", bound=Body)


async def read(request: Request, kind: type[Kind], max_bytes: int) -> Kind:
    """The body of a request; ``ApiError`` tells what is wrong with it."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Another page of a browser could send anything else without asking first.
        raise ApiError(NOT_JSON, "The body must be JSON, with the header Content-Type: application/json.")
    too_large = ApiError(TOO_LARGE, f"The body is longer than {max_bytes:,} bytes.", code="request_too_large")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > max_bytes:
        raise too_large

    async def received() -> bytes:
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > max_bytes:
                raise too_large
        return bytes(raw)

    raw = await unless(request.app.state.service.ending.wait(), received())
    if raw is None:
        raise shutting_down()
    return await asyncio.to_thread(parse, raw, kind) if len(raw) > _LONG else parse(raw, kind)


def parse(raw: bytes, kind: type[Kind]) -> Kind:
    """JSON text into checked fields."""
    if _num_marks(raw) > MAX_MARKS:
        message = f"The body has more than {MAX_MARKS:,} brackets, colons and commas outside of its texts."
        raise ApiError(BAD_REQUEST, f"{message} Send fewer messages, fields or token ids.")
    try:
        data = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and numbers of thousands of digits are ValueErrors too
        raise ApiError(BAD_REQUEST, f"The body is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ApiError(BAD_REQUEST, "The body must be a JSON object.")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise _told(error) from None
    for name, harmless in kind.refused.items():
        value = data.get(name)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            place = kind.places.get(name)
            raise refused(name, f"its place is {place}." if place else "this server does not support it. Leave it out.")
    return body


def _num_marks(raw: bytes) -> int:
    """Of a body's structure, without parsing it; those in texts are looked away from only if it matters."""
    most = sum(map(raw.count, _MARKS))
    if most <= MAX_MARKS:
        return most
    # What is JSON has quotes around texts alone, once those that are escaped are gone.
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if raw.count(b'"') > 2 * MAX_MARKS + 2:  # between two texts there is a mark
        return MAX_MARKS + 1
    return sum(map(b"".join(raw.split(b'"')[::2]).count, _MARKS))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _told(error: ValidationError) -> ApiError:
    """All complaints about the first field that has one; the parts of a union complain one by one."""
    complaints = error.errors(include_url=False, include_input=False)
    path = complaints[0]["loc"]
    name = str(path[0])
    messages = dict.fromkeys(c["msg"] for c in complaints if c["loc"][0] == path[0])
    return refused(name, "; or ".join(message[:1].lower() + message[1:] for message in messages) + ".")


def check_names(item: Mapping[str, Any] | None, field: str, names: Sequence[str]) -> None:
    """Refuses an inner object of the body that has others: the APIs do so themselves."""
    for name in item or {}:
        if name not in names:
            raise refused(field, f"it has {shown(name)}; there are {', '.join(names)}.")


def string(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an inner object that must be text; where: the object's place in the body, for the error."""
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "it must be a string.")
    return value


def part_text(part: Any, where: str, names: Mapping[str, str]) -> str:
    """The text of a part of a message's content. names: in which field it stands, by the part's type."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in names:
        told = shown(kind) if kind else "a part without a type"
        raise refused(where, f"{told} cannot be read here; this model reads text alone.")
    return string(part, names[kind], where)


def schema_of(kind: type[Body]) -> dict[str, Any]:
    """What the OpenAPI page says of a body: the JSON schema, without references."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inlined(parts[value["$ref"].rpartition("/")[2]])
            return {name: inlined(part) for name, part in value.items()}
        return [inlined(part) for part in value] if isinstance(value, list) else value

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
