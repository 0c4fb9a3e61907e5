"""When a wavefront trusts a prediction that is deeper than the draft, but not the final one.

A wrong draft costs all that was computed behind it. Trusting early loses less where the deeper
prediction is right, and throws good drafts away where it is not. The tokens are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from latentcot.errors import UserError


class Policy(Protocol):
    """When a prediction replaces the draft behind it."""

    def trusts(self, steps: int, logits: Tensor) -> bool:
        """Whether a token's prediction after `steps` passes, with (V,) logits, replaces a draft."""


@dataclass(frozen=True)
class AtOnce:
    """Every deeper prediction is better than a shallower one."""

    def trusts(self, steps: int, logits: Tensor) -> bool:
        return True


@dataclass(frozen=True)
class AtEnd:
    """Only the final prediction replaces a draft."""

    def trusts(self, steps: int, logits: Tensor) -> bool:
        return False


@dataclass(frozen=True)
class Confident:
    """A prediction replaces a draft if the model gives it a probability of at least `threshold`."""

    threshold: float = 0.5

    def trusts(self, steps: int, logits: Tensor) -> bool:
        return float(logits.float().softmax(-1).max()) >= self.threshold


POLICIES: dict[str, Policy] = {"at_once": AtOnce(), "at_end": AtEnd(), "confident": Confident()}
DEFAULT_POLICY = "at_once"


def policy_of(wavefront: Any) -> Policy:
    """The policy that the generation option `wavefront` asks for: a name, a policy, or the default.

    Raises:
        UserError: no such policy.
    """
    if wavefront is None or isinstance(wavefront, bool):
        return POLICIES[DEFAULT_POLICY]
    if isinstance(wavefront, str):
        if wavefront not in POLICIES:
            raise UserError(
                f"wavefront is {wavefront!r}: give True, False, or one of {', '.join(POLICIES)}"
            )
        return POLICIES[wavefront]
    if not callable(getattr(wavefront, "trusts", None)):
        raise UserError(
            f"wavefront is {wavefront!r}: give True, False, one of {', '.join(POLICIES)}, or an "
            "object with a method trusts(steps, logits)"
        )
    return wavefront  # type: ignore[no-any-return]
