"""Probabilistic halting, section 3.3 of the paper: pure functions of gates and reach.

Shapes: N active tokens, K steps at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from latentcot.errors import UserError

KeepRule = Callable[[Tensor, Tensor, int], Tensor]
"""Who goes on: `(next_reach, index, step) -> bool`, all (N,): reach probability of the next step,
place of the token in the flattened input, and the step just executed (from 1)."""


@dataclass(frozen=True)
class Threshold:
    """Truncation: a token goes on while its reach probability of the next step is >= tau."""

    tau: float

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise UserError(f"tau is {self.tau}: give a probability from 0 to 1")

    def __call__(self, next_reach: Tensor, index: Tensor, step: int) -> Tensor:
        return next_reach >= self.tau


@dataclass(frozen=True)
class GivenPasses:
    """Every token executes a given number of passes, whatever its reach probability.

    Attributes:
        passes: (B, L) passes of each token, at least 1.
    """

    passes: Tensor

    def __call__(self, next_reach: Tensor, index: Tensor, step: int) -> Tensor:
        return self.passes.flatten()[index] > step


def halt(gate: Tensor, reach: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the probability flow, truncated.

    With p_reach^(k+1) = p_reach^(k) g^(k), a token that goes on leaves p_reach^(k) (1 - g^(k)) at
    this step; a token that stops here leaves all that reached it (residual re-allocation), so the
    masses of a token sum to 1 whatever is pruned.

    Args:
        gate: (N,) probability g^(k) of continuing.
        reach: (N,) probability p_reach^(k) of reaching this step.
        keep: (N,) whether the token executes the next step.

    Returns:
        (N,) mass that exits at this step, and (N,) reach probability of the next step.
    """
    next_reach = reach * gate
    return torch.where(keep, reach * (1 - gate), reach), next_reach
