"""The figures of a report: matplotlib without pyplot's global state, as inline SVG for a page.

Text stays text in the SVG, and its colours are CSS variables with defaults, so that a page sets
the font and a dark mode; `Figure.savefig` gives the same figures as files.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from latentcot.analysis.tokens import StepsRow

Row = Mapping[str, Any]
Series = tuple[np.ndarray, np.ndarray]

INK = "#1b1f24"
TRAIN = "#0072b2"  # blue and vermilion of Okabe and Ito's colour-blind-safe palette
VALIDATION = "#d55e00"
CSS_VARIABLES = {
    INK: "--figure-ink",
    TRAIN: "--figure-train",
    VALIDATION: "--figure-validation",
}

WIDTH, HEIGHT = 6.0, 3.4  # inches; with 13-point text, legible when shown 300 pixels wide
MAX_POINTS = 600  # drawn per line: a run of 50,000 updates stays a small file
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 13,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "svg.fonttype": "none",
    "svg.hashsalt": "latentcot",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
figure_style = partial(matplotlib.style.context, ["default", STYLE])
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@figure_style()
def loss_curves(history: Sequence[Row]) -> Figure:
    """Cross-entropy in nats per token over training tokens: training and validation.

    Training is a moving average over the raw values; a validation point is one evaluation. Rows
    whose loss is not finite are left out.
    """
    figure, axes = _axes()
    train = series(history, "train", "ce_loss")
    validation = series(history, "eval", "loss")
    _draw_curves(axes, train, validation)
    axes.set_ylabel("cross-entropy (nats per token)")
    if len(train[1]):
        # The first updates fall from log(vocabulary); they would flatten all that follows.
        top = float(np.percentile(train[1], 97))
        bottom = float(np.min(np.concatenate([train[1], validation[1]])))
        if top > bottom:
            margin = 0.05 * (top - bottom)
            axes.set_ylim(bottom - margin, top + margin)
    return figure


@figure_style()
def passes_curve(history: Sequence[Row]) -> Figure:
    """Executed passes per token over training tokens; 1 is a model without latent steps."""
    figure, axes = _axes()
    train = series(history, "train", "passes_per_token")
    validation = series(history, "eval", "passes_per_token")
    _draw_curves(axes, train, validation)
    axes.set_ylabel("passes per token")
    most = float(np.max(np.concatenate([train[1], validation[1], [1.0]])))
    axes.set_ylim(1, max(2.0, 1 + 1.08 * (most - 1)))
    return figure


@figure_style()
def steps_profile(by_steps: Sequence[StepsRow]) -> Figure:
    """Two panels by latent steps: the share of tokens, and their mean final p_target."""
    figure = Figure(figsize=(1.2 * WIDTH, HEIGHT), layout="constrained")
    shares, targets = figure.subplots(1, 2)
    steps = [row["latent_steps"] for row in by_steps]
    _draw_bars(shares, steps, [100 * row["share"] for row in by_steps], "{:.0f}", TRAIN)
    shares.set_ylabel("share of tokens (%)")
    known = [(row["latent_steps"], row["mean_p_target"]) for row in by_steps]
    pairs = [(step, value) for step, value in known if value is not None]
    _draw_bars(targets, [s for s, _ in pairs], [v for _, v in pairs], "{:.2f}", VALIDATION)
    targets.set_ylabel("mean p(true next token)")
    for axes in (shares, targets):
        axes.set_xlabel("latent steps")
        axes.set_xticks(steps)
        axes.grid(visible=False, axis="x")
    return figure


@figure_style()
def dial_curve(curve: Sequence[Row], references: Sequence[Row], chosen: Row) -> Figure:
    """Loss over passes per token, tau by tau, beside models of a fixed depth; below is better.

    Args:
        curve: rows with `tau`, `loss`, `passes_per_token`, the model's own curve.
        references: the same of other models.
        chosen: the row of the curve that the dial was set to.
    """
    figure, axes = _axes()
    axes.plot(
        [row["passes_per_token"] for row in curve],
        [row["loss"] for row in curve],
        color=TRAIN,
        marker="o",
        markersize=5,
        label=f"{curve[0]['name']}, tau from {curve[0]['tau']:g} to {curve[-1]['tau']:g}",
    )
    if references:
        fixed = sorted(references, key=lambda row: row["passes_per_token"])
        axes.plot(
            [row["passes_per_token"] for row in fixed],
            [row["loss"] for row in fixed],
            color=VALIDATION,
            marker="s",
            linestyle="--",
            label="trained at a fixed depth",
        )
    axes.plot(chosen["passes_per_token"], chosen["loss"], "*", color=INK, markersize=16)
    axes.annotate(
        f"tau = {chosen['tau']:.3g}",
        (chosen["passes_per_token"], chosen["loss"]),
        xytext=(8, 8),
        textcoords="offset points",
    )
    axes.set_xlabel("passes per token")
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend()
    return figure


@figure_style()
def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for an HTML page; equal figures give equal text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # A style element inside the SVG would apply to the whole page, and matplotlib gives the groups
    # of every figure the same ids.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace("<svg ", '<svg stroke-linejoin="round" role="img" ', 1)
    for colour, variable in CSS_VARIABLES.items():
        svg = svg.replace(colour, f"var({variable}, {colour})")
    return svg


def series(history: Iterable[Row], kind: str, key: str) -> Series:
    """(tokens, values) of the rows of a kind, where the value is present and finite.

    Evaluation rows of other splits than validation are left out.
    """
    rows = [
        (row["tokens"], row[key])
        for row in history
        if row["kind"] == kind
        and row.get("split", "validation") == "validation"
        and is_finite(row.get(key))
    ]
    tokens, values = zip(*rows, strict=True) if rows else ((), ())
    return np.array(tokens, dtype=float), np.array(values, dtype=float)


def is_finite(value: Any) -> bool:
    """Whether a logged value is a number to draw: present, not null, NaN or infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    return figure, figure.subplots()


