"""FLOPs of a batch from what was really executed: every matmul, attention by visible pairs.

A multiply-add counts as two FLOPs; element-wise work and recomputation count nothing; a backward
pass costs twice its forward pass. Shapes: B rows, L columns, K passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from latentcot.core.slots import Visibility


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of a batch, by part.

    Attributes:
        linear: linear layers of the backbone, and of the router.
        attention: query-key and weight-value products over visible (query, slot) pairs.
        head: the LM head on the states that are scored.
        forward_only: what training computes without a gradient: the LM head on the states of each
            step, for the adaptive loss.
    """

    linear: float
    attention: float
    head: float
    forward_only: float = 0.0

    @property
    def forward(self) -> float:
        """FLOPs of inference: the states are scored once."""
        return self.linear + self.attention + self.head

    @property
    def training(self) -> float:
        """FLOPs of a forward and a backward pass."""
        return 3 * self.forward + self.forward_only


def linear_flops(module: nn.Module) -> int:
    """Forward FLOPs of all linear layers inside `module`, for one token."""
    layers = (child for child in module.modules() if isinstance(child, nn.Linear))
    return sum(2 * layer.in_features * layer.out_features for layer in layers)


def visible_pairs(passes: Tensor, visibility: Visibility, window: int | None = None) -> int:
    """Number of visible (query, slot) pairs of a batch, the slots of each row being its own.

    Args:
        passes: (B, L) passes that each token executed, 0 at padding.
        visibility: `all`: the query (t, k) sees min(k, K*_t') slots of each t' <= t; `latest`: one.
        window: sliding window in positions, or None. Padding counts as positions here.
    """
    pairs = 0
    for step in range(1, int(passes.max()) + 1):
        slots = passes.clamp(max=step if visibility == "all" else 1)
        seen = slots.cumsum(1)
        if window is not None and window < passes.shape[1]:
            seen = seen - nn.functional.pad(seen, (window, 0))[:, :-window]
        pairs += int((seen * (passes >= step)).sum())
    return pairs


def attention_flops(num_pairs: int, head_width: int, num_heads: int) -> int:
    """Forward FLOPs of attention over `num_pairs` (query, slot) pairs."""
    return 4 * num_pairs * head_width * num_heads


def kaplan_flops(num_parameters: int, passes: Tensor | float) -> float:
    """Kaplan's 6 N for each pass of each token (Kaplan et al. 2020), the paper's ledger.

    Args:
        passes: passes of the tokens, or their sum.
    """
    return 6.0 * num_parameters * float(torch.as_tensor(passes).sum())
