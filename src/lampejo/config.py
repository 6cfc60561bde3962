"""Frozen configuration of the parts. The CLI turns its flags into one of these; resolving returns a new object."""

from dataclasses import dataclass, replace
from typing import Any

from lampejo.errors import UserError

LARGEST_PAGE = 128  # attention walks the keys in chunks of this many, which pages must fill
SPARE_TOKENS = 8192  # most that the default pool holds beside one request of full length


@dataclass(frozen=True)
class Drafting:
    """How much a DFlash drafter does, and which drafts count.

    block: tokens that it drafts at once, the anchor included, at most; window: tokens of context that it looks back on,
    at most. None leaves each as the drafter was made. Neither ever changes an answer. typical: None accepts the
    target's own choices alone (lossless); a threshold above 0, up to 1, also accepts drafts that the target finds
    typical by it (``sampling.is_typical``): faster and not lossless, at temperatures above 0.
    """

    block: int | None = None
    window: int | None = None
    typical: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("block", self.block, 2), ("window", self.window, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UserError(f"{name} is {value}; it must be a whole number of at least {least}.")
        typical: Any = self.typical
        if typical is not None and not (
            isinstance(typical, int | float) and not isinstance(typical, bool) and 0 < typical <= 1
        ):
            raise UserError(f"The threshold of typical acceptance is {typical}; it must be above 0 and at most 1.")

    @property
    def policy(self) -> str:
        return "lossless" if self.typical is None else "typical"


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs. ``None`` means "decide at load" and is filled by ``resolve``.

    max_context: tokens of prompt and answer together; max_rows: requests decoded at once; token_budget: most tokens
    of one step, which bounds a prefill chunk; num_pages pages of page_size tokens hold all keys and values; a target
    with recurrent layers has room for the states of max_rows requests and of num_snapshots cached prefixes; width: a
    fixed number of drafted tokens per step, None lets the controller choose; ops: "cpu" (the kernels), "reference", or
    "auto"; quantize: how the CPU kernels hold weights that the checkpoint stores as floats, "q8" (the choice of None),
    "q4", or "none" (fp32 on the reference operations). Weights that are quantised already keep their codes, or go to 8
    bits; device: "auto" (a GPU if there is one), "cpu", or the name that PyTorch has for a GPU; dtype: of weights, keys
    and values on a GPU, "bf16", "fp16" or "fp32", "auto" takes what the GPU is made for; on a CPU "fp32" is quantize
    "none"; drafting: how a DFlash drafter drafts, and which drafts are accepted.

    What defines an answer beside the request: ops, quantize, page_size, device and dtype. The kernels round attention
    page by page, so another page size may choose another token at a near-tie. None of the others ever changes it, but
    for drafting.typical; and on a GPU a token's last bits depend on what is computed beside it, so there near-ties may
    fall either way.
    """

    max_context: int | None = None
    max_rows: int = 16
    token_budget: int = 512
    page_size: int = 32
    num_pages: int | None = None
    num_snapshots: int = 16
    width: int | None = None
    ops: str = "auto"
    quantize: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    drafting: Drafting = Drafting()

    def __post_init__(self) -> None:
        if self.dtype == "fp32" and self.quantize not in (None, "none"):
            raise UserError(f"quantize is {self.quantize}, but dtype is fp32.", "Leave one of them out.")
        if self.ops == "reference" and self.quantize not in (None, "none"):
            raise UserError(
                f"quantize is {self.quantize}, but the reference operations compute in fp32.", "Leave one of them out."
            )

    def resolve(self, model_context: int) -> "EngineConfig":
        """Fills what is open from the model's own context limit, and refuses what cannot work."""
        choices = {"ops": ("auto", "cpu", "reference"), "quantize": (None, "q8", "q4", "none")}
        for name, value in vars(self).items():
            if name in ("device", "dtype", "drafting"):  # the first two are for ``ops.place``
                continue
            if name in choices:
                if value not in choices[name]:
                    raise UserError(f"{name} is {value!r}; it must be one of {', '.join(filter(None, choices[name]))}.")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"{name} is {value}; it must be a whole number.")
        if not isinstance(self.drafting, Drafting):
            raise UserError(f"drafting must be a Drafting, not {self.drafting!r}.", "Import it from lampejo.")
        max_context = model_context if self.max_context is None else self.max_context
        if not 2 <= max_context <= model_context:
            raise UserError(
                f"A context of {max_context} tokens does not fit this model.", f"Choose 2 to {model_context}."
            )
        if self.width is not None and self.width < 0:
            raise UserError(f"width is {self.width}; it must be 0 (no drafts) or more.")
        if self.page_size < 1 or LARGEST_PAGE % self.page_size:
            raise UserError(f"page_size is {self.page_size}; it must divide {LARGEST_PAGE}.")
        if self.max_rows < 1 or self.token_budget < self.max_rows:
            raise UserError("max_rows must be at least 1, and token_budget at least max_rows.")
        if self.num_snapshots < 0:
            raise UserError(f"num_snapshots is {self.num_snapshots}; it must be 0 or more.")
        full_request = -(-max_context // self.page_size)
        # One request of full length always fits, and beside it as much again, within reason, for others and for cached
        # prefixes.
        spare = min(full_request, SPARE_TOKENS // self.page_size)
        num_pages = self.num_pages if self.num_pages is not None else full_request + spare
        if num_pages < full_request:
            raise UserError(
                f"{num_pages} pages of {self.page_size} tokens hold less than one request of {max_context} tokens.",
                f"Give at least {full_request} pages or a smaller context.",
            )
        return replace(self, max_context=max_context, num_pages=num_pages)
