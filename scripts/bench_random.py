"""Runs ``lampejo bench`` on random weights of a published model's shape: what the engine makes of such a model on this
machine, where its weights are not at hand. Nothing is downloaded, and no weights touch the disk.

    python scripts/bench_random.py Qwen/Qwen3.5-4B --synthetic-acceptance 0.85
    python scripts/bench_random.py Qwen/Qwen3.5-35B-A3B --synthetic-acceptance 0.9,0.85,0.8,0.75,0.7 --width 5 --json

The first argument is a target that ``lampejo plan`` knows (``plan/published.py``), all others are flags of ``lampejo
bench``. Its drafter comes along, random too, unless ``--drafter none`` leaves it out.

The weights are random, but not the choices: each layer adds little to the embedding of its token, and the head answers
to that. So a model with a head of its own says the token after the last one, and one with a tied head repeats it, by a
margin that no rounding reaches. Speeds are those of trained weights; what is said and how much is accepted is not.
"""

import json
import re
import sys
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lampejo import cli
from lampejo.drafter_setup import DrafterChoice
from lampejo.errors import UserError
from lampejo.models.dflash import DFlash
from lampejo.models.hf_config import model_config_from_hf
from lampejo.models.layers import RMSNorm
from lampejo.models.targets import make_target
from lampejo.ops.stored import Stored
from lampejo.plan.published import TARGETS, published_drafter, published_target
from lampejo.weights.speculators import SPECULATORS

FLAGS = "--arms plain,dflash --sections categories,concurrency,lengths,verify --context 8192"  # before those given
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.weight")


class RandomWeights:
    """The parameters of a module that has no values, by name; the same name always has the same ones."""

    def __init__(self, module: torch.nn.Module, num_layers: int) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self._norms = {f"{n}.weight": 1.0 - m.offset for n, m in module.named_modules() if isinstance(m, RMSNorm)}
        self._share = (2 * num_layers) ** -0.5  # what a half layer adds to the stream, beside the embedding's 1

    def read(self, name: str, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        if name in self._norms:
            return torch.full(self.shapes[name], self._norms[name], dtype=dtype, device=device)
        if name == "lm_head.weight":
            return self.read("model.embed_tokens.weight", dtype, device).roll(1, 0)
        shape = self._shape(name)
        seed = torch.Generator(device or "cpu").manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=seed, dtype=dtype, device=device)
        if "embed_tokens" in name:
            return values
        if re.search(r"\.(o_proj|out_proj|down_proj)\b", name):
            values.mul_(0.5 * self._share)
        return values.mul_(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Also of the matrix of a single expert."""
        if (match := _EXPERT.fullmatch(name)) is None:
            return self.shapes[name]
        if match[2] == "down":
            return self.shapes[f"{match[1]}.down_proj"][1:]
        _, twice, hidden = self.shapes[f"{match[1]}.gate_up_proj"]
        return twice // 2, hidden


class RandomCheckpoint(RandomWeights):
    """What ``loader`` asks of a checkpoint."""

    def __init__(self, target: str, folder: Path) -> None:
        known = published_target(target)
        if known is None:
            raise UserError(f"The sizes of {target!r} are not known.", f"Known: {', '.join(TARGETS)}.")
        self.config = model_config_from_hf(known.config)
        self.name, self.path, self.folder = f"{target} (random weights)", Path(target), folder
        self.format, self.quantization, self.skipped = "none", "random", {}
        self.chat_template, self.generation_defaults = TEMPLATE, {}
        self.eos_ids = (self.config.vocab_size - 1,)
        write_tokenizer(self.config.vocab_size, folder)
        with torch.device("meta"):
            super().__init__(make_target(self.config), self.config.num_layers)

    def tensor_names(self) -> list[str]:
        return list(self.shapes)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        return self.shapes[name], "BF16"

    def stored(self, name: str) -> Stored:
        return Stored.of(self.read(name, torch.bfloat16))


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """The first 256 ids are bytes, the last one ends the text, all others are numbers. Words are spelled in bytes."""
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    space = to_byte_level.pre_tokenize_str(" ")[0][0]
    names = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"{space}{i}" for i in range(256, vocab_size - 1)),
        "<end>",
    ]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer, backend.decoder = to_byte_level, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def random_drafter(drafter: str, checkpoint: RandomCheckpoint, _: object) -> DrafterChoice:
    """The drafter that is known for a target, in the place of ``open_for``."""
    if drafter in ("none", "ngram"):
        return DrafterChoice(drafter)
    repos = [repo for known in SPECULATORS if str(checkpoint.path) in known.targets for repo in known.repos]
    sizes = next(filter(None, map(published_drafter, repos)), None)
    if sizes is None:
        raise UserError(f"The sizes of a drafter for {checkpoint.path} are not known.", "Give --drafter none.")
    config = sizes.config(checkpoint.config)
    with torch.device("meta"):
        weights = RandomWeights(DFlash(config), config.num_layers)
    tensors = {name: weights.read(name, torch.bfloat16) for name in weights.shapes}
    return DrafterChoice(
        f"{repos[0]} (random weights)", (config, tensors), "known for its target", is_packaged=True
    )  # nothing to try out


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    target, *flags = argv
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint = RandomCheckpoint(target, Path(folder))
        except UserError as error:
            print(f"{error} {error.remedy}", file=sys.stderr)
            return 2
        with (
            mock.patch("lampejo.loader.open_checkpoint", lambda _: nullcontext(checkpoint)),
            mock.patch("lampejo.loader.open_for", random_drafter),
            mock.patch("lampejo.cli_bench.locate", Path),
        ):
            return cli.main(["bench", *FLAGS.split(), *flags, "--model", target])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
