"""The objective: cross-entropy over the mixture and the correctness-aware adaptive loss.

Everything is a sum; the caller divides once by the number of target tokens, so that accumulation
and many devices change nothing. Logits exist one chunk of tokens at a time.
Shapes: N tokens, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100
CHUNK_LOGITS, CPU_CHUNK_LOGITS = 2**26, 2**18
"""Logits held at a time: what fills an accelerator, what stays in the cache of a core."""
CHUNK_TOKENS = 128
"""Tokens of a chunk at least: fewer would spend their time adding up the head's gradient."""


def shift_labels(labels: Tensor) -> Tensor:
    """(B, L) labels as transformers has them to targets: place t is scored against label t + 1."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def chunks(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Slices of the (N, d) states whose logits are held at a time."""
    num_logits = CPU_CHUNK_LOGITS if hidden.device.type == "cpu" else CHUNK_LOGITS
    size = max(CHUNK_TOKENS, num_logits // vocabulary)
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies that computes the gradients of each chunk while its logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        for part in chunks(hidden, weight.shape[0]):
            logits = (hidden[part] @ weight.T).to(wide)
            total += F.cross_entropy(
                logits, targets[part], ignore_index=IGNORE_INDEX, reduction="sum"
            )
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax - onehot, and zero where the target is ignored.
            kept = (targets[part] != IGNORE_INDEX)[:, None]
            grad = logits.softmax(-1)
            grad.scatter_add_(1, targets[part, None].clamp(min=0), -torch.ones_like(grad[:, :1]))
            grad = (grad * kept).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            None,
        )


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(weight @ hidden)[target], in float32 or wider.

    Args:
        hidden: (N, d); weight: (V, d); targets: (N,), IGNORE_INDEX where there is none.
    """
    device = weight.device
    total: Tensor = _LinearCrossEntropy.apply(hidden.to(device), weight, targets.to(device))
    return total


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """(N,) cross-entropy of each token in nats, 0 where the target is ignored; forward only."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    states, targets = hidden.to(weight.device), targets.to(weight.device)
    losses = [
        F.cross_entropy(
            (states[part] @ weight.T).to(wide),
            targets[part],
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        for part in chunks(states, weight.shape[0])
    ]
    return torch.cat(losses).to(hidden.device)


def target_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """(N,) probability p_target of each target, 0 where it is ignored; forward only."""
    probs = token_losses(hidden, weight, targets).neg().exp()
    return probs.masked_fill(targets == IGNORE_INDEX, 0)


def adaptive_penalty(gate: Tensor, target_prob: Tensor, beta: float) -> Tensor:
    """Sum over tokens of g^(k) sg(p_target^(k) ** beta): one step of the adaptive loss / lambda.

    Args:
        gate, target_prob: (N,) of the tokens that execute this step and have a target.
    """
    return (gate * target_prob.detach() ** beta).sum()
