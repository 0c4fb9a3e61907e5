"""Recipes: bases, overrides, messages for typing errors."""

from pathlib import Path

import pytest
import yaml

from latentcot.errors import UserError
from latentcot.training.recipe import load_recipe, make_recipe
from training.helpers import tiny, write_recipe


@pytest.fixture
def base(tmp_path: Path, source: Path) -> Path:
    return write_recipe(tmp_path / "base.yaml", tiny(source))


def derived(base: Path, text: str) -> Path:
    path = base.with_name("derived.yaml")
    path.write_text(f"base: {base.name}\n{text}")
    return path


def test_a_derived_recipe_changes_what_it_names_and_nothing_else(base: Path):
    path = derived(base, "name: other\nmodel: {tau: 0.25, backbone: {hidden_size: 32}}\n")
    expected = yaml.safe_load(base.read_text()) | {"name": "other"}
    expected["model"]["tau"] = 0.25
    expected["model"]["backbone"]["hidden_size"] = 32
    assert load_recipe(path) == make_recipe(expected)


def test_bases_have_bases_beside_them(base: Path, tmp_path: Path):
    (tmp_path / "deeper").mkdir()
    middle = write_recipe(tmp_path / "deeper" / "middle.yaml", {"base": "../base.yaml", "seed": 3})
    recipe = load_recipe(derived(middle, "note: last\n"))
    assert (recipe.note, recipe.seed, recipe.model.tau) == ("last", 3, 0.49)


def test_a_circle_of_bases_is_refused(base: Path):
    write_recipe(base, {"base": "derived.yaml"})
    with pytest.raises(UserError, match=r"own base.*circle"):
        load_recipe(derived(base, ""))


def test_a_recipe_without_a_name_is_called_like_its_file(tmp_path: Path, source: Path):
    content = tiny(source)
    del content["name"]
    assert load_recipe(write_recipe(tmp_path / "mine.yaml", content)).name == "mine"


def test_another_method_drops_the_options_of_the_first_one(base: Path):
    recipe = load_recipe(derived(base, "model: {method: vanilla}\n"))
    assert recipe.model.method == "vanilla"
    assert not hasattr(recipe.model, "tau")
    assert recipe.model.backbone == load_recipe(base).model.backbone
    assert recipe.model == load_recipe(base, ["model.method=vanilla"]).model


def test_the_same_method_keeps_its_options(base: Path):
    recipe = load_recipe(derived(base, "model: {method: adaptive}\n"))
    assert recipe.model == load_recipe(base).model


def test_another_method_over_the_default_backbone(base: Path, source: Path):
    content = tiny(source)
    del content["model"]["backbone"]
    write_recipe(base, content)
    assert load_recipe(base, ["model.method=vanilla"]).model.backbone == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E+2", 100.0), ("2.5e-1", 0.25), ("3", 3), ("0.5", 0.5), ("0x10", 16)],
)
def test_overrides_read_numbers_as_people_write_them(base: Path, text: str, value: float):
    recipe = load_recipe(base, [f"training.weight_decay={text}"])
    assert recipe.training.weight_decay == value


def test_a_recipe_reads_numbers_as_overrides_do(base: Path):
    assert load_recipe(derived(base, "training: {eps: 1e-6}\n")).training.eps == 1e-6


def test_the_last_override_counts_and_creates_what_is_not_there(base: Path):
    overrides = ["model.backbone.rms_norm_eps=1e-3", "seed=4", "seed=5", "note='a=b: c'"]
    recipe = load_recipe(base, overrides)
    assert recipe.model.backbone["rms_norm_eps"] == 1e-3
    assert (recipe.seed, recipe.note) == (5, "a=b: c")


def test_null_takes_a_value_back(base: Path):
    recipe = load_recipe(base, ["training.budget_flops=1e9", "training.budget_tokens=null"])
    assert (recipe.training.budget_tokens, recipe.training.budget_flops) == (None, 1e9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainig.batch_size=4", "unknown key 'trainig': did you mean 'training'?"),
        ("model.taus=0.1", "unknown key 'model.taus': did you mean 'tau'?"),
        ("model.lmax=2", "unknown key 'model.lmax': did you mean 'l_max'?"),
        ("model.backbone.hiden_size=8", "no key 'hiden_size': did you mean 'hidden_size'?"),
        ("model.backbone.model_type=lama", "no backbone 'lama' in transformers: did you mean"),
        ("training.learnig_rate=1", "'training.learnig_rate': did you mean 'learning_rate'?"),
        ("training.zzz=1", "unknown key 'training.zzz': the keys here are attention, "),
        ("data.sorce=x", "unknown key 'data.sorce': did you mean 'source'?"),
        ("data.tokenizer.vocabsize=9", "'data.tokenizer.vocabsize': did you mean 'vocab_size'?"),
        ("model.method=adaptiv", "unknown method 'adaptiv': choose one of adaptive, "),
        ("model.method=null", "unknown method 'None': choose one of adaptive, "),
        ("model=adaptive", "model.method is missing: give one of adaptive, "),
        ("model.router=liner", "model.router is 'liner': "),
        ("model.l_max=two", "model.l_max is 'two': "),
        ("model.backbone=small", "model.backbone is 'small': "),
        ("training.batch_size=0", "training.batch_size is 0: "),
        ("training.warmup_share=1", "training.warmup_share is 1: "),
        ("training.precision=half", "training.precision is 'half': "),
        ("training.micro_batch_size=3", "training: micro_batch_size 3 does not divide batch_size"),
        ("data.tokenizer.vocab_size=10", "data.tokenizer.vocab_size is 10: "),
        ("seed=one", "seed is 'one': "),
        ("training=fast", "training is 'fast': "),
    ],
)
def test_a_mistake_is_named(base: Path, override: str, message: str):
    with pytest.raises(UserError) as caught:
        load_recipe(base, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"budget_flops": 1e9}, {"budget_tokens": None}])
def test_the_budget_is_given_once(source: Path, changes: dict[str, float | None]):
    with pytest.raises(UserError, match="exactly one of budget_tokens and budget_flops"):
        make_recipe(tiny(source, **changes))


@pytest.mark.parametrize("section", ["model", "training"])
def test_a_missing_section_is_named(source: Path, section: str):
    content = tiny(source)
    del content[section]
    with pytest.raises(UserError, match=rf"{section}(\.method)? is missing"):
        make_recipe(content)


@pytest.mark.parametrize("method", ["adaptive", "vanilla"])
def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path, source: Path, method: str):
    content = tiny(source, method, learning_rate=1e-20, min_learning_rate_ratio=1e-5)
    recipe = make_recipe(content | {"name": "no", "note": "1e-3: ünï\n\t#"})
    path = tmp_path / "resolved.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert make_recipe(yaml.safe_load(recipe.to_yaml())) == recipe


def test_another_method_keeps_what_all_methods_have(base: Path):
    """Or a baseline would silently start from another initialisation than its rival."""
    overrides = ["model.initialization=stock", "model.embedding_scale=1"]
    recipe = load_recipe(base, [*overrides, "model.method=vanilla"])
    assert recipe.model.initialization == "stock"
    assert recipe.model.embedding_scale == 1


def test_a_derived_recipe_has_a_name_of_its_own(base: Path):
    recipe = load_recipe(derived(base, "training: {batch_size: 2}\n"))
    assert recipe.name != load_recipe(base).name
