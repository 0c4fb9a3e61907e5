"""The figures of a comparison: loss over tokens, loss over FLOPs, ablations on two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from latentcot.analysis.comparison import Line, RunRecord
from latentcot.analysis.figures import (
    HEIGHT,
    INK,
    TRAIN,
    VALIDATION,
    WIDTH,
    figure_style,
    token_unit,
)

Ledger = Literal["exact_flops", "kaplan_flops"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#882255", "#999933")
MARKERS = "osD^vPX"
"""Okabe and Ito's colour-blind-safe palette and two of Tol's. The numbers of colours and markers
share no divisor: no two of 56 lines look alike."""


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """The recipes in a fixed order, so that a recipe looks alike in all figures."""
    return sorted({record.name for record in records})


@figure_style()
def iso_data(records: Sequence[RunRecord]) -> Figure:
    """Validation loss over training tokens, mean over seeds, of the runs with equal tokens."""
    runs = [record for record in records if record.match == "tokens"]
    figure, axes = _axes(len(names_of(records)))
    unit, unit_name = token_unit(max(row["tokens"] for run in runs for row in run.curve))
    for name, style in _styles(records).items():
        x, y = _mean_curve([run for run in runs if run.name == name], "tokens")
        axes.plot(x / unit, y, label=name, **style)
    axes.set_xlabel(f"training tokens{unit_name}")
    axes.set_ylabel("validation loss (nats per token)")
    _frame(axes)
    _legend(axes)
    return figure


@figure_style()
def iso_flops(records: Sequence[RunRecord], ledger: Ledger = "exact_flops") -> Figure:
    """Validation loss over training FLOPs.

    Markers joined by a line are runs whose schedule ended there, mean over seeds (the fair way);
    dotted lines are checkpoints within the runs with equal tokens, matched afterwards (the
    paper's way): their learning rate had not come down yet.
    """
    figure, axes = _axes(len(names_of(records)) + 2)
    ends_of_all: list[float] = []
    for name, style in _styles(records).items():
        own = [record for record in records if record.name == name]
        x, y = _mean_curve([run for run in own if run.match == "tokens"], ledger)
        axes.plot(x, y, **{**style, "marker": "", "linestyle": ":", "linewidth": 1.2})
        ends: dict[tuple[str, float], list[RunRecord]] = {}
        for run in own:
            ends.setdefault((run.match, run.budget), []).append(run)
        points = sorted(
            (
                float(np.mean([run.curve[-1][ledger] for run in runs])),
                float(np.mean([run.curve[-1]["loss"] for run in runs])),
            )
            for runs in ends.values()
        )
        ends_of_all += [loss for _, loss in points]
        axes.plot(*zip(*points, strict=True), label=name, **style)
    kind = "exact" if ledger == "exact_flops" else "Kaplan's 6 N for each pass"
    axes.set_xscale("log")
    axes.set_xlabel(f"training FLOPs ({kind})")
    axes.set_ylabel("validation loss (nats per token)")
    _frame(axes, at_least=max(ends_of_all))
    _legend(
        axes,
        Line2D([], [], color=INK, marker="o", linestyle="-", label="schedule ended here"),
        Line2D([], [], color=INK, linestyle=":", label="checkpoints of one run"),
    )
    return figure


@figure_style()
def ablation(lines: Sequence[Line], key: str) -> Figure:
    """Test loss (left axis) and prune ratio (right axis) over the values of a swept key."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    places = np.arange(len(lines))
    spread = [0.0 if np.isnan(line.loss_std) else line.loss_std for line in lines]
    losses = [line.test_loss for line in lines]
    left.errorbar(places, losses, spread, color=TRAIN, marker="o", capsize=3)
    prunes = [100 * line.prune_ratio for line in lines]
    right.plot(places, prunes, color=VALIDATION, marker="s", linestyle="--")
    left.set_xticks(places, [str(line.value) for line in lines])
    left.set_xlabel(key)
    left.set_ylabel("test loss (nats per token)", color=TRAIN)
    right.set_ylabel("prune ratio (%)", color=VALIDATION)
    right.set_ylim(bottom=0)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    return figure


def _styles(records: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 6,
        }
        for place, name in enumerate(names_of(records))
    }


def _mean_curve(runs: Sequence[RunRecord], x: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds of x and of the loss, evaluation by evaluation; empty without runs."""
    length = min((len(run.curve) for run in runs), default=0)
    xs = [[row[x] for row in run.curve[:length]] for run in runs]
    losses = [[row["loss"] for row in run.curve[:length]] for run in runs]
    if not length:
        return np.empty(0), np.empty(0)
    return np.mean(xs, axis=0), np.mean(losses, axis=0)


def _axes(num_labels: int) -> tuple[Figure, Axes]:
    figure = Figure(
        figsize=(1.5 * WIDTH, max(1.3 * HEIGHT, 0.34 * num_labels)), layout="constrained"
    )
    return figure, figure.subplots()


def _frame(axes: Axes, at_least: float = -math.inf) -> None:
    """The first evaluations fall from log(vocabulary); they would flatten all that follows.

    Args:
        at_least: a loss that stays in the frame.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    top, bottom = max(at_least, float(np.percentile(values, 85))), float(values.min())
    if top > bottom:
        margin = 0.05 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)


def _legend(axes: Axes, *more: Line2D) -> None:
    handles = list(axes.get_legend_handles_labels()[0]) + list(more)
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=11)
