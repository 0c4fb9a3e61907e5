"""What the pages show of a text: its tokens, the steps spent on each and what they led to.

Plain data without a model and without HTML: collecting fills it, figures and pages read it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypedDict

SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class TokenView:
    """One token of a text and the steps executed after reading it, before predicting the next.

    `gates`, `reach` and `exits` have one entry per executed step (`latent_steps + 1`), or are empty
    where a method has no such quantity; so has `p_target`.

    Attributes:
        text: the decoded piece; part of a UTF-8 sequence shows as U+FFFD.
        token_id: its id in the vocabulary.
        latent_steps: executed passes minus one.
        loss: nats of this token given the past; None for the first.
        gates: probability of going on after each step.
        reach: probability of reaching each step.
        exits: probability of exiting at each step, which is its weight in the mixture.
        p_target: probability of the true next token when decoding after each step.
        target: text of the true next token; None for the last.
    """

    text: str
    token_id: int
    latent_steps: int
    loss: float | None
    gates: list[float]
    reach: list[float]
    exits: list[float]
    p_target: list[float] | None
    target: str | None

    def __post_init__(self) -> None:
        num_steps = self.latent_steps + 1
        for name in ("gates", "reach", "exits", "p_target"):
            values = getattr(self, name)
            if values and len(values) != num_steps:
                raise ValueError(
                    f"{name} has {len(values)} entries for {num_steps} executed steps; "
                    "give one per executed step, or none"
                )

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values; numbers are rounded to five significant digits."""
        return {field.name: _compact(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class TextView:
    """A text as the token view shows it; `max_latent_steps` is the most the model can take."""

    title: str
    tokens: list[TokenView]
    max_latent_steps: int

    def __post_init__(self) -> None:
        deepest = max((token.latent_steps for token in self.tokens), default=0)
        if deepest > self.max_latent_steps:
            raise ValueError(
                f"a token of {self.title!r} took {deepest} latent steps, "
                f"above max_latent_steps={self.max_latent_steps}"
            )

    @property
    def mean_latent_steps(self) -> float | None:
        """Latent steps per token; None without tokens."""
        return _mean([token.latent_steps for token in self.tokens])

    @property
    def mean_loss(self) -> float | None:
        """Nats per predicted token; None where no token has a loss."""
        return _mean([token.loss for token in self.tokens if token.loss is not None])

    def as_dict(self) -> dict[str, Any]:
        """The view as JSON values, in the form that `tokenview.js` takes."""
        return {
            "title": self.title,
            "max_latent_steps": self.max_latent_steps,
            "tokens": [token.as_dict() for token in self.tokens],
        }


class StepsRow(TypedDict):
    """The tokens that took the same number of latent steps."""

    latent_steps: int
    share: float
    mean_p_target: float | None


def profile_by_steps(texts: Iterable[TextView]) -> list[StepsRow]:
    """Share of all tokens, and mean p_target after the last step, by latent steps (ascending)."""
    tokens = [token for text in texts for token in text.tokens]
    rows: list[StepsRow] = []
    for latent_steps in sorted({token.latent_steps for token in tokens}):
        group = [token for token in tokens if token.latent_steps == latent_steps]
        rows.append(
            {
                "latent_steps": latent_steps,
                "share": len(group) / len(tokens),
                "mean_p_target": _mean([token.p_target[-1] for token in group if token.p_target]),
            }
        )
    return rows


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _compact(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return value
