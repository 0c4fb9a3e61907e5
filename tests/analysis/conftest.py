from typing import Any

import pytest

from latentcot.analysis.tokens import TextView, TokenView

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--",
    "--><img src=x onerror=alert(3)>",
    "]]>&amp;'\"",
    "\u2028\u2029",
    "\u202eright to left\u202c",
    "\ud83d",  # half of a surrogate pair
    "\x00\r\n\t",
    "",
]


def make_token(text: str = "a", latent_steps: int = 0, **changes: Any) -> TokenView:
    passes = latent_steps + 1
    values: dict[str, Any] = {
        "token_id": 7,
        "loss": 1.5,
        "gates": [0.5] * passes,
        "reach": [1.0] * passes,
        "exits": [1.0 / passes] * passes,
        "p_target": [0.25] * passes,
        "target": "b",
    }
    return TokenView(text=text, latent_steps=latent_steps, **{**values, **changes})


@pytest.fixture
def hostile_text() -> TextView:
    tokens = [make_token(piece, i % 4, target=piece) for i, piece in enumerate(HOSTILE)]
    return TextView("".join(HOSTILE), tokens, max_latent_steps=3)


@pytest.fixture
def history() -> list[dict[str, Any]]:
    """40 training rows with falling loss and passes, an evaluation after every tenth."""
    rows: list[dict[str, Any]] = []
    for i in range(1, 41):
        shared = {"step": i, "tokens": 50_000 * i, "passes_per_token": 4 - i / 40}
        rows.append({"kind": "train", "ce_loss": 7 - i / 10, "loss": 8 - i / 10, **shared})
        if i % 10 == 0:
            rows.append({"kind": "eval", "split": "validation", "loss": 7.1 - i / 10, **shared})
    return rows
