"""Keyformer's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_kv.accumulation import AccumulatingPolicy, AccumulationOptions, Kept
from mlx_kv_kernels.accumulate import Noise

if TYPE_CHECKING:
    from mlx_kv import Geometry


@dataclass(frozen=True)
class Keyformer(AccumulationOptions):
    """Keep the rows whose noisy, tempered attention adds up to most, and the newest (Keyformer, arXiv 2403.09054).

    A row's score is the sum of softmax((logit + noise) / tau) over every query so far, averaged over the query heads of
    a KV head; attention itself is the model's own. Gumbel noise, fixed for each row, keeps tokens in the running that
    have had little attention yet; tau rises from `tau_init` for the prompt to `tau_end` after `steps` tokens. When a
    prompt ends, and after every token generated, each KV head keeps the newest rows and the highest scores.

    Raises:
        ValueError: if an option is out of its range.
    """

    budget: int | float = 0.6
    """Rows to keep, the newest included; a number between 0 and 1 is a share of the tokens seen when a prompt ends."""
    recent: float = 0.3
    """Share of the budget that is kept for the newest rows: 0 to less than 1."""
    tau_init: float = 1.0
    """Temperature of a prompt."""
    tau_end: float = 2.0
    """Temperature `steps` tokens after it, and from then on."""
    steps: int = 256
    """Tokens over which the temperature changes."""
    noise: float = 1.0
    """Factor of the noise; 0 for none."""
    seed: int = 0
    """Of the noise: 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        count, share = type(self.budget) is int and self.budget > 0, type(self.budget) is float and 0 < self.budget < 1
        _expect(count or share, "budget of 1 or more rows, or a share between 0 and 1", self.budget)
        _expect(_is_number(self.recent) and 0 <= self.recent < 1, "recent from 0 to less than 1", self.recent)
        for name, tau in (("tau_init", self.tau_init), ("tau_end", self.tau_end)):
            _expect(_is_number(tau) and 0 < tau < float("inf"), f"{name} above 0", tau)
        _expect(type(self.steps) is int and self.steps > 0, "steps of 1 or more", self.steps)
        _expect(_is_number(self.noise) and 0 <= self.noise < float("inf"), "noise of 0 or more", self.noise)
        _expect(type(self.seed) is int and 0 <= self.seed < 2**32, "seed from 0 to 2**32 - 1", self.seed)
        _expect(type(self.every_chunk) is bool, "every_chunk True or False", self.every_chunk)

    def kept(self, tokens: int) -> Kept | None:
        """Return the rows to keep after a prompt that ended with so many tokens; all while a share has no prompt."""
        if isinstance(self.budget, int):
            rows = self.budget
        elif tokens:
            rows = max(int(tokens * self.budget), 1)
        else:
            return None
        return Kept(rows, int(rows * self.recent))

    def temperature(self, step: int) -> float:
        """Return what logits are divided by."""
        return temperature(step, self.steps, self.tau_init, self.tau_end)

    def noise_on(self, layer: int) -> Noise | None:
        """Return the noise on one layer's logits."""
        return Noise(self.seed, layer, self.noise) if self.noise else None

    def create(self, geometry: Geometry) -> AccumulatingPolicy:
        """Make the policy of one layer; any geometry will do."""
        return AccumulatingPolicy(self, geometry)


def temperature(step: int, steps: int, tau_init: float, tau_end: float) -> float:
    """Return tau: `tau_init` at step 0, a prompt; linear to `tau_end` at `steps` tokens after it, and no further."""
    return tau_init + min(step, steps) * (tau_end - tau_init) / steps


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[keyformer] expected {expected}, got {got}")
