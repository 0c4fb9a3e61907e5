"""The compute dial: what it chooses, what it leaves, what it refuses."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from latentcot.dial import Point, Wish, turn
from latentcot.errors import UserError
from training.helpers import Latentcot, tiny


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from latentcot.training.loop import train
    from latentcot.training.recipe import make_recipe

    path = tmp_path_factory.mktemp("dial") / "run"
    train(make_recipe(tiny(source)), path, "auto")
    return path


def curve_of(tau: float) -> Point:
    """A model whose passes fall from 4 to 1, and whose loss rises with the square of that."""
    return Point("toy", tau, 3 + tau**2 / 10, 4 - 3 * tau)


@pytest.mark.parametrize("budget", [1.5, 2.0, 3.1])
def test_a_budget_is_spent_and_not_exceeded(budget: float):
    wish = Wish(budget=budget)
    curve = turn(curve_of, wish, (0.0, 0.25, 0.5, 0.75, 1.0))
    chosen = wish.choose(curve)
    assert budget - 0.03 <= chosen.passes_per_token <= budget
    assert [point.tau for point in curve] == sorted(point.tau for point in curve)


def test_a_loss_is_given_up_and_no_more():
    wish = Wish(max_loss_increase=0.02)
    chosen = wish.choose(turn(curve_of, wish, (0.0, 0.5, 1.0)))
    assert chosen.loss <= 3.02
    assert chosen.tau == pytest.approx(0.2**0.5, abs=0.02)


def test_an_admissible_extreme_needs_no_search():
    calls = []

    def measure(tau: float) -> Point:
        calls.append(tau)
        return curve_of(tau)

    assert Wish(budget=9).choose(turn(measure, Wish(budget=9), (0.0, 1.0))).tau == 0
    assert calls == [0.0, 1.0]


def test_a_budget_out_of_reach_says_what_is_within():
    wish = Wish(budget=0.5)
    with pytest.raises(UserError, match=r"no tau spends 0.5 passes.*1.00 to 4.00"):
        wish.choose(turn(curve_of, wish, (0.0, 1.0)))


def test_it_is_kept_in_the_generation_config(run_dir: Path, latentcot: Latentcot):
    report = json.loads(latentcot("dial", run_dir, "--budget", 1.8, "--json").out)
    assert report["test"]["passes_per_token"] < report["test_before"]["passes_per_token"]
    assert json.loads((run_dir / "dial.json").read_text()) == report
    for name in ("dial.png", "dial.svg"):
        assert (run_dir / name).stat().st_size > 1000
    passes = [point["passes_per_token"] for point in report["validation"]]
    assert passes == sorted(passes, reverse=True)
    assert passes[-1] == 1

    model = AutoModelForCausalLM.from_pretrained(run_dir / "model").eval()
    assert model.generation_config.tau == report["tau"]
    ids = torch.arange(3, 9)[None]
    out, want = (
        model.generate(
            ids,
            max_new_tokens=9,
            do_sample=False,
            wavefront=False,
            return_dict_in_generate=True,
            **options,
        ).past_key_values.depth
        for options in ({}, {"tau": report["tau"]})
    )
    assert torch.equal(out, want)


def test_the_table_names_the_references(
    run_dir: Path, source: Path, tmp_path: Path, latentcot: Latentcot
):
    recipe = tmp_path / "fixed.yaml"
    content = tiny(source) | {"name": "fixed-1"}
    content["model"] |= {"router": "none", "l_max": 1}
    recipe.write_text(yaml.safe_dump(content))
    assert latentcot("train", recipe, "--run-dir", tmp_path / "fixed").code == 0
    done = latentcot(
        "dial", run_dir, "--max-loss-increase", 0.01, "--reference", tmp_path / "fixed"
    )
    assert done.code == 0
    assert "fixed-1" in done.out
    report = json.loads((run_dir / "dial.json").read_text())
    assert [point["passes_per_token"] for point in report["references"]] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --budget or --max-loss-increase"),
        (("--budget", 2, "--max-loss-increase", 0.1), "one of them"),
        (("--budget", 0.9), "can be set to 1.00 to"),
        (("--max-loss-increase", -1), "give 0 or more"),
        (("--budget", 2, "--taus", "0,2"), "tau is 2"),
    ],
)
def test_wishes_that_make_no_sense(
    run_dir: Path, latentcot: Latentcot, arguments: tuple[object, ...], message: str
):
    done = latentcot("dial", run_dir, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err
