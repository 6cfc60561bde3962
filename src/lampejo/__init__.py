"""lampejo: open language models faster, with exactly the same output.

    llm = lampejo.load("smollm2")
    print(llm.generate([{"role": "user", "content": "Write a haiku about the sea"}]).text)

Reading order: ``api`` (what users call), ``engine`` (the one decode loop), ``accept`` and ``request`` (what is kept of
a block), ``scheduler`` and ``pages``, ``speculate`` (who drafts, and how much), ``runner`` (all that touches the
device), ``models`` and ``ops``. ``docs/structure.md`` walks along one request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lampejo.api import LLM, Chunk, Completion, load
    from lampejo.config import Drafting, EngineConfig
    from lampejo.errors import UserError
    from lampejo.request import StopParams
    from lampejo.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Drafting",
    "EngineConfig",
    "Grammar",
    "SamplingParams",
    "StopParams",
    "UserError",
    "load",
]

_MODULES = {
    "LLM": "api",
    "Chunk": "api",
    "Completion": "api",
    "load": "api",
    "Drafting": "config",
    "EngineConfig": "config",
    "Grammar": "grammar",
    "UserError": "errors",
    "StopParams": "request",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: torch takes seconds, which ``lampejo --help`` need not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lampejo.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
