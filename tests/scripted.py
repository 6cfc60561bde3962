"""Engines over a scripted target: no weights, so that the blocks of a test are exactly known and cost microseconds.

A scripted target is a pure function of the text before a position. It reads that text back from its pages, slot by
slot, so that a wrong page table, a wrong prefix hit or a page given to two requests changes its answers.
"""

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lampejo.api import LLM
from lampejo.batch import Batch
from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.loader import Loaded
from lampejo.models import layers
from lampejo.models.config import ModelConfig
from lampejo.models.dflash import DFlash
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.library import Q8
from lampejo.packing import pack_drafter, pack_target
from lampejo.request import Request, StopParams
from lampejo.runner import VerifyOutput
from lampejo.sampling import SamplingParams
from lampejo.scheduler import ScheduledRow
from lampejo.scores import Scores
from lampejo.speculate import NGRAM_MAX_WIDTH, Drafter, Speculator
from lampejo.states import Save
from lampejo.tokenizer import Tokenizer
from lampejo.width import WidthController
from tiny import EOS, TINY, TINY_DRAFTER, ScriptedDrafter, make_drafter, make_target, reader_of

VOCAB = 97  # of the tiny model too: 0 nothing, 1 end of text, then the printable characters
CONTEXT = 512
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

Target = Callable[[Sequence[int]], int | Sequence[float]]  # text before a position -> the token there, or its logits


