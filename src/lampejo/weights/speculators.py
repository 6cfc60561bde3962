"""The published DFlash drafters that are known by name: which belongs to which target, and back.

Modal and Z Lab publish the same weights; Modal's repositories come first, those of Z Lab serve where Modal's cannot be
had. Names are compared without organisation, punctuation and quantisation, and otherwise in full: ``Qwen3-4B-Base`` or
``Qwen3-4B-Instruct-2507`` are other models than ``Qwen3-4B``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_QUANTISATION = re.compile(
    r"[-_. ](gguf|fp8|(nv|mx)?fp4|awq|gptq|int[48]|w[48]a(8|16)|[48]-?bit|mlx|bnb|dynamic|ud|i?q\d\w*|[bf]?f(16|32))$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Speculator:
    """A published drafter. ``targets`` are names of one model; ``repos`` hold the same weights, best first; ``sizes``
    are the target's hidden size, layers and vocabulary; ``trained_on`` is what its card says of thinking."""

    targets: tuple[str, ...]
    repos: tuple[str, ...]
    sizes: tuple[int, int, int]
    trained_on: str | None = None


def _by_both(target: str, *sizes: int) -> Speculator:
    name = target.rpartition("/")[2]
    hidden, layers, vocabulary = sizes
    repos = (f"modal-labs/{name}-DFlash", f"z-lab/{name}-DFlash")
    return Speculator((target,), repos, (hidden, layers, vocabulary))


SPECULATORS = (
    _by_both("Qwen/Qwen3.5-4B", 2560, 32, 248320),
    _by_both("Qwen/Qwen3.5-9B", 4096, 32, 248320),
    _by_both("Qwen/Qwen3.5-27B", 5120, 64, 248320),
    _by_both("Qwen/Qwen3.5-35B-A3B", 2048, 40, 248320),
    _by_both("Qwen/Qwen3.5-122B-A10B", 3072, 48, 248320),
    _by_both("Qwen/Qwen3.6-35B-A3B", 2048, 40, 248320),
    Speculator(("Qwen/Qwen3.6-27B",), ("z-lab/Qwen3.6-27B-DFlash",), (5120, 64, 248320)),
    Speculator(("Qwen/Qwen3-4B",), ("z-lab/Qwen3-4B-DFlash-b16",), (2560, 36, 151936), "answers without thinking"),
    Speculator(("Qwen/Qwen3-8B",), ("z-lab/Qwen3-8B-DFlash-b16",), (4096, 36, 151936), "answers without thinking"),
    Speculator(
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-Coder-30B-A3B"),
        ("z-lab/Qwen3-Coder-30B-A3B-DFlash",),
        (2048, 48, 151936),
    ),
    Speculator(("Qwen/Qwen3-Coder-Next",), ("z-lab/Qwen3-Coder-Next-DFlash",), (2048, 48, 151936)),
    Speculator(
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",),
        (4096, 32, 128256),
    ),
)


def speculator_for(names: Iterable[str], sizes: tuple[int, int, int]) -> Speculator | None:
    """The published drafter of the target that bears one of ``names`` and has ``sizes``."""
    bare = {_bare(name) for name in names}
    for known in SPECULATORS:
        if known.sizes == sizes and bare & {_bare(target) for target in known.targets}:
            return known
    return None


def speculators_like(sizes: tuple[int, int, int]) -> tuple[Speculator, ...]:
    """Those whose targets have ``sizes``, whatever the model at hand is called."""
    return tuple(known for known in SPECULATORS if known.sizes == sizes)


def speculator_named(name: str) -> Speculator | None:
    """The published drafter that a repository, folder or file is named after."""
    bare = _bare(name)
    return next((known for known in SPECULATORS if bare in {_bare(repo) for repo in known.repos}), None)


def _bare(name: str) -> str:
    """``Qwen/Qwen3.5-27B-FP8`` -> ``qwen3527b``."""
    text = name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    while (shorter := _QUANTISATION.sub("", text)) != text:
        text = shorter
    return re.sub(r"[^a-z0-9]", "", text.lower())
