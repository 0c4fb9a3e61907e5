"""`vanilla`: the backbone as it is, one pass for each token."""

from __future__ import annotations

from typing import final

import torch
from huggingface_hub.dataclasses import strict

from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method


@strict
class VanillaConfig(LatentConfig):
    """Configuration of `VanillaLM`: nothing beyond the common fields."""

    model_type = "latentcot_vanilla"


@final
@register_method("vanilla")
class VanillaLM(LatentLM):
    """One pass: z = F(e), logits = LMHead(z)."""

    config_class = VanillaConfig

    def think(self, chunk: Chunk) -> Thought:
        packing = chunk.packing
        z = self.run(chunk.embeds, self.slots(chunk, 1, packing))
        return Thought(packing.scatter(z), packing.scatter(torch.ones_like(packing.index)))
