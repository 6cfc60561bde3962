"""One public function per device operation. Everything above this package calls these names and no others.

``reference`` is the definition of correct; faster versions come beside it and are chosen once, at load.
"""

from .reference import (
    DeltaSizes,
    Segment,
    block_attention,
    delta_net,
    delta_net_chunked,
    experts,
    linear,
    paged_attention,
    rms_norm,
    rope,
    route,
    sigmoid,
    softplus,
    swiglu,
    write_pages,
)

__all__ = [
    "DeltaSizes",
    "Segment",
    "block_attention",
    "delta_net",
    "delta_net_chunked",
    "experts",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "route",
    "sigmoid",
    "softplus",
    "swiglu",
    "write_pages",
]