def _draw_curves(axes: Axes, train: Series, validation: Series) -> None:
    last = max((float(tokens[-1]) for tokens, _ in (train, validation) if len(tokens)), default=0)
    unit, unit_name = token_unit(last)
    if len(train[0]):
        stride = math.ceil(len(train[0]) / MAX_POINTS)
        tokens, raw = train[0][::stride] / unit, train[1][::stride]
        smooth = _moving_average(train[1], window=max(1, len(train[1]) // 40))[::stride]
        axes.plot(tokens, raw, color=TRAIN, alpha=0.25, linewidth=1)
        axes.plot(tokens, smooth, color=TRAIN, label="training (smoothed)")
    if len(validation[0]):
        tokens, values = validation[0] / unit, validation[1]
        axes.plot(tokens, values, color=VALIDATION, marker="o", markersize=5, label="validation")
    if axes.lines:
        axes.legend()
    axes.set_xlabel(f"training tokens{unit_name}")
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))


def _draw_bars(axes: Axes, steps: list[int], values: list[float], label: str, colour: str) -> None:
    bars = axes.bar(steps, values, color=colour, width=0.6)
    size = STYLE["font.size"] if len(values) <= 5 else 10
    axes.bar_label(bars, [label.format(value) for value in values], padding=2, fontsize=size)
    axes.margins(y=0.15)


def token_unit(tokens: float) -> tuple[float, str]:
    """The unit in which so many tokens are written, and its name for an axis."""
    for unit, name in ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)")):
        if tokens >= unit:
            return unit, name
    return 1.0, ""


def _moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values, over fewer near the ends."""
    ones = np.ones(window)
    counts = np.convolve(np.ones(len(values)), ones, mode="same")
    return np.convolve(values, ones, mode="same") / counts
