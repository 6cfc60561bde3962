"""Tensors of tiny models as releases lay them out: experts one by one, 8-bit floats with scales."""

import json
import re
from typing import Any

import torch
from transformers import PreTrainedModel

BLOCK = (16, 24)  # in no size of the models a whole number of times


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts under the names of Qwen3-MoE and Qwen3-Next."""
    out = {}
    for name, x in tensors.items():
        if ".experts." not in name:
            out[name] = x
            continue
        prefix, _, part = name.rpartition(".")
        for e in range(len(x)):
            names = ["down_proj"] if part == "down_proj" else ["gate_proj", "up_proj"]
            for name, values in zip(names, x[e].chunk(len(names)), strict=True):
                out[f"{prefix}.{e}.{name}.weight"] = values.clone()
    return out


def to_fp8(
    tensors: dict[str, torch.Tensor], block: tuple[int, int] = BLOCK
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors and scales as fp8 releases have them, and what they mean in fp32."""
    stored, meant = {}, {}
    for name, x in tensors.items():
        stored[name] = meant[name] = x
        if re.search(r"_proj(\.weight)?$|in_proj_(qkv|z|qkvz)\.weight$", name):
            grid = tuple(-(-n // b) for n, b in zip(x.shape[-2:], block, strict=True))
            scale = (0.001 + torch.rand(*x.shape[:-2], *grid)).bfloat16()
            spread = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
            spread = spread[..., : x.shape[-2], : x.shape[-1]]
            stored[name] = (x / spread).to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            meant[name] = (stored[name].double() * spread.double()).float()
    return stored, meant


def fp8_config(config: dict[str, Any], block: tuple[int, int] = BLOCK) -> dict[str, Any]:
    return config | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                     "weight_block_size": list(block), "modules_to_not_convert": ["lm_head"]}}  # fmt: skip


def parts_of(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a model by their names in memory, which are stacked, and its config.json."""
    return {name: x.detach().clone() for name, x in model.state_dict().items()}, json.loads(
        model.config.to_json_string()
    )


def stacked(tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back from ``one_by_one``."""
    out = {}
    for name, x in like.items():
        if name in tensors or ".experts." not in name:
            out[name] = tensors[name]
            continue
        prefix, _, part = name.rpartition(".")
        parts = ("down",) if part == "down_proj" else ("gate", "up")
        out[name] = torch.stack(
            [torch.cat([tensors[f"{prefix}.{e}.{p}_proj.weight"] for p in parts]) for e in range(len(x))]
        )
    return out
