"""What a run will cost: against the paper's table, against what runs report, by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from latentcot.core import slots
from latentcot.core.halting import GivenPasses
from latentcot.models import METHODS, LatentLM, build_model
from latentcot.training import ledger
from latentcot.training.recipe import load_recipe, make_recipe
from models.helpers import ids_of, tiny_llama
from training.helpers import Latentcot, tiny, write_recipe

PAPER = Path(__file__).parents[2] / "recipes" / "paper"
RULES = ("kaplan", "exact", "executed")

PRINTED = {
    "Looped LLaMA-410M (4 loops)": "2.56",
    "Pause LLaMA-410M (3 pauses)": "2.56",
    "PonderLM-410M (3 steps)": "2.56",
    "PonderLM2-410M (1 step)": "5.12",
    "MoR-410M (4 Recursions)": "2.27",
    "LLaMA-1.4B (train from scratch)": "2.18",
    "Our LLaMA-410M (l_max = 3)": "2.27",
    "Looped LLaMA-1.4B (4 loops)": "8.74",
    "Pause LLaMA-1.4B (3 pauses)": "8.74",
    "PonderLM-1.4B (3 steps)": "8.74",
    "Our LLaMA-1.4B (l_max = 3)": "7.47",
    "PonderLM-1.4B (4 steps)": "10.92",
    "PonderLM2-1.4B (1 step)": "17.47",
    "Our LLaMA-1.4B (l_max = 5)": "10.84",
}
"""The paper's table of downstream accuracy, column FLOPs, as it stands there."""

RECIPE_OF = {
    "PonderLM-1.4B (4 steps)": "ponderlm_4",
    "Our LLaMA-1.4B (l_max = 5)": "adaptive_l5",
}


@pytest.fixture(scope="module")
def table() -> list[dict[str, Any]]:
    return ledger.paper_table()


def test_our_kaplan_flops_are_those_of_the_paper_in_all_its_digits(table):
    assert {row["model"]: f"{row['kaplan_1e20']:.2f}" for row in table} == PRINTED
    assert {row["model"]: row["paper_1e20"] for row in table} == {
        model: float(printed) for model, printed in PRINTED.items()
    }


def test_passes_are_computed_unless_a_router_decides(table):
    for row in table:
        routed = row["method"] in {"adaptive", "mor"}
        assert row["source"] == ("back-solved" if routed else "computed")
        assert row["model"].count(row["size"]) == 1
    passes = {row["model"]: row["passes"] for row in table}
    assert passes["LLaMA-1.4B (train from scratch)"] == 1
    assert passes["Pause LLaMA-410M (3 pauses)"] == 4
    assert passes["PonderLM-1.4B (4 steps)"] == 5
    assert passes["PonderLM2-410M (1 step)"] == 8
    # The capacities of MoR are chosen so that they give the paper's passes.
    assert ledger.training_passes(fresh("mor", {}).config) == [passes["MoR-410M (4 Recursions)"]]


@pytest.mark.parametrize("model", PRINTED)
def test_the_paper_needs_no_recipes_but_has_theirs(table, model):
    """An installed package has no recipes/: their shapes are kept in the code, and are the same."""
    (row,) = (row for row in table if row["model"] == model)
    name = RECIPE_OF.get(model, row["method"])
    recipe = load_recipe(PAPER / row["size"].lower() / f"{name}.yaml")
    assert recipe.model.method == row["method"]
    assert recipe.model.backbone == ledger.PAPER_BACKBONES[row["size"]]
    passes = row["passes"] if row["source"] == "back-solved" else None
    costs = ledger.recipe_costs(recipe, passes)
    assert costs["tokens"] == ledger.PAPER_TOKENS
    assert costs["passes"] == row["passes"]
    assert costs["run"]["exact"] / 1e20 == pytest.approx(row["exact_1e20"], rel=1e-12)
    kaplan = 6 * costs["parameters"] * 26.2144e9 * row["passes"] / 1e20
    assert row["kaplan_all_parameters_1e20"] == pytest.approx(kaplan, rel=1e-12)


