"""One public function per device operation. Everything above this package calls these names and no others.

``reference`` is the definition of correct; faster versions come beside it and are chosen once, at load.
"""

from .reference import Segment, block_attention, linear, paged_attention, rms_norm, rope, swiglu, write_pages

__all__ = ["Segment", "block_attention", "linear", "paged_attention", "rms_norm", "rope", "swiglu", "write_pages"]
