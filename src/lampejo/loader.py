"""From names to a ready runner: checkpoint, weights, tokenizer, drafter."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lampejo.config import SPARE_TOKENS, EngineConfig
from lampejo.drafter_setup import drafter_info, mismatch, open_for, refuse_drafter_as_model, trial
from lampejo.errors import UserError
from lampejo.models.config import DrafterConfig, ModelConfig
from lampejo.models.dflash import DFlash
from lampejo.models.layers import Target
from lampejo.models.targets import make_target
from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu import set_threads as set_kernel_threads
from lampejo.ops.cpu.fused import MAX_PAGE_SIZE, PackedEmbedding, PackedExperts, PackedLinear
from lampejo.ops.cpu.library import LIBRARY, Q4, Q4K, Q8
from lampejo.ops.place import DTYPES, ON_CPU, Place, choose_place, device_name, enough_memory, free_memory
from lampejo.packing import fits_kernels, pack_drafter, pack_target, stays_float
from lampejo.runner import Runner
from lampejo.sampling import check_number
from lampejo.speculate import NGRAM_MAX_WIDTH, DFlashDrafter, Drafter, NgramDrafter, Speculator
from lampejo.tokenizer import Tokenizer, load_tokenizer
from lampejo.weights.checkpoint import Checkpoint, check_tensors, open_checkpoint
from lampejo.weights.describe import kv_bytes_per_token, skipped_parts, state_bytes
from lampejo.width import WidthController

MOST_THREADS = 4096  # OpenMP ends the process when it is asked for a billion
STEP_SHARE = 0.1  # of a GPU's memory, for what a step computes
IN_FP32 = (".A_log", ".dt_bias")  # few numbers, from which decays come that are multiplied token after token
SHORT_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Loaded:
    """Everything that an ``LLM`` is made of. ``info`` tells people the effective mode."""

    runner: Runner
    speculator: Speculator
    tokenizer: Tokenizer
    chat_template: str | None
    generation_defaults: dict[str, Any]
    eos_ids: tuple[int, ...]
    info: dict[str, Any]
    load_s: float
    template_defaults: dict[str, Any] = field(default_factory=dict)  # of ``chat_template_kwargs``


def load_model(
    model: str,
    drafter: str,
    config: EngineConfig,
    threads: int | None,
    target_layer_ids: tuple[int, ...] | None,
) -> tuple[Loaded, EngineConfig]:
    """Loads all parts; nothing stays behind when one of them fails."""
    started = time.perf_counter()
    if threads is not None:
        check_number("threads", threads, 1, MOST_THREADS, whole=True)
    place = choose_place(config.device, config.dtype)
    refuse_drafter_as_model(model)
    with open_checkpoint(model) as checkpoint:
        config = config.resolve(checkpoint.config.max_context)
        assert config.max_context is not None and config.num_pages is not None
        tokenizer = load_tokenizer(checkpoint)
        packed_kind, ops_reason = choose_ops(config, checkpoint.config, place)
        packed_pages = None if packed_kind is None else config.page_size
        choice = open_for(drafter, checkpoint, target_layer_ids).narrowed(config.drafting)
        _check_width(config.width, drafter, choice.config)
        kv_dtype = kv_dtype_of(packed_kind, place)
        cached: list[ModelConfig | DrafterConfig] = [checkpoint.config, *([choice.config] if choice.config else [])]
        bytes_per_token = sum(kv_bytes_per_token(part, kv_dtype.itemsize) for part in cached)
        if place.device.type == "cpu":
            room = _cpu_room()
        else:
            room = _device_room(place, checkpoint.config, choice.opened[1] if choice.opened else {})
        _check_memory(config, bytes_per_token, state_bytes(checkpoint.config), room)
        with enough_memory(place.device):
            dflash = build_drafter(*choice.opened, packed_pages, place) if choice.opened else None
            choice.let_go()
            target = load_target(checkpoint, packed_kind, place)
            num_state_slots = config.max_rows + config.num_snapshots
            runner = Runner(target, dflash, config.num_pages, config.page_size, kv_dtype, num_state_slots)
        speculator = _speculator(drafter, runner, config)
        eos_ids = checkpoint.eos_ids or tokenizer.eos_ids
        template = checkpoint.chat_template
        info: dict[str, Any] = {
            "model": checkpoint.name,
            "architecture": checkpoint.config.architecture,
            "quantization": checkpoint.quantization,
            "skipped": skipped_parts(checkpoint.skipped),
            "device": str(runner.device),
            "device_name": device_name(runner.device),
            "ops": _ops_name(packed_kind, place),
            "ops_reason": ops_reason,
            "dtype": str(target.model.norm.weight.dtype).removeprefix("torch.") if packed_kind is None else "int8",
            "weights": SHORT_NAMES[place.dtype] if packed_kind is None else _packed_weights(target),
            "kv_dtype": str(runner.cache.k.dtype).removeprefix("torch."),
            "drafter": choice.name,
            "drafters": [d.name for d in speculator.drafters],
            "dflash": drafter_info(choice, runner),
            "width": "auto" if config.width is None else config.width,
            "policy": config.drafting.policy,
            "lossless": config.drafting.typical is None,
            "typical_threshold": config.drafting.typical,
            "thinking": "the template's default" if has_thinking(template) else "the template has no such mode",
            "page_size": config.page_size,
            "max_context": config.max_context,
            "kv_bytes_per_token": runner.bytes_per_token,
            "state_bytes_per_request": runner.bytes_per_state,
            "warnings": choice.warnings,
        }
    _set_threads(threads, on_kernels=packed_kind is not None)  # last, so that a failed load changes nothing
    if choice.opened and not choice.is_packaged and config.width != 0:
        length = trial(runner, config, tokenizer, template, eos_ids)
        info["dflash"]["trial_acceptance_length"] = length
        if warning := mismatch(choice.name, length):
            info["warnings"].append(warning)
    loaded = Loaded(
        runner=runner,
        speculator=speculator,
        tokenizer=tokenizer,
        chat_template=template,
        generation_defaults=checkpoint.generation_defaults,
        eos_ids=eos_ids,
        info=info,
        load_s=time.perf_counter() - started,
    )
    return loaded, config


_torch_threads: int | None = None  # what PyTorch had before the kernels took over


def _set_threads(threads: int | None, on_kernels: bool) -> None:
    """Threads for who computes. Beside the kernels PyTorch gets one: its pool and theirs would wait for each other's
    cores in every step, and what is left to it are small operations."""
    global _torch_threads
    if on_kernels:
        _torch_threads = _torch_threads or torch.get_num_threads()
        set_kernel_threads(threads or _torch_threads)
        torch.set_num_threads(1)
    elif threads is not None or _torch_threads is not None:
        torch.set_num_threads(threads or _torch_threads or 1)
        _torch_threads = None


def choose_ops(config: EngineConfig, model: ModelConfig, place: Place) -> tuple[int | None, str | None]:
    """How the CPU kernels pack float weights; None where PyTorch's operations run, with the reason if they run on a CPU
    and nobody asked for them."""
    if place.device.type != "cpu":
        for name, value, harmless in (("ops", config.ops, ("auto",)), ("quantize", config.quantize, (None, "none"))):
            if value not in harmless:
                raise UserError(
                    f"--{name} {value} is for a CPU, but the model runs on {place.device}.",
                    "Leave it out, or choose --device cpu.",
                )
        return None, None
    if config.ops == "reference":
        return None, None
    if config.quantize == "none" or config.dtype == "fp32":
        if config.ops == "cpu":
            raise UserError("The CPU kernels have no fp32 weights.", "Choose --quantize q8, or --ops reference.")
        return None, None
    lacking = _lacking(model, config.page_size)
    if lacking and (config.ops == "cpu" or config.quantize):
        asked_for = "--ops cpu" if config.ops == "cpu" else f"--quantize {config.quantize}"
        raise UserError(
            f"{asked_for} is for the CPU kernels, which cannot serve this model here: {lacking}.",
            "Install lampejo where a C++ compiler is at hand, or use the reference operations.",
        )
    return (None, lacking) if lacking else ({"q4": Q4, "q8": Q8}[config.quantize or "q8"], None)


def kv_dtype_of(packed_kind: int | None, place: Place) -> torch.dtype:
    """What keys and values are kept in, by what ``choose_ops`` chose."""
    return place.dtype if packed_kind is None else torch.float16


def _ops_name(packed_kind: int | None, place: Place) -> str:
    if packed_kind is not None:
        return f"cpu ({instruction_set()})"
    return "reference" if place.device.type == "cpu" else "device"


def _lacking(model: ModelConfig, page_size: int) -> str | None:
    """Why the kernels cannot run; the reference operations always can."""
    if LIBRARY is None:
        return "the CPU kernels were not built"
    if instruction_set() is None:
        return "the CPU kernels do not know this processor"
    if not fits_kernels(model.head_dim, MAX_PAGE_SIZE):
        return f"the CPU kernels do not know heads of {model.head_dim}"
    return (
        None if fits_kernels(model.head_dim, page_size) else f"the CPU kernels do not know pages of {page_size} tokens"
    )


def _packed_weights(target: Target) -> str:
    """How many of the target's matrices are held in which kind, like "q4: 210, q8: 1"."""
    layers: Any = target.model.layers  # fused ones, which are no modules
    parts: list[nn.Module] = [target, *(layer.layer for layer in layers)]
    modules = [m for part in parts for m in part.modules()]
    matrices = [m.matrix for m in modules if isinstance(m, PackedLinear | PackedEmbedding)]
    matrices += [matrix for m in modules if isinstance(m, PackedExperts) for matrix in (m.gate, m.up, m.down)]
    kinds = {id(matrix): matrix.c.kind for matrix in matrices}  # a tied head is one matrix
    counts = Counter({Q4: "q4", Q4K: "q4k", Q8: "q8"}[kind] for kind in kinds.values())
    return ", ".join(f"{kind}: {counts[kind]}" for kind in sorted(counts))