class ScriptedRunner:
    """Has the interface of ``Runner``; ``target`` says what follows a text."""

    def __init__(self, target: Target, num_pages: int, page_size: int, vocab_size: int = VOCAB) -> None:
        self.script = target
        self.device = torch.device("cpu")
        self.drafter = None
        self.target = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.num_state_slots = 0
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.num_steps = 0

    def verify(self, batch: Batch) -> VerifyOutput:
        self.num_steps += 1
        assert len(batch.slots.unique()) == len(batch.slots), "a slot is written twice in a step"
        for slot, token_id in zip(batch.slots.tolist(), batch.ids.tolist(), strict=True):
            self.slots[slot] = token_id
        wanted = dict.fromkeys(batch.logit_index.tolist())
        logits = torch.zeros(len(wanted), self.vocab_size)
        num_done = 0
        for segment in batch.segments:
            positions = range(segment.position + segment.length)
            pages = segment.pages
            text = [self.slots[pages[p // self.page_size] * self.page_size + p % self.page_size] for p in positions]
            assert None not in text, "a slot is read before it was written"
            for j in range(segment.length):
                if segment.start + j not in wanted:
                    continue
                said = self.script(text[: segment.position + j + 1])  # type: ignore[arg-type]
                if isinstance(said, int):
                    logits[num_done, said] = 10.0
                else:
                    logits[num_done] = torch.as_tensor(said)
                num_done += 1
        return VerifyOutput(Scores(logits), torch.empty(len(batch.ids), 0), torch.empty(len(batch.ids), 0))

    def commit(self, out: VerifyOutput, num_committed: Sequence[int], saves: Sequence[Sequence[Save]]) -> None:
        assert not any(saves), "the target has no state"


class ScriptedHybridRunner(ScriptedRunner):
    """Has recurrent layers too. A state is the text that it was computed from, so that it tells when it is another."""

    def __init__(self, target: Target, num_pages: int, page_size: int, num_state_slots: int) -> None:
        super().__init__(target, num_pages, page_size)
        self.num_state_slots = num_state_slots
        self.states: list[tuple[int, ...] | None] = [None] * num_state_slots
        self._journal: dict[int, tuple[ScheduledRow, tuple[int, ...]]] = {}

    def verify(self, batch: Batch) -> VerifyOutput:
        out = super().verify(batch)
        for row in batch.rows:
            if row.load is not None:
                self.states[row.request.state.slot] = self.states[row.load]
        self._journal = {}
        for i, (row, segment) in enumerate(zip(batch.rows, batch.segments, strict=True)):
            if segment.position == 0:
                self.states[row.request.state.slot] = ()
            self.check(row.request)
            tokens = tuple(batch.ids[segment.start : segment.start + segment.length].tolist())
            if row.width:
                self._journal[i] = row, tokens
            else:
                self._fold(row, tokens, row.saves)
        return out

    def commit(self, out: VerifyOutput, num_committed: Sequence[int], saves: Sequence[Sequence[Save]]) -> None:
        for i, (row, tokens) in self._journal.items():
            self._fold(row, tokens[: num_committed[i]], saves[i])

    def check(self, request: Request) -> None:
        """The state of a row is that of its committed text."""
        assert self.states[request.state.slot] == tuple(request.ids[: request.num_computed]), "a state of another text"

    def _fold(self, row: ScheduledRow, tokens: tuple[int, ...], saves: Sequence[Save]) -> None:
        slot = row.request.state.slot
        text = (self.states[slot] or ()) + tokens
        for save in saves:
            self.states[save.slot] = text[: save.position]
        self.states[slot] = text


def text_of_snapshot(engine: Engine, name: int) -> tuple[int, ...]:
    """The text up to the end of a page, by the keys of the prefix cache."""
    keys = {engine.pool._names[pages[0]]: key for key, pages in engine.pool._bearers.items()}
    text: tuple[int, ...] = ()
    while name:
        name, tokens = keys[name]
        text = tokens + text
    return text


def random_target(seed: int = 0) -> Target:
    """A target without rhyme or reason, but always the same: logits from a checksum of the whole text."""
    base = torch.arange(VOCAB, dtype=torch.long)

    def target(text: Sequence[int]) -> torch.Tensor:
        key = zlib.crc32(bytes(text), seed)
        return ((base * 2654435761 + key) * 40503 % 1009).float() / 150

    return target


def answering(num_prompt: int, answer: Sequence[int]) -> Target:
    """A target that gives this answer to every prompt of this length, whatever the text, and then ends it."""
    return lambda text: answer[len(text) - num_prompt] if len(text) - num_prompt < len(answer) else EOS


def knowing(answer: Sequence[int], max_width: int = NGRAM_MAX_WIDTH) -> ScriptedDrafter:
    """A drafter that is always right."""
    return ScriptedDrafter(lambda request, width: list(answer[request.num_output :][:width]), max_width)


def scripted_engine(
    target: Target, drafters: Sequence[Drafter] = (), eos_ids: Sequence[int] = (EOS,), **config: Any
) -> Engine:
    resolved = EngineConfig(**config).resolve(CONTEXT)
    assert resolved.num_pages is not None
    runner: Any = ScriptedRunner(target, resolved.num_pages, resolved.page_size)
    controller = WidthController(NGRAM_MAX_WIDTH, resolved.width)
    return Engine(runner, Speculator(drafters, controller), resolved, eos_ids)


def make_tokenizer(*long_tokens: str) -> Tokenizer:
    """One id per printable ASCII character, 97 in all; ``long_tokens`` take the places of "#", "$", "%", ..."""
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["<none>", "<end>", *map(chr, range(0x20, 0x7F))]
    first = ids_of("#")[0]
    spelled[first : first + len(long_tokens)] = long_tokens
    names = [*spelled[:2], *(to_byte_level.pre_tokenize_str(token)[0][0] for token in spelled[2:])]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = to_byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    return Tokenizer(backend, {"eos_token": "<end>"})


def ids_of(text: str) -> list[int]:
    """Ids of printable ASCII by ``make_tokenizer``."""
    return [ord(char) - 0x20 + 2 for char in text]


def make_llm(runner: Any, drafters: Sequence[Drafter] = (), tokenizer: Tokenizer | None = None, **config: Any) -> LLM:
    """The whole Python interface over a runner whose pages are those of ``config``."""
    resolved = EngineConfig(**config)
    assert resolved.max_context is not None
    resolved = resolved.resolve(resolved.max_context)
    loaded = Loaded(
        runner=runner,
        speculator=Speculator(drafters, WidthController(NGRAM_MAX_WIDTH, resolved.width)),
        tokenizer=tokenizer or make_tokenizer(),
        chat_template=CHAT,
        generation_defaults={},
        eos_ids=(EOS,),
        info={},
        load_s=0.0,
    )
    return LLM(loaded, resolved)


def scripted_llm(
    target: Target, drafters: Sequence[Drafter] = (), tokenizer: Tokenizer | None = None, **config: Any
) -> LLM:
    resolved = EngineConfig(**{"max_context": CONTEXT, **config})
    resolved = resolved.resolve(CONTEXT)
    assert resolved.num_pages is not None
    runner = ScriptedRunner(target, resolved.num_pages, resolved.page_size)
    return make_llm(runner, drafters, tokenizer, **{"max_context": CONTEXT, **config})


def decode_plainly(
    target: Target,
    prompt: Sequence[int],
    stops: StopParams,
    max_context: int = CONTEXT,
    tokenizer: Tokenizer | None = None,
) -> tuple[list[int], str]:
    """What greedy decoding means, token by token: ids and finish reason. Shares no code with the engine."""
    ids: list[int] = []
    while True:
        said = target([*prompt, *ids])
        scores = [10.0 * (i == said) for i in range(VOCAB)] if isinstance(said, int) else [float(s) for s in said]
        if len(ids) < stops.min_tokens:
            for hidden in (EOS, *stops.stop_token_ids):
                scores[hidden] = -1e9
        token_id = scores.index(max(scores))
        ids.append(token_id)
        if token_id in stops.stop_token_ids or (token_id == EOS and not stops.ignore_eos):
            return ids, "stop"
        if tokenizer and len(ids) >= stops.min_tokens:
            before, text = len(tokenizer.decode(ids[:-1])), tokenizer.decode(ids)
            if any(text.find(s, max(0, before + 1 - len(s))) >= 0 for s in stops.stop):  # completed by this token
                return ids, "stop"
        if len(ids) == stops.max_tokens or len(prompt) + len(ids) == max_context:
            return ids, "length"


def text_request(prompt: Sequence[int], text: Any, stops: StopParams, request_id: int = 0, **sampling: Any) -> Request:
    return Request(request_id, list(prompt), SamplingParams(**sampling), stops, text)


def lively_pair(config: ModelConfig = TINY, quick: bool = False) -> tuple[layers.Target, DFlash]:
    """A random target and drafter whose drafts vary with the context, so that they tell when it is not what it was.

    (By themselves random drafters say the mask token for ever: its own embedding outweighs all that they read.)
    ``quick``: on the CPU kernels, where they were built; ten times as fast as the reference operations.
    """
    target, drafter = make_target(config), make_drafter()
    target.model.embed_tokens.weight[TINY_DRAFTER.mask_token_id] *= 0.01
    for name, parameter in drafter.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(4)
    if quick and instruction_set() is not None:
        pack_target(target, reader_of(dict(target.named_parameters())), Q8)
        pack_drafter(drafter, dict(drafter.named_parameters()), Q8, page_size=32)
    return target, drafter
