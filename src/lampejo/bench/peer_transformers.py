"""transformers as a peer: ``generate`` in fp32, in this process, with PyTorch's threads. Not a dependency."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lampejo.bench.workloads import WARM_UP, long_prompt
from lampejo.errors import UserError


class Transformers:
    """One request at a time: ``generate`` has no way to take requests as they come."""

    name = "transformers"

    def __init__(self, model_file: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise UserError("transformers is not installed.", "Run pip install transformers accelerate.") from None
        self.transformers: Any = transformers
        self.model_file = model_file
        self._model: Any = None
        self._tokenizer: Any = None

    def plain(self, num_tokens: int) -> float:
        self._load()
        ids = self._ids(WARM_UP[0]["content"])
        started = time.perf_counter()
        out = self._model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        return (out.shape[1] - ids.shape[1]) / (time.perf_counter() - started)

    def prefill(self, num_tokens: int) -> float:
        self._load()
        text = long_prompt(num_tokens + 8, lambda messages: self._ids(messages[0]["content"]).shape[1])
        assert text is not None
        ids = self._ids(text[0]["content"])[:, :num_tokens]
        started = time.perf_counter()
        with torch.inference_mode():
            self._model(ids, logits_to_keep=1)
        return ids.shape[1] / (time.perf_counter() - started)

    def serving(self, num_rows: int) -> AbstractContextManager[None]:
        return nullcontext(None)

    def _ids(self, text: str) -> torch.Tensor:
        ids: torch.Tensor = self._tokenizer(text, return_tensors="pt").input_ids
        return ids

    def _load(self) -> None:
        if self._model is not None:
            return
        place: dict[str, Any] = {"pretrained_model_name_or_path": str(self.model_file)}
        if self.model_file.suffix == ".gguf":
            place = {
                "pretrained_model_name_or_path": str(self.model_file.parent),
                "gguf_file": self.model_file.name,
            }
        self._tokenizer = self.transformers.AutoTokenizer.from_pretrained(**place)
        self._model = self.transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
        self._model.generate(self._ids("one two"), max_new_tokens=2, do_sample=False)  # warms up
