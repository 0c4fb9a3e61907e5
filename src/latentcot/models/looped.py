"""`looped`: the stack of layers several times over, the final norm once (Giannou et al. 2023).

Shapes: N active tokens, d width.
"""

from __future__ import annotations

from typing import final

import torch
from huggingface_hub.dataclasses import strict

from latentcot.core.objective import target_probs
from latentcot.errors import UserError
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method
from latentcot.models.steps import StepRecord


@strict
class LoopedConfig(LatentConfig):
    """Configuration of `LoopedLM`.

    Args:
        loops: times that the stack of layers runs.
        reinject: add the input embedding e to the state before every loop but the first.
    """

    model_type = "latentcot_looped"

    loops: int = 4
    reinject: bool = False

    def check(self) -> None:
        super().check()
        if self.loops < 1:
            raise UserError(f"loops is {self.loops}: give 1 (the backbone as it is) or more")

    @property
    def num_passes(self) -> int:
        return self.loops


@final
@register_method("looped")
class LoopedLM(LatentLM):
    """h_0 = e, h_i = layers(h_{i-1}) or layers(h_{i-1} + e), logits = LMHead(norm(h_loops)).

    Loop i attends to the slots of loop i alone.
    """

    config: LoopedConfig
    config_class = LoopedConfig

    def think(self, chunk: Chunk) -> Thought:
        config, packing = self.config, chunk.packing
        record = StepRecord(packing, config.num_passes, chunk.embeds.dtype)
        states = chunk.embeds
        for loop in range(1, config.loops + 1):
            if config.reinject and loop > 1:
                states = states + chunk.embeds
            states = self.run_layers(states, self.slots(chunk, loop, packing))
            if chunk.output_steps and chunk.targets is not None:
                z = self.final_norm(states)
                p_target = target_probs(z, self.lm_head.weight, chunk.targets)
                record.add(loop, packing, step_target_probs=p_target)
        passes = torch.full_like(packing.index, config.loops)
        hidden = packing.scatter(self.final_norm(states))
        return Thought(hidden, packing.scatter(passes), steps=record.tensors)
