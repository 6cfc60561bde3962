"""Where each tensor of a model lies in its files: releases differ in names, and in what they put together.

Everything here is names and numbers of rows. A tensor of a file counts as a matrix of its last dimension; a tensor of
ours is a sequence of runs of such rows. Our names are those of the releases, of experts those of Qwen3.5: all experts
of a layer stand in ``mlp.experts.gate_up_proj`` [E, 2 I, H], gate rows first, and ``mlp.experts.down_proj`` [E, H, I].
A single expert has the names of Qwen3-MoE, ``mlp.experts.7.gate_proj.weight`` and so on, whatever the files do. The
fused projections of Qwen3-Next's Gated DeltaNet are taken apart into those of Qwen3.5.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lampejo.errors import UserError
from lampejo.models.config import DeltaNetConfig, ModelConfig

Shape = tuple[int, ...]
_REMEDY = "It is incomplete or another kind of model."
# What the text does not need, by the names of the releases, and what people call it.
_SKIPPED = {"model.visual.": "vision", "visual.": "vision", "mtp.": "MTP"}
_EXPERT = re.compile(r"(.+\.mlp\.experts)(?:\.(\d+))?\.(gate_up|gate|up|down)_proj(?:\.weight)?")


def hub_name(name: str) -> str:
    """A release's name of a tensor without what says that there are other models beside the text's."""
    return re.sub(r"^model\.language_model\.", "model.", name)


def skipped(name: str) -> str | None:
    """What people call the part that a tensor belongs to, if the text does not need it."""
    return next((kind for prefix, kind in _SKIPPED.items() if name.startswith(prefix)), None)


@dataclass(frozen=True)
class Run:
    """Rows [start, stop) of a tensor of the files."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours lies, its rows in order."""

    shape: Shape
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class _PerExpert:
    """Where one matrix of every expert lies: in a tensor of its own, or all of them in one."""

    tensors: list[str]  # by expert, or the one
    first: int  # row of expert 0
    step: int  # rows from one expert to the next in the same tensor; 0: each has its own
    shape: tuple[int, int]

    def run(self, expert: int) -> Run:
        start = self.first + expert * self.step
        return Run(self.tensors[0 if self.step else expert], start, start + self.shape[0])


