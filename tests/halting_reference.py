"""Halting in closed form over all steps at once: the readable reference of `halt`."""

import torch
from torch import Tensor


def halting_distribution(gates: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Section 3.3 of the paper.

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
