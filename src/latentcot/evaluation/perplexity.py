"""Loss, perplexity, bits per byte and executed passes of a model on blocks of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latentcot.analysis.tokens import StepsRow
from latentcot.core.halting import GivenPasses, KeepRule
from latentcot.core.objective import IGNORE_INDEX, shift_labels, token_losses
from latentcot.evaluation.statistics import spearman
from latentcot.models.base import LatentLM
from latentcot.models.config import LatentConfig

Amp = Callable[[], Any]
"""Makes the autocast context that a model is run under."""


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model on a text.

    Attributes:
        loss: nats per predicted token.
        bits_per_byte: loss over the mean number of UTF-8 bytes of a token; None where unknown.
        passes_per_token: executed passes, mean over tokens.
        prune_ratio: see `prune_ratio`.
        steps_vs_ptarget: Spearman correlation of a token's latent steps with the probability that
            the model finally gives to the next token; None where all tokens take the same.
        tokens: predicted tokens.
        by_steps: per number of latent steps, the share of tokens and their mean final p_target.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    passes_per_token: float
    prune_ratio: float
    steps_vs_ptarget: float | None
    tokens: int
    by_steps: list[StepsRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prune_ratio(passes_per_token: float, config: LatentConfig) -> float:
    """1 - E[latent steps] / l_max, the share of latent steps that a router saved; 0 without one."""
    return 1 - (passes_per_token - 1) / (config.num_passes - 1) if config.prunes else 0.0


@torch.no_grad()
def evaluate(
    model: LatentLM,
    batches: Iterable[np.ndarray],
    amp: Amp,
    bytes_per_token: float | None = None,
    keep_rule_for: Callable[[Tensor], KeepRule | None] | None = None,
) -> Evaluation:
    """Score every token of every block but its first, each block on its own.

    Args:
        batches: int arrays (B, L).
        amp: makes the autocast context of the forward passes.
        bytes_per_token: UTF-8 bytes of a token of this text, for bits per byte.
        keep_rule_for: from (B, L) token ids to the rule of who goes on, instead of the model's own.
    """
    was_training = model.training
    model.eval()
    losses, steps = [], []
    for batch in batches:
        ids = torch.from_numpy(batch).to(model.device)
        rule = keep_rule_for(ids) if keep_rule_for else None
        with amp():
            out = model(ids, skip_logits=True, use_cache=False, keep_rule=rule)
            targets = shift_labels(ids)
            token_loss = token_losses(
                out.last_hidden_state.flatten(0, 1), model.lm_head.weight, targets.flatten()
            )
        scored = targets.flatten() != IGNORE_INDEX
        losses.append(token_loss[scored].double().cpu())
        steps.append(out.passes.flatten()[scored].cpu() - 1)
    model.train(was_training)
    loss, latent_steps = torch.cat(losses).numpy(), torch.cat(steps).numpy()
    return _summarise(loss, latent_steps, model.config, bytes_per_token)


def _summarise(
    losses: np.ndarray,
    latent_steps: np.ndarray,
    config: LatentConfig,
    bytes_per_token: float | None,
) -> Evaluation:
    loss, passes = float(losses.mean()), float(latent_steps.mean() + 1)
    p_target = np.exp(-losses)
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700)),
        bits_per_byte=loss / math.log(2) / bytes_per_token if bytes_per_token else None,
        passes_per_token=passes,
        prune_ratio=prune_ratio(passes, config),
        steps_vs_ptarget=spearman(latent_steps, p_target),
        tokens=len(losses),
        by_steps=[
            {
                "latent_steps": int(count),
                "share": float((latent_steps == count).mean()),
                "mean_p_target": float(p_target[latent_steps == count].mean()),
            }
            for count in np.unique(latent_steps)
        ],
    )


def shuffled_passes(model: LatentLM, amp: Amp, seed: int = 0) -> Callable[[Tensor], KeepRule]:
    """The control for *where* a model thinks: its own passes, dealt to random tokens of the batch.

    Same model, same number of passes, other tokens: pass it to `evaluate` as `keep_rule_for`.
    """
    generator = torch.Generator().manual_seed(seed)

    def rule_for(ids: Tensor) -> KeepRule:
        with amp():
            passes = model(ids, skip_logits=True, use_cache=False).passes
        order = torch.randperm(passes.numel(), generator=generator).to(passes.device)
        return GivenPasses(passes.flatten()[order].view_as(passes))

    return rule_for
