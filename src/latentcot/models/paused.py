"""`paused`: pause tokens after every token, read at the last one (Goyal et al. 2023).

The deterministic form of the paper's table, "3 pauses = 4x": every token has its pauses.
Shapes: N active tokens, m = num_pauses + 1 slots of a token, d width.
"""

from __future__ import annotations

from typing import final

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from latentcot.core.objective import target_probs
from latentcot.errors import UserError
from latentcot.flops import Ledger, interleave
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method
from latentcot.models.steps import StepRecord


@strict
class PausedConfig(LatentConfig):
    """Configuration of `PausedLM`.

    Args:
        num_pauses: pause tokens after every token.
    """

    model_type = "latentcot_paused"

    num_pauses: int = 3

    def check(self) -> None:
        super().check()
        if self.num_pauses < 1:
            raise UserError(
                f"num_pauses is {self.num_pauses}: give 1 or more (without pauses: vanilla)"
            )

    @property
    def num_passes(self) -> int:
        return self.num_pauses + 1


@final
@register_method("paused")
class PausedLM(LatentLM):
    """One causal pass over x_1, p, p, p, x_2, p, p, p, ...: the last pause of x_t predicts x_{t+1}.

    p is one learnable embedding; a token and its pauses share a position.
    """

    config: PausedConfig
    config_class = PausedConfig

    def build(self) -> None:
        self.pause = nn.Embedding(1, self.config.hidden_size)

    def think(self, chunk: Chunk) -> Thought:
        config, packing = self.config, chunk.packing
        slots = packing.interleave(config.num_passes)
        pause = self._scale(self.pause.weight).to(chunk.embeds)
        pauses = pause.expand(len(packing), config.num_pauses, -1)
        states = torch.cat([chunk.embeds[:, None], pauses], dim=1).flatten(0, 1)
        z = self.run(states, self.slots(chunk, 1, slots)).unflatten(0, (len(packing), -1))
        record = StepRecord(packing, config.num_passes, z.dtype)
        if chunk.output_steps and chunk.targets is not None:
            for step in range(1, config.num_passes + 1):
                p_target = target_probs(z[:, step - 1], self.lm_head.weight, chunk.targets)
                record.add(step, packing, step_target_probs=p_target)
        passes = torch.full_like(packing.index, config.num_passes)
        hidden = packing.scatter(z[:, -1])
        return Thought(hidden, packing.scatter(passes), steps=record.tensors)

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        copies = self.config.num_passes
        sequence = interleave(passes, copies)
        ledger.run(sequence, self.config.visibility, copies=copies, together=copies)
