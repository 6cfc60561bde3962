"""Tokenizers built from GGUF metadata and from folders, against transformers and the models' own definitions."""

import json
import re
import sys
import threading
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5Tokenizer

import tokenizer_samples as samples
from lampejo.errors import UserError
from lampejo.tokenizer import Tokenizer, from_folder, from_gguf, load_tokenizer
from lampejo.weights.checkpoint import open_checkpoint
from lampejo.weights.store import locate


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file without tensors; sizes are those that transformers wants before it reads the tokenizer."""
    arch = metadata["general.architecture"]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def oracle(folder: Path, metadata: dict[str, Any]) -> Any:
    write_gguf(folder / "model.gguf", metadata)
    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


# --- SmolLM2 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return locate("smollm2")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with open_checkpoint(smollm2_path) as checkpoint:
        return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def between_numerals(text: str) -> list[str]:
    """The text cut before and after every numeral (Unicode categories Nd, Nl, No)."""
    marked = "".join(f"\0{char}\0" if unicodedata.category(char).startswith("N") else char for char in text)
    return [part for part in marked.split("\0") if part]


def test_smollm2_ids_and_text_equal_transformers(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    """Fault: a tokenizer rebuilt from GGUF that splits words, digits or special tokens differently from the model.

    SmolLM2's tokenizer.json splits off numerals first (Digits, then GPT-2's words); transformers' GGUF reader knows no
    such step for ``smollm``, so it gets the stretches between numerals one by one.
    """
    texts = [*samples.TEXTS, *samples.random_texts(seed=1, count=1500)]
    for text in texts:
        ids = smollm2.encode(text)
        assert ids == [i for part in between_numerals(text) for i in smollm2_oracle.encode(part)], text
        assert smollm2.decode(ids) == smollm2_oracle.decode(ids, skip_special_tokens=True), text
        assert smollm2.decode(ids, skip_special_tokens=False) == smollm2_oracle.decode(ids), text
    whole = [text for text in texts if len(between_numerals(text)) <= 1]
    assert len(whole) > 300
    assert [smollm2.encode(text) for text in whole] == [smollm2_oracle.encode(text) for text in whole]


def test_smollm2_keeps_runs_of_spaces_before_a_digit_whole(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    """Fault: transformers' reading of ``smollm`` splits "    5" as "   " and " 5"; the model never saw that."""
    spaces, digit = smollm2.encode("    5")
    assert smollm2.token_text(spaces).text == " " * 4
    assert smollm2.token_text(digit).text == "5"
    assert smollm2_oracle.encode("    5") != [spaces, digit]  # when this fails, transformers has been mended


def test_smollm2_names_its_special_tokens(smollm2: Tokenizer) -> None:
    """Fault: EOS or the template's variables lost on the way from GGUF metadata."""
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2,))
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)  # add_bos_token is false
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([1, 2]) == ""


