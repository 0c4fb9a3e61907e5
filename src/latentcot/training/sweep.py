"""Sweeps: one key of a recipe over several values, the form of an ablation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from latentcot.errors import UserError
from latentcot.training.recipe import Recipe, Strict, first_problem, load_recipe, read_yaml


class SweepSection(Strict):
    key: str
    values: list[Any] = Field(min_length=1)

    @field_validator("values")
    @classmethod
    def _name_recipes(cls, values: list[Any]) -> list[Any]:
        if bad := [value for value in values if not isinstance(value, str | int | float)]:
            raise ValueError(f"no recipe can be called after {bad[0]!r}: give numbers or words")
        return values


class SweepFile(Strict):
    base: str | None = None
    name: str
    sweep: SweepSection


@dataclass(frozen=True)
class Sweep:
    """Recipes that differ in `key` (as `section.key`), one for each value: `<name>-<value>`."""

    name: str
    key: str
    values: list[Any]
    recipes: list[Recipe]


def load_sweep(
    path: str | Path, base: str | Path | None = None, overrides: Iterable[str] = ()
) -> Sweep:
    """Read a sweep: `base` (a recipe beside it), `name`, `sweep: {key: ..., values: [...]}`.

    Args:
        base: a recipe in place of the file's own base.
        overrides: `key.sub=value`, applied to every recipe.

    Raises:
        UserError: a file that is missing or no sweep, an unknown key, no values, values that the
            recipe or the model refuses or that are equal, an override of the swept key.
    """
    path, overrides = Path(path), list(overrides)
    content = {"name": path.stem} | read_yaml(path)
    if "sweep" not in content:
        raise UserError(f"{path} is not a sweep: give one with a `sweep` section of key and values")
    try:
        file = SweepFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error, SweepFile)}") from None
    if base is None and file.base is None:
        raise UserError(f"{path}: base is missing: name the recipe whose {file.sweep.key} is swept")
    origin = Path(base) if base is not None else path.parent / str(file.base)
    key, values = file.sweep.key, file.sweep.values
    if taken := [text for text in overrides if text.partition("=")[0] == key]:
        raise UserError(f"override {taken[0]!r} sets the swept key: change the values in {path}")
    load_recipe(origin, overrides)  # so that no value is blamed for what is wrong without it

    recipes: list[Recipe] = []
    for value in values:
        changes = {key: value, "name": f"{file.name}-{value}"}
        assignments = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in changes.items()]
        try:
            recipe = load_recipe(origin, [*overrides, *assignments])
            recipe.build_on_meta()
        except UserError as error:
            raise UserError(f"{path}, value {value!r} of the sweep: {error}") from None
        twins = [r.model_copy(update={"name": recipe.name}) for r in recipes]
        if recipe in twins or recipe.name in {r.name for r in recipes}:
            raise UserError(f"{path}: sweep.values holds {value!r} twice: drop one of them")
        recipes.append(recipe)
    return Sweep(file.name, key, values, recipes)
