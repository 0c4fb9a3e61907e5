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

from latentcot.analysis.comparison import AVERAGED, Line, Match, RunRecord, compare_lines
from latentcot.analysis.comparison_page import ComparisonPage, write_comparison
from latentcot.data import prepare
from latentcot.errors import UserError
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
SUMMARY_KEYS = {"step", "test_loss", *AVERAGED, "parameters", "peak_bytes"}
"""What a comparison reads of a summary."""


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
        """Whether the run has ended as its recipe says: a shorter one of before does not count."""
        training = self.recipe.training
        if not (self.directory / files.SUMMARY).is_file():
            return False
        summary = self._summary()
        share = training.share_spent(summary["tokens"], summary["exact_flops"])
        return share >= 1 or summary["step"] >= (training.max_steps or math.inf)

    def _summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises UserError where it is damaged."""
        try:
            text = (self.directory / files.SUMMARY).read_text(encoding="utf-8")
            summary: dict[str, Any] = json.loads(text)
            missing = SUMMARY_KEYS - summary.keys()
        except (OSError, ValueError, AttributeError) as error:
            raise self._damaged(repr(error)) from error
        if missing:
            raise self._damaged(f"its summary has no {min(missing)}")
        return summary

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"the run {self.directory} is damaged ({reason}): delete it and give the same command "
            "again"
        )

    def record(self) -> RunRecord:
        """What a finished run left. Raises UserError where that is damaged."""
        rows = read_rows(self.directory / "metrics.jsonl")
        keys = ("tokens", "loss", "passes_per_token", "exact_flops", "kaplan_flops")
        summary = self._summary()
        try:
            versions = (self.directory / files.VERSIONS).read_text(encoding="utf-8")
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
                versions=json.loads(versions),
            )
        except (OSError, ValueError, KeyError, statistics.StatisticsError) as error:
            raise self._damaged(repr(error)) from error


def check_protocol(recipes: Sequence[Recipe], swept: str | None = None) -> None:
    """Whether these recipes can be compared; they may differ in the swept key.

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
        if changed := difference(_protocol(first, swept), _protocol(other, swept)):
            raise UserError(
                f"{first.name} and {other.name} cannot be compared: {changed}; give all recipes "
                "the same data and budget, by an override (key.sub=value) if need be"
            )


def _protocol(recipe: Recipe, swept: str | None) -> dict[str, Any]:
    """The sections that must be the same, without the keys that may differ."""
    content = recipe.model_dump(mode="json", include={"data", "training"})
    for path in OWN_TO_A_RECIPE | {swept or ""}:
        section, _, key = path.partition(".")
        content.get(section, {}).pop(key, None)
    return content


def plan(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    out: Path,
    match: MatchChoice = "tokens",
    budgets: Sequence[float] = (),
    flops_seeds: Sequence[int] | None = None,
    values: Sequence[Any] = (),
    swept: str | None = None,
) -> list[Job]:
    """The runs of a comparison, seed by seed, so that one that is stopped early has all recipes.

    Args:
        budgets: exact training FLOPs of the FLOPs-matched runs; default `FLOPS_FACTORS` times what
            the cheapest recipe needs for its tokens.
        flops_seeds: seeds of the FLOPs-matched runs; default `seeds`.
        values: of the key `swept`, one for each recipe.

    Raises:
        UserError: see `check_protocol`; equal seeds or budgets; recipes without a token budget.
    """
    if swept == "seed":
        raise UserError("seed cannot be swept: give --seeds")
    check_protocol(recipes, swept)
    for recipe in recipes:
        recipe.build_on_meta()  # values that the model refuses: now, not when its turn comes
    flops_seeds = seeds if flops_seeds is None else flops_seeds
    for given in (seeds, flops_seeds):
        if not given or len(set(given)) != len(given):
            raise UserError(f"seeds are {list(given)}: give one or more different numbers")
    if not all(math.isfinite(budget) for budget in budgets) or len(set(budgets)) != len(budgets):
        raise UserError(f"FLOPs budgets are {list(budgets)}: give different finite numbers")
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
            budgets = [float(f"{factor * cheapest:.3g}") for factor in FLOPS_FACTORS]
        groups += [("flops", budget) for budget in budgets]
    values = values or [None] * len(recipes)
    return [
        Job(
            _at(recipe, kind, budget, seed),
            out
            / (kind if kind == "tokens" else f"flops-{budget!r}")
            / recipe.name
            / f"seed-{seed}",
            kind,
            value,
        )
        for kind, budget in groups
        for seed in (seeds if kind == "tokens" else flops_seeds)
        for recipe, value in zip(recipes, values, strict=True)
    ]


def _at(recipe: Recipe, match: Match, budget: float, seed: int) -> Recipe:
    """`recipe` with a seed, and with a FLOPs budget where FLOPs are matched."""
    content = recipe.model_dump(mode="json") | {"seed": seed}
    if match == "flops":
        content["training"] |= {"budget_tokens": None, "budget_flops": budget}
    return make_recipe(content, recipe.name)