class Layout:
    """``shapes`` are ours, by our names; ``skipped`` tells how many tensors of which kind are left alone."""

    def __init__(self, where: str, names: Mapping[str, str], shapes: Mapping[str, Shape], config: ModelConfig) -> None:
        """``names`` of the files by hub name, ``shapes`` by the files' names. ``UserError`` for experts that are
        incomplete or misshapen."""
        self.shapes: dict[str, Shape] = {}
        self._where, self._config = where, config
        self._places: dict[str, Place] = {}
        self._experts: dict[str, _PerExpert] = {}  # by prefix and part, "model.layers.0.mlp.experts.gate"
        kinds: Counter[str] = Counter()
        groups: dict[str, dict[tuple[str, int | None], str]] = {}
        for ours, name in names.items():
            if kind := skipped(ours):
                kinds[kind] += 1
            elif config.experts and (match := _EXPERT.fullmatch(ours)):
                prefix, expert, part = match.groups()
                groups.setdefault(prefix, {})[part, None if expert is None else int(expert)] = name
            elif config.delta_net and ours.endswith((".in_proj_qkvz.weight", ".in_proj_ba.weight")):
                self._add_apart(ours, name, shapes[name], config.delta_net)
            else:
                self._add(ours, _as_on_hub(ours, shapes[name]), [Run(name, 0, math.prod(shapes[name][:-1]))])
        self.skipped = {kind: kinds[kind] for kind in sorted(kinds)}
        for prefix, found in groups.items():
            self._add_experts(prefix, found, shapes)

    def find(self, name: str) -> Place:
        """Of a tensor in ``shapes``, or a single expert's matrix."""
        if (match := _EXPERT.fullmatch(name)) and match[1] + ".down" in self._experts:
            prefix, expert, part = match.groups()
            if expert is not None:
                rows = self._experts[f"{prefix}.{part}"]
                return Place(rows.shape, (rows.run(int(expert)),))
            parts = [self._experts[f"{prefix}.{p}"] for p in part.split("_")]
            return Place(self.shapes[name], _joined(p.run(e) for e in range(self.shapes[name][0]) for p in parts))
        return self._places[name]

    def _add(self, name: str, shape: Shape, runs: Iterable[Run]) -> None:
        self.shapes[name] = shape
        self._places[name] = Place(shape, _joined(runs))

    def _add_apart(self, ours: str, name: str, shape: Shape, sizes: DeltaNetConfig) -> None:
        """The rows of a fused projection go key head by key head: its q, its k, then v and z of its value heads; or b,
        then a of its value heads."""
        heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
        if ours.endswith(".in_proj_qkvz.weight"):
            parts, widths = ["qkv", "qkv", "qkv", "z"], [sizes.key_head_dim] * 2 + [group * sizes.value_head_dim] * 2
        else:
            parts, widths = ["b", "a"], [group] * 2
        wanted = heads * sum(widths), self._config.hidden_size
        compare_tensors(self._where, "Gated DeltaNet", _REMEDY, {name: shape}, {name: wanted})
        runs: dict[str, list[Run]] = {part: [] for part in parts}
        for i, part in enumerate(parts):
            for head in range(heads):
                start = head * sum(widths) + sum(widths[:i])
                runs[part].append(Run(name, start, start + widths[i]))
        for part, found in runs.items():
            num_rows = sum(run.stop - run.start for run in found)
            self._add(re.sub(r"qkvz|ba(?=\.weight)", part, ours), (num_rows, wanted[1]), found)

    def _add_experts(
        self, prefix: str, found: Mapping[tuple[str, int | None], str], shapes: Mapping[str, Shape]
    ) -> None:
        """``found``: the files' names by part ("gate", "up", "down", "gate_up") and expert, None for all in one."""
        assert self._config.experts is not None
        num_experts, hidden = self._config.experts.num_experts, self._config.hidden_size
        inner = self._config.experts.intermediate_size
        expected = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for part, shape in expected.items():
            first, step = 0, shape[0]
            tensors: list[str] = []
            wanted: Shape = shape
            stacked = found.get((part, None))
            if stacked is None and part != "down" and (stacked := found.get(("gate_up", None))):
                first, step = inner if part == "up" else 0, 2 * inner
            if stacked:
                tensors, wanted = [stacked], (num_experts, step, shape[1])
            else:
                step = 0
                for expert in range(num_experts):
                    name = found.get((part, expert))
                    if name is None:
                        missing = f"{prefix}.{expert}.{part}_proj.weight"
                        raise UserError(f"{self._where} (experts) lacks tensors: {missing}.", _REMEDY)
                    tensors.append(name)
            compare_tensors(
                self._where, "experts", _REMEDY, {n: shapes[n] for n in tensors}, dict.fromkeys(tensors, wanted)
            )
            self._experts[f"{prefix}.{part}"] = _PerExpert(tensors, first, step, shape)
        used = {name for part in expected for name in self._experts[f"{prefix}.{part}"].tensors}
        for name in found.values():
            if name not in used:
                raise UserError(f"{self._where} has unknown tensors: {name}.", _REMEDY)
        self.shapes[f"{prefix}.gate_up_proj"] = num_experts, 2 * inner, hidden
        self.shapes[f"{prefix}.down_proj"] = num_experts, hidden, inner


def compare_tensors(
    where: str, kind: str, remedy: str, found: Mapping[str, Shape], expected: Mapping[str, Shape]
) -> None:
    """``UserError`` naming the first differences between ``found`` and ``expected`` names and shapes."""
    for what, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise UserError(f"{where} ({kind}) {what} tensors: {listed}.", remedy)
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{where} ({kind}): tensor {name!r} has shape {list(found[name])}, but must have {list(shape)}.",
                "Weights and configuration do not belong together.",
            )


def _as_on_hub(name: str, shape: Shape) -> Shape:
    """GGUF drops dimensions of 1 that the hub's files have."""
    if name.endswith(".conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if name.endswith(".shared_expert_gate.weight") and len(shape) == 1 else shape


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same rows in as few runs as possible."""
    joined: list[Run] = []
    for run in runs:
        if joined and (joined[-1].tensor, joined[-1].stop) == (run.tensor, run.start):
            joined[-1] = Run(run.tensor, joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)
