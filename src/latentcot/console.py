"""What the command line prints, and how it reads lists."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from latentcot.errors import UserError

STEP_COLOURS = ("#e8eef4", "#b9d3e8", "#7fb2d8", "#4a8cc2", "#21639d", "#0b3c6f")
"""From no latent step to the most: lightness tells them apart without colour."""


def step_style(steps: int, num_passes: int) -> str:
    """rich's style of a token that took so many latent steps."""
    place = round(steps / max(1, num_passes - 1) * (len(STEP_COLOURS) - 1))
    ink = "black" if place < 3 else "white"
    return f"{ink} on {STEP_COLOURS[place]}"


def shower(num_passes: int | None) -> Any:
    """What prints text while it is generated: coloured by latent steps, or plain without passes."""
    console = Console(highlight=False)

    def show(piece: str, steps: int | None) -> None:
        if num_passes is None or steps is None:
            print(piece, end="", flush=True)
        else:
            style = step_style(steps, num_passes)
            console.print(Text(piece, style=style), end="", soft_wrap=True)

    return show


def flops_text(value: float) -> str:
    """Four digits, in the paper's unit from a hundredth of it on."""
    return f"{value / 1e20:.4g} x 1e20" if value >= 1e18 else f"{value:.4g}"


def numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    """The numbers of a comma-separated option. Raises UserError."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{option} is {text!r}: give numbers with commas between them") from None


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print figures as a table or as JSON."""
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in values.items():
        if not isinstance(value, list):
            table.add_row(key, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console(highlight=False).print(table)


def show_cells(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a line and a table of text below it."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    print(title)
    Console(highlight=False).print(table)
