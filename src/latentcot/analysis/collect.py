"""From a model and a text to the tables that figures and pages show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from latentcot.analysis.tokens import TextView, TokenView
from latentcot.core.objective import shift_labels, token_losses
from latentcot.models.base import LatentLM


@torch.no_grad()
def collect_text(
    model: LatentLM,
    tokenizer: PreTrainedTokenizerBase,
    ids: np.ndarray,
    title: str,
    amp: Callable[[], Any] = contextlib.nullcontext,
) -> TextView:
    """Run one text (L,) through the model and keep what every token executed.

    Args:
        amp: makes the autocast context of the forward pass.
    """
    was_training = model.training
    model.eval()
    batch = torch.from_numpy(np.asarray(ids, np.int64))[None].to(model.device)
    with amp():
        out = model(batch, labels=batch, output_steps=True, skip_logits=True, use_cache=False)
        losses = token_losses(
            out.last_hidden_state[0], model.lm_head.weight, shift_labels(batch)[0]
        ).tolist()
    model.train(was_training)
    pieces = [tokenizer.decode([token]) for token in batch[0].tolist()]
    tokens = []
    for place, piece in enumerate(pieces):
        passes = int(out.passes[0, place])
        is_last = place == len(pieces) - 1

        def steps(values: Tensor | None, place: int = place, passes: int = passes) -> list[float]:
            return [] if values is None else values[0, place, :passes].tolist()

        tokens.append(
            TokenView(
                text=piece,
                token_id=int(batch[0, place]),
                latent_steps=passes - 1,
                loss=losses[place - 1] if place else None,
                gates=steps(out.gates),
                reach=steps(out.reach_probs),
                exits=steps(out.exit_probs),
                p_target=None if is_last else steps(out.step_target_probs),
                target=None if is_last else pieces[place + 1],
            )
        )
    return TextView(title, tokens, model.config.num_passes - 1)