def tokens_cost(recipe: Recipe) -> float:
    """Exact training FLOPs of a recipe's token budget (for `adaptive`, if nothing is pruned)."""
    token = trained_token(recipe.build_on_meta(), recipe.training.block_length)
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
    recipes: dict[str, Recipe] = {}
    for job in jobs:
        recipes.setdefault(job.recipe.name, job.recipe)
    reference = choose_reference(recipes.values(), reference)
    for job in jobs:
        files.check_resume(job.directory, job.recipe, "auto", has_checkpoint=True)
    missing = [job for job in jobs if not job.is_finished]
    failures: dict[str, str] = {}
    if missing:
        prepare(missing[0].recipe.data)  # once, before several workers ask for it
        tasks = [Task(job.recipe, job.directory, job.label) for job in missing]
        try:
            failures = train_all(tasks, workers or default_workers(missing[0].recipe))
        except (KeyboardInterrupt, SystemExit):
            write_results(jobs, recipes, out, reference, swept, command)
            raise
    lines = write_results(jobs, recipes, out, reference, swept, command)
    if failures:
        label, message = next(iter(failures.items()))
        raise UserError(
            f"{len(failures)} of {len(jobs)} runs failed, the first is {label}: {message}"
        )
    return lines


def write_results(
    jobs: Sequence[Job],
    recipes: dict[str, Recipe],
    out: Path,
    reference: str,
    swept: str | None,
    command: str,
) -> list[Line]:
    """Write what the finished runs say; nothing if there is none. Returns the lines."""
    finished = [job for job in jobs if job.is_finished]
    records = [job.record() for job in finished]
    check_alike(records)
    lines = compare_lines(records, reference)
    if not lines:
        return lines
    out.mkdir(parents=True, exist_ok=True)
    page = ComparisonPage(
        title=f"{swept} swept" if swept else f"{len(recipes)} systems, one protocol",
        protocol=describe(list(recipes.values())),
        reference=reference,
        command=command,
        versions=json.dumps(shared_versions(records), indent=2),
        recipes={name: recipe.to_yaml() for name, recipe in recipes.items()},
        missing=[job.label for job in jobs if job not in finished],
        swept=swept,
    )
    results = {
        "command": command,
        "reference": reference,
        "lines": [asdict(line) for line in lines],
        "runs": [asdict(record) for record in records],
    }
    files.write_text(out / "results.json", json.dumps(without_nan(results), indent=1))
    write_comparison(out, page, lines, records)
    return lines


def check_alike(records: Sequence[RunRecord]) -> None:
    """Raise a UserError if runs were made on different text or in different precision."""
    for key in ("corpus", "precision"):
        by_value: dict[Any, RunRecord] = {}
        for record in records:
            if key in record.versions:
                by_value.setdefault(record.versions[key], record)
        if len(by_value) > 1:
            (ours, a), (theirs, b), *_ = by_value.items()
            raise UserError(
                f"{a.name}, seed {a.seed} and {b.name}, seed {b.seed} cannot be compared: {key} is "
                f"{ours!r} here and {theirs!r} there; delete the older run, or give another --out"
            )


def shared_versions(records: Sequence[RunRecord]) -> dict[str, Any]:
    """versions.json of the runs: one value where they agree, all where they do not."""
    keys = sorted({key for record in records for key in record.versions})
    found = {key: sorted({str(r.versions.get(key)) for r in records}) for key in keys}
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


def choose_reference(recipes: Iterable[Recipe], name: str | None = None) -> str:
    """The recipe that differences are taken to.

    `name`, else the first `adaptive` one, with a router if there is such, else the first. Raises
    UserError where `name` is none of them.
    """
    recipes = list(recipes)
    names = [recipe.name for recipe in recipes]
    if name is not None:
        if name not in names:
            raise UserError(f"no recipe {name!r} to refer to: choose one of {', '.join(names)}")
        return name
    adaptive = [recipe for recipe in recipes if recipe.model.method == "adaptive"]
    adaptive.sort(key=lambda recipe: getattr(recipe.model, "router", None) == "none")
    return adaptive[0].name if adaptive else names[0]


def describe(recipes: Sequence[Recipe]) -> str:
    """Data and schedule of a comparison in some sentences."""
    recipe, training = recipes[0], recipes[0].training
    rates = sorted({one.training.learning_rate for one in recipes})
    same = "the same order of data"
    if all(one.model.backbone == recipe.model.backbone for one in recipes):
        same += " and the same initial backbone"
    return (
        f"Text: {recipe.data.source}. Sequences of {training.block_length} tokens, "
        f"{training.batch_size} an update; learning rate {', '.join(f'{r:g}' for r in rates)}"
        f"{' (as the recipes say)' if len(rates) > 1 else ''}, weight decay "
        f"{training.weight_decay:g}, {same} for every system of a seed. Loss in nats per token."
    )


def without_nan(content: Any) -> Any:
    """JSON knows no NaN: None in its place."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
