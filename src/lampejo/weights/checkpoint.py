"""A target model's checkpoint, whatever its format: configuration, tensors by their hub names, template, defaults."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lampejo.errors import UserError
from lampejo.models.config import Keys, ModelConfig
from lampejo.models.gguf_config import hf_name, keys_of, model_config_from_gguf, mtp_layers_of
from lampejo.models.hf_config import MODEL_TYPES, model_config_from_hf, text_config_of
from lampejo.ops.stored import Stored
from lampejo.weights.files import damaged, read_json
from lampejo.weights.fp8 import TYPE as FP8
from lampejo.weights.fp8 import Fp8
from lampejo.weights.gguf import GgufFile, dequantised
from lampejo.weights.layout import Layout, compare_tensors, hub_name, skipped
from lampejo.weights.safetensors import SafetensorsFolder
from lampejo.weights.store import locate, model_name
from lampejo.weights.tensors import Tensors

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FP8: "float8_e4m3"}
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|rope_freqs\.weight")  # derived from the configuration
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Checkpoint:
    """An open checkpoint; use it as a context manager, or ``close()`` it.

    ``quantization`` is for people; ``eos_ids`` end an answer; ``generation_defaults`` are the publisher's sampling
    parameters; ``metadata`` holds the GGUF values; ``folder`` is where ``tokenizer.json`` lies, if it is a folder;
    ``skipped`` tells how many tensors are left alone, by kind ("vision", "MTP").
    """

    name: str
    path: Path
    format: str
    config: ModelConfig
    quantization: str
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    chat_template: str | None
    metadata: dict[str, Any]
    folder: Path | None
    skipped: dict[str, int]

    def __init__(self, path: Path, name: str) -> None:
        """Open a ``.gguf`` file or a folder of safetensors; ``UserError`` for everything wrong with it."""
        self.path, self.name = path, name
        self._source: GgufFile | SafetensorsFolder
        if path.is_dir():
            config = read_json(path / "config.json")
            self.config = model_config_from_hf(config)
            self._source = SafetensorsFolder(path)
        else:
            self._source = GgufFile(path)
        try:
            if isinstance(self._source, GgufFile):
                self._describe_gguf(self._source)
            else:
                self._describe_folder(self._source, config)
        except BaseException:
            self.close()
            raise

    def _describe_gguf(self, file: GgufFile) -> None:
        self.format, self.folder, self.generation_defaults = "gguf", None, {}
        self.metadata = file.metadata
        if (num_parts := file.metadata.get("split.count", 1)) != 1:
            raise UserError(
                f"{self.path} is one of {num_parts} parts of a GGUF file.",
                "Put them together with llama.cpp: llama-gguf-split --merge FIRST_PART WHOLE.",
            )
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        factors = None
        if (entry := file.tensors.get("rope_freqs.weight")) is not None:
            if math.prod(entry.shape) > 1024:
                raise damaged(self.path, f"its rope_freqs.weight has the shape {list(entry.shape)}")
            factors = dequantised(entry.type, file.read_rows("rope_freqs.weight", 0, entry.num_rows)).flatten().tolist()
        self.config = model_config_from_gguf(file.metadata, shapes, factors)
        mtp_layers = mtp_layers_of(keys_of(file.metadata))
        self._lay_out(file, [(hf_name(name, mtp_layers), name) for name in file.tensors])
        keys = Keys(file.metadata, f"{self.path}, metadata")
        ends = [*keys.ids("tokenizer.ggml.eos_token_id"), *keys.ids("tokenizer.ggml.eot_token_id")]
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if self.config.architecture.startswith("qwen") and isinstance(tokens, list) and "<|endoftext|>" in tokens:
            ends.append(tokens.index("<|endoftext|>"))  # Qwen's generation_config.json has both, GGUF keeps one
        self.eos_ids = self._check_ends(ends)
        self.chat_template = _template(file.metadata.get("tokenizer.chat_template"), self.path)

    def _describe_folder(self, folder: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        self.format, self.folder, self.metadata = "safetensors", self.path, {}
        fp8 = Fp8(folder, config)
        scales = set(fp8.scales.values())
        names = [(hub_name(name), name) for name in folder.tensors if name not in scales]
        for ours, name in names:
            kind = folder.tensors[name].type
            readable = name in fp8.scales if kind == FP8 else kind in _FLOATS
            if not readable and not _HARMLESS.fullmatch(ours) and not skipped(ours):
                raise UserError(
                    f"{self.path}: tensor {name!r} has type {kind}, which is not supported.",
                    f"Supported: {', '.join(_FLOATS.values())} with a scale per block.",
                )
        self._lay_out(folder, names, fp8)
        generation = read_json(self.path / "generation_config.json", required=False)
        ends = [*Keys(config, "config.json").ids("eos_token_id"), *text_config_of(config).ids("eos_token_id")]
        ends += Keys(generation, "generation_config.json").ids("eos_token_id")
        self.eos_ids = self._check_ends(ends)
        self.generation_defaults = _sampling_defaults(generation)
        self.chat_template = _folder_template(self.path)

    def _check_ends(self, ids: list[int]) -> tuple[int, ...]:
        for token in ids:
            if token >= self.config.vocab_size:
                raise damaged(self.path, f"the end token {token} is outside the vocabulary of {self.config.vocab_size}")
        return tuple(dict.fromkeys(ids))

    def _lay_out(
        self, source: GgufFile | SafetensorsFolder, pairs: list[tuple[str, str]], fp8: Fp8 | None = None
    ) -> None:
        """``pairs`` of a hub name and the file's."""
        names = dict(pairs)
        if len(names) < len(pairs):
            name = Counter(ours for ours, _ in pairs).most_common(1)[0][0]
            raise damaged(self.path, f"it has {name!r} twice")
        shapes = {name: entry.shape for name, entry in source.tensors.items()}
        self._layout = Layout(str(self.path), names, shapes, self.config)
        self._tensors = Tensors(source, self._layout, self.config, fp8)
        self.skipped = self._layout.skipped
        types = Counter(source.tensors[name].type for ours, name in names.items() if not skipped(ours))
        if self.format == "safetensors":
            types = Counter({_FLOATS.get(kind, kind): count for kind, count in types.items()})
        self.quantization = next(iter(types)) if len(types) == 1 else _count_types(types)

    def tensor_names(self) -> list[str]:
        """Names as in hub checkpoints, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
        return list(self._layout.shapes)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape (rows first) and type (``BF16``, ``Q4_1``, ...) of a tensor."""
        return self._tensors.info(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """A fresh contiguous tensor, dequantised. Also of a single expert (``weights/layout.py``)."""
        return self._tensors.read(name, dtype, device)

    def stored(self, name: str) -> Stored:
        """A matrix as the file has it, for packing; or that of a single expert."""
        return self._tensors.stored(name)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape hold the same values, rounded to bfloat16."""
        return self._tensors.equal(first, second)

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(spec: str | Path) -> Checkpoint:
    """Open what ``spec`` names (alias, hub repository, folder or file), fetching it first if need be."""
    path = locate(spec)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            path = files[0]
    return Checkpoint(path, model_name(spec, path))


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse unknown, missing and misshapen tensors by name, before anything is read.

    Buffers that follow from the configuration are skipped, and so is a tied head that repeats the embedding exactly.
    """
    found = {name: checkpoint.info(name)[0] for name in checkpoint.tensor_names() if not _HARMLESS.fullmatch(name)}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in found and head not in expected and embedding in found:
        if found[head] != found[embedding] or not checkpoint.equal(head, embedding):
            raise UserError(
                f"{checkpoint.path}: config.json ties the head to the embedding, but 'lm_head.weight' differs.",
                "Set 'tie_word_embeddings' to false in config.json.",
            )
        del found[head]
    kind = f"architecture {checkpoint.config.architecture}"
    remedy = f"It is incomplete or another kind of model; supported architectures: {', '.join(MODEL_TYPES)}."
    compare_tensors(str(checkpoint.path), kind, remedy, found, expected)


def _count_types(types: Counter[str]) -> str:
    parts = [f"{name} ({count}{' tensors' if i == 0 else ''})" for i, (name, count) in enumerate(types.most_common())]
    return ", ".join(parts)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of ``generation_config.json``; a model that says ``do_sample: false`` has none."""
    defaults = {}
    for key in _SAMPLING:
        value = generation.get(key)
        if value is None or (generation.get("do_sample") is False and key != "repetition_penalty"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Keys(generation, "generation_config.json").bad(key, value, "a number")
        defaults[key] = value
    return defaults


def _folder_template(folder: Path) -> str | None:
    """``chat_template.jinja``, else the one in ``tokenizer_config.json`` (its ``default`` if there are several)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError:
            raise damaged(file, "it is not UTF-8") from None
    file = folder / "tokenizer_config.json"
    return _template(read_json(file, required=False).get("chat_template"), file)


def _template(value: object, path: Path) -> str | None:
    if isinstance(value, list):  # several by name
        value = next((i.get("template") for i in value if isinstance(i, dict) and i.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise damaged(path, "its chat template is not a text")
    return value