# --- pre-tokenizers on small vocabularies ------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_ids_equal_transformers_for_each_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    """Fault: a regular expression that differs in contractions, digits, newlines or the space before a word."""
    metadata = samples.gguf_metadata(pre, add_bos_token=False)
    ours, theirs = from_gguf(metadata), oracle(tmp_path, metadata)
    assert ours.vocab_size == len(theirs)
    nfc = pre == "qwen2"  # Qwen2's tokenizer.json normalises, transformers' GGUF reader forgets it
    for text in [*samples.TEXTS, *samples.random_texts(seed=2, count=800)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(unicodedata.normalize("NFC", text) if nfc else text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_ids_equal_those_of_the_tokenizer_of_qwen35() -> None:
    """Fault: vowel signs cut off their letters (Hindi, Hebrew with points), as Qwen2's pattern does."""
    metadata = samples.gguf_metadata("qwen35", add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen3_5Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    ours, qwen2 = from_gguf(metadata), from_gguf(samples.gguf_metadata("qwen2", add_bos_token=False))
    texts = [text for text in [*samples.TEXTS, *samples.random_texts(seed=3, count=800)] if "<" not in text]
    assert all(ours.encode(text) == theirs.encode(text, add_special_tokens=False) for text in texts)
    assert any(ours.encode(text) != qwen2.encode(text) for text in texts)


def test_qwen2_composes_characters_before_it_splits() -> None:
    """Fault: decomposed accents (as macOS types them) becoming tokens that Qwen never saw."""
    qwen2 = from_gguf(samples.gguf_metadata("qwen2"))
    assert qwen2.encode("e\u0301 a\u0303") == qwen2.encode("é ã")


@pytest.mark.parametrize(("pre", "longest"), [("smollm", 1), ("qwen2", 1), ("llama-bpe", 3)])
def test_digits_are_grouped_as_the_model_was_trained(pre: str, longest: int) -> None:
    """Fault: "12345" as one token where the model saw single digits, or groups of three from the left."""
    tokenizer = from_gguf(samples.gguf_metadata(pre))
    pieces = [tokenizer.token_text(token_id).text for token_id in tokenizer.encode("12345", add_special_tokens=False)]
    assert pieces == (["123", "45"] if longest == 3 else list("12345"))


def test_smollm_equals_the_definition_in_its_tokenizer_json() -> None:
    """Fault: the order Digits, then GPT-2's words (the space before a digit stays alone)."""
    metadata = samples.gguf_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=samples.SPECIALS)
    theirs.add_tokens(samples.USER_DEFINED)
    ours = from_gguf(metadata)
    for text in [*samples.TEXTS, *samples.random_texts(seed=3, count=400)]:
        assert ours.encode(text) == theirs.encode(text), text


def test_llama_bpe_takes_a_whole_word_before_it_merges() -> None:
    """Fault: Llama 3's ``ignore_merges`` lost; words that merges cannot reach fall to pieces."""
    metadata = samples.gguf_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("Ġzyxwv")
    metadata["tokenizer.ggml.token_type"].append(1)
    word = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert from_gguf(metadata).encode("a zyxwv", add_special_tokens=False)[-1] == word
    assert from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("a zyxwv")[-1] != word


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("llama-bpe", None, [1]), ("llama-bpe", False, []), ("qwen2", None, []), ("qwen2", True, [1])],
)
def test_bos_is_added_where_the_file_or_the_family_says_so(pre: str, flag: bool | None, added: list[int]) -> None:
    """Fault: Llama 3 without BOS (its GGUF files often lack the key), or two of them after a chat template."""
    tokenizer = from_gguf(samples.gguf_metadata(pre, add_bos_token=flag))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == added + plain
    assert 1 not in plain


def test_user_defined_tokens_are_whole_and_visible_and_control_tokens_invisible() -> None:
    """Fault: <think> cut into pieces, or hidden from the text that the reasoning parser reads."""
    tokenizer = from_gguf(samples.gguf_metadata("qwen2"))
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>")
    assert [tokenizer.token_text(i).text for i in ids] == ["<|im_start|>", "<think>", "x", "</think>", "<|im_end|>"]
    assert tokenizer.decode(ids) == "<think>x</think>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("<|nothing|>") is None


def test_generation_ends_at_every_end_the_checkpoint_and_the_file_name() -> None:
    """Fault: end-of-turn forgotten, so that answers run on into the next turn."""
    metadata = samples.gguf_metadata("llama-bpe", eot_token_id=0)
    assert from_gguf(metadata).eos_ids == (0, 2)
    checkpoint = SimpleNamespace(format="gguf", metadata=metadata, folder=None, eos_ids=(5,))
    assert load_tokenizer(checkpoint).eos_ids == (0, 2, 5)


def test_a_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    """Fault: DeepSeek-like names ("<｜User｜>") decoded as broken bytes, or given an id beyond the vocabulary."""
    metadata = samples.gguf_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"].append("<｜User｜>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = from_gguf(metadata)
    ids = tokenizer.encode("<｜User｜>olá")
    assert ids[0] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "<｜User｜>olá"


