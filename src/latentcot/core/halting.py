"""Probabilistic halting, section 3.3 of the paper: pure functions of gates and reach.

Shapes: N active tokens, K steps at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KeepRule = Callable[[Tensor, Tensor, int], Tensor]
"""Who goes on: `(next_reach, index, step) -> bool`, all (N,): reach probability of the next step,
place of the token in the flattened input, and the step just executed (from 1)."""


@dataclass(frozen=True)
class Threshold:
    """Truncation: a token goes on while its reach probability of the next step is >= tau."""

    tau: float

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


@dataclass(frozen=True)
class Explore:
    """Keeps a random share of the tokens that `rule` would stop (their mass goes on with them).

    Attributes:
        share: probability that a stopped token is kept, drawn anew at every step.
    """

    rule: KeepRule
    share: float

    def __call__(self, next_reach: Tensor, index: Tensor, step: int) -> Tensor:
        kept = torch.rand(next_reach.shape, device=next_reach.device) < self.share
        return self.rule(next_reach, index, step) | kept


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


def halting_distribution(gates: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The equations in closed form over all steps at once: the readable reference of `halt`.

    Args:
        gates: (..., K) gates of every step; the last one is taken as 0.
        tau: truncation threshold.

    Returns:
        (..., K) truncated exit probabilities, and (...,) the last executed step K*.
    """
    gates = gates.clone()
    gates[..., -1] = 0
    reach = torch.cat([torch.ones_like(gates[..., :1]), gates[..., :-1]], -1).cumprod(-1)
    # Reach probabilities fall with k, so {k : reach >= tau} is a prefix (step 1 always belongs).
    executed = reach >= tau
    executed[..., 0] = True
    last = executed.sum(-1)
    steps = torch.arange(1, gates.shape[-1] + 1, device=gates.device)
    exits = torch.where(steps == last[..., None], reach, reach * (1 - gates))
    return exits * executed, last
