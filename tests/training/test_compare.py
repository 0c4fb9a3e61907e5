"""`latentcot compare`: one protocol, what is missing is trained, a killed comparison goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from latentcot.compare import choose_reference, plan, tokens_cost
from latentcot.errors import UserError
from latentcot.training.loop import train
from latentcot.training.recipe import load_recipe, make_recipe
from training.helpers import tiny, write_recipe

METHODS = ("adaptive", "vanilla")


def recipe_of(source, method="adaptive", name=None, **training):
    return make_recipe(tiny(source, method, **training) | {"name": name or method})


@pytest.fixture
def paths(source, tmp_path):
    return [write_recipe(tmp_path / f"{m}.yaml", tiny(source, m) | {"name": m}) for m in METHODS]


def summaries(out: Path) -> dict[Path, int]:
    """Every finished run and when it finished."""
    return {path: path.stat().st_mtime_ns for path in out.glob("*/*/*/summary.json")}


def test_trains_what_is_missing_and_shows_it(latentcot, paths, tmp_path):
    out = tmp_path / "out"
    command = ("compare", *paths, "--out", out, "--match", "both", "--flops", "6e7")
    done = latentcot(*command, "--workers", 2)
    assert done.code == 0, done.err
    runs = summaries(out)
    assert len(runs) == 4
    results = json.loads((out / "results.json").read_text())
    assert {(line["name"], line["match"]) for line in results["lines"]} == {
        (method, match) for method in METHODS for match in ("tokens", "flops")
    }
    for run in results["runs"]:
        spent = run["summary"]["tokens" if run["match"] == "tokens" else "exact_flops"]
        assert run["budget"] <= spent <= 1.2 * run["budget"]
        assert run["curve"][-1]["tokens"] == run["summary"]["tokens"]
        assert run["summary"]["peak_bytes"] > 1e8
    assert "adaptive" in (out / "comparison.html").read_text()
    # The same corpus, order and initial weights: the first batch gives every system its own loss,
    # and the same recipe trained alone gives this loss again.
    alone = tmp_path / "alone"
    assert latentcot("train", paths[1], "--run-dir", alone).code == 0
    ours = json.loads((alone / "summary.json").read_text())
    theirs = json.loads((out / "tokens/vanilla/seed-0/summary.json").read_text())
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    # A short run in the same place does not count as finished.
    short = latentcot(*command, "--seeds", "1", "training.max_steps=2", "--workers", 2)
    assert short.code == 0, short.err
    assert latentcot(*command, "--seeds", "0,1", "--workers", 2).code == 0
    longer = json.loads((out / "results.json").read_text())["runs"]
    assert {run["summary"]["tokens"] >= 768 for run in longer if run["match"] == "tokens"} == {True}
    runs = summaries(out)
    # Again: nothing is trained, the same table comes out.
    again = latentcot(*command, "--json")
    assert summaries(out) == runs
    assert [line["test_loss"] for line in json.loads(again.out)] == [
        line["test_loss"] for line in results["lines"]
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="kills as Unix does")
def test_killed_at_any_moment_it_loses_no_run_and_repeats_none(source, tmp_path):
    """kill -9 of the parent: its workers save and leave, and the same command goes on."""
    paths = []
    for method in METHODS:
        content = tiny(source, method, budget_tokens=9600, checkpoint_every=10, precision="float64")
        paths.append(write_recipe(tmp_path / f"{method}.yaml", content | {"name": method}))

    quiet = {path.stem: train(load_recipe(path), tmp_path / path.stem) for path in paths}
    out, log = tmp_path / "out", tmp_path / "log"

    def start() -> subprocess.Popen:
        command = [sys.executable, "-m", "latentcot", "compare", *paths, "--out", out]
        with log.open("w") as stream:
            return subprocess.Popen(
                [str(word) for word in [*command, "--workers", "1"]], stderr=stream, stdout=stream
            )

    first, second = (out / "tokens" / method / "seed-0" for method in METHODS)
    moments = [
        lambda: (first / "metrics.jsonl").exists(),  # while the first run trains
        lambda: any((first / "checkpoints").glob("*")),
        lambda: (second / "metrics.jsonl").exists(),
    ]
    finished: dict[Path, int] = {}
    for moment in moments:
        process = start()
        end = time.monotonic() + 120
        while not moment() and time.monotonic() < end:
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        now = summaries(out)
        assert finished.items() <= now.items()
        finished = now
    assert start().wait(120) == 0, log.read_text()
    assert finished.items() <= summaries(out).items()
    for line in json.loads((out / "results.json").read_text())["lines"]:
        # Another number of threads adds up in another order.
        assert line["test_loss"] == pytest.approx(quiet[line["name"]]["test_loss"], rel=1e-9)
        assert line["tokens"] == quiet[line["name"]]["tokens"]


def test_runs_on_different_text_are_not_put_in_one_table(latentcot, paths, tmp_path):
    command = ("compare", *paths, "--out", tmp_path / "out", "training.max_steps=1")
    assert latentcot(*command).code == 0
    versions = tmp_path / "out/tokens/vanilla/seed-0/versions.json"
    versions.write_text(json.dumps(json.loads(versions.read_text()) | {"corpus": "another"}))
    done = latentcot(*command)
    assert done.code == 2
    assert "cannot be compared: corpus is" in done.err


def test_a_failing_run_stops_no_other(latentcot, source, tmp_path):
    good = write_recipe(tmp_path / "good.yaml", tiny(source, "vanilla") | {"name": "good"})
    content = tiny(source, "vanilla", learning_rate=1e30) | {"name": "bad"}
    bad = write_recipe(tmp_path / "bad.yaml", content)
    done = latentcot("compare", bad, good, "--out", tmp_path / "out", "--workers", 1)
    assert done.code == 2
    assert "1 of 2 runs failed, the first is bad, seed 0: the loss of step" in done.err
    assert [path.parent.parent.name for path in summaries(tmp_path / "out")] == ["good"]
    assert "bad, seed 0" in (tmp_path / "out" / "comparison.html").read_text()


def test_runs_are_planned_seed_by_seed(source, tmp_path):
    recipes = [recipe_of(source, method) for method in METHODS]
    jobs = plan(recipes, [0, 1], tmp_path, "both", [1e8])
    assert [(job.recipe.name, job.recipe.seed, job.match) for job in jobs] == [
        (name, seed, match) for match in ("tokens", "flops") for seed in (0, 1) for name in METHODS
    ]
    assert len({job.directory for job in jobs}) == len(jobs)
    assert jobs[-1].recipe.training.budget_flops == 1e8
    assert jobs[-1].recipe.training.budget_tokens is None
    fewer = plan(recipes, [0, 1], tmp_path, "both", [1e8], flops_seeds=[1])
    assert [job.recipe.seed for job in fewer if job.match == "flops"] == [1, 1]
    cheapest = tokens_cost(recipes[1])
    budgets = {job.budget for job in plan(recipes, [0], tmp_path, "flops")}
    assert budgets == {float(f"{factor * cheapest:.3g}") for factor in (1, 2, 4)}
    assert choose_reference(recipes[::-1]) == "adaptive"
    assert choose_reference(recipes[1:]) == "vanilla"
    fixed = tiny(source) | {"name": "fixed"}
    fixed["model"]["router"] = "none"
    assert choose_reference([make_recipe(fixed), *recipes]) == "adaptive"


def test_recipes_that_differ_are_refused_with_the_difference(source, tmp_path):
    ours = recipe_of(source)

    def refused(*others, match="tokens"):
        with pytest.raises(UserError) as caught:
            plan([ours, *others], [0], tmp_path, match)
        return str(caught.value)

    assert "training.budget_tokens is 768 here and 64 there" in refused(
        recipe_of(source, "vanilla", budget_tokens=64)
    )
    other_data = tiny(source, "vanilla") | {"name": "vanilla"}
    other_data["data"] = {**other_data["data"], "source": "stdlib"}
    assert "data.source is" in refused(make_recipe(other_data))
    assert "two recipes are called 'adaptive'" in refused(ours)
    # A learning rate of one's own is allowed: it may have been chosen by a sweep.
    assert plan([ours, recipe_of(source, "vanilla", learning_rate=0.1)], [0], tmp_path)
    no_tokens = recipe_of(source, budget_tokens=None, budget_flops=1e8)
    with pytest.raises(UserError, match=r"no training.budget_tokens"):
        plan([no_tokens], [0], tmp_path)
    assert plan([no_tokens], [0], tmp_path, "flops", [1e8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give recipes or --sweep FILE"),
        (["{0}", "--seeds", "0,x"], "--seeds is '0,x': give numbers"),
        (["{0}", "--seeds", "1,1"], "seeds are [1, 1]"),
        (["{0}", "--match", "flops", "--flops", "many"], "--flops is 'many'"),
        (["{0}", "--reference", "nobody"], "no recipe 'nobody'"),
        (["{0}", "--base", "{1}"], "--base is for --sweep"),
        (["{0}", "seed=3"], "seed=3 would be overruled"),
        (["{0}", "--flops", "1e9"], "add --match both"),
        (["{0}", "--match", "flops", "--flops", "1e9,1e9"], "FLOPs budgets are"),
        (["{0}", "--match", "flops", "--flops", "inf"], "FLOPs budgets are"),
        (["{0}", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["{0}", "model.method=adaptve"], "unknown method 'adaptve': choose one of adaptive, loo"),
        (["{1}", "model.l_max=3"], "unknown key 'model.l_max'"),
        (["{1}", "model.method=mor", "model.capacities=[1,0.5,0.9]"], "capacities grow in"),
        (["{1}", "model.method=paused", "model.num_pauses=0"], "num_pauses is 0: give 1 or more"),
    ],
)
def test_bad_input(latentcot, paths, tmp_path, arguments, message):
    words = [str(word).format(*paths) for word in arguments]
    done = latentcot("compare", *words, "--out", tmp_path / "out")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_directory_of_another_comparison_is_refused(latentcot, paths, tmp_path):
    run = tmp_path / "out" / "tokens" / "vanilla" / "seed-0"
    run.mkdir(parents=True)
    other = yaml.safe_load(paths[1].read_text())
    other["training"]["learning_rate"] = 0.5
    (run / "recipe.yaml").write_text(yaml.safe_dump(other))
    done = latentcot("compare", paths[1], "--out", tmp_path / "out")
    assert done.code == 2
    assert "training.learning_rate is 0.01 here and 0.5 there" in done.err


def test_a_sweep_gives_the_ablation(latentcot, paths, tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        yaml.safe_dump(
            {
                "base": str(paths[0]),
                "name": "ablation-beta",
                "sweep": {"key": "model.beta", "values": [1, 8]},
            }
        )
    )
    done = latentcot("compare", "--sweep", sweep, "--out", tmp_path / "out", "--workers", 2)
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert sorted(line["value"] for line in results["lines"]) == [1, 8]
    assert (tmp_path / "out" / "ablation.png").is_file()
    assert "model.beta" in (tmp_path / "out" / "comparison.html").read_text()
