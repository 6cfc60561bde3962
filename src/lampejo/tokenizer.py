"""Text to token ids and back: one class around `tokenizers`, built from a model folder or from GGUF metadata.

Sources of the facts: the `tokenizer.json` files of SmolLM2, Qwen2 and Llama 3 (pre-tokenizers, normalizer,
`ignore_merges`), and llama.cpp's vocabulary loader (which `tokenizer.ggml.*` keys mean what, BOS by default).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lampejo.errors import UserError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Checkpoint(Protocol):
    """What `load_tokenizer` reads of a checkpoint."""

    @property
    def format(self) -> str: ...  # "gguf" | "safetensors"
    @property
    def metadata(self) -> Mapping[str, Any]: ...  # GGUF metadata as plain Python values
    @property
    def folder(self) -> Path | None: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...  # empty: the tokenizer's own


class TokenText(NamedTuple):
    """One token as logprobs show it: ``text`` may hold U+FFFD where ``bytes`` are a part of a character."""

    text: str
    bytes: bytes


@dataclass(frozen=True)
class DecodeRules:
    """How pieces join into text; read from the decoder of the tokenizer, used by `lampejo.text`."""

    byte_level: (
        bool  # pieces are bytes of UTF-8; else strings, with single bytes where the vocabulary falls back to them
    )
    replacements: tuple[tuple[str, str], ...] = ()  # applied to each piece in this order, "▁" -> " " as a rule
    byte_fallback: bool = False  # "<0xE2>" is the byte E2
    strip_spaces: int = 0  # spaces taken off the start of the whole text
    bare_first: str = ""  # a mark that vanishes in the first token instead of becoming a space (Metaspace)


class Tokenizer:
    """Ids and text of one model. Thread-safe after construction.

    ``special_tokens`` maps names as chat templates use them (``bos_token``, ...) to their text; ``special_ids`` are
    invisible in decoded text; ``vocab_size`` counts the tokenizer's tokens, a model may have padding rows beyond.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int] = (),
        affixes: tuple[list[int], list[int]] | None = None,  # ids around every text; None: the backend's post-processor
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry either; both would falsify prompts silently
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.rules = _decode_rules(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id = self.token_id(self.special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        own_eos = self.token_id(self.special_tokens["eos_token"]) if "eos_token" in special_tokens else None
        self.eos_ids: tuple[int, ...] = tuple(sorted(set(eos_ids))) or (() if own_eos is None else (own_eos,))
        self._affixes = affixes
        self._pieces: dict[int, bytes | str] = {}
        self._texts: dict[int, TokenText] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens written in it are recognised.

        ``add_special_tokens`` adds BOS and the like by the model's own convention: True for a raw prompt, False for a
        rendered chat, whose template writes them itself. Raises UserError for text that is not valid Unicode.
        """
        try:
            if not add_special_tokens:
                return self._ids(text, False)
            if self._affixes is None:
                return self._ids(text, True)
            before, after = self._affixes
            return [*before, *self._ids(text, False), *after]
        except (UnicodeEncodeError, TypeError) as error:
            raise UserError(
                "The text cannot be encoded: it is not valid Unicode (a lone surrogate).", "Send well-formed UTF-8."
            ) from error

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch of one: for a single text the library keeps Python's other threads waiting until it is done. Fast:
        # without where each token stands in the text, whose release would keep them waiting for 100 ms at 3 MB.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> TokenText:
        """One token for logprobs, special tokens by their name."""
        text = self._texts.get(token_id)
        if text is None:
            piece = self._spell(token_id)
            raw = piece if isinstance(piece, bytes) else piece.encode()
            text = self._texts[token_id] = TokenText(raw.decode(errors="replace"), raw)
        return text

    def piece(self, token_id: int) -> bytes | str:
        """What a token adds to visible text before joining (see `DecodeRules`): nothing for special tokens."""
        piece = self._pieces.get(token_id)
        if piece is None:
            empty = b"" if self.rules.byte_level else ""
            piece = self._pieces[token_id] = empty if token_id in self.special_ids else self._spell(token_id)
        return piece

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary (special tokens: their text), or None."""
        return self.backend.token_to_id(token)

    def _spell(self, token_id: int) -> bytes | str:
        token = self.backend.id_to_token(token_id) or ""
        if self.rules.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token with a character outside the byte alphabet stands for itself
                return token.encode()
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Tokenizer of a checkpoint. Its ``eos_ids`` (from ``generation_config.json``) win over the tokenizer's own.

    Raises UserError when files are missing or the kind is not supported.
    """
    if checkpoint.format == "gguf":
        return from_gguf(checkpoint.metadata, checkpoint.eos_ids)
    if checkpoint.folder is None:
        raise UserError("The checkpoint has no folder to read tokenizer.json from.", "Give a model folder.")
    return from_folder(checkpoint.folder, checkpoint.eos_ids)


# --- a folder: tokenizer.json, tokenizer_config.json -----------------------------------------------------------------


def from_folder(path: Path, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """Tokenizer from ``tokenizer.json`` and ``tokenizer_config.json`` in ``path``; UserError when one is missing."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise UserError(
                f"{path} has no {name}.",
                "Download it from the model's repository into that folder, or use a GGUF file, which holds its own.",
            )
    try:
        backend = Backend.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UserError(f"{path / 'tokenizer.json'} cannot be read: {error}.", "Download the file again.") from error
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_content(config.get(name)))}
    _add_declared_tokens(backend, config, special_tokens, path)
    affixes = None
    if "add_bos_token" in config or "add_eos_token" in config:
        ends = [backend.token_to_id(special_tokens.get(name, "")) for name in ("bos_token", "eos_token")]
        flags = [config.get("add_bos_token"), config.get("add_eos_token")]
        before, after = ([end] if flag and end is not None else [] for end, flag in zip(ends, flags, strict=True))
        affixes = (before, after)
    return Tokenizer(backend, special_tokens, eos_ids, affixes)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.", "Download the file again.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object.", "Download the file again.")
    return data


