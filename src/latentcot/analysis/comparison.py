"""From finished runs to one table: means over seeds, spread, paired differences to a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import t as student

Match = Literal["tokens", "flops"]


AVERAGED = (
    "tokens",
    "passes_per_token",
    "train_passes_per_token",
    "prune_ratio",
    "kaplan_flops",
    "exact_flops",
)
"""Figures of summary.json of which a line shows the mean over seeds."""


@dataclass(frozen=True)
class RunRecord:
    """One finished run of a comparison.

    Attributes:
        name: of its recipe.
        method: key of `METHODS`.
        seed: of weights and data order.
        match: what the runs of its group have in common, tokens or exact training FLOPs.
        budget: how much of it.
        value: of the swept key, None outside a sweep.
        summary: the content of summary.json.
        curve: validation rows: tokens, loss, passes_per_token, exact_flops, kaplan_flops.
        tokens_per_s: median over its updates.
        versions: the content of versions.json: packages, commit, precision, corpus.
    """

    name: str
    method: str
    seed: int
    match: Match
    budget: float
    value: Any
    summary: dict[str, Any]
    curve: list[dict[str, float]]
    tokens_per_s: float
    versions: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One recipe at one budget, over its seeds.

    Attributes:
        seeds: those that have finished.
        test_loss, loss_std: mean and standard deviation over seeds (NaN for one seed).
        difference, low, high: test loss minus the reference's, mean over common seeds and 95 %
            paired t-interval; None for the reference itself and without a common seed.
        passes, prune_ratio: in evaluation; train_passes: in training.
        kaplan_flops, exact_flops: spent in training.
        tokens_per_s: median of the runs; peak_bytes: largest.
    """

    name: str
    method: str
    match: Match
    budget: float
    value: Any
    seeds: list[int]
    parameters: int
    tokens: float
    passes: float
    train_passes: float
    prune_ratio: float
    kaplan_flops: float
    exact_flops: float
    tokens_per_s: float
    peak_bytes: float
    test_loss: float
    loss_std: float
    difference: float | None
    low: float | None
    high: float | None


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean of a sample and Student's interval around it: (mean, low, high).

    Of paired differences it is the paired t-interval. Low and high are NaN for a sample of one,
    which says nothing about its spread.
    """
    sample = np.asarray(values, dtype=float)
    mean, count = float(sample.mean()), len(sample)
    if count < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf((1 + level) / 2, count - 1) * sample.std(ddof=1) / math.sqrt(count))
    return mean, mean - half, mean + half


def compare_lines(records: Iterable[RunRecord], reference: str) -> list[Line]:
    """One line for each recipe and budget, budgets in ascending order, lowest loss first.

    Args:
        reference: name of the recipe that differences are taken to, at the same budget.
    """
    groups: dict[tuple[Match, float], dict[str, list[RunRecord]]] = {}
    for record in records:
        group = groups.setdefault((record.match, record.budget), {})
        group.setdefault(record.name, []).append(record)
    lines = []
    for key in sorted(groups, key=lambda key: (key[0] != "tokens", key[1])):
        own = groups[key]
        found = [_line(runs, own.get(reference, [])) for runs in own.values()]
        lines += sorted(found, key=lambda line: line.test_loss)
    return lines


def _line(runs: list[RunRecord], references: list[RunRecord]) -> Line:
    runs = sorted(runs, key=lambda run: run.seed)
    first = runs[0]

    means = {key: float(np.mean([run.summary[key] for run in runs])) for key in AVERAGED}
    losses = np.array([run.summary["test_loss"] for run in runs])
    theirs = {run.seed: run.summary["test_loss"] for run in references}
    differences = [
        run.summary["test_loss"] - theirs[run.seed] for run in runs if run.seed in theirs
    ]
    difference: tuple[float | None, float | None, float | None] = (None, None, None)
    if differences and references[0].name != first.name:
        difference = mean_interval(differences)
    return Line(
        name=first.name,
        method=first.method,
        match=first.match,
        budget=first.budget,
        value=first.value,
        seeds=[run.seed for run in runs],
        parameters=first.summary["parameters"],
        tokens=means["tokens"],
        passes=means["passes_per_token"],
        train_passes=means["train_passes_per_token"],
        prune_ratio=means["prune_ratio"],
        kaplan_flops=means["kaplan_flops"],
        exact_flops=means["exact_flops"],
        tokens_per_s=float(np.median([run.tokens_per_s for run in runs])),
        peak_bytes=max(run.summary["peak_bytes"] for run in runs),
        test_loss=float(losses.mean()),
        loss_std=float(losses.std(ddof=1)) if len(losses) > 1 else math.nan,
        difference=difference[0],
        low=difference[1],
        high=difference[2],
    )


@dataclass(frozen=True)
class Column:
    """A column of the printed table: its title, and a line's cell."""

    title: str
    cell: Callable[[Line], str]


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "" if value is None or math.isnan(value) else f"{value:{sign}.{digits}f}"


def _interval(line: Line) -> str:
    if line.low is None or line.high is None or math.isnan(line.low):
        return ""
    return f"[{line.low:+.4f}, {line.high:+.4f}]"


COLUMNS = (
    Column("recipe", lambda line: line.name),
    Column("method", lambda line: line.method),
    Column("parameters (M)", lambda line: f"{line.parameters / 1e6:.3g}"),
    Column("tokens (M)", lambda line: f"{line.tokens / 1e6:.3g}"),
    Column("passes, training", lambda line: f"{line.train_passes:.2f}"),
    Column("passes, test", lambda line: f"{line.passes:.2f}"),
    Column("prune ratio (%)", lambda line: f"{100 * line.prune_ratio:.1f}"),
    Column("Kaplan FLOPs", lambda line: f"{line.kaplan_flops:.2e}"),
    Column("exact FLOPs", lambda line: f"{line.exact_flops:.2e}"),
    Column("tokens/s", lambda line: f"{line.tokens_per_s:,.0f}"),
    Column("process memory (MB)", lambda line: f"{line.peak_bytes / 1e6:,.0f}"),
    Column("seeds", lambda line: str(len(line.seeds))),
    Column("test loss", lambda line: f"{line.test_loss:.4f}"),
    Column("std", lambda line: _number(line.loss_std, 4)),
    Column("difference", lambda line: _number(line.difference, 4, "+")),
    Column("95 % interval", _interval),
)


SHORT = ("recipe", "passes, test", "exact FLOPs", "seeds", "test loss", "difference")
"""Columns that fit on a terminal, and the interval."""


def table(lines: Sequence[Line], short: bool = False) -> list[list[str]]:
    """The printed cells, titles first; `short` is for a terminal."""
    columns = [c for c in COLUMNS if not short or c.title in (*SHORT, COLUMNS[-1].title)]
    return [[column.title for column in columns]] + [
        [column.cell(line) for column in columns] for line in lines
    ]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    title, *rows = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([title, "|" + "---|" * len(cells[0]), *rows]) + "\n"


def heading(match: Match, budget: float) -> str:
    """What the runs of a group have in common, in words."""
    if match == "tokens":
        return f"Equal tokens: {budget / 1e6:.3g} million"
    return f"Equal training FLOPs: {budget:.2e} (exact)"
