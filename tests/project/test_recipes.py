"""Every recipe that is shipped: it is read, built without memory, and has the size it says.

Sizes and FLOPs are those of formulas written here: V vocabulary, d width, f inner width, n layers.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from latentcot.models import METHODS, LatentLM
from latentcot.training.ledger import deal, trained_token, training_passes
from latentcot.training.recipe import Recipe, load_recipe
from latentcot.training.sweep import load_sweep

ROOT = Path(__file__).parents[2] / "recipes"
PATHS = sorted(ROOT.rglob("*.yaml"))
SWEEPS = [path for path in PATHS if "sweep" in yaml.safe_load(path.read_text())]


class Shape(NamedTuple):
    V: int
    d: int
    f: int
    n: int
    heads: int

    @property
    def layers(self) -> int:
        """Weights of the matrices of all layers."""
        return self.n * (4 * self.d**2 + 3 * self.d * self.f)

    @property
    def parameters(self) -> int:
        """Embedding, head, layers with two norms each, and the final norm."""
        return 2 * self.V * self.d + self.layers + (2 * self.n + 1) * self.d


SHAPES = {
    "demo": Shape(2048, 128, 344, 4, 2),
    "demo_vanilla": Shape(2048, 128, 344, 4, 2),
    "micro": Shape(1024, 128, 344, 4, 2),
    "small/2m": Shape(4096, 128, 344, 5, 2),
    "small/10m": Shape(4096, 320, 864, 6, 5),
    "paper/base": Shape(50304, 1024, 2752, 24, 16),
    "paper/70m": Shape(50304, 512, 1376, 6, 8),
    "paper/410m": Shape(50304, 1024, 2752, 24, 16),
    "paper/1.4b": Shape(50304, 2048, 5504, 24, 32),
    "ablations": Shape(50304, 512, 1376, 6, 8),
}
"""By file or folder."""

MILLIONS = {
    "micro": 1.05,
    "small/2m": 2.04,
    "small/10m": 10.06,
    "paper/70m": 70.5,
    "paper/410m": 406.6,
    "paper/1.4b": 1420,
}
"""Parameters of the backbone with embedding and head, as documentation says them."""


def shipped(path: Path) -> list[tuple[str, Recipe]]:
    """The recipes of a file, each with its place in `SHAPES`."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    place = name if name in SHAPES else name.rpartition("/")[0]
    recipes = load_sweep(path).recipes if path in SWEEPS else [load_recipe(path)]
    return [(place, recipe) for recipe in recipes]


RECIPES = [pair for path in PATHS for pair in shipped(path)]
each_recipe = pytest.mark.parametrize(
    ("place", "recipe"), RECIPES, ids=[recipe.name for _, recipe in RECIPES]
)


def built(recipe: Recipe) -> LatentLM:
    with torch.device("meta"):
        return recipe.build_model()


def router_weights(recipe: Recipe, d: int) -> tuple[int, int]:
    """Parameters of all routers of an adaptive model, and matrix weights that one gate uses."""
    l_max = recipe.model.l_max
    linear, mlp = d + 1, d * d + d + d + 1
    return {
        "none": (0, 0),
        "linear": (linear, d),
        "mlp": (mlp, d * d + d),
        "multi_linear": (l_max * linear, d),
        "multi_mlp": (l_max * mlp, d * d + d),
    }[recipe.model.router]


def own_parameters(recipe: Recipe, d: int) -> int:
    """What a method adds to backbone and head."""
    match recipe.model.method:
        case "adaptive":
            return router_weights(recipe, d)[0]
        case "paused":
            return d
        case "mor":
            return 4 * d
    return 0


def passes(recipe: Recipe) -> float:
    """Passes of the backbone over a token, mean over updates, by the paper's count."""
    match recipe.model.method:
        case "adaptive":
            return recipe.model.l_max + 1
        case "ponderlm":
            return recipe.model.steps + 1
        case method:
            return {"vanilla": 1, "looped": 4, "paused": 4, "ponderlm2": 8, "mor": 3.55}[method]


def own_linear(recipe: Recipe, shape: Shape) -> float:
    """Forward FLOPs a token in linear maps that are not the backbone's."""
    d = shape.d
    match recipe.model.method:
        case "adaptive":  # a gate after every pass but the last
            return 2 * recipe.model.l_max * router_weights(recipe, d)[1]
        case "ponderlm":  # a head and a mean embedding for each step
            return recipe.model.steps * 2 * (2 * shape.V * d)
        case "mor":  # 3.55 passes are dealt as 3 or 4, so each recursion has all as candidates
            return 2 * d * 4
    return 0


def test_every_place_is_one_of_a_recipe():
    assert {place for place, _ in RECIPES} == set(SHAPES)


@pytest.mark.parametrize("place", MILLIONS)
def test_a_size_is_what_it_is_called(place):
    shown = f"{MILLIONS[place]}"
    digits = len(shown.partition(".")[2])
    assert f"{SHAPES[place].parameters / 1e6:.{digits}f}" == shown


@each_recipe
def test_a_recipe_has_the_parameters_of_its_shape(place, recipe):
    shape, model = SHAPES[place], built(recipe)
    assert model.num_parameters() == shape.parameters + own_parameters(recipe, shape.d)
    config = model.config.backbone_config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    assert heads == (shape.heads, shape.heads)
    assert shape.d // shape.heads == 64
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@each_recipe
def test_a_recipe_costs_what_its_shape_says(place, recipe):
    shape, model, length = SHAPES[place], built(recipe), recipe.training.block_length
    parameters = shape.parameters + own_parameters(recipe, shape.d)
    cost = trained_token(model, length)
    assert cost["kaplan"] == pytest.approx(6 * parameters * passes(recipe), rel=1e-12)
    kinds = training_passes(model.config)
    flops = [model.count_flops(deal(kind, length)) for kind in kinds]
    linear = sum(each.linear for each in flops) / len(flops) / length
    dealt = math.floor(passes(recipe) * length) / length
    assert linear == pytest.approx(2 * shape.layers * dealt + own_linear(recipe, shape), rel=1e-12)


@each_recipe
def test_the_tokenizer_of_a_recipe_fits(place, recipe):
    tokenizer = recipe.data.tokenizer
    assert tokenizer.path is not None or tokenizer.vocab_size == SHAPES[place].V


def test_names_are_unique():
    names = [recipe.name for _, recipe in RECIPES]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("place", MILLIONS)
def test_every_method_has_a_recipe_of_each_size(place):
    group = [recipe for where, recipe in RECIPES if where == place]
    assert {recipe.model.method for recipe in group} == set(METHODS)


@pytest.mark.parametrize("place", MILLIONS)
def test_recipes_of_a_size_share_data_and_training(place):
    """Or they could not be compared."""
    first, *others = (recipe for where, recipe in RECIPES if where == place)
    for recipe in others:
        assert (recipe.data, recipe.training) == (first.data, first.training), recipe.name
        assert recipe.model.backbone == first.model.backbone, recipe.name


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_runs_on_a_small_model(path):
    for recipe in load_sweep(path, base=ROOT / "micro" / "adaptive.yaml").recipes:
        assert recipe.model.backbone["hidden_size"] == SHAPES["micro"].d
