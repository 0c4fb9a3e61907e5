"""The page of a comparison: tables and curves in one HTML file that needs nothing but a browser."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from latentcot.analysis import comparison_figures as figures
from latentcot.analysis.comparison import Line, RunRecord, heading, markdown, table
from latentcot.analysis.figures import figure_style, to_svg
from latentcot.analysis.report import page_styles, page_template


@dataclass(frozen=True)
class ComparisonPage:
    """What the page of a comparison tells beside its runs.

    Attributes:
        title: the heading.
        protocol: one sentence on data, seeds and budget.
        reference: name of the recipe that differences are taken to.
        command: what was typed.
        versions: of packages, and the commit.
        recipes: name -> resolved YAML.
        missing: runs that have not finished.
        swept: the key of a sweep, or None.
    """

    title: str
    protocol: str
    reference: str
    command: str
    versions: str
    recipes: dict[str, str]
    missing: list[str]
    swept: str | None = None


@dataclass(frozen=True)
class Drawn:
    """A figure of the page, and the name of its files."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> Markup:
        return Markup(to_svg(self.figure))


def write_comparison(
    out: Path, page: ComparisonPage, lines: Sequence[Line], records: Sequence[RunRecord]
) -> None:
    """Write comparison.html, table.md, and every figure as PNG and SVG into `out`."""
    drawn = draw(page, lines, records)
    groups = [
        {"title": heading(*key), "cells": table(list(own))}
        for key, own in itertools.groupby(lines, key=lambda line: (line.match, line.budget))
    ]
    html = page_template("comparison.html.j2").render(
        page=page, groups=groups, drawn=drawn, styles=Markup(page_styles())
    )
    (out / "comparison.html").write_text(html, encoding="utf-8", newline="\n")
    parts = [f"## {group['title']}\n\n{markdown(group['cells'])}" for group in groups]
    text = f"# {page.title}\n\n{page.protocol}\n\n`{page.command}`\n\n" + "\n".join(parts)
    (out / "table.md").write_text(text, encoding="utf-8", newline="\n")
    with figure_style():
        for one in drawn:
            one.figure.savefig(out / f"{one.name}.png", dpi=120, facecolor="white")
            one.figure.savefig(out / f"{one.name}.svg")


def draw(page: ComparisonPage, lines: Sequence[Line], records: Sequence[RunRecord]) -> list[Drawn]:
    """The figures that these runs allow."""
    drawn = []
    equal_tokens = [line for line in lines if line.match == "tokens"]
    if page.swept and equal_tokens:
        place = {name: number for number, name in enumerate(page.recipes)}
        ordered = sorted(equal_tokens, key=lambda line: place[line.name])
        drawn.append(
            Drawn(
                "ablation",
                f"Test loss and prune ratio over {page.swept}",
                "Left axis, solid: test loss, with its standard deviation over seeds. Right axis, "
                "dashed: prune ratio, the share of latent steps that were not executed.",
                figures.ablation(ordered, page.swept),
            )
        )
    if equal_tokens:
        drawn.append(
            Drawn(
                "iso_data",
                "Validation loss over training tokens",
                "Equal data: every system has read the same tokens in the same order. The frame "
                "cuts off the first evaluations.",
                figures.iso_data(records),
            )
        )
    for ledger, words in (
        ("exact_flops", "every matmul, attention by visible pairs"),
        ("kaplan_flops", "the paper's ledger: 6 N for each pass of each token"),
    ):
        drawn.append(
            Drawn(
                f"iso_{ledger}",
                f"Validation loss over training FLOPs ({words})",
                f"Equal compute ({words}). Markers joined by lines: runs whose learning-rate "
                "schedule ended at these FLOPs, the fair way, mean over the seeds that each has. "
                "Dotted: checkpoints of the runs with equal tokens, matched afterwards, the "
                "paper's way; the frame cuts off their first ones.",
                figures.iso_flops(records, ledger),  # type: ignore[arg-type]
            )
        )
    return drawn