def _token_content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_declared_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str], path: Path
) -> None:
    """Add what the configuration declares beyond tokenizer.json, and mark named tokens as special."""
    place = path / "tokenizer_config.json"
    try:
        declared = {
            int(token_id): AddedToken(
                entry["content"], **{key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "special")}
            )
            for token_id, entry in (config.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place} has a malformed added_tokens_decoder: {error}.", "Download it again.") from error
    for token_id, token in sorted(declared.items()):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (found := backend.token_to_id(token.content)) != token_id:
            raise UserError(
                f"{place} puts token {token.content!r} at id {token_id}, tokenizer.json at {found}.",
                "Take both files from the same revision of the model.",
            )
    names = [*special_tokens.values()]
    names += [text for entry in config.get("additional_special_tokens") or () if (text := _token_content(entry))]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for name in names:
        if name not in known and backend.token_to_id(name) is not None:
            backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])


# --- GGUF metadata ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PreTokenizer:
    """What the name in ``tokenizer.ggml.pre`` stands for; GGUF stores no more than the name."""

    pattern: str  # words that merges never cross; "" is GPT-2's own pattern
    single_digits: bool = False  # every digit is a word before the pattern applies
    nfc: bool = False
    ignore_merges: bool = False  # a whole word in the vocabulary is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# As above, but accents and vowel signs (\p{M}) stay with their letters.
_ACCENTED_AND_OTHERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer("", single_digits=True),
    "qwen2": _PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS_AND_SPACES}", nfc=True),
    "qwen35": _PreTokenizer(rf"{_CONTRACTIONS}|{_ACCENTED_AND_OTHERS}|{_SPACES}", nfc=True),
    "llama-bpe": _PreTokenizer(
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}", ignore_merges=True, add_bos=True
    ),
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_GGUF_NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def from_gguf(metadata: Mapping[str, Any], eos_ids: Iterable[int] = ()) -> Tokenizer:
    """Tokenizer from the ``tokenizer.*`` metadata of a GGUF file (byte-level BPE only).

    Generation ends at ``eos_ids`` and at the file's end-of-sequence, end-of-turn and end-of-message ids. Raises
    UserError for another tokenizer model or pre-tokenizer, and for lists that contradict each other.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UserError(
            f"The GGUF file has tokenizer model {model!r} (tokenizer.ggml.model); supported: 'gpt2' (byte-level BPE).",
            "Use the model's safetensors folder, whose tokenizer.json needs no translation.",
        )
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"The GGUF file has pre-tokenizer {pre!r} (tokenizer.ggml.pre); supported: {', '.join(_PRE_TOKENIZERS)}.",
            "Use the model's safetensors folder, whose tokenizer.json needs no translation.",
        )
    kind = _PRE_TOKENIZERS[pre]
    tokens, merges, types = (
        _list(metadata, "tokens", str),
        _list(metadata, "merges", str),
        _list(metadata, "token_type", int),
    )
    backend = _byte_level_backend(kind, tokens, merges)
    if len(types) != len(tokens):
        raise _contradiction(f"{len(tokens)} tokens but {len(types)} token types")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    ids = {key: metadata[key] for key in (*_GGUF_NAMES.values(), *_GGUF_ENDS) if metadata.get(key) is not None}
    for key, token_id in ids.items():
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise _contradiction(f"{key} is {token_id!r}, outside the vocabulary of {len(tokens)}")
    special_tokens = {name: tokens[ids[key]] for name, key in _GGUF_NAMES.items() if key in ids}
    ends = {*eos_ids, *(ids[key] for key in _GGUF_ENDS if key in ids)}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind.add_bos)
    before = [ids[_GGUF_NAMES["bos_token"]]] if add_bos and _GGUF_NAMES["bos_token"] in ids else []
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    after = [ids[_GGUF_NAMES["eos_token"]]] if add_eos and _GGUF_NAMES["eos_token"] in ids else []
    return Tokenizer(backend, special_tokens, ends, (before, after))


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _contradiction(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
    return values


def _contradiction(what: str) -> UserError:
    return UserError(f"The GGUF file's tokenizer is damaged: {what}.", "Download the file again.")


def _byte_level_backend(kind: _PreTokenizer, tokens: list[str], merges: list[str]) -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _contradiction(f"{len(tokens) - len(vocab)} tokens occur twice")
    if bad := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise _contradiction(f"merge {bad!r} is no pair")
    pairs: list[tuple[str, str]] = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind.ignore_merges))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise _contradiction(str(error)) from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    if kind.pattern:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


# --- decoding rules --------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet: a character for each byte; those that print stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decode_rules(backend: Backend) -> DecodeRules:
    decoder: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        bare = "" if steps[0].get("prepend_scheme") == "never" else mark
        return DecodeRules(byte_level=False, replacements=((mark, " "),), bare_first=bare)
    replaces = [step for step in steps if step["type"] == "Replace"]
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if (
        re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{kind} " for kind in kinds))
        and all("String" in step["pattern"] for step in replaces)
        and (strip["content"], strip["stop"]) == (" ", 0)
    ):
        return DecodeRules(
            byte_level=False,
            replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaces),
            byte_fallback="ByteFallback" in kinds,
            strip_spaces=strip["start"],
        )
    raise UserError(
        f"The tokenizer's decoder is {' + '.join(kinds)}; supported: ByteLevel, Metaspace, and "
        "Replace + ByteFallback + Fuse + Strip.",
        "Use a model with a byte-level or SentencePiece-like tokenizer.",
    )
