"""AdamW and the schedule, the same for every method."""

from __future__ import annotations

import math

import torch
from torch import nn

from latentcot.training.recipe import TrainingConfig


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices and embeddings, none on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )


def learning_rate(share_spent: float, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine to the minimum, over the share of the budget that is spent."""
    if share_spent < config.warmup_share:
        return config.learning_rate * share_spent / config.warmup_share
    progress = (share_spent - config.warmup_share) / (1 - config.warmup_share)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * cosine)
