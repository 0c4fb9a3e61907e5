"""`mor`: Mixture-of-Recursions, routers choose which tokens recur (Bae et al. 2025).

Shapes: N tokens of the chunk, A of them active, R recursions, d width.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from latentcot.core.halting import GivenPasses, KeepRule
from latentcot.core.objective import IGNORE_INDEX, target_probs
from latentcot.core.packing import Packing
from latentcot.errors import UserError
from latentcot.flops import Ledger, interleave, linear_flops
from latentcot.models.base import Chunk, LatentLM, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import register_method
from latentcot.models.steps import StepRecord

CAPACITIES = (1.0, 0.95, 0.85, 0.75)
"""Their sum is the 3.55 passes that the paper's FLOPs imply; it does not give them."""


@strict
class MoRConfig(LatentConfig):
    """Configuration of `MoRLM`.

    Args:
        capacities: share of a sequence's tokens that each recursion keeps, from 1 downwards; their
            number is the number of recursions. None: `CAPACITIES`. Token choice uses the number.
        routing: `expert`: each recursion chooses its top tokens in training, and a token goes on
            where sigmoid(router) > 0.5 in evaluation and decoding, which is causal; `token`: one
            router gives each token its number of recursions at the start.
        sharing: `cycle`: all layers recur; `middle_cycle`: the first and the last layer run once.
        alpha: factor on what a recursion adds.
        aux_weight: weight of the router's loss: binary cross-entropy (expert choice) or load
            balance (token choice).
    """

    model_type = "latentcot_mor"

    capacities: list[float | int] | None = None
    routing: Literal["expert", "token"] = "expert"
    sharing: Literal["cycle", "middle_cycle"] = "cycle"
    alpha: float | int = 0.1
    aux_weight: float | int = 0.001

    def __post_init__(self, **kwargs: Any) -> None:
        if self.capacities is None:
            self.capacities = list(CAPACITIES)
        super().__post_init__(**kwargs)

    def check(self) -> None:
        super().check()
        shares = self.capacities or []
        if not shares or shares[0] != 1:
            raise UserError(f"capacities are {shares}: the first recursion keeps all tokens, 1")
        if any(later > earlier for earlier, later in itertools.pairwise(shares)):
            raise UserError(
                f"capacities grow in {shares}: a recursion chooses among the tokens of the one "
                "before, so give shares that fall or stay"
            )
        if shares[-1] <= 0:
            raise UserError(f"capacities are {shares}: give shares above 0")
        if self.sharing == "middle_cycle" and self.num_hidden_layers < 3:
            raise UserError(
                f"sharing middle_cycle needs 3 layers or more and the backbone has "
                f"{self.num_hidden_layers}: use cycle"
            )

    @property
    def num_passes(self) -> int:
        return len(self.capacities or [])

    @property
    def training_passes(self) -> list[float]:
        if self.routing == "token":
            return [(self.num_passes + 1) / 2]  # an even load
        return [float(sum(self.capacities or []))]

    @property
    def prunes(self) -> bool:
        return self.num_passes > 1


