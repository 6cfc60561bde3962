"""What a head says after the tokens of a step, and the choices from it.

``Scores`` has all logits at hand; ``FusedScores`` has hidden states and a head on the CPU kernels, and computes logits
only for whoever asks. Both choose the same tokens: ``sampling.choose`` is the definition.

Shape legend: L tokens after which one is chosen, H hidden, V ids of the head.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lampejo import sampling
from lampejo.ops.cpu.choice import choose, choose_from_head
from lampejo.ops.cpu.fused import PackedLinear
from lampejo.ops.cpu.library import CChoice
from lampejo.sampling import COLDEST, SamplingParams, gumbel_noise


class Asked(NamedTuple):
    """A token to be chosen: where its logits stand among all [L], how it is chosen, and its absolute position."""

    at: int
    params: SamplingParams
    seed: int
    position: int


class Draw(NamedTuple):
    """A token to be drafted for an absolute position: what the target's choice is made of, but for filters."""

    temperature: float
    seed: int
    position: int


class Scores:
    """Of logits [L, V] at hand."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __len__(self) -> int:
        return len(self._logits)

    @property
    def logits(self) -> torch.Tensor:
        """[L, V], fp32."""
        return self._logits

    def logits_of(self, spans: Sequence[range]) -> list[torch.Tensor]:
        """Logits [n, V] of each span of n tokens."""
        return [self._logits[span.start : span.stop] for span in spans]

    def choose_at_once(self, asked: Sequence[Asked]) -> dict[int, int]:
        """Choices by index, of those that are made together rather than one by one as far as they count: here, all if
        all are greedy."""
        if len(asked) < len(self._logits) or any(one.params.temperature > 0 for one in asked):
            return {}
        return dict(enumerate(self._logits.argmax(-1).tolist()))

    def choose(self, logits: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int]) -> list[int]:
        """Choices from logits that were asked for and perhaps changed [n, V], at n absolute positions."""
        return sampling.choose(logits, params, seed, positions).tolist()

    def values(self, indices: Sequence[int], ids: Sequence[int]) -> list[float]:
        """The logits of tokens that were chosen."""
        device = self._logits.device
        return self._logits[torch.tensor(indices, device=device), torch.tensor(ids, device=device)].tolist()

    def draw(self, draws: Sequence[Draw], ids: torch.Tensor) -> torch.Tensor:
        """Indices of drafts [L], one for each; ids [V]: the target ids that the logits are of."""
        scores = self._logits.clone()
        for i, draw in enumerate(draws):
            if draw.temperature > 0:
                noise = gumbel_noise(draw.seed, [draw.position], ids)[0]
                scores[i] = scores[i] / max(draw.temperature, COLDEST) + noise
        return scores.argmax(-1)

    def of(self, logits: torch.Tensor) -> "Scores":
        """The same way of choosing, from other logits at hand."""
        return Scores(logits)


class KernelScores(Scores):
    """Of logits [L, V] at hand, fp32 on a CPU, chosen from by the kernels."""

    def choose(self, logits: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int]) -> list[int]:
        chosen = choose(logits, [_kernel_choice(params, seed, position) for position in positions])
        return [token_id for token_id, _ in chosen]

    def draw(self, draws: Sequence[Draw], ids: torch.Tensor) -> torch.Tensor:
        chosen = choose(self._logits, [_kernel_draw(draw) for draw in draws], ids.int())
        return torch.tensor([index for index, _ in chosen])

    def of(self, logits: torch.Tensor) -> "Scores":
        return KernelScores(logits)


class FusedScores(KernelScores):
    """Of hidden states [L, H] and a head on the kernels."""

    def __init__(self, head: PackedLinear, hidden: torch.Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self._chosen: dict[int, float] = {}  # by index: the logit of what was chosen
        self._parts: dict[int, torch.Tensor] = {}  # by index: logits [V] of those that were asked for

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def logits(self) -> torch.Tensor:
        return self.head(self.hidden)

    def logits_of(self, spans: Sequence[range]) -> list[torch.Tensor]:
        indices = [i for span in spans for i in span]
        if not indices:
            return []
        logits = self.head(self.hidden[indices])
        self._parts.update(zip(indices, logits, strict=True))
        return list(logits.split([len(span) for span in spans]))

    def choose_at_once(self, asked: Sequence[Asked]) -> dict[int, int]:
        """All: the head reads its weights once, whether for one token or for several."""
        if not asked:
            return {}
        indices = [one.at for one in asked]
        hidden = self.hidden if len(asked) == len(self.hidden) else self.hidden[indices]
        chosen = choose_from_head(self.head, hidden, [_kernel_choice(*one[1:]) for one in asked])
        self._chosen.update((i, logit) for i, (_, logit) in zip(indices, chosen, strict=True))
        return {i: token_id for i, (token_id, _) in zip(indices, chosen, strict=True)}

    def values(self, indices: Sequence[int], ids: Sequence[int]) -> list[float]:
        return [
            self._parts[i][token_id].item() if i in self._parts else self._chosen[i]
            for i, token_id in zip(indices, ids, strict=True)
        ]

    def draw(self, draws: Sequence[Draw], ids: torch.Tensor) -> torch.Tensor:
        chosen = choose_from_head(self.head, self.hidden, [_kernel_draw(draw) for draw in draws], ids.int())
        return torch.tensor([index for index, _ in chosen])


def make_scores(head: Any, hidden: torch.Tensor) -> Scores:
    """What ``head`` says after hidden states [L, H]."""
    return FusedScores(head, hidden) if isinstance(head, PackedLinear) else Scores(head(hidden).float())


def _kernel_choice(params: SamplingParams, seed: int, position: int) -> CChoice:
    if params.temperature == 0:
        return _GREEDY
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    temperature = max(params.temperature, COLDEST)
    return CChoice(seed % 2**64, position, temperature, log_min_p, params.top_p, params.top_k)


def _kernel_draw(draw: Draw) -> CChoice:
    if draw.temperature == 0:
        return _GREEDY
    return CChoice(draw.seed % 2**64, draw.position, max(draw.temperature, COLDEST), -math.inf, 1.0, 0)


_GREEDY = CChoice()
