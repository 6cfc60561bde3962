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
from lampejo.models.config import MODEL_TYPES, Keys, ModelConfig, model_config_from_hf
from lampejo.models.gguf_config import hf_name, model_config_from_gguf
from lampejo.ops.stored import Stored
from lampejo.weights.files import damaged, read_json
from lampejo.weights.gguf import GgufFile
from lampejo.weights.safetensors import SafetensorsFolder
from lampejo.weights.store import locate, model_name

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|rope_freqs\.weight")  # derived from the configuration
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Checkpoint:
    """An open checkpoint; use it as a context manager, or ``close()`` it.

    ``quantization`` is for people; ``eos_ids`` end an answer; ``generation_defaults`` are the publisher's sampling
    parameters; ``metadata`` holds the GGUF values; ``folder`` is where ``tokenizer.json`` lies, if it is a folder.
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
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        factors = None
        if (shape := shapes.get("rope_freqs.weight")) is not None:
            if math.prod(shape) > 1024:
                raise damaged(self.path, f"its rope_freqs.weight has the shape {list(shape)}")
            factors = file.read("rope_freqs.weight").flatten().tolist()
        self.config = model_config_from_gguf(file.metadata, shapes, factors)
        self._names: dict[str, str] = {}
        for name in file.tensors:
            if hf_name(name) in self._names:
                raise damaged(self.path, f"it has {hf_name(name)!r} twice")
            self._names[hf_name(name)] = name
        types = Counter(entry.type.name for entry in file.tensors.values())
        self.quantization = _count_types(types)
        keys = Keys(file.metadata, f"{self.path}, metadata")
        ends = [*keys.ids("tokenizer.ggml.eos_token_id"), *keys.ids("tokenizer.ggml.eot_token_id")]
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if self.config.architecture == "qwen2" and isinstance(tokens, list) and "<|endoftext|>" in tokens:
            ends.append(tokens.index("<|endoftext|>"))  # Qwen's generation_config.json has both, GGUF keeps one
        self.eos_ids = self._check_ends(ends)
        self.chat_template = _template(file.metadata.get("tokenizer.chat_template"), self.path)

    def _describe_folder(self, folder: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        self.format, self.folder, self.metadata = "safetensors", self.path, {}
        self._names = {name: name for name in folder.names()}
        types: Counter[str] = Counter()
        for name in folder.names():
            dtype = folder.entry(name).dtype
            if dtype in _FLOATS:
                types[_FLOATS[dtype]] += 1
            elif not _HARMLESS.fullmatch(name):
                raise UserError(
                    f"{self.path}: tensor {name!r} has type {dtype}, which is not supported.",
                    f"Supported: {', '.join(_FLOATS.values())}.",
                )
        self.quantization = next(iter(types)) if len(types) == 1 else _count_types(types)
        generation = read_json(self.path / "generation_config.json", required=False)
        ends = [*Keys(config, "config.json").ids("eos_token_id")]
        ends += Keys(generation, "generation_config.json").ids("eos_token_id")
        self.eos_ids = self._check_ends(ends)
        self.generation_defaults = _sampling_defaults(generation)
        self.chat_template = _folder_template(self.path)

    def _check_ends(self, ids: list[int]) -> tuple[int, ...]:
        for token in ids:
            if token >= self.config.vocab_size:
                raise damaged(self.path, f"the end token {token} is outside the vocabulary of {self.config.vocab_size}")
        return tuple(dict.fromkeys(ids))

    def tensor_names(self) -> list[str]:
        """Names as in hub checkpoints, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
        return list(self._names)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape (rows first) and type (``BF16``, ``Q4_1``, ...) of a tensor."""
        if isinstance(self._source, GgufFile):
            stored = self._source.tensors[self._names[name]]
            return stored.shape, stored.type.name
        entry = self._source.entry(name)
        return entry.shape, entry.dtype

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A fresh contiguous tensor, dequantised, with heads in rotate-half order whatever the file's order is."""
        if not isinstance(self._source, GgufFile):
            return self._source.read(name).to(dtype)
        tensor = self._source.read(self._names[name], dtype)
        heads = self._interleaved_heads(name)
        return rotate_half_order(tensor, heads) if heads else tensor

    def stored(self, name: str) -> Stored:
        """A matrix as the file has it, for packing: its bytes, and in which order they hold its rows."""
        if not isinstance(self._source, GgufFile):
            return Stored.of(self._source.read(name))
        kind, data = self._source.read_raw(self._names[name])
        shape = self.info(name)[0]
        order = None
        heads = self._interleaved_heads(name)
        if heads:
            order = torch.empty(shape[0], dtype=torch.int32)
            order[rotate_half_order(torch.arange(shape[0]), heads)] = torch.arange(shape[0], dtype=torch.int32)
        return Stored(kind, (shape[0], shape[1]), data, order)

    def _interleaved_heads(self, name: str) -> int:
        """The number of heads of a q or k projection whose rows the file interleaves, else 0."""
        module = name.rpartition(".")[0]
        if self.format == "safetensors" or self.config.architecture != "llama":
            return 0
        if module.endswith(".q_proj"):
            return self.config.num_heads
        return self.config.num_kv_heads if module.endswith(".k_proj") else 0

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


def rotate_half_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of llama GGUF files, which interleaves the two halves of each head.

    ``[heads * head_dim, ...]``: row ``2 i + j`` of a head becomes row ``j * head_dim / 2 + i``.
    """
    rows = tensor.shape[0]
    pairs = tensor.view(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse unknown, missing and misshapen tensors by name, before anything is read.

    Buffers that follow from the configuration are skipped, and so is a tied head that repeats the embedding exactly.
    """
    found = {name: checkpoint.info(name)[0] for name in checkpoint.tensor_names() if not _HARMLESS.fullmatch(name)}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in found and head not in expected and embedding in found:
        if not torch.equal(checkpoint.read(head, torch.bfloat16), checkpoint.read(embedding, torch.bfloat16)):
            raise UserError(
                f"{checkpoint.path}: config.json ties the head to the embedding, but 'lm_head.weight' differs.",
                "Set 'tie_word_embeddings' to false in config.json.",
            )
        del found[head]
    kind = f"architecture {checkpoint.config.architecture}"
    remedy = f"It is incomplete or another kind of model; supported architectures: {', '.join(MODEL_TYPES)}."
    compare_tensors(str(checkpoint.path), kind, remedy, found, expected)


def compare_tensors(
    where: str, kind: str, remedy: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """``UserError`` naming the first differences between ``found`` and ``expected`` names and shapes."""
    for what, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise UserError(f"{where} ({kind}) {what} tensors: {listed}.", remedy)
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{where} ({kind}): tensor {name!r} has shape {list(found[name])}, but must have {list(shape)}.",
                "Weights and configuration do not belong together.",
            )


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
