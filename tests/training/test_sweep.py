"""Sweeps: one recipe for each value, and a sentence for every mistake."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from latentcot.errors import UserError
from latentcot.training.recipe import load_recipe
from latentcot.training.sweep import load_sweep
from training.helpers import Latentcot, tiny, write_recipe

VALUES = [0.1, 0.2, 1e-5]


@pytest.fixture
def base(tmp_path: Path, source: Path) -> Path:
    (tmp_path / "bases").mkdir()
    return write_recipe(tmp_path / "bases" / "base.yaml", tiny(source))


@pytest.fixture
def sweep(base: Path, tmp_path: Path) -> Path:
    return write(tmp_path, {"key": "model.lambda_adaptive", "values": VALUES})


def write(folder: Path, section: Any, **changes: Any) -> Path:
    content = {"base": "bases/base.yaml", "name": "ablation", "sweep": section} | changes
    content = {key: value for key, value in content.items() if value is not None}
    return write_recipe(folder / "sweep.yaml", content)


def test_a_sweep_varies_one_key_of_its_base(sweep: Path, base: Path):
    swept = load_sweep(sweep)
    assert (swept.name, swept.key, swept.values) == ("ablation", "model.lambda_adaptive", VALUES)
    assert [recipe.name for recipe in swept.recipes] == [f"ablation-{value}" for value in VALUES]
    for value, recipe in zip(VALUES, swept.recipes, strict=True):
        changes = [f"model.lambda_adaptive={value}", f"name=ablation-{value}"]
        assert recipe == load_recipe(base, changes)


def test_values_keep_their_types(base: Path, tmp_path: Path):
    words = load_sweep(write(tmp_path, {"key": "model.router", "values": ["none", "mlp"]}))
    assert [recipe.model.router for recipe in words.recipes] == ["none", "mlp"]
    # As words they stay words, even where YAML would read something else.
    notes = load_sweep(write(tmp_path, {"key": "note", "values": ["null", "2", "ü: #"]}))
    assert [recipe.note for recipe in notes.recipes] == ["null", "2", "ü: #"]


def test_another_base_takes_the_place_of_the_own_one(sweep: Path, tmp_path: Path, source: Path):
    other = write_recipe(tmp_path / "other.yaml", tiny(source, learning_rate=0.5))
    swept = load_sweep(sweep, base=other)
    assert [recipe.training.learning_rate for recipe in swept.recipes] == [0.5] * len(VALUES)
    without = write(tmp_path, {"key": "seed", "values": [1]}, base=None)
    assert load_sweep(without, base=str(other)).recipes[0].seed == 1


def test_overrides_are_applied_to_every_recipe(sweep: Path):
    swept = load_sweep(sweep, overrides=iter(["seed=7", "name=other", "model.tau=0.2"]))
    assert {(recipe.seed, recipe.model.tau) for recipe in swept.recipes} == {(7, 0.2)}
    assert swept.recipes[0].name == "ablation-0.1"


def test_a_sweep_without_a_name_is_called_like_its_file(base: Path, tmp_path: Path):
    path = write(tmp_path, {"key": "seed", "values": [3]}, name=None)
    assert load_sweep(path).recipes[0].name == "sweep-3"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"key": "seed", "values": [1], "step": 2}, "unknown key 'sweep.step': the keys here are"),
        ({"kye": "seed", "key": "seed", "values": [1]}, "'sweep.kye': did you mean 'key'?"),
        ({"values": [1]}, "sweep.key is missing"),
        ({"key": "seed"}, "sweep.values is missing"),
        ({"key": "seed", "values": []}, "sweep.values is []: "),
        ({"key": "seed", "values": 3}, "sweep.values is 3: "),
        ({"key": "seed", "values": [[1]]}, "sweep.values: no recipe can be called after [1]"),
        ({"key": "seed", "values": [None]}, "sweep.values: no recipe can be called after None"),
        ("seed", "sweep is 'seed': "),
        (None, "is not a sweep: give one with a `sweep` section"),
        ({"key": "model.taus", "values": [1]}, "unknown key 'model.taus': did you mean 'tau'?"),
        ({"key": "", "values": [1]}, "value 1 of the sweep: "),
        ({"key": "model.beta", "values": [1, "x"]}, "value 'x' of the sweep: "),
        ({"key": "model.l_max", "values": [1, -1]}, "value -1 of the sweep: l_max is -1: give 0"),
        ({"key": "model.l_max", "values": [1, 2, 1]}, "sweep.values holds 1 twice"),
        ({"key": "model.beta", "values": [1, 1.0]}, "sweep.values holds 1.0 twice"),
        ({"key": "note", "values": [1.5, "1.5"]}, "1.5"),
        ({"key": "name", "values": ["a", "b"]}, "sweep.values holds 'b' twice"),
    ],
)
def test_a_mistake_is_named(base: Path, tmp_path: Path, section: Any, message: str):
    path = write(tmp_path, section)
    with pytest.raises(UserError) as caught:
        load_sweep(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": None}, "base is missing: name the recipe whose seed is swept"),
        ({"base": "nowhere.yaml"}, "no recipe at "),
        ({"base": "sweep.yaml"}, "is a sweep, several recipes in one"),
        ({"base": 3}, "base is 3: "),
        ({"model": {"tau": 1}}, "unknown key 'model': the keys here are base, name, sweep"),
    ],
)
def test_a_mistake_beside_the_section_is_named(base, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load_sweep(write(tmp_path, {"key": "seed", "values": [1]}, **changes))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"no recipe at .*nowhere.yaml"):
        load_sweep(tmp_path / "nowhere.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UserError, match="holds no keys"):
        load_sweep(tmp_path / "empty.yaml")


def test_an_override_of_the_swept_key_is_refused(sweep: Path):
    with pytest.raises(UserError, match="'model.lambda_adaptive=3' sets the swept key"):
        load_sweep(sweep, overrides=["seed=1", "model.lambda_adaptive=3"])


def test_what_is_wrong_without_the_sweep_is_not_blamed_on_a_value(sweep: Path):
    with pytest.raises(UserError) as caught:
        load_sweep(sweep, overrides=["trainig.batch_size=4"])
    assert "unknown key 'trainig': did you mean 'training'?" in str(caught.value)
    assert "value" not in str(caught.value)


def test_a_sweep_is_no_recipe(sweep: Path, tmp_path: Path, latentcot: Latentcot):
    for command in ("train", "flops"):
        outcome = latentcot(command, sweep)
        assert outcome.code == 2
        assert "is a sweep, several recipes in one: give it to `latentcot compare" in outcome.err
    derived = write_recipe(tmp_path / "derived.yaml", {"base": "sweep.yaml"})
    with pytest.raises(UserError, match=r"sweep.yaml is a sweep"):
        load_recipe(derived)


def test_a_resolved_recipe_of_a_sweep_reads_back_as_itself(sweep: Path, tmp_path: Path):
    for recipe in load_sweep(sweep).recipes:
        (tmp_path / "resolved.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        assert load_recipe(tmp_path / "resolved.yaml") == recipe
        assert yaml.safe_load(recipe.to_yaml())["name"] == recipe.name
