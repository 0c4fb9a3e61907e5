"""Routers: they read a latent state z^(k) and give the logit of the gate g^(k).

All are called as `router(z, step)` with z (N, d) and their step, from 1, or (N,) one for each, and
return logits (N,).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

RouterName = Literal["none", "linear", "mlp", "multi_linear", "multi_mlp"]


class NoRouter(nn.Module):
    """No-Adaptive: the gate is always 1, so all mass flows to the last step, z^(K)."""

    def forward(self, z: Tensor, step: int | Tensor) -> Tensor:
        return z.new_full(z.shape[:-1], math.inf)


class LinearRouter(nn.Module):
    """One linear map, shared by all steps (the paper's default)."""

    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, z: Tensor, step: int | Tensor) -> Tensor:
        return self.out(z).squeeze(-1)


class MLPRouter(nn.Module):
    """One hidden layer of the model's width, shared by all steps."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, z: Tensor, step: int | Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.hidden(z))).squeeze(-1)


class MultiRouter(nn.Module):
    """One router for each step that has a gate."""

    def __init__(self, routers: list[nn.Module]):
        super().__init__()
        self.steps = nn.ModuleList(routers)

    def forward(self, z: Tensor, step: int | Tensor) -> Tensor:
        if isinstance(step, int):
            return self.steps[step - 1](z, step)
        steps = step.clamp(max=len(self.steps)).tolist()  # the last step has no gate
        return torch.cat([self.steps[k - 1](z[n : n + 1], k) for n, k in enumerate(steps)])


def build_router(name: RouterName, width: int, l_max: int) -> nn.Module:
    """The router `name` for states of `width` and at most `l_max` latent steps."""
    match name:
        case "none":
            return NoRouter()
        case "linear":
            return LinearRouter(width)
        case "mlp":
            return MLPRouter(width)
        case "multi_linear":
            return MultiRouter([LinearRouter(width) for _ in range(l_max)])
        case "multi_mlp":
            return MultiRouter([MLPRouter(width) for _ in range(l_max)])


@torch.no_grad()
def set_initial_gate(router: nn.Module, gate: float) -> None:
    """Start every gate at `gate`: zero output weights, and the bias that gives it.

    Parameters that were loaded from a checkpoint are left alone.
    """
    for module in router.modules():
        if isinstance(module, LinearRouter | MLPRouter):
            init.zeros_(module.out.weight)
            init.constant_(module.out.bias, math.log(gate / (1 - gate)))
