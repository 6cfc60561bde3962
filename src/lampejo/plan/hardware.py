"""What devices can do by their makers' data sheets, and what engines make of it.

Sources (all compute figures are dense, without 2:4 sparsity, which data sheets like to count in):

- A100, H100, H200, L40S: NVIDIA's data sheets; as collected in github.com/stas00/ml-engineering,
  compute/accelerator/README.md.
- B200: NVIDIA's Blackwell data sheet (2.25, 4.5, 9 PFLOP/s); bandwidth 7.68 TB/s, not the 8 of the first sheets: a bus
  of 7680 bits at 3996 MHz, as read from the driver in github.com/pytorch/ao pull request 4002.
- RTX 4090, RTX 5090: NVIDIA's Ada and Blackwell whitepapers, tensor cores with fp32 accumulation (GeForce cards halve
  it). RTX PRO 6000: github.com/ai-dynamo/aiconfigurator, systems/rtx_pro_6000_server.yaml.
- Memory is what the driver reports, in bytes: a little below the GiB of the name.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU. ``bandwidth`` bytes per second; ``bf16``, ``fp8``, ``fp4`` operations per second, 0 where the tensor cores
    do not know the format, so that weights are kept in it and computed in the next larger one."""

    name: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float = 0.0
    fp4: float = 0.0

    def compute(self, kind: str) -> float:
        """Operations per second on weights kept as ``kind``."""
        return (self.fp4 if kind == "fp4" else 0.0) or (self.fp8 if kind != "bf16" else 0.0) or self.bf16


DEVICES = {
    "a100": Device("A100 80 GB", int(79.2 * GIB), 2.039e12, 312e12),
    "l40s": Device("L40S", int(45.0 * GIB), 0.864e12, 362e12, 733e12),
    "h100": Device("H100 SXM", int(79.6 * GIB), 3.35e12, 989e12, 1979e12),
    "h200": Device("H200", int(139.8 * GIB), 4.8e12, 989e12, 1979e12),
    "b200": Device("B200", int(178.3 * GIB), 7.68e12, 2250e12, 4500e12, 9000e12),
    "rtx4090": Device("RTX 4090", int(23.6 * GIB), 1.008e12, 165e12, 330e12),
    "rtx5090": Device("RTX 5090", int(31.4 * GIB), 1.792e12, 209e12, 419e12, 1676e12),
    "rtxpro6000": Device("RTX PRO 6000", int(95.6 * GIB), 1.792e12, 468e12, 936e12, 1871e12),
}

# What a good engine reaches, used for "expected" beside the limit. Fitted to the published speeds in docs/plan.md, all
# of which it meets within a quarter; not measured with lampejo.
BANDWIDTH_SHARE = 0.8  # of the data sheet's; aiconfigurator corrects by the same
COMPUTE_SHARE = 0.6
LAYER_S = 30e-6  # of launches and small kernels per layer, with graphs, on one device
SHARED_LAYER_S = 70e-6  # on several, whose results are summed twice in every layer
RESERVED = 0.08  # of the memory: the driver's context, graphs, activations, fragmentation
