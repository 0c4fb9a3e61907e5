"""Several recipes under one protocol: train what is missing, then one table, curves and a page.

Every run is a run directory as `latentcot train` makes it, trained in a process of its own, so a
comparison that was killed goes on where each of its runs stopped.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from latentcot.analysis.comparison import Line, Match, RunRecord, compare_lines
from latentcot.analysis.comparison_page import ComparisonPage, write_comparison
from latentcot.data import prepare
from latentcot.errors import UserError
from latentcot.models import LatentLM
from latentcot.training import run_dir as files
from latentcot.training.ledger import trained_token
from latentcot.training.metrics import read_rows
from latentcot.training.recipe import Recipe, difference, make_recipe
from latentcot.training.workers import Task, default_workers, train_all

MatchChoice = Literal["tokens", "flops", "both"]
FLOPS_FACTORS = (1, 2, 4)
"""Default FLOPs budgets, as multiples of what the cheapest recipe spends on its tokens."""
OWN_TO_A_RECIPE = {"training.learning_rate", "training.micro_batch_size"}
"""Keys of data and training in which compared recipes may differ."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a recipe with its seed and budget, and where it is kept."""

    recipe: Recipe
    directory: Path
    match: Match
    value: Any = None

    @property
    def budget(self) -> float:
        training = self.recipe.training
        return float(training.budget_tokens or training.budget_flops or 0)

    @property
    def label(self) -> str:
        kind = "" if self.match == "tokens" else f", {self.budget:.2e} FLOPs"
        return f"{self.recipe.name}, seed {self.recipe.seed}{kind}"

    @property
    def is_finished(self) -> bool:
        return (self.directory / files.SUMMARY).is_file()

    def record(self) -> RunRecord:
        """What a finished run left. Raises UserError where that is damaged."""
        rows = read_rows(self.directory / "metrics.jsonl")
        keys = ("tokens", "loss", "passes_per_token", "exact_flops", "kaplan_flops")
        try:
            summary = json.loads((self.directory / files.SUMMARY).read_text(encoding="utf-8"))
            return RunRecord(
                name=self.recipe.name,
                method=self.recipe.model.method,
                seed=self.recipe.seed,
                match=self.match,
                budget=self.budget,
                value=self.value,
                summary=summary,
                curve=[{k: row[k] for k in keys} for row in rows if row["kind"] == "eval"],
                tokens_per_s=statistics.median(
                    row["tokens_per_s"] for row in rows if row["kind"] == "train"
                ),
            )
        except (OSError, ValueError, KeyError, statistics.StatisticsError) as error:
            raise UserError(
                f"the run {self.directory} is damaged ({error!r}): delete it and give the same "
                "command again"
            ) from error


def check_protocol(recipes: Sequence[Recipe]) -> None:
    """Whether these recipes can be compared.

    Raises:
        UserError: none, two of one name, or different data or training, with the difference.
    """
    if not recipes:
        raise UserError("nothing to compare: give recipes, for example recipes/micro/*.yaml")
    names = [recipe.name for recipe in recipes]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two recipes are called {doubled!r}: give each a name of its own")
    first = recipes[0]
    for other in recipes[1:]:
        if changed := difference(_protocol(first), _protocol(other)):
            raise UserError(
                f"{first.name} and {other.name} cannot be compared: {changed}; give all recipes "
                f"the same data and budget, for example by an override ({_example(changed)})"
            )


def _protocol(recipe: Recipe) -> dict[str, Any]:
    """The sections that must be the same, without the keys that may differ."""
    content = recipe.model_dump(mode="json", include={"data", "training"})
    for path in OWN_TO_A_RECIPE:
        section, key = path.split(".")
        del content[section][key]
    return content


def _example(changed: str) -> str:
    key, _, rest = changed.partition(" is ")
    return f"{key}={rest.partition(' here')[0]}"


def plan(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    out: Path,
    match: MatchChoice = "tokens",
    budgets: Sequence[float] = (),
    values: Sequence[Any] = (),
) -> list[Job]:
    """The runs of a comparison, seed by seed, so that an early look has all recipes.

    Args:
        budgets: exact training FLOPs of the FLOPs-matched runs; default `FLOPS_FACTORS` times what
            the cheapest recipe needs for its tokens.
        values: of the swept key, one for each recipe.

    Raises:
        UserError: see `check_protocol`; equal seeds; recipes without a token budget.
    """
    check_protocol(recipes)
    for recipe in recipes:
        build_on_meta(recipe)  # values that the model refuses: now, not when its turn comes
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds are {list(seeds)}: give one or more different numbers")
    if match != "flops" or not budgets:
        for recipe in recipes:
            if recipe.training.budget_tokens is None:
                raise UserError(
                    f"{recipe.name} has no training.budget_tokens: give one, or --match flops "
                    "with --flops"
                )
    groups: list[tuple[Match, float]] = []
    if match != "flops":
        groups.append(("tokens", float(recipes[0].training.budget_tokens or 0)))
    if match != "tokens":
        if not budgets:
            cheapest = min(tokens_cost(recipe) for recipe in recipes)
            budgets = [factor * cheapest for factor in FLOPS_FACTORS]
        groups += [("flops", float(f"{budget:.3g}")) for budget in budgets]
    values = values or [None] * len(recipes)
    return [
        Job(
            _at(recipe, kind, budget, seed),
            out
            / (kind if kind == "tokens" else f"flops-{budget:g}")
            / recipe.name
            / f"seed-{seed}",
            kind,
            value,
        )
        for kind, budget in groups
        for seed in seeds
        for recipe, value in zip(recipes, values, strict=True)
    ]


