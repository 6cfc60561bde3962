"""What the CPU kernels gain over the reference operations on every kind of target: small ones, of random weights.

    python scripts/kernels_against_reference.py

A pass of 1 token, of 8 as a verify step has them (7 drafts, 4 of them accepted), and of a prompt of 256, behind 64
others. The two take turns, each on one thread, with 8-bit weights on one side and fp32 on the other. What counts is
the thread's own processor time, so that other work on the machine disturbs little; told are the median of the kernels'
time, and that of the ratios. The last line is JSON.
"""

import json
import re
import statistics
import time
from dataclasses import replace

import torch

from lampejo.batch import make_batch
from lampejo.models.config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeConfig
from lampejo.models.layers import RMSNorm, Target
from lampejo.models.targets import make_target
from lampejo.ops.cpu import instruction_set, set_threads
from lampejo.ops.cpu.library import Q8
from lampejo.ops.stored import Stored
from lampejo.packing import pack_target
from lampejo.request import Request
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.states import RowState

ROUNDS, PAGE_SIZE, BEFORE = 9, 32, 64
PASSES = {"1 token": (1, 0), "8 tokens, 4 accepted": (1, 7), "prompt of 256": (256, 0)}  # known tokens, drafts
DENSE = ModelConfig(
    architecture="qwen3", vocab_size=2048, hidden_size=1024, intermediate_size=3072, num_layers=4, num_heads=16,
    num_kv_heads=4, head_dim=64, rms_norm_eps=1e-6, rope=RopeConfig(1e6), max_context=4096, tie_word_embeddings=False,
    qk_norm=True,
)  # fmt: skip
EXPERTS = ExpertsConfig(num_experts=32, num_active=4, intermediate_size=384)
DELTA_NET = DeltaNetConfig(
    layers=(0, 1, 2), num_key_heads=8, num_value_heads=16, key_head_dim=128, value_head_dim=128, conv_size=4
)
HYBRID = replace(
    DENSE, architecture="qwen3_5", rotary_dim=16, attention_gate=True, norm_offset=True, delta_net=DELTA_NET
)
TARGETS = {
    "dense": DENSE,
    "experts": replace(DENSE, architecture="qwen3_moe", experts=EXPERTS),
    "hybrid": HYBRID,
    "hybrid with experts": replace(
        HYBRID, architecture="qwen3_5_moe", experts=replace(EXPERTS, shared_intermediate_size=384)
    ),
}


def make_pair(config: ModelConfig) -> tuple[Target, Target]:
    """The same weights in fp32, and packed in 8 bits."""
    targets = [make_target(config), make_target(config)]
    for target in targets:
        generator = torch.Generator().manual_seed(0)
        for module in target.modules():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
                if isinstance(module, RMSNorm):
                    parameter.fill_(1 - module.offset)
                else:
                    parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    weights = dict(targets[1].named_parameters())

    def read(name: str) -> Stored:
        match = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            return Stored.of(weights[name])
        prefix, expert, part = match[1], int(match[2]), match[3]
        if part == "down":
            return Stored.of(weights[f"{prefix}.down_proj"][expert])
        return Stored.of(weights[f"{prefix}.gate_up_proj"][expert].chunk(2)[part == "up"])

    pack_target(targets[1], read, Q8)
    return targets[0], targets[1]


class Arm:
    """A target with a text before what is measured."""

    def __init__(self, target: Target, kv_dtype: torch.dtype) -> None:
        self.runner = Runner(target, None, 16, PAGE_SIZE, kv_dtype)
        self.request = Request(0, list(range(2, 2 + BEFORE)))
        self.request.pages, self.request.state = list(range(16)), RowState(0)
        self.step(BEFORE, 0)

    def step(self, num_known: int, num_drafts: int) -> float:
        """Seconds of a pass from the text on; the text stays as it was."""
        self.request.ids = [7] * (self.request.num_computed + num_known)
        row = ScheduledRow(self.request, num_known, num_drafts)
        batch = make_batch([row], [[5] * num_drafts], PAGE_SIZE, (), self.runner.device)
        started = time.thread_time()
        out = self.runner.verify(batch)
        self.runner.commit(out, [5 if num_drafts else num_known], [()])
        seconds = time.thread_time() - started
        self.request.num_computed = BEFORE
        return seconds


def measure(config: ModelConfig) -> dict[str, dict[str, float]]:
    arms = [Arm(target, dtype) for target, dtype in zip(make_pair(config), (torch.float32, torch.float16), strict=True)]
    found = {}
    for name, sizes in PASSES.items():
        ratios, kernels = [], []
        for turn in range(ROUNDS + 1):
            reference, ours = (arm.step(*sizes) for arm in arms)
            if turn:  # the first round warms up
                ratios.append(reference / ours)
                kernels.append(ours * 1e3)
        found[name] = {"ratio": statistics.median(ratios), "kernels_ms": statistics.median(kernels)}
    return found


def main() -> None:
    set_threads(1)
    torch.set_num_threads(1)
    results = {}
    for name, config in TARGETS.items():
        results[name] = measure(config)
        for what, figures in results[name].items():
            print(f"{name:20} {what:22} {figures['kernels_ms']:8.2f} ms  {figures['ratio']:6.2f} times the reference")
    print(json.dumps({"instruction_set": instruction_set(), "targets": results}))


if __name__ == "__main__":
    main()
