"""`ponderlm2`: latent thoughts in the sequence, trained by Jacobi iteration (Zeng et al. 2025).

Shapes: N active tokens, K latent thoughts of each, m = K + 1 slots of a token, d width.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from latentcot.errors import UserError
from latentcot.flops import Ledger, interleave
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method


@strict
class Ponder2Config(LatentConfig):
    """Configuration of `PonderLM2`.

    Args:
        thoughts: latent thoughts K of a token.
        min_iterations, max_iterations: Jacobi iterations n of an update are drawn between these.
        eval_iterations: Jacobi iterations of a parallel pass in evaluation; fewer where the
            thoughts stop changing before. Equal to decoding from thoughts * L on.
    """

    model_type = "latentcot_ponderlm2"
    exact_options: ClassVar[dict[str, Any]] = {"eval_iterations": 2**10}

    thoughts: int = 1
    min_iterations: int = 2
    max_iterations: int = 3
    eval_iterations: int = 3

    def check(self) -> None:
        super().check()
        if self.thoughts < 1:
            raise UserError(f"thoughts is {self.thoughts}: give 1 or more (without: vanilla)")
        if not 1 <= self.min_iterations <= self.max_iterations:
            raise UserError(
                f"min_iterations {self.min_iterations} and max_iterations {self.max_iterations}: "
                "give 1 <= min_iterations <= max_iterations"
            )
        if self.eval_iterations < 1:
            raise UserError(f"eval_iterations is {self.eval_iterations}: give 1 or more")

    @property
    def num_passes(self) -> int:
        return self.parallel_passes(max(self.max_iterations, self.eval_iterations))

    def parallel_passes(self, iterations: int) -> int:
        """Passes of a token: over the tokens, `iterations` over all slots, and the final one."""
        return 1 + (iterations + 1) * (self.thoughts + 1)

    @property
    def training_passes(self) -> list[float]:
        drawn = range(self.min_iterations, self.max_iterations + 1)
        return [float(self.parallel_passes(iterations)) for iterations in drawn]

    @property
    def decoding_passes(self) -> int:
        return self.thoughts + 1


@final
@register_method("ponderlm2")
class PonderLM2(LatentLM):
    """One causal sequence x_1, z_1, x_2, z_2, ...; z_t is the state read at x_t, not detached.

    In parallel, Jacobi iteration: a pass over the tokens alone gives the first thoughts; n times,
    the whole sequence runs and every thought becomes the state read at the slot before it; a
    final pass gives the states for the LM head. One token at a time (cached decoding) is exact:
    K + 1 passes in sequence. The slots of a token share a position.
    """

    config: Ponder2Config
    config_class = Ponder2Config
    _drawn_iterations: int | None = None

    def draw(self) -> None:
        self._drawn_iterations = self._random_iterations()

    def _random_iterations(self) -> int:
        config = self.config
        return int(torch.randint(config.min_iterations, config.max_iterations + 1, (1,)))

    def think(self, chunk: Chunk) -> Thought:
        packing = chunk.packing
        is_one_token = packing.batch_shape[1] == 1
        z, passes = (self.decode if is_one_token else self.iterate)(chunk)
        executed = torch.full_like(packing.index, passes)
        return Thought(packing.scatter(z), packing.scatter(executed))

    def decode(self, chunk: Chunk) -> tuple[Tensor, int]:
        """One token of each row, its slots one after the other: states (N, d), and the passes."""
        z, num_slots = chunk.embeds, self.config.thoughts + 1
        packing = chunk.packing.interleave(num_slots)
        for slot in range(num_slots):
            own = packing.select(packing.positions % num_slots == slot)
            z = self.run(z, self.slots(chunk, 1, own))
        return z, num_slots

    def iterate(self, chunk: Chunk) -> tuple[Tensor, int]:
        """All tokens at once by Jacobi iteration: states (N, d), and the passes of a token."""
        num_slots = self.config.thoughts + 1
        packing = chunk.packing.interleave(num_slots)
        tokens = packing.select(packing.positions % num_slots == 0)
        z = self.run(chunk.embeds, self.slots(chunk, 1, tokens))
        thoughts = z[:, None].expand(-1, self.config.thoughts, -1)
        passes = 1
        for last in [*[False] * self.num_iterations(), True]:
            chunk.cache.rewind(chunk.packing)
            sequence = torch.cat([chunk.embeds[:, None], thoughts], dim=1)
            z = self.run(sequence.flatten(0, 1), self.slots(chunk, 1, packing))
            z = z.view_as(sequence)
            passes += num_slots
            if last or (not self.training and torch.equal(z[:, :-1], thoughts)):
                break
            thoughts = z[:, :-1]
        return z[:, -1], passes

    def num_iterations(self) -> int:
        """n of this pass: random in training, for a whole update where `draw` is called."""
        if not self.training:
            return self.config.eval_iterations
        return self._drawn_iterations or self._random_iterations()

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        num_slots, visibility = self.config.thoughts + 1, self.config.visibility
        sequence = interleave(passes, num_slots)
        times = 1
        if (num_passes := int(passes.max())) > num_slots:  # in parallel
            ledger.run(interleave(passes, 1), visibility)
            times = (num_passes - 1) // num_slots
        ledger.run(sequence, visibility, copies=num_slots, times=times)
