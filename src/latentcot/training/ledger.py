"""What a recipe will cost: FLOPs of a trained token, of a decoded one, of the run; and the paper's.

Nothing runs: models are built on the meta device, and passes are given, not executed.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latentcot.errors import UserError
from latentcot.models import LatentConfig, LatentLM, build_model
from latentcot.training.recipe import Recipe

PAPER_LENGTH = 2048
PAPER_TOKENS = 50_000 * 256 * PAPER_LENGTH
ROUNDED_TOKENS = 26e9
ROUNDED_PARAMETERS = {"410M": 0.41e9, "1.4B": 1.4e9}
"""T and N of the paper's FLOPs column."""
PAPER_BACKBONES: dict[str, dict[str, Any]] = {
    size: {
        "model_type": "llama",
        "vocab_size": 50304,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 24,
        "num_attention_heads": heads,
        "max_position_embeddings": PAPER_LENGTH,
        "rms_norm_eps": 1e-5,
    }
    for size, width, inner, heads in (("410M", 1024, 2752, 16), ("1.4B", 2048, 5504, 32))
}
"""As in recipes/paper/, which an installed package does not have."""


class PaperRow(NamedTuple):
    """A model of the paper's table, its printed FLOPs in 1e20; back-solved passes if routed."""

    model: str
    size: str
    method: str
    flops: float
    options: dict[str, Any]
    passes: float | None = None


PAPER_ROWS = (
    PaperRow("Looped LLaMA-410M (4 loops)", "410M", "looped", 2.56, {}),
    PaperRow("Pause LLaMA-410M (3 pauses)", "410M", "paused", 2.56, {}),
    PaperRow("PonderLM-410M (3 steps)", "410M", "ponderlm", 2.56, {}),
    PaperRow("PonderLM2-410M (1 step)", "410M", "ponderlm2", 5.12, {}),
    PaperRow("MoR-410M (4 Recursions)", "410M", "mor", 2.27, {}, 3.55),
    PaperRow("LLaMA-1.4B (train from scratch)", "1.4B", "vanilla", 2.18, {}),
    PaperRow("Our LLaMA-410M (l_max = 3)", "410M", "adaptive", 2.27, {"l_max": 3}, 3.55),
    PaperRow("Looped LLaMA-1.4B (4 loops)", "1.4B", "looped", 8.74, {}),
    PaperRow("Pause LLaMA-1.4B (3 pauses)", "1.4B", "paused", 8.74, {}),
    PaperRow("PonderLM-1.4B (3 steps)", "1.4B", "ponderlm", 8.74, {}),
    PaperRow("Our LLaMA-1.4B (l_max = 3)", "1.4B", "adaptive", 7.47, {"l_max": 3}, 3.42),
    PaperRow("PonderLM-1.4B (4 steps)", "1.4B", "ponderlm", 10.92, {"steps": 4}),
    PaperRow("PonderLM2-1.4B (1 step)", "1.4B", "ponderlm2", 17.47, {}),
    PaperRow("Our LLaMA-1.4B (l_max = 5)", "1.4B", "adaptive", 10.84, {"l_max": 5}, 4.963),
)


def training_passes(config: LatentConfig, passes: float | None = None) -> list[float]:
    """Mean passes of a trained token, in each of the equally likely kinds of update.

    Args:
        passes: the mean of a method that prunes. None: what its configuration says, which is all
            passes for `adaptive`.

    Raises:
        UserError: passes that the method cannot execute.
    """
    if passes is None:
        return config.training_passes
    method = config.model_type.removeprefix("latentcot_")
    if not config.prunes:
        raise UserError(
            f"passes is {passes:g}, but a token of this {method} model always executes "
            f"{fmean(config.training_passes):g}: leave it out"
        )
    if not 1 <= passes <= config.num_passes:
        raise UserError(
            f"passes is {passes:g}: give 1 to {config.num_passes}, what this {method} executes"
        )
    return [passes]


