"""lampejo: open language models several times faster, with exactly the same output.

    llm = lampejo.load("smollm2")
    print(llm.generate([{"role": "user", "content": "Write a haiku about the sea"}]).text)

Reading order: ``api`` (what users call), ``engine`` (the one decode loop), ``accept`` and ``request`` (what is kept of a
block), ``scheduler`` and ``pages``, ``speculate`` (who drafts, and how much), ``runner`` (all that touches the device),
``models`` and ``ops``. ``docs/structure.md`` walks along one request.
"""

from lampejo.api import LLM, Chunk, Completion, load
from lampejo.config import EngineConfig
from lampejo.errors import UserError
from lampejo.request import StopParams
from lampejo.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Chunk", "Completion", "EngineConfig", "SamplingParams", "StopParams", "UserError", "load"]