@pytest.mark.parametrize("passes", [1, 1.75, 3.55, 4])
def test_passes_are_dealt_evenly(passes):
    dealt = ledger.deal(passes, 2048)
    assert dealt.shape == (1, 2048)
    assert int(dealt.sum()) == int(passes * 2048)
    assert set(dealt.flatten().tolist()) == {math.floor(passes), math.ceil(passes)}
    first, second = dealt.view(2, 1024).sum(1).tolist()
    assert abs(first - second) <= 1


VARIANTS = [(method, {}) for method in METHODS] + [
    ("adaptive", {"router": "none"}),
    ("adaptive", {"visibility": "latest", "router": "multi_mlp"}),
    ("ponderlm2", {"thoughts": 2, "min_iterations": 1, "max_iterations": 4}),
    ("mor", {"capacities": [1, 0.5]}),
    ("mor", {"sharing": "middle_cycle"}),
]


def fresh(method: str, options: dict[str, Any]) -> LatentLM:
    """A model as training starts it: its gates are open."""
    return build_model(method, tiny_llama(num_hidden_layers=3), **options)


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_planned_passes_are_those_of_training(method, options):
    model = fresh(method, options).train()
    ids = ids_of(1, 20)
    seen = set()
    for _ in range(25 if method == "ponderlm2" else 1):
        model.draw()
        seen.add(float(model(ids, labels=ids, skip_logits=True).passes.double().mean()))
    assert sorted(seen) == pytest.approx(ledger.training_passes(model.config))


def test_token_choice_is_planned_with_an_even_load():
    config = fresh("mor", {"routing": "token"}).config
    assert ledger.training_passes(config) == [(1 + 2 + 3 + 4) / 4]


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_a_trained_token_costs_its_share_of_a_sequence(method, options):
    """A length of 20 has whole numbers of tokens for all capacities, so nothing is rounded."""
    model, length = fresh(method, options), 20
    dealt = [ledger.deal(passes, length) for passes in ledger.training_passes(model.config)]
    flops = [model.count_flops(each) for each in dealt]
    executed = [model.count_flops(each, executed=True) for each in dealt]
    want = {
        "kaplan": [each.kaplan(model.num_parameters()) for each in flops],
        "exact": [each.training for each in flops],
        "executed": [each.training for each in executed],
    }
    cost = ledger.trained_token(model, length)
    assert tuple(cost) == RULES
    for rule, values in want.items():
        assert cost[rule] == pytest.approx(sum(values) / len(values) / length, rel=1e-9), rule
    assert cost["exact"] < cost["executed"]


@pytest.mark.parametrize(("method", "options"), VARIANTS)
@torch.no_grad()
def test_a_decoded_token_costs_what_pytorch_counts(method, options, monkeypatch):
    # The ledger does not count the columns that a buffer keeps for slots to come.
    monkeypatch.setattr(slots, "SPARE", 10**9)
    model, length = fresh(method, options).eval(), 12
    passes = model.config.thoughts + 1 if method == "ponderlm2" else model.config.num_passes
    model.set_attn_implementation("eager")
    rule = GivenPasses(torch.full((1, 1), passes))
    ids, cache = ids_of(1, length), None
    for place in range(length):
        with FlopCounterMode(display=False) as counter:
            token = ids[:, place : place + 1]
            out = model(token, past_key_values=cache, use_cache=True, keep_rule=rule)
        cache = out.past_key_values
    assert int(out.passes) == passes
    cost = ledger.decoded_token(model, length, passes)
    assert counter.get_total_flops() == pytest.approx(cost["executed"], rel=1e-6)
    if model.config.visibility != "latest":  # which masks slots where they lie
        assert cost["exact"] == pytest.approx(cost["executed"], rel=1e-2)
    if "sharing" not in options:
        assert cost["kaplan"] == 2 * model.num_parameters() * passes


def test_a_fraction_of_a_pass_costs_a_fraction():
    model = fresh("adaptive", {"visibility": "latest"})
    low, high = (ledger.decoded_token(model, 64, passes) for passes in (3, 4))
    for share in (0.25, 0.5):
        cost = ledger.decoded_token(model, 64, 3 + share)
        for rule in (
            "kaplan",
            "exact",
        ):  # `latest`: a query sees one slot of a token, however many there are
            assert cost[rule] == pytest.approx((1 - share) * low[rule] + share * high[rule])