# --- bad GGUF metadata -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, ["'llama'", "tokenizer.ggml.model", "gpt2"]),
        ({"model": None}, ["None", "gpt2"]),
        ({"pre": "tekken"}, ["'tekken'", "tokenizer.ggml.pre", "smollm, qwen2, qwen35, llama-bpe"]),
        ({"pre": None}, ["None", "smollm"]),
        ({"pre": ["qwen2"]}, ["qwen2", "smollm"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens"]),
        ({"merges": 7}, ["tokenizer.ggml.merges"]),
        ({"merges": ["a"]}, ["'a'"]),
        ({"merges": ["zz yy"]}, ["damaged"]),
        ({"merges": [1]}, ["tokenizer.ggml.merges"]),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, ["twice"]),
        ({"tokens": ["a", 5], "token_type": [1, 1], "merges": []}, ["tokenizer.ggml.tokens"]),
        ({"token_type": [1]}, ["token types"]),
        ({"eos_token_id": 10**6}, ["eos_token_id", "1000000"]),
        ({"bos_token_id": -1}, ["bos_token_id"]),
        ({"bos_token_id": "x"}, ["bos_token_id"]),
    ],
)
def test_unsupported_or_damaged_gguf_metadata_is_named(changes: dict[str, Any], words: list[str]) -> None:
    """Cases C2, C7: a clear error with a remedy; never a tokenizer that is silently another one."""
    with pytest.raises(UserError) as caught:
        from_gguf(samples.gguf_metadata("qwen2", **changes))
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy


# --- folders -----------------------------------------------------------------------------------------------------


def byte_level_backend() -> Backend:
    return from_gguf(samples.gguf_metadata("qwen2")).backend


def save_folder(folder: Path, backend: Backend, **config: Any) -> None:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_folder_saved_by_transformers_gives_the_same_ids(tmp_path: Path) -> None:
    """Fault: special tokens, post-processor or decoder lost between tokenizer.json and tokenizer_config.json."""
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **names)
    theirs.save_pretrained(tmp_path)
    ours = from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_ids, ours.special_tokens) == (1, (2,), names)
    for text in samples.TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True), text


def test_a_sentencepiece_folder_gives_the_same_ids_and_text_as_transformers(tmp_path: Path) -> None:
    """Fault: BOS or the space before the first word lost for Llama-2-like tokenizers."""
    backend = samples.sentencepiece_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    theirs.save_pretrained(tmp_path)
    ours = from_folder(tmp_path)
    for text in samples.TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_flags_in_the_configuration_decide_about_bos_and_eos(tmp_path: Path) -> None:
    """Fault: ``add_bos_token`` ignored in favour of whatever tokenizer.json happens to hold."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    names = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": None}
    save_folder(tmp_path, backend, **names)
    plain = from_folder(tmp_path).encode("x", add_special_tokens=False)
    assert from_folder(tmp_path).encode("x") == [1, *plain]
    save_folder(tmp_path, backend, add_bos_token=False, **names)
    assert from_folder(tmp_path).encode("x") == plain
    save_folder(tmp_path, backend, add_bos_token=True, add_eos_token=True, **names)
    assert from_folder(tmp_path).encode("x") == [1, *plain, 2]


def test_tokens_that_only_the_configuration_declares_are_added(tmp_path: Path) -> None:
    """Fault: tokens of tokenizer_config.json missing, so that the template's markers become text."""
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    declared = {str(size): {"content": "<|new|>", "special": True}, "2": {"content": "<|im_end|>", "special": True}}
    save_folder(tmp_path, backend, eos_token="<|new|>", added_tokens_decoder=declared)
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("<|new|>") == [size]
    assert tokenizer.eos_ids == (size,)
    assert size in tokenizer.special_ids
    save_folder(tmp_path, backend, added_tokens_decoder={str(size + 7): {"content": "<|new|>"}})
    with pytest.raises(UserError, match=re.escape("<|new|>")):
        from_folder(tmp_path)


def test_a_named_token_becomes_special_even_if_tokenizer_json_does_not_say_so(tmp_path: Path) -> None:
    """Fault: the end token printed at the end of every answer."""
    backend = byte_level_backend()
    save_folder(tmp_path, backend, eos_token="</think>", additional_special_tokens=["<think>"])
    tokenizer = from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("<think>x</think>")) == "x"


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(tmp_path: Path) -> None:
    """Fault: prompts cut to 512 tokens without a word."""
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    save_folder(tmp_path, backend)
    assert len(from_folder(tmp_path).encode("one two three four five six seven")) > 6
    assert len(from_folder(tmp_path).encode("!")) == 1


