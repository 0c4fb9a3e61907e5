"""Step-wise records (B, L, K) of what each token executed, zero where it did not."""

from __future__ import annotations

import torch
from torch import Tensor

from latentcot.core.packing import Packing


class StepRecord:
    """Collects step-wise values of the active tokens, step by step.

    Attributes:
        tensors: name -> (B, L, K).
    """

    def __init__(self, packing: Packing, num_passes: int, dtype: torch.dtype):
        self.shape = (*packing.batch_shape, num_passes)
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}

    def add(self, step: int, packing: Packing, **values: Tensor) -> None:
        """Record (N,) values of the tokens of `packing` at `step` (from 1)."""
        for name, value in values.items():
            if name not in self.tensors:
                self.tensors[name] = value.new_zeros(self.shape, dtype=self.dtype)
            self.tensors[name].flatten(0, 1)[packing.index, step - 1] = value.to(self.dtype)


def fixed_steps(passes: Tensor, num_passes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The records of tokens that go on surely until their last pass, and read its state.

    Args:
        passes: (B, L) passes executed, 0 at padding.
    """
    steps = torch.arange(1, num_passes + 1, device=passes.device)
    reached, last = passes[..., None] >= steps, passes[..., None] == steps
    return {
        "gates": (reached & ~last).to(dtype),
        "reach_probs": reached.to(dtype),
        "exit_probs": last.to(dtype),
    }