def _at(recipe: Recipe, match: Match, budget: float, seed: int) -> Recipe:
    """`recipe` with a seed, and with a FLOPs budget where FLOPs are matched."""
    content = recipe.model_dump(mode="json") | {"seed": seed}
    if match == "flops":
        content["training"] |= {"budget_tokens": None, "budget_flops": budget}
    return make_recipe(content, recipe.name)


def build_on_meta(recipe: Recipe) -> LatentLM:
    """The model of a recipe without its weights. Raises UserError as `Recipe.build_model`."""
    with torch.device("meta"):
        return recipe.build_model()


def tokens_cost(recipe: Recipe) -> float:
    """Exact training FLOPs of a recipe's token budget (for `adaptive`, if nothing is pruned)."""
    token = trained_token(build_on_meta(recipe), recipe.training.block_length)
    return token["exact"] * (recipe.training.budget_tokens or 0)


def compare(
    jobs: Sequence[Job],
    out: Path,
    *,
    workers: int | None = None,
    reference: str | None = None,
    swept: str | None = None,
    command: str = "",
) -> list[Line]:
    """Train what is missing, then write results.json, table.md, comparison.html and the figures.

    Args:
        workers: runs at a time; default see `default_workers`.
        reference: recipe that differences are taken to; default see `choose_reference`.
        swept: the key of a sweep.
        command: what was typed, for the page.

    Raises:
        UserError: no such reference; a directory that holds another recipe's run; runs that
            failed (the others are finished first, and the table is written without them).
    """
    recipes = {job.recipe.name: job.recipe for job in jobs}
    reference = choose_reference(recipes.values(), reference)
    for job in jobs:
        files.check_resume(job.directory, job.recipe, "auto", has_checkpoint=True)
    missing = [job for job in jobs if not job.is_finished]
    failures: dict[str, str] = {}
    if missing:
        prepare(missing[0].recipe.data)  # once, before several workers ask for it
        tasks = [Task(job.recipe, job.directory, job.label) for job in missing]
        failures = train_all(tasks, workers or default_workers(missing[0].recipe))
    records = [job.record() for job in jobs if job.is_finished]
    lines = compare_lines(records, reference)
    if lines:
        out.mkdir(parents=True, exist_ok=True)
        page = ComparisonPage(
            title=f"{swept} swept" if swept else f"{len(recipes)} systems, one protocol",
            protocol=describe(jobs),
            reference=reference,
            command=command,
            versions=json.dumps(files.versions(), indent=2),
            recipes={name: recipe.to_yaml() for name, recipe in recipes.items()},
            missing=sorted(failures),
            swept=swept,
        )
        results = {
            "command": command,
            "versions": files.versions(),
            "reference": reference,
            "lines": [asdict(line) for line in lines],
            "runs": [asdict(record) for record in records],
        }
        files.write_text(out / "results.json", json.dumps(_without_nan(results), indent=1))
        write_comparison(out, page, lines, records)
    if failures:
        label, message = next(iter(failures.items()))
        raise UserError(
            f"{len(failures)} of {len(jobs)} runs failed, the first is {label}: {message}"
        )
    return lines


def choose_reference(recipes: Iterable[Recipe], name: str | None = None) -> str:
    """The recipe that differences are taken to: `name`, else the first `adaptive` one, else the
    first. Raises UserError where `name` is none of them.
    """
    recipes = list(recipes)
    names = [recipe.name for recipe in recipes]
    if name is not None:
        if name not in names:
            raise UserError(f"no recipe {name!r} to refer to: choose one of {', '.join(names)}")
        return name
    adaptive = [recipe.name for recipe in recipes if recipe.model.method == "adaptive"]
    return (adaptive or names)[0]


def describe(jobs: Sequence[Job]) -> str:
    """Data, seeds and schedule of a comparison in a sentence or two."""
    recipe = jobs[0].recipe
    training = recipe.training
    seeds = sorted({job.recipe.seed for job in jobs})
    return (
        f"Text: {recipe.data.source}. Sequences of {training.block_length} tokens, "
        f"{training.batch_size} an update; learning rate {training.learning_rate:g}, "
        f"weight decay {training.weight_decay:g}, the same order of data and the same initial "
        f"backbone for every system of a seed. Seeds: {', '.join(map(str, seeds))}. "
        "Loss in nats per token."
    )


def _without_nan(content: Any) -> Any:
    """JSON knows no NaN: None in its place."""
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
