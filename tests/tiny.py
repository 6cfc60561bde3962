"""Tiny random models, drafters and engines that the tests share. Nothing here needs a network."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from lampejo.config import EngineConfig
from lampejo.engine import Engine
from lampejo.models import targets
from lampejo.models.config import DeltaNetConfig, DrafterConfig, ExpertsConfig, ModelConfig, RopeConfig
from lampejo.models.dflash import DFlash
from lampejo.models.layers import Target
from lampejo.ops.cpu.fused import PackedLinear
from lampejo.ops.cpu.library import Q8
from lampejo.ops.stored import Stored
from lampejo.packing import pack_drafter, pack_target
from lampejo.request import Request, StopParams
from lampejo.runner import Runner
from lampejo.sampling import SamplingParams
from lampejo.speculate import NGRAM_MAX_WIDTH, DFlashDrafter, Drafter, Speculator
from lampejo.width import RowOffer, WidthController

TINY = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    max_context=6000,
    tie_word_embeddings=True,
)
TINY_QWEN3 = replace(TINY, architecture="qwen3", qk_norm=True)
TINY_MOE = replace(
    TINY_QWEN3,
    architecture="qwen3_moe",
    experts=ExpertsConfig(num_experts=8, num_active=3, intermediate_size=24, dense_layers=(1,)),
)
# Three layers of Gated DeltaNet to one of attention, as in the releases; value heads more than key heads, and larger.
TINY_HYBRID = replace(
    TINY_QWEN3,
    architecture="qwen3_5",
    head_dim=16,
    rotary_dim=4,
    attention_gate=True,
    norm_offset=True,
    delta_net=DeltaNetConfig(
        layers=(0, 1, 2), num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=16, conv_size=4
    ),
)
TINY_HYBRID_MOE = replace(
    TINY_HYBRID,
    architecture="qwen3_5_moe",
    experts=ExpertsConfig(num_experts=8, num_active=3, intermediate_size=24, shared_intermediate_size=40),
)
TINY_NEXT = replace(
    TINY_HYBRID_MOE, architecture="qwen3_next", experts=replace(TINY_HYBRID_MOE.experts, dense_layers=(2,))
)
TINY_TARGETS = {
    config.architecture: config for config in (TINY, TINY_QWEN3, TINY_MOE, TINY_NEXT, TINY_HYBRID, TINY_HYBRID_MOE)
}  # one of each architecture
TINY_DRAFTER = DrafterConfig(
    block_size=6,
    mask_token_id=96,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0),
    vocab_size=97,
    windows=(None, None),
    causal=(False, False),
)
EOS = 1


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights large enough that the model's choices vary with its input, norms near one, memories of all lengths."""
    generator = torch.Generator().manual_seed(seed)
    offset = {f"{name}.weight" for name, part in module.named_modules() if getattr(part, "offset", False)}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("norm.weight"):
            parameter.copy_((name not in offset) + 0.1 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith("A_log"):  # a head forgets by a factor of exp(-A * softplus(...)) per token
            parameter.copy_((0.01 + torch.rand(parameter.shape, generator=generator)).log())
        else:
            scale = 1.0 if "embed" in name or "predecessor" in name else 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def reader_of(weights: Mapping[str, torch.Tensor]) -> Callable[[str], Stored]:
    """Matrices by name as a checkpoint gives them for packing, those of experts one by one."""

    def read(name: str) -> Stored:
        match = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            return Stored.of(weights[name])
        prefix, expert, part = match[1], int(match[2]), match[3]
        if part == "down":
            return Stored.of(weights[f"{prefix}.down_proj"][expert])
        return Stored.of(weights[f"{prefix}.gate_up_proj"][expert].chunk(2)[part == "up"])

    return read


def make_target(config: ModelConfig = TINY, seed: int = 0, packed: bool = False) -> Target:
    """``packed``: in 8 bits, on the CPU kernels."""
    target = targets.make_target(config)
    randomise(target, seed)
    if packed:
        weights = dict(target.named_parameters())
        pack_target(target, reader_of(weights), Q8)
    return target


def make_drafter(config: DrafterConfig = TINY_DRAFTER, seed: int = 1, packed: bool = False) -> DFlash:
    drafter = DFlash(config)
    randomise(drafter, seed)
    if config.draft_vocab_size:
        ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))
        drafter.draft_token_ids = ids[: config.draft_vocab_size].sort().values.int()
    if packed:
        pack_drafter(drafter, dict(drafter.named_parameters()), Q8, page_size=32)
    return drafter


def is_packed(target: Target) -> bool:
    return isinstance(target.lm_head, PackedLinear)


class ScriptedDrafter:
    """Drafts what a function says, for tests: ``script(request, width) -> ids``."""

    name = "scripted"

    def __init__(self, script: Callable[[Request, int], list[int]], max_width: int = 15) -> None:
        self.script = script
        self.max_width = max_width

    def offer(self, request: Request) -> RowOffer | None:
        return RowOffer(request.id, self.name, self.max_width) if self.max_width else None

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        return [self.script(request, width)[:width] for request, width in zip(requests, widths, strict=True)]

    def observe(self, batch, taps, num_committed) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


_request_ids = itertools.count()


def make_request(prompt_ids: Sequence[int], stops: StopParams | None = None, **sampling) -> Request:
    return Request(next(_request_ids), list(prompt_ids), SamplingParams(**sampling), stops or StopParams())


def make_engine(
    target: Target,
    drafters: Sequence[Drafter] = (),
    drafter: DFlash | None = None,
    eos_ids: Sequence[int] = (EOS,),
    dflash: bool = False,
    **config,
) -> Engine:
    """An engine over a tiny model. ``width`` fixes the number of drafts; ``dflash`` lets the DFlash drafter draft."""
    resolved = EngineConfig(**config).resolve(target.config.max_context)
    kv_dtype = torch.float16 if is_packed(target) else None
    num_state_slots = resolved.max_rows + resolved.num_snapshots
    runner = Runner(target, drafter, resolved.num_pages, resolved.page_size, kv_dtype, num_state_slots)
    all_drafters = list(drafters) + ([DFlashDrafter(runner)] if dflash else [])
    speculator = Speculator(all_drafters, WidthController(NGRAM_MAX_WIDTH, resolved.width))
    return Engine(runner, speculator, resolved, eos_ids)


def run(engine: Engine, requests: Sequence[Request], check: bool = True) -> list[list[int]]:
    """Decodes all requests to their ends; returns the answers' ids."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        if check:
            engine.pool.check_integrity()
    return [request.output_ids for request in requests]


def prompt_of(num_tokens: int, seed: int = 0, vocab_size: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (num_tokens,), generator=generator).tolist()
