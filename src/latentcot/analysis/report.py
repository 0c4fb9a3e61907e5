"""The report of a training run: one HTML file that needs nothing but a browser.

The page holds its styles, script, figures and data. A content security policy lets exactly this
script run and forbids every request, so the file can be opened and passed on wherever it came from.
"""

import base64
import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from latentcot.analysis import figures, headline, tokenview
from latentcot.analysis.tokens import StepsRow, TextView, profile_by_steps


@dataclass
class RunReport:
    """What a report tells about a run.

    Attributes:
        title: the run's name.
        summary: final numbers by name; `headline.METRICS` lists the names the page explains.
        recipe_yaml: the resolved recipe.
        history: the rows of the metrics file. Training rows have `kind` "train", `tokens`,
            `ce_loss` and `passes_per_token`; evaluation rows have `kind` "eval", `split`,
            `tokens`, `loss` and `passes_per_token`; other keys are not drawn.
        texts: texts with the steps spent on each token.
        controls: measurements that put the summary in proportion, by name.
        by_steps: share of tokens and mean p_target by latent steps; computed from `texts` if None.
    """

    title: str
    summary: dict[str, float | int | str]
    recipe_yaml: str
    history: list[dict[str, Any]] = field(default_factory=list)
    texts: list[TextView] = field(default_factory=list)
    controls: dict[str, float] = field(default_factory=dict)
    by_steps: list[StepsRow] | None = None


def write_report(path: str | PathLike[str], run: RunReport) -> None:
    """Write the report of `run` to `path`, a self-contained HTML file; same run, same bytes."""
    script = tokenview.js_text() + _template_text("report.js")
    profile = profile_by_steps(run.texts) if run.by_steps is None else run.by_steps
    html = page_template("report.html.j2").render(
        run=run,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        styles=Markup(page_styles() + tokenview.css_text()),
        tiles=headline.headline(run.summary),
        numbers=headline.all_numbers(run.summary),
        controls=headline.all_numbers(run.controls),
        profile_figure=_svg(figures.steps_profile(profile)) if len(profile) > 1 else None,
        profile_of_texts=run.by_steps is None,
        **_training(run.history),
    )
    Path(path).write_text(html, encoding="utf-8", errors="replace", newline="\n")


def _training(history: list[dict[str, Any]]) -> dict[str, Any]:
    """What the section on training shows; a constant number of passes needs no figure."""
    logged = {row.get("passes_per_token") for row in history}
    passes = [value for value in logged if figures.is_finite(value)]
    return {
        "loss_figure": _svg(figures.loss_curves(history)) if history else None,
        "passes_figure": _svg(figures.passes_curve(history)) if len(passes) > 1 else None,
        "constant_passes": passes[0] if len(passes) == 1 else None,
        "num_lost": sum("loss" in row and not figures.is_finite(row["loss"]) for row in history),
    }


def page_template(name: str) -> Template:
    """A page of `templates/`."""
    environment = Environment(
        loader=PackageLoader("latentcot.analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json_script"] = tokenview.to_json_script
    return environment.get_template(name)


def page_styles() -> str:
    """The styles that all pages share."""
    return _template_text("report.css")


def _template_text(name: str) -> str:
    return files("latentcot.analysis").joinpath("templates", name).read_text(encoding="utf-8")


def _svg(figure: Figure) -> Markup:
    return Markup(figures.to_svg(figure))
