"""`adaptive`: token-level adaptive latent chain-of-thought, section 3 of the paper.

Shapes: B rows, L columns, N active tokens (fewer at every step), K = l_max + 1 passes, d width.
"""

from __future__ import annotations

from typing import final

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from latentcot.core.halting import Threshold, halt
from latentcot.core.objective import IGNORE_INDEX, adaptive_penalty, cross_entropy_sum, target_probs
from latentcot.core.router import MultiRouter, RouterName, build_router, set_initial_gate
from latentcot.core.slots import Visibility
from latentcot.errors import UserError
from latentcot.flops import Ledger, linear_flops
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method
from latentcot.models.steps import StepRecord


@strict
class AdaptiveConfig(LatentConfig):
    """Configuration of `AdaptiveLM`.

    Args:
        l_max: latent steps at most; K = l_max + 1 passes.
        router: what reads z^(k) and gives the gate; `none` executes all passes (No-Adaptive).
        tau: a token stops when its reach probability of the next step falls below it.
        lambda_adaptive: weight of the adaptive loss.
        beta: exponent of the target probability in it.
        step_loss_weight: weight of the cross-entropy of all states before step K, for better drafts
            in wavefront decoding; 0 (the paper) is none.
        initial_gate: value of every gate before training.
        visibility: which slots of earlier steps a query sees: `all` (the paper), `latest` (of each
            position its deepest), or `own` (only those of the same step).
    """

    model_type = "latentcot_adaptive"

    l_max: int = 3
    router: RouterName = "linear"
    tau: float | int = 0.1
    lambda_adaptive: float | int = 0.4
    beta: float | int = 10.0
    step_loss_weight: float | int = 0.0
    initial_gate: float = 0.95
    visibility: Visibility = "all"  # type: ignore[assignment]  # a field where the base computes

    def check(self) -> None:
        super().check()
        if self.l_max < 0:
            raise UserError(f"l_max is {self.l_max}: give 0 (no latent steps) or more")
        if not 0 <= self.tau <= 1:
            raise UserError(f"tau is {self.tau}: give a probability from 0 to 1")
        if not 0 < self.initial_gate < 1:
            raise UserError(f"initial_gate is {self.initial_gate}: give a value between 0 and 1")
        if not (self.lambda_adaptive >= 0 and self.beta >= 0 and self.step_loss_weight >= 0):
            raise UserError("lambda_adaptive, beta and step_loss_weight must be 0 or more")

    @property
    def num_passes(self) -> int:
        return self.l_max + 1

    @property
    def prunes(self) -> bool:
        return self.router != "none" and self.tau > 0 and self.l_max > 0

    @property
    def is_watched(self) -> bool:
        return self.prunes


@final
@register_method("adaptive")
class AdaptiveLM(LatentLM):
    """Latent steps under a (position, step) mask, probabilistic halting, mass-preserving mixing."""

    config: AdaptiveConfig
    config_class = AdaptiveConfig
    can_wavefront = True

    def build(self) -> None:
        self.router = build_router(self.config.router, self.config.hidden_size, self.config.l_max)

    def initialize_weights(self) -> None:
        super().initialize_weights()
        set_initial_gate(self.router, self.config.initial_gate)

    def gate(self, z: Tensor, step: int | Tensor) -> Tensor:
        """g^(k): (N, d) states at `step`, or at (N,) steps, to (N,) probabilities of continuing.

        In float32, or wider.
        """
        dtype = next((p.dtype for p in self.router.parameters()), z.dtype)
        with torch.autocast(z.device.type, enabled=False):
            logits = self.router(z.to(dtype), step)
        wide = torch.promote_types(z.dtype, torch.float32)
        return logits.to(z.device, wide).sigmoid()

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        super().tally(ledger, passes)
        num_gates = int(passes.clamp(max=self.config.l_max).sum())
        if self.config.step_loss_weight:  # a forward and a backward pass of the head
            ledger.add(forward_only=3 * num_gates * linear_flops(self.lm_head))
        if self.config.router == "none":
            return
        # Every executed step but the last has a gate, and p_target for the adaptive loss.
        router = linear_flops(self.router)
        if isinstance(self.router, MultiRouter):
            router //= max(1, self.config.l_max)
        ledger.add(linear=num_gates * router, forward_only=num_gates * linear_flops(self.lm_head))

    def think(self, chunk: Chunk) -> Thought:
        config, packing, targets = self.config, chunk.packing, chunk.targets
        keep_rule = chunk.keep_rule or Threshold(config.tau)
        wide = torch.promote_types(chunk.embeds.dtype, torch.float32)
        record = StepRecord(packing, config.num_passes, wide) if chunk.output_steps else None
        learns_to_halt = targets is not None and config.router != "none"
        learns_steps = targets is not None and config.step_loss_weight > 0
        adaptive_sum = step_sum = chunk.embeds.new_zeros((), dtype=wide)

        states = chunk.embeds
        reach = states.new_ones(len(packing), dtype=wide)
        mixture = packing.scatter(torch.zeros_like(states, dtype=wide)).flatten(0, 1)
        passes = packing.index.new_zeros(mixture.shape[0])
        for step in range(1, config.num_passes + 1):
            slots = self.slots(chunk, step, packing)
            z = self.run(states, slots)
            is_last = step == config.num_passes
            gate = torch.zeros_like(reach) if is_last else self.gate(z, step)
            keep = torch.zeros_like(reach, dtype=torch.bool)
            if not is_last:
                keep = keep_rule(reach * gate, packing.index, step)
            exit_prob, next_reach = halt(gate, reach, keep)
            mixture = mixture.index_add(0, packing.index, exit_prob[:, None] * z)
            passes[packing.index] = step

            if targets is not None and (record or (learns_to_halt and not is_last)):
                p_target = target_probs(z, self.lm_head.weight, targets)
                if learns_to_halt:
                    scored = targets != IGNORE_INDEX
                    adaptive_sum = adaptive_sum + adaptive_penalty(
                        gate[scored], p_target[scored], config.beta
                    )
                if record:
                    record.add(step, packing, step_target_probs=p_target)
            if targets is not None and learns_steps and not is_last:
                step_loss = cross_entropy_sum(z, self.lm_head.weight, targets)
                step_sum = step_sum + step_loss.to(step_sum.device)
            if record:
                record.add(step, packing, gates=gate, reach_probs=reach, exit_probs=exit_prob)

            num_kept = int(keep.sum())
            if num_kept == 0:
                break
            states, reach = z, next_reach
            if num_kept < len(packing):
                packing, states, reach = packing.select(keep), states[keep], reach[keep]
                targets = None if targets is None else targets[keep]

        penalty = config.lambda_adaptive * adaptive_sum
        if learns_steps:
            penalty = penalty + config.step_loss_weight * step_sum
        return Thought(
            hidden=mixture.to(z.dtype).unflatten(0, packing.batch_shape),
            passes=passes.unflatten(0, packing.batch_shape),
            penalty=penalty if learns_to_halt or learns_steps else None,
            steps=record.tensors if record else {},
        )