@final
@register_method("mor")
class MoRLM(LatentLM):
    """x[kept] += alpha * sigmoid(router_r(x)) * layers(x[kept]) for each recursion r.

    The tokens kept by recursion r are among those kept by r - 1 and have keys there, at their own
    positions; recursion r attends to the keys of recursion r alone.
    """

    config: MoRConfig
    config_class = MoRConfig

    def build(self) -> None:
        width, recursions = self.config.hidden_size, self.config.num_passes
        if self.config.routing == "token":
            self.router = nn.ModuleList([nn.Linear(width, recursions, bias=False)])
        else:
            self.router = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(recursions))

    @property
    def layer_groups(self) -> tuple[slice, slice, slice]:
        """Layers before, inside and behind the recursion."""
        last = self.config.num_hidden_layers - 1
        if self.config.sharing == "cycle":
            return slice(0, 0), slice(None), slice(0, 0)
        return slice(0, 1), slice(1, last), slice(last, None)

    def think(self, chunk: Chunk) -> Thought:
        config, everyone = self.config, chunk.packing
        before, inside, behind = self.layer_groups
        record = StepRecord(everyone, config.num_passes, chunk.embeds.dtype)
        x, once = chunk.embeds, None
        if config.sharing == "middle_cycle":
            once = self.slots(chunk, config.num_passes + 1, everyone)
            x = self.run_layers(x, once, before)
        choice = self.assign(x, chunk) if config.routing == "token" else None
        penalty = x.new_zeros(()) if choice is None else choice.penalty
        passes = torch.zeros_like(everyone.index)
        active = torch.arange(len(everyone), device=x.device)  # places among the N tokens
        for recursion in range(1, config.num_passes + 1):
            if choice is not None:
                weight = choice.weight[active]
                kept = choice.rule(weight, everyone.index[active], recursion - 1)
            else:
                weight, kept, auxiliary = self.choose(x, active, recursion, chunk)
                penalty = penalty + auxiliary
            active, weight = active[kept], weight[kept]
            if not len(active):
                break
            own = everyone.select(active)
            new = self.run_layers(x[active], self.slots(chunk, recursion, own), inside)
            update = config.alpha * weight[:, None] * new
            x = x.index_add(0, active, update.to(x.dtype))
            passes[active] = recursion
            if chunk.output_steps and chunk.targets is not None and once is None:
                z = self.final_norm(x[active])
                p_target = target_probs(z, self.lm_head.weight, chunk.targets[active])
                record.add(recursion, own, step_target_probs=p_target)
        if once is not None:
            x = self.run_layers(x, once, behind)
        learns = self.training and chunk.targets is not None
        return Thought(
            hidden=everyone.scatter(self.final_norm(x)),
            passes=everyone.scatter(passes),
            penalty=config.aux_weight * penalty if learns else None,
            steps=record.tensors,
        )

    def choose(
        self, x: Tensor, active: Tensor, recursion: int, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expert choice among the A active tokens: weight (A,), kept (A,), auxiliary loss ()."""
        shares = self.config.capacities or []
        capacity, before = shares[recursion - 1], shares[max(0, recursion - 2)]
        candidates = chunk.packing.select(active)
        logits = self.router_logits(x[active], recursion - 1).squeeze(-1)
        weight = logits.sigmoid()
        if chunk.keep_rule is not None and recursion > 1:
            kept = chunk.keep_rule(weight, candidates.index, recursion - 1)
        elif capacity == before:  # nothing to choose
            kept = torch.ones_like(active, dtype=torch.bool)
        elif self.training:
            kept = top_k(logits.detach(), capacity, candidates, chunk.packing.counts)
        else:
            kept = weight > 0.5
        if chunk.targets is None:
            return weight, kept, weight.new_zeros(())
        scored = chunk.targets[active] != IGNORE_INDEX
        auxiliary = F.binary_cross_entropy_with_logits(
            logits[scored], kept[scored].to(logits.dtype), reduction="sum"
        )
        return weight, kept, auxiliary

    def router_logits(self, x: Tensor, number: int) -> Tensor:
        """Logits of a router in its own precision: bfloat16 would tie the scores of many tokens."""
        router = self.router[number]
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = router(x.to(next(router.parameters()).dtype))
        return logits

    def assign(self, x: Tensor, chunk: Chunk) -> _Assignment:
        """Token choice: the depth of each token, and the load balance of each sequence."""
        probs = self.router_logits(x, 0).softmax(-1)
        weight, deepest = probs.max(-1)
        depth = chunk.packing.scatter(deepest + 1)
        rule = chunk.keep_rule or GivenPasses(depth)
        penalty = weight.new_zeros(())
        if chunk.targets is not None:
            penalty = balance_loss(probs, deepest, chunk.targets, chunk.packing)
        return _Assignment(weight, rule, penalty)

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        before, inside, behind = self.layer_groups
        once = interleave(passes, 1)
        for layers, executed in ((before, once), (inside, passes), (behind, once)):
            ledger.run(executed, self.config.visibility, layers)
        num_choices = int(once.sum())
        if self.config.routing == "expert":  # recursion r reads all that went through r - 1
            num_choices += int(passes.clamp(max=self.config.num_passes - 1).sum())
        ledger.add(linear=num_choices * linear_flops(self.router[0]))


@dataclass(frozen=True)
class _Assignment:
    """What token choice decides before the first recursion: (N,) weights, who goes on, its loss."""

    weight: Tensor
    rule: KeepRule
    penalty: Tensor


def top_k(scores: Tensor, capacity: float, candidates: Packing, num_tokens: Tensor) -> Tensor:
    """(A,) whether a candidate is among the int(capacity * num_tokens) best of its row.

    Args:
        scores: (A,) of the candidates; num_tokens: (B,) tokens of each row, not only candidates.
    """
    padded = candidates.pad(scores, fill=-math.inf)
    ranks = torch.argsort(padded, dim=1, descending=True, stable=True).argsort(1)
    wanted = (capacity * num_tokens.double()).long()
    return candidates.unpad(ranks < wanted[:, None])


def balance_loss(probs: Tensor, deepest: Tensor, targets: Tensor, packing: Packing) -> Tensor:
    """Load balance R sum_i f_i P_i of each sequence, times its targets, summed over sequences.

    f_i is the share of the sequence's tokens that were given depth i, P_i the mean probability of
    i (Fedus et al. 2021, by sequence, so that micro-batches change nothing).

    Args:
        probs: (N, R) of the router; deepest: (N,) its argmax; targets: (N,).
    """
    num_rows, depths = packing.batch_shape[0], probs.shape[1]
    counts = packing.counts.clamp(min=1)[:, None]
    chosen = F.one_hot(deepest, depths).to(probs)
    shares = probs.new_zeros(num_rows, depths).index_add(0, packing.rows, chosen) / counts
    means = probs.new_zeros(num_rows, depths).index_add(0, packing.rows, probs) / counts
    scored = torch.bincount(packing.rows[targets != IGNORE_INDEX], minlength=num_rows)
    return (depths * (shares * means).sum(1) * scored).sum()
