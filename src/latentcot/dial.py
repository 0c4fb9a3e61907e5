"""The compute dial: the tau that spends a wanted number of passes, or loses a wanted little.

tau is a threshold on reach probabilities that the model has learned, so it can be turned after
training: a larger one stops tokens earlier. It is chosen on validation text, reported on test text,
and kept in the generation configuration of the exported model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latentcot.analysis.figures import dial_curve
from latentcot.core.halting import Threshold
from latentcot.errors import UserError
from latentcot.evaluation.perplexity import Evaluation
from latentcot.training.run_dir import EXPORT, OpenRun, open_run, write_text

TAUS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
REFINEMENTS = 5
"""Halvings of the interval between the last tau that is not admissible and the first that is."""
DIAL = "dial"


@dataclass(frozen=True)
class Point:
    """What a model spends and loses at a threshold, or, for a fixed depth, always.

    Attributes:
        name: the model.
        tau: its threshold; None for a model that has none.
        loss: nats per token.
        passes_per_token: mean executed passes.
    """

    name: str
    tau: float | None
    loss: float
    passes_per_token: float


@dataclass(frozen=True)
class Wish:
    """What is asked of the dial, one of the two.

    Attributes:
        budget: mean passes per token at most.
        max_loss_increase: nats per token at most above the best point.
    """

    budget: float | None = None
    max_loss_increase: float | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.max_loss_increase is None):
            raise UserError("give --budget or --max-loss-increase, one of them")
        if self.max_loss_increase is not None and self.max_loss_increase < 0:
            raise UserError(f"--max-loss-increase is {self.max_loss_increase:g}: give 0 or more")

    def admits(self, point: Point, best: float) -> bool:
        """Whether `point` grants the wish, where `best` is the lowest loss of the curve."""
        if self.budget is not None:
            return point.passes_per_token <= self.budget
        assert self.max_loss_increase is not None
        return point.loss <= best + self.max_loss_increase

    def choose(self, curve: Sequence[Point]) -> Point:
        """The admissible point: the best within a budget, or the cheapest within a loss.

        Raises:
            UserError: none; says what is within reach.
        """
        best = min(point.loss for point in curve)
        admitted = [point for point in curve if self.admits(point, best)]
        if not admitted:
            passes = sorted(point.passes_per_token for point in curve)
            raise UserError(
                f"no tau spends {self.budget:g} passes per token: this model can be set to "
                f"{passes[0]:.2f} to {passes[-1]:.2f}"
            )
        if self.budget is not None:
            return min(admitted, key=lambda point: (point.loss, point.passes_per_token))
        return min(admitted, key=lambda point: (point.passes_per_token, point.loss))


def turn(measure: Callable[[float], Point], wish: Wish, taus: Sequence[float]) -> list[Point]:
    """The curve over `taus`, with more points where the wish begins or ceases to be granted."""
    curve = sorted((measure(tau) for tau in taus), key=lambda point: point.tau or 0)
    for _ in range(REFINEMENTS):
        best = min(point.loss for point in curve)
        granted = [wish.admits(point, best) for point in curve]
        edges = [n for n in range(len(curve) - 1) if granted[n] != granted[n + 1]]
        if not edges:
            break
        # A budget is granted from an edge on, a loss up to one: the last edge counts.
        left, right = curve[edges[-1]], curve[edges[-1] + 1]
        between = measure(((left.tau or 0) + (right.tau or 0)) / 2)
        curve.insert(edges[-1] + 1, between)
    return curve


def dial(
    path: Path,
    wish: Wish,
    *,
    taus: Sequence[float] = TAUS,
    references: Sequence[Path] = (),
    max_blocks: int | None = None,
) -> dict[str, Any]:
    """Set tau of a run; leaves dial.json, dial.png and dial.svg beside it.

    Args:
        taus: the grid.
        references: other runs on the same corpus, for the picture: models of fixed depth.
        max_blocks: only the first blocks of the validation text.

    Returns:
        tau; the curve and the references on validation text; on test text the chosen point, the
        model as it was, and the references.

    Raises:
        UserError: not a run of a model that halts, or a wish that no tau grants.
    """
    run = open_run(path)
    config = run.model.config
    if not hasattr(config, "tau") or config.num_passes == 1:
        raise UserError(f"the model of {path} has no threshold of halting: dial an adaptive run")
    others = [open_run(reference) for reference in references]

    def on_validation(run: OpenRun, tau: float | None = None) -> Point:
        return _point(run, tau, run.evaluate("validation", max_blocks, _rule(tau)))

    def on_test(run: OpenRun, tau: float | None = None) -> Point:
        return _point(run, tau, run.evaluate("test", None, _rule(tau)))

    curve = turn(lambda tau: on_validation(run, tau), wish, taus)
    chosen = wish.choose(curve)
    fixed = [on_validation(other) for other in others]
    report = {
        "tau": chosen.tau,
        **asdict(wish),
        "validation": [asdict(point) for point in curve],
        "references": [asdict(point) for point in fixed],
        "test": asdict(on_test(run, chosen.tau)),
        "test_before": asdict(on_test(run, config.tau)),
        "test_references": [asdict(on_test(other)) for other in others],
    }
    generation = run.model.generation_config
    generation.tau = chosen.tau
    generation._from_model_config = False  # else loading would drop what is not transformers' own
    generation.save_pretrained(path / EXPORT)
    write_text(path / f"{DIAL}.json", json.dumps(report, indent=2))
    figure = dial_curve(report["validation"], report["references"], asdict(chosen))
    for suffix in ("png", "svg"):
        figure.savefig(path / f"{DIAL}.{suffix}", dpi=150, facecolor="white")
    return report


def _rule(tau: float | None) -> Threshold | None:
    return None if tau is None else Threshold(tau)


def _point(run: OpenRun, tau: float | None, figures: Evaluation) -> Point:
    return Point(run.recipe.name, tau, figures.loss, figures.passes_per_token)
