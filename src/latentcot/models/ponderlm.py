"""`ponderlm`: the predicted distribution's mean embedding is fed back (Zeng et al. 2025, PonderLM).

Shapes: N active tokens, d width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, final

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from latentcot.core.objective import chunks, target_probs
from latentcot.errors import UserError
from latentcot.flops import Ledger, linear_flops
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method
from latentcot.models.steps import StepRecord


@strict
class PonderConfig(LatentConfig):
    """Configuration of `PonderLM`.

    Args:
        steps: pondering steps before the final pass.
        cumulative: add each step's soft embedding to the last input (the method's own code), not
            to e (the baseline of a later repository).
        scale_input: start from steps * e, as the method's larger runs do; cumulative only.
    """

    model_type = "latentcot_ponderlm"

    steps: int = 3
    cumulative: bool = True
    scale_input: bool = False

    def check(self) -> None:
        super().check()
        if self.steps < 0:
            raise UserError(f"steps is {self.steps}: give 0 (the backbone as it is) or more")
        if self.scale_input and not (self.cumulative and self.steps):
            raise UserError("scale_input is for the cumulative form with 1 step or more: drop it")

    @property
    def num_passes(self) -> int:
        return self.steps + 1


@final
@register_method("ponderlm")
class PonderLM(LatentLM):
    """p_k = softmax(U F(x_k)), w_k = scale E^T p_k; x_{k+1} = x_k + w_k (or e + w_k), x_0 = e.

    Pass k attends to the slots of pass k alone; gradients flow through all passes.
    """

    config: PonderConfig
    config_class = PonderConfig

    def think(self, chunk: Chunk) -> Thought:
        config, packing = self.config, chunk.packing
        record = StepRecord(packing, config.num_passes, chunk.embeds.dtype)
        x = chunk.embeds * config.steps if config.scale_input else chunk.embeds
        for step in range(1, config.num_passes + 1):
            z = self.run(x, self.slots(chunk, step, packing))
            if chunk.output_steps and chunk.targets is not None:
                p_target = target_probs(z, self.lm_head.weight, chunk.targets)
                record.add(step, packing, step_target_probs=p_target)
            if step < config.num_passes:
                x = (x if config.cumulative else chunk.embeds) + self.soft_embedding(z)
        passes = torch.full_like(packing.index, config.num_passes)
        return Thought(packing.scatter(z), packing.scatter(passes), steps=record.tensors)

    def soft_embedding(self, z: Tensor) -> Tensor:
        """(N, d) states to the mean scaled embedding of the token that each predicts, (N, d).

        Probabilities exist one chunk of tokens at a time; the backward pass makes them again.
        """
        head, table = self.lm_head.weight, self.get_input_embeddings().weight
        parts = []
        for part in chunks(z, head.shape[0]):
            arguments: tuple[Any, ...] = (z[part], head, table)
            parts.append(checkpoint(_mean_embedding, *arguments, use_reentrant=False))
        return self._scale(torch.cat(parts))

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        super().tally(ledger, passes)
        num_soft = self.config.steps * int((passes > 0).sum())
        head = linear_flops(self.lm_head)
        ledger.add(linear=2 * num_soft * head)
        if ledger.executed:
            ledger.add(recomputed=num_soft * head)


def _mean_embedding(z: Tensor, head: Tensor, table: Tensor) -> Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    probs = (z @ head.T).to(wide).softmax(-1)
    return probs.to(z.dtype) @ table