def deal(passes: float, length: int) -> Tensor:
    """(1, length) passes of the given mean, rounded down to whole ones, in an even pattern.

    Token t executes floor((t + 1) passes) - floor(t passes): 2.5 gives 2, 3, 2, 3, ...
    """
    return (torch.arange(length + 1).double() * passes).floor().diff().long()[None]


def trained_token(model: LatentLM, length: int, passes: float | None = None) -> dict[str, float]:
    """Training FLOPs of a token by rule, mean over a sequence; `passes` as `training_passes`."""
    kinds = training_passes(model.config, passes)
    dealt = [deal(mean, length) for mean in kinds]
    exact = [model.count_flops(each) for each in dealt]
    executed = [model.count_flops(each, executed=True) for each in dealt]
    # Of the whole backbone: in MoR's middle cycle a recursion runs only some of the layers.
    whole = [p * f.passes / int(d.sum()) for p, f, d in zip(kinds, exact, dealt, strict=True)]
    return {
        "kaplan": 6 * model.num_parameters() * fmean(whole),
        "exact": fmean(flops.training for flops in exact) / length,
        "executed": fmean(flops.training for flops in executed) / length,
    }


def decoded_token(model: LatentLM, length: int, passes: float) -> dict[str, float]:
    """FLOPs by rule of decoding the last of `length` tokens, the slots of the others cached.

    A fractional number of passes weighs the whole ones around it.
    """
    context = deal(passes, length - 1)
    cost = dict.fromkeys(("kaplan", "exact", "executed"), 0.0)
    for last in {math.floor(passes), math.ceil(passes)}:
        share = 1 - abs(passes - last)
        longer = torch.cat([context, torch.tensor([[last]])], dim=1)
        for rule in ("exact", "executed"):
            before, after = (
                model.count_flops(tokens, executed=rule == "executed", decoding=True)
                for tokens in (context, longer)
            )
            cost[rule] += share * (after.forward - before.forward)
        cost["kaplan"] += share * 2 * model.num_parameters() * (after.passes - before.passes)
    return cost


def recipe_costs(recipe: Recipe, passes: float | None = None) -> dict[str, Any]:
    """FLOPs by rule of a trained token, a decoded token and the run of a recipe, and its size.

    Raises:
        UserError: a model that cannot be built, or passes that it cannot execute.
    """
    model = recipe.build_on_meta()
    length, mean = recipe.training.block_length, fmean(training_passes(model.config, passes))
    decoding = model.config.decoding_passes or mean
    trained = trained_token(model, length, passes)
    tokens = recipe.training.budget_tokens or (recipe.training.budget_flops or 0) / trained["exact"]
    return {
        "name": recipe.name,
        "method": recipe.model.method,
        "parameters": model.num_parameters(),
        "passes": mean,
        "decoding_passes": decoding,
        "block_length": length,
        "tokens": tokens,
        "trained_token": trained,
        "decoded_token": decoded_token(model, length, decoding),
        "run": {rule: tokens * value for rule, value in trained.items()},
    }


def paper_table() -> list[dict[str, Any]]:
    """The FLOPs column of the paper's table of downstream accuracy beside ours, in 1e20.

    `kaplan_1e20` is the paper's rule, 6 N T for each pass with rounded N and T; the two columns
    behind the printed one take all parameters and all tokens of the protocol.
    """
    table = []
    for row in PAPER_ROWS:
        with torch.device("meta"):
            model = build_model(row.method, PAPER_BACKBONES[row.size], **row.options)
        passes = fmean(training_passes(model.config, row.passes))
        rounded = 6 * ROUNDED_PARAMETERS[row.size] * ROUNDED_TOKENS * passes
        token = trained_token(model, PAPER_LENGTH, row.passes)
        table.append(
            {
                "method": row.method,
                "size": row.size,
                "model": row.model,
                "passes": passes,
                "source": "computed" if row.passes is None else "back-solved",
                "kaplan_1e20": rounded / 1e20,
                "paper_1e20": row.flops,
                "kaplan_all_parameters_1e20": token["kaplan"] * PAPER_TOKENS / 1e20,
                "exact_1e20": token["exact"] * PAPER_TOKENS / 1e20,
            }
        )
    return table
