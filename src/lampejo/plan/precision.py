"""In how many bits each part of a target is held."""

from dataclasses import dataclass

from lampejo.models.config import ModelConfig
from lampejo.plan.sizes import Parts, count
from lampejo.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Precision:
    """Bits per parameter by part; ``kind``: what the matrix products are computed in; ``told``: for people."""

    name: str
    bits: Parts
    kind: str
    told: str

    def bytes(self, parameters: Parts) -> Parts:
        pairs = {name: getattr(parameters, name) * bits / 8 for name, bits in vars(self.bits).items()}
        return Parts(**pairs)


# For GPUs, the most exact first. fp8 and fp4 as the published checkpoints have them: embedding and head stay bf16.
GPU_PRECISIONS = {
    "bf16": Precision("bf16", Parts(16, 16, 16, 16, 16), "bf16", "all in bf16"),
    "fp8": Precision("fp8", Parts(16, 16, 8, 8, 8), "fp8", "layers in fp8, embedding and head in bf16"),
    "fp4": Precision(
        "fp4",
        Parts(16, 16, 8, 4.5, 4.5),
        "fp4",
        "MLPs and experts in 4-bit floats with a scale per 16 (4.5 bits), the rest of the layers in fp8, embedding and "
        "head in bf16",
    ),
}
_Q4, _Q4K, _Q8, _F32 = 5.0, 4.625, 8.5, 32.0  # bits of the layouts of csrc/lampejo_kernels.h
CPU_PRECISIONS = {
    "q8": Precision("q8", Parts(_Q8, _Q8, _Q8, _Q8, _Q8), "int8", "all in 8 bits with a scale per 32 (8.5 bits)"),
    "q4": Precision(
        "q4", Parts(_Q4, _Q4, _Q4, _Q4, _Q4), "int8", "all in 4 bits with scale and minimum per 32 (5 bits)"
    ),
}
_PACKED = {"Q4_0": _Q4, "Q4_1": _Q4, "Q4_K": _Q4K}  # GGUF types that keep their codes; others go to 8 bits


def stored_precision(checkpoint: Checkpoint, config: ModelConfig) -> Precision:
    """What the CPU kernels make of a GGUF file."""
    names = set(checkpoint.tensor_names())

    def bits(name: str, size: int) -> float:
        if name not in names:
            return size * _Q8
        shape, kind = checkpoint.info(name)
        return size * (_F32 if len(shape) == 1 else _PACKED.get(kind, _Q8))

    parameters, held = count(config), count(config, bits)
    average = {name: held_bits / (getattr(parameters, name) or 1) for name, held_bits in vars(held).items()}
    return Precision("as stored", Parts(**average), "int8", f"as the file has it ({checkpoint.quantization})")
