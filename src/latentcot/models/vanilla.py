"""`vanilla`: the backbone as it is, one pass for each token."""

from __future__ import annotations

from typing import final

from huggingface_hub.dataclasses import strict

from latentcot.core.objective import target_probs
from latentcot.models.base import Chunk, LatentLM, Thought, register_method
from latentcot.models.config import LatentConfig


@strict
class VanillaConfig(LatentConfig):
    """Configuration of `VanillaLM`: nothing beyond the common fields."""

    model_type = "latentcot_vanilla"

    @property
    def l_max(self) -> int:
        return 0


@final
@register_method("vanilla")
class VanillaLM(LatentLM):
    """One pass: z = F(e), logits = LMHead(z)."""

    config_class = VanillaConfig

    def think(self, chunk: Chunk) -> Thought:
        packing = chunk.packing
        slots = chunk.cache.step(1, packing, backend=self.attention_backend)
        z = self.run(chunk.embeds, slots)
        ones = packing.index.new_ones(len(packing))
        steps = {}
        if chunk.output_steps:
            certain = packing.scatter(ones.to(z.dtype))[..., None]
            steps = {"gates": 0 * certain, "reach_probs": certain, "exit_probs": certain}
            if chunk.targets is not None:
                p_target = target_probs(z, self.lm_head.weight, chunk.targets)
                steps["step_target_probs"] = packing.scatter(p_target)[..., None]
        return Thought(packing.scatter(z), packing.scatter(ones), None, steps)