def test_a_run_costs_its_tokens(source):
    costs = ledger.recipe_costs(make_recipe(tiny(source)))
    assert costs["tokens"] == 12 * 4 * 16
    for rule in RULES:
        assert costs["run"][rule] == pytest.approx(costs["tokens"] * costs["trained_token"][rule])


def test_a_budget_in_flops_buys_tokens(source):
    by_flops = make_recipe(tiny(source, budget_tokens=None, budget_flops=1e9))
    costs = ledger.recipe_costs(by_flops)
    assert costs["run"]["exact"] == pytest.approx(1e9)
    assert costs["tokens"] == pytest.approx(1e9 / costs["trained_token"]["exact"])


def test_a_plan_of_a_run_is_what_the_run_reports(source, tmp_path, latentcot: Latentcot):
    """At a tau of almost 0 nothing is pruned: all passes are executed, as planned."""
    recipe = write_recipe(tmp_path / "tiny.yaml", tiny(source))
    changes = ["model.tau=0.001", "model.initial_gate=0.95"]
    run = latentcot("train", recipe, *changes, "--run-dir", tmp_path / "run", "--json")
    plan = latentcot("flops", recipe, *changes, "--json")
    summary, costs = json.loads(run.out), json.loads(plan.out)
    assert summary["exact_flops"] == pytest.approx(costs["run"]["exact"], rel=1e-9)
    assert summary["kaplan_flops"] == pytest.approx(costs["run"]["kaplan"], rel=1e-9)


def test_the_command_shows_a_recipe(source, tmp_path, latentcot: Latentcot):
    recipe = write_recipe(tmp_path / "tiny.yaml", tiny(source))
    shown = latentcot("flops", recipe, "model.l_max=1", "--passes", 1.5)
    assert shown.code == 0
    for word in (*RULES, "a trained token", "a decoded token", "run", "1.5 passes"):
        assert word in shown.out
    costs = json.loads(latentcot("flops", recipe, "model.l_max=1", "--passes", 1.5, "--json").out)
    assert costs["passes"] == costs["decoding_passes"] == 1.5
    kaplan = costs["trained_token"]["kaplan"]
    assert kaplan == pytest.approx(6 * costs["parameters"] * 1.5)
    assert costs["decoded_token"]["kaplan"] == pytest.approx(kaplan / 3)


def test_the_command_shows_the_paper(latentcot: Latentcot, table, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = latentcot("flops", "--paper")
    assert shown.code == 0
    for row in table:
        (line,) = (line for line in shown.out.splitlines() if row["model"] in line)
        assert line.count(PRINTED[row["model"]]) >= 2
        assert ("*" in line) == (row["source"] == "back-solved")
    assert json.loads(latentcot("flops", "--paper", "--json").out) == table


def test_large_totals_are_shown_in_the_unit_of_the_paper(latentcot: Latentcot):
    assert "2.271 x 1e20" in latentcot("flops", PAPER / "410m" / "mor.yaml").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe or --paper, one of them"),
        (["RECIPE", "--paper"], "give a recipe or --paper, one of them"),
        (["--paper", "--passes", "2"], "--passes is for a recipe"),
        (["RECIPE", "--passes", "0.99"], "passes is 0.99: give 1 to 3"),
        (["RECIPE", "--passes", "3.01"], "passes is 3.01: give 1 to 3"),
        (["RECIPE", "--passes", "nan"], "passes is nan: give 1 to 3"),
        (["RECIPE", "model.router=none", "--passes", "3"], "always executes 3: leave it out"),
        (["RECIPE", "model.method=vanilla", "--passes", "1"], "always executes 1: leave it out"),
        (["RECIPE", "model.method=ponderlm2", "--passes", "8"], "always executes 8: leave it out"),
        (["RECIPE", "model.method=mor", "--passes", "5"], "passes is 5: give 1 to 4"),
        (["RECIPE", "model.taus=1"], "did you mean 'tau'?"),
        (["RECIPE", "model.l_max=-1"], "l_max is -1"),
        (["nowhere.yaml"], "no recipe at nowhere.yaml"),
    ],
)
def test_a_mistake_is_named(source, tmp_path, latentcot: Latentcot, arguments, message):
    recipe = str(write_recipe(tmp_path / "tiny.yaml", tiny(source)))
    outcome = latentcot("flops", *[recipe if word == "RECIPE" else word for word in arguments])
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