def test_the_end_ids_of_the_checkpoint_win_for_folders(tmp_path: Path) -> None:
    """Fault: generation_config.json's list of end ids ignored."""
    save_folder(tmp_path, byte_level_backend(), eos_token="<|im_end|>")
    checkpoint = SimpleNamespace(format="safetensors", metadata={}, folder=tmp_path, eos_ids=(9, 7))
    assert load_tokenizer(checkpoint).eos_ids == (7, 9)
    checkpoint.eos_ids = ()
    assert load_tokenizer(checkpoint).eos_ids == (2,)
    checkpoint.folder = None
    with pytest.raises(UserError):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named_with_a_remedy(missing: str, tmp_path: Path) -> None:
    """Fault: a traceback from the tokenizers library."""
    save_folder(tmp_path, byte_level_backend())
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=re.escape(missing)) as caught:
        from_folder(tmp_path)
    assert "Download" in caught.value.remedy


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_broken_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    """Case C7: truncated or wrong JSON."""
    save_folder(tmp_path, byte_level_backend())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(name)):
        from_folder(tmp_path)


@pytest.mark.parametrize("declared", [[], {"x": {"content": "a"}}, {"1": 5}, {"1": {}}, {"1": {"content": 3}}])
def test_malformed_declarations_are_named(declared: Any, tmp_path: Path) -> None:
    """Case C7: wrong types inside tokenizer_config.json."""
    save_folder(tmp_path, byte_level_backend(), added_tokens_decoder=declared)
    if declared:
        with pytest.raises(UserError, match=re.escape("tokenizer_config.json")):
            from_folder(tmp_path)
    else:
        from_folder(tmp_path)


def test_an_unsupported_decoder_is_named(tmp_path: Path) -> None:
    """Fault: text joined by the wrong rules, found by a user after days."""
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    save_folder(tmp_path, backend)
    with pytest.raises(UserError, match="WordPiece"):
        from_folder(tmp_path)


# --- logprobs and odd input --------------------------------------------------------------------------------------


def test_token_text_gives_bytes_and_string_of_every_token() -> None:
    """Fault: half characters lost from logprobs."""
    tokenizer = from_gguf(samples.gguf_metadata("qwen2"))
    ids = tokenizer.encode("olá 🎉𐍈!")
    assert b"".join(tokenizer.token_text(i).bytes for i in ids) == "olá 🎉𐍈!".encode()
    halves = [tokenizer.token_text(i) for i in ids if "\ufffd" in tokenizer.token_text(i).text]
    assert halves
    assert tokenizer.token_text(2).text == "<|im_end|>"
    spm = samples.sentencepiece_tokenizer()
    texts = [spm.token_text(i) for i in spm.encode("the ß")]
    assert texts == [(" the", b" the"), (" ", b" "), ("\ufffd", b"\xc3"), ("\ufffd", b"\x9f")]


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    """Fault: a model's padded vocabulary rows crash the decoder."""
    tokenizer = from_gguf(samples.gguf_metadata("qwen2"))
    assert tokenizer.decode([tokenizer.vocab_size + 10]) == ""
    assert tokenizer.token_text(tokenizer.vocab_size + 10) == ("", b"")


def test_text_that_is_no_unicode_is_refused() -> None:
    """Fault: a lone surrogate from JSON gives a traceback."""
    with pytest.raises(UserError, match="surrogate"):
        from_gguf(samples.gguf_metadata("qwen2")).encode("a\ud800")


def test_special_tokens_with_spaces_around_keep_the_added_token_rules(tmp_path: Path) -> None:
    """Fault: ``lstrip``/``rstrip`` of added tokens dropped on the way."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    save_folder(tmp_path, backend)
    tokenizer = from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a   <mask>b")) == "ab"


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Fault: a prompt of some megabytes stopped the whole server for a minute, until it was found to be too long."""
    tokenizer = from_gguf(samples.gguf_metadata("qwen2"))
    began, done = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        tokenizer.encode("a b " * 200_000)
        done.set()

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # seconds: Python takes its lock from no thread that does not give it
    try:
        thread.start()
        began.wait()
        assert not done.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
