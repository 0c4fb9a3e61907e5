"""The summary numbers of a run in words: label, unit, plain explanation and printed form."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = float | int | str
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Number:
    """One summary number as a page prints it."""

    label: str
    value: str
    unit: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class _Metric:
    label: str
    unit: str
    explanation: str
    print: Callable[[float], str]


def _fixed(digits: int) -> Callable[[float], str]:
    # A minus sign, not a hyphen.
    return lambda value: f"{value:.{digits}f}".replace("-", "−")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _count(value: float) -> str:
    """2048000 as `2.05 M`."""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"


def _power_of_ten(value: float) -> str:
    """1.234e15 as 1.23 times ten to the 15, in superscript."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


# In the order in which numbers claim a tile.
METRICS = {
    "val_loss": _Metric(
        "Validation loss",
        "nats/token",
        "Cross-entropy on text the model was not trained on; lower is better.",
        _fixed(3),
    ),
    "test_loss": _Metric(
        "Test loss",
        "nats/token",
        "The same on text that played no part in any choice; the number to report.",
        _fixed(3),
    ),
    "passes_per_token": _Metric(
        "Passes per token",
        "passes",
        "Average runs through the model before each token: 1 + latent steps.",
        _fixed(2),
    ),
    "prune_ratio": _Metric(
        "Prune ratio", "%", "Share of the possible latent steps that were skipped.", _percent
    ),
    "steps_vs_ptarget": _Metric(
        "Steps against certainty",
        "Spearman ρ",
        "Latent steps against final p(true next token); negative: it thinks longer about hard "
        "tokens.",
        _fixed(2),
    ),
    "test_loss_shuffled_steps": _Metric(
        "Test loss, passes dealt at random",
        "nats/token",
        "The same model and the same number of passes, given to random tokens: what choosing where "
        "to think is worth.",
        _fixed(3),
    ),
    "exact_flops": _Metric(
        "Training compute",
        "FLOPs",
        "Every matrix product, visible attention pair and head counted.",
        _power_of_ten,
    ),
    "perplexity": _Metric(
        "Perplexity", "", "exp(loss): as unsure as choosing among this many tokens.", _fixed(2)
    ),
    "bits_per_byte": _Metric(
        "Bits per byte",
        "bits/byte",
        "Loss per byte of text; comparable across tokenizers.",
        _fixed(3),
    ),
    "tokens": _Metric("Training tokens", "tokens", "Tokens the model was trained on.", _count),
    "kaplan_flops": _Metric(
        "Training compute, 6ND rule",
        "FLOPs",
        "6 × parameters × tokens × passes; ignores attention and heads.",
        _power_of_ten,
    ),
    "seconds": _Metric("Training time", "", "Wall-clock time.", _duration),
}
LOSSES = ("val_loss", "test_loss")
CONTROLS = ("test_loss_shuffled_steps",)
MAX_TILES = 6


def headline(summary: Mapping[str, Value]) -> list[Number]:
    """The first numbers of the page, at most six.

    A loss that is not finite stays, because it is the news of such a run; any other number that is
    undefined (a correlation of constants) leaves its place to the next.
    """
    tiles = [key for key in METRICS if key not in CONTROLS]
    shown = [key for key in tiles if key in summary and _has_place(key, summary[key])]
    return [_describe(key, summary[key]) for key in shown[:MAX_TILES]]


def all_numbers(summary: Mapping[str, Value]) -> list[Number]:
    """Every number of the summary, known ones first, others under their own name."""
    known = [key for key in METRICS if key in summary]
    others = [key for key in summary if key not in METRICS]
    return [_describe(key, summary[key]) for key in known + others]


def format_number(value: Value) -> str:
    """A number of unknown meaning: floats with four digits, integers and strings as they are."""
    if not isinstance(value, float):
        return str(value)
    digits = ".4f" if 1e-3 <= abs(value) < 1e4 or value == 0 else ".4g"
    return f"{value:{digits}}".replace("-", "−")


def _has_place(key: str, value: Value) -> bool:
    return key in LOSSES or isinstance(value, str) or math.isfinite(value)


def _describe(key: str, value: Value) -> Number:
    metric = METRICS.get(key)
    if metric is None:
        return Number(key, format_number(value))
    if isinstance(value, str) or not math.isfinite(value):
        return Number(metric.label, format_number(value), metric.unit, metric.explanation)
    return Number(metric.label, metric.print(value), metric.unit, metric.explanation)