@dataclass(frozen=True)
class Room:
    """Bytes that caches may take at most, and how many are advised; ``of``: whose they are, for people."""

    most: int
    advised: int
    of: str


def _cpu_room() -> Room | None:
    """None where the system does not tell. Pages and states are touched as needed: less may do or may not. Advised is
    half of the memory, beside weights and others."""
    memory = _total_memory()
    return None if memory is None else Room(memory, memory // 2, f"this machine has {memory / 1e9:,.1f} GB")


def _device_room(place: Place, model: ModelConfig, drafter: dict[str, torch.Tensor]) -> Room | None:
    """What the weights leave of a GPU's free memory; ``UserError`` if they do not fit themselves."""
    free = free_memory(place.device)
    if free is None:
        return None
    with torch.device("meta"):
        tensors = [*make_target(model).parameters(), *drafter.values()]
    weights, usable = sum(t.numel() for t in tensors) * place.dtype.itemsize, int(free * (1 - STEP_SHARE))
    if weights >= usable:
        raise UserError(
            f"The weights take {weights / 1e9:,.1f} GB in {SHORT_NAMES[place.dtype]}; {place.device} has "
            f"{free / 1e9:,.1f} GB free.",
            "Choose a smaller model, end what else runs there, or choose --device cpu.",
        )
    left = usable - weights
    return Room(left, left, f"{place.device} has {left / 1e9:,.1f} GB left beside weights and a step's own needs")


def _check_memory(config: EngineConfig, bytes_per_token: int, bytes_per_state: int, room: Room | None) -> None:
    """Refuses caches that surely cannot be held."""
    assert config.num_pages is not None
    states = (config.max_rows + config.num_snapshots) * bytes_per_state
    needed = config.num_pages * config.page_size * bytes_per_token + states
    if room is None or needed <= room.most:
        return
    if states > room.advised:
        raise UserError(
            f"Recurrent states of {config.max_rows} requests and {config.num_snapshots} cached prefixes would take "
            f"{states / 1e9:,.1f} GB; {room.of}.",
            "Choose a smaller max_rows or num_snapshots (EngineConfig).",
        )
    num_tokens = (room.advised - states) // bytes_per_token
    context = max(num_tokens // 2, num_tokens - SPARE_TOKENS, 2)
    raise UserError(
        f"Keys and values of {config.max_context} tokens of context, with room for cached prefixes, would take "
        f"{needed / 1e9:,.1f} GB; {room.of}.",
        f"Choose --context {1 << (context.bit_length() - 1)} or another size that fits.",
    )


def _total_memory() -> int | None:
    """Bytes of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return None


def without_drafts(loaded: Loaded) -> Loaded:
    """The same parts for plain decoding. Its engine shares memory with others of ``loaded``: one at a time."""
    info = {**loaded.info, "drafter": "none", "drafters": [], "dflash": None, "policy": "lossless", "lossless": True}
    return replace(loaded, speculator=Speculator([], WidthController(NGRAM_MAX_WIDTH)), info=info)


def has_thinking(template: str | None) -> bool:
    """Whether a chat template can be told to think or not, as those of Qwen can."""
    return template is not None and "enable_thinking" in template


def with_thinking(loaded: Loaded, thinking: bool) -> Loaded:
    """Answers with or without reasoning, unless a request says otherwise."""
    if not has_thinking(loaded.chat_template):
        raise UserError(
            f"The chat template of {loaded.info['model']} cannot be told to think.", "Leave out --thinking."
        )
    info = {**loaded.info, "thinking": "on" if thinking else "off"}
    return replace(loaded, template_defaults={"enable_thinking": thinking}, info=info)


def load_target(checkpoint: Checkpoint, packed_kind: int | None = None, place: Place = ON_CPU) -> Target:
    """The target with its weights in their place, one tensor after another; or packed for the CPU kernels, those that
    are stored as floats as ``packed_kind``."""
    with torch.device("meta"):
        target = make_target(checkpoint.config)
    unfilled = list(target.parameters())
    expected = {name: tuple(p.shape) for name, p in target.named_parameters()}
    check_tensors(checkpoint, expected)
    tied = checkpoint.config.tie_word_embeddings
    if packed_kind is None:
        types = {name: torch.float32 if name.endswith(IN_FP32) else place.dtype for name in expected}
        _assign(target, {name: checkpoint.read(name, dtype, place.device) for name, dtype in types.items()})
        if tied:
            target.lm_head.weight = target.model.embed_tokens.weight
    else:
        _assign(target, {name: checkpoint.read(name) for name, shape in expected.items() if stays_float(name, shape)})
        if tied:
            target.lm_head.weight = target.model.embed_tokens.weight  # one parameter again: it is packed once
        pack_target(target, checkpoint.stored, packed_kind)
    _check_complete(target, unfilled)
    return target


def build_drafter(
    config: DrafterConfig,
    tensors: dict[str, torch.Tensor],
    packed_pages: int | None = None,
    place: Place = ON_CPU,
) -> DFlash:
    """A DFlash drafter from checked tensors, in its place; or in 8 bits for the CPU kernels and pages of so many
    tokens."""
    with torch.device("meta"):
        drafter = DFlash(config)
    unfilled = list(drafter.parameters())
    kept = {name: t for name, t in tensors.items() if packed_pages is None or t.ndim == 1}
    placed = {n: t.to(place.device, place.dtype if t.is_floating_point() else t.dtype) for n, t in kept.items()}
    _assign(drafter, placed)
    if packed_pages is not None:
        pack_drafter(drafter, tensors, Q8, packed_pages)
    _check_complete(drafter, unfilled)
    return drafter


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(tensors, strict=False, assign=True)
    module.requires_grad_(False)


def _check_complete(module: nn.Module, unfilled: Sequence[nn.Parameter]) -> None:
    """Every parameter that the module was made with has given way to one that holds something."""
    kept = {id(p) for p in unfilled}
    left = [name for name, p in module.named_parameters() if id(p) in kept]
    assert not left, left


def _check_width(width: int | None, drafter: str, dflash: DrafterConfig | None) -> None:
    """A fixed width that no drafter can offer would be narrowed without a word."""
    most = max(NGRAM_MAX_WIDTH if drafter in ("auto", "ngram") else 0, dflash.max_drafts if dflash else 0)
    if width is not None and width > most:
        raise UserError(
            f"width is {width}, but --drafter {drafter} offers {most} drafts at most.", f"Choose 0 to {most}."
        )


def _speculator(drafter: str, runner: Runner, config: EngineConfig) -> Speculator:
    drafters: list[Drafter] = []
    if drafter in ("auto", "ngram"):
        drafters.append(NgramDrafter())
    if runner.drafter:
        drafters.append(DFlashDrafter(runner))
    most = max([NGRAM_MAX_WIDTH, *([runner.drafter.config.max_drafts] if runner.drafter else [])])
    return Speculator(drafters, WidthController(most, config.width))
