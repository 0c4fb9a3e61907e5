"""The loop: accumulation, budgets, schedule, what a run leaves behind."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from latentcot.data import Blocks, prepare
from latentcot.errors import UserError
from latentcot.models import METHODS
from latentcot.training.checkpoint import Checkpoints
from latentcot.training.loop import Run, train
from latentcot.training.metrics import RouterWatch
from latentcot.training.optimization import build_optimizer, learning_rate
from latentcot.training.recipe import TrainingConfig, make_recipe
from training.helpers import Latentcot, checkpoints, rows, tiny, train_rows, weights, write_recipe


@pytest.fixture(scope="module", params=["adaptive", "vanilla"])
def finished(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp(request.param)
    train(make_recipe(tiny(source, request.param)), run_dir)
    return run_dir


def updates(run_dir: Path, content: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Rows of the first updates of a run that is left there."""
    run = Run(make_recipe(content), run_dir)
    for _ in range(count):
        run.update()
    run.metrics.close()
    return train_rows(run_dir)


def config(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**({"budget_tokens": 1} | changes))


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_changes_nothing(tmp_path: Path, source: Path, method: str):
    runs = [
        updates(
            tmp_path / str(size),
            tiny(source, method, batch_size=8, micro_batch_size=size, precision="float64"),
            5,
        )
        for size in (1, 2, 8)
    ]
    for ones, twos, eights in zip(*runs, strict=True):
        assert ones.pop("kind") == twos.pop("kind") == eights.pop("kind") == "train"
        # Sums of a few hundred terms in another order: some units of the 16th digit.
        assert ones == pytest.approx(eights, rel=1e-12, abs=0)
        assert twos == pytest.approx(eights, rel=1e-12, abs=0)
    if method == "adaptive":
        assert runs[0][-1]["adaptive_loss"] > 1e-3
        assert 0.02 < runs[0][-1]["prune_ratio"] < 0.98


def test_an_update_is_the_mean_over_its_targets(tmp_path: Path, source: Path):
    run = Run(make_recipe(tiny(source, precision="float64", micro_batch_size=2)), tmp_path)
    ids = torch.from_numpy(run.blocks.batch(0, 4))
    run.model.train()
    with torch.no_grad():
        out = run.model(ids, labels=ids)
    logits = out.logits[:, :-1].flatten(0, 1)
    ce_loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    row = run.update()
    run.metrics.close()
    assert row["ce_loss"] == pytest.approx(ce_loss.item(), rel=1e-12)
    assert row["adaptive_loss"] == pytest.approx(out.adaptive_loss.item(), rel=1e-12)
    assert row["loss"] == row["ce_loss"] + row["adaptive_loss"]
    assert row["passes_per_token"] == out.passes.double().mean().item()
    assert row["exact_flops"] == run.model.count_flops(out.passes).training
    assert row["tokens"] == ids.numel()


class Record(NamedTuple):
    """The weights a run starts from; the ids and the state of chance of its first updates."""

    start: torch.Tensor
    ids: list[list[int]]
    seeds: list[int]


def record(run_dir: Path, content: dict[str, Any]) -> Record:
    run = Run(make_recipe(content), run_dir)
    start = torch.nn.utils.parameters_to_vector(run.model.backbone.parameters()).detach().clone()
    found = Record(start, [], [])

    def see(model: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        found.ids.extend(arguments[0].tolist())
        found.seeds.append(torch.initial_seed())

    run.model.register_forward_pre_hook(see)
    for _ in range(3):
        run.update()
    run.metrics.close()
    return found


def test_all_methods_start_alike_and_read_alike(tmp_path: Path, source: Path):
    first, *others = (record(tmp_path / method, tiny(source, method)) for method in METHODS)
    assert others
    for other in others:
        assert torch.equal(other.start, first.start)
        assert (other.ids, other.seeds) == (first.ids, first.seeds)


def test_data_and_chance_are_functions_of_seed_and_step(tmp_path: Path, source: Path):
    zero, one = (record(tmp_path / str(seed), tiny(source) | {"seed": seed}) for seed in (0, 1))
    stream = prepare(make_recipe(tiny(source)).data).stream("train")
    assert zero.ids == Blocks(stream, 16, seed=0).samples(0, 3 * 4).tolist()
    assert one.ids == Blocks(stream, 16, seed=1).samples(0, 3 * 4).tolist()
    assert not torch.equal(zero.start, one.start)
    assert len({*zero.seeds, *one.seeds}) == 2 * 3


@pytest.mark.parametrize(
    ("share", "warmup", "value"),
    [
        (0.0, 0.1, 0.0),
        (0.05, 0.1, 0.5),
        (0.1, 0.1, 1.0),
        (0.325, 0.1, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        (0.55, 0.1, 0.6),
        (1.0, 0.1, 0.2),
        (1.3, 0.1, 0.2),
        (0.0, 0.0, 1.0),
        (0.5, 0.0, 0.6),
    ],
)
def test_schedule(share: float, warmup: float, value: float):
    schedule = config(learning_rate=1.0, warmup_share=warmup, min_learning_rate_ratio=0.2)
    assert learning_rate(share, schedule) == pytest.approx(value, abs=1e-15)


def test_weight_decay_is_for_matrices_alone(source: Path):
    model = make_recipe(tiny(source)).build_model()
    optimizer = build_optimizer(model, config(weight_decay=0.3))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.3 if parameter.ndim == 2 else 0.0)


def test_a_budget_in_tokens_decides_end_and_schedule(finished: Path, source: Path):
    recorded = train_rows(finished)
    schedule = make_recipe(tiny(source)).training
    assert schedule.budget_tokens == recorded[-1]["tokens"] == 12 * 64
    for row in recorded:
        expected = learning_rate(row["tokens"] / (12 * 64), schedule)
        assert row["learning_rate"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("method", ["adaptive", "vanilla"])
def test_a_budget_in_flops_decides_end_and_schedule(tmp_path: Path, source: Path, method: str):
    (first,) = updates(tmp_path / "first", tiny(source, method), 1)
    budget = 8.5 * first["exact_flops"]
    content = tiny(source, method, budget_tokens=None, budget_flops=budget, warmup_share=0.25)
    recipe = make_recipe(content)
    train(recipe, tmp_path / "run")
    recorded = train_rows(tmp_path / "run")
    assert recorded[-2]["exact_flops"] < budget <= recorded[-1]["exact_flops"]
    for before, row in itertools.pairwise(recorded):
        # What the coming update will cost is not known: the mean of those before stands for it.
        expected = before["exact_flops"] * (1 + 1 / before["step"]) / budget
        assert row["learning_rate"] == pytest.approx(
            learning_rate(expected, recipe.training), rel=1e-12
        )
    if method == "vanilla":
        assert len(recorded) == 9
        assert recorded[-1]["learning_rate"] == pytest.approx(
            1e-2 * recipe.training.min_learning_rate_ratio
        )


def test_max_steps_cuts_the_run_and_not_the_schedule(tmp_path: Path, source: Path, finished: Path):
    method = json.loads((finished / "summary.json").read_text())["method"]
    summary = train(make_recipe(tiny(source, method, max_steps=4)), tmp_path)
    assert summary["step"] == 4
    assert train_rows(tmp_path) == train_rows(finished)[:4]
    assert [row["step"] for row in rows(tmp_path) if row["kind"] == "eval"] == [2, 4]


def test_a_lost_loss_ends_the_run_and_harms_no_checkpoint(
    tmp_path: Path, source: Path, latentcot: Latentcot, monkeypatch: pytest.MonkeyPatch
):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(source))
    update = Run.update

    def poisoned(run: Run) -> dict[str, Any]:
        if run.counters.step == 4:
            run.model.lm_head.weight.data[7, 3] = math.nan
        return update(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", poisoned)
        left = latentcot("train", path, "--run-dir", tmp_path / "run")
    assert left.code == 2
    assert "error: the loss of step 5 is nan" in left.err
    assert "training.learning_rate" in left.err.splitlines()[-1]
    assert checkpoints(tmp_path / "run") == ["step-00000003"]
    assert all(
        tensor.isfinite().all()
        for tensor in Checkpoints(tmp_path / "run" / "checkpoints", 2).load(3)["model"].values()
    )
    assert len(train_rows(tmp_path / "run")) == 4
    assert latentcot("train", path, "--run-dir", tmp_path / "run").code == 0
    assert len(train_rows(tmp_path / "run")) == 12


def warnings(watch: RouterWatch, passes: list[float]) -> list[tuple[int, str]]:
    said = [watch.update(value, (i + 1) / len(passes)) for i, value in enumerate(passes)]
    return [(i, message) for i, message in enumerate(said) if message]


def test_a_dead_router_is_reported_once():
    ((_, message),) = warnings(RouterWatch(3), [1.0] * 50)
    assert "the router has died: 1.000 passes per token" in message


def test_a_router_that_dies_later_is_reported_when_its_mean_says_so():
    ((place, _),) = warnings(RouterWatch(3), [4.0] * 20 + [1.0] * 180)
    # 1 + 3 * 0.95 ** n falls below 1.05 at n = 80.
    assert place == 20 + 80 - 1


def test_a_sleeping_router_is_reported_once_after_half_of_the_run():
    ((place, message),) = warnings(RouterWatch(3), [4.0] * 50)
    assert place == 25
    assert "the router sleeps: 0.00% of the latent steps are pruned" in message


def test_a_working_router_and_a_method_without_one_are_not_reported():
    assert warnings(RouterWatch(3), [2.5] * 50) == []
    assert warnings(RouterWatch(0), [1.0] * 50) == []


@pytest.mark.parametrize(("tau", "news"), [(1, "has died"), (1e-6, "sleeps")])
def test_a_run_records_and_shows_the_warning(
    tmp_path: Path, source: Path, latentcot: Latentcot, tau: float, news: str
):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(source))
    left = latentcot("train", path, f"model.tau={tau}", "--run-dir", tmp_path / "run")
    assert left.code == 0
    (warning,) = (row for row in rows(tmp_path / "run") if row["kind"] == "warning")
    assert news in warning["message"]
    assert left.err.splitlines().count(f"warning: {warning['message']}") == 1


def test_a_run_tells_what_it_does_in_whole_lines(
    tmp_path: Path, source: Path, latentcot: Latentcot
):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(source, max_steps=2))
    left = latentcot("train", path, "--run-dir", tmp_path / "run")
    lines = left.err.splitlines()
    assert any(re.fullmatch(r"tiny: 0\.01M parameters, up to 3 .* tokens", line) for line in lines)
    (evaluated,) = (line for line in lines if "validation loss" in line)
    assert re.fullmatch(r"step +2 .* validation loss \d\.\d{4}  passes .* tokens/s", evaluated)
    assert "test_loss" in left.out
    assert f"report: {tmp_path / 'run' / 'report.html'}" in left.out.splitlines()


def test_json_on_stdout_is_the_summary(tmp_path: Path, source: Path, latentcot: Latentcot):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(source, max_steps=2))
    left = latentcot("train", path, "--run-dir", tmp_path / "run", "--json")
    assert json.loads(left.out) == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_summary(finished: Path):
    summary = json.loads((finished / "summary.json").read_text())
    last = train_rows(finished)[-1]
    assert summary["step"] == 12
    assert summary["tokens"] == last["tokens"] == 12 * 64
    assert summary["exact_flops"] == last["exact_flops"]
    assert summary["seconds"] > 0
    assert summary["perplexity"] == pytest.approx(math.exp(summary["test_loss"]))
    assert summary["val_loss"] != summary["test_loss"]
    passes = sum(row["passes_per_token"] for row in train_rows(finished)) * 64
    assert summary["kaplan_flops"] == pytest.approx(6 * summary["parameters"] * passes)
    assert summary["train_passes_per_token"] == pytest.approx(passes / summary["tokens"])
    if summary["method"] == "vanilla":
        assert (summary["passes_per_token"], summary["prune_ratio"]) == (1, 0)
        assert summary["steps_vs_ptarget"] is None
        assert "test_loss_shuffled_steps" not in summary
    else:
        assert summary["prune_ratio"] == pytest.approx(1 - (summary["passes_per_token"] - 1) / 2)
        assert -1 <= summary["steps_vs_ptarget"] <= 1
        assert summary["test_loss_shuffled_steps"] != summary["test_loss"]


def test_what_a_run_leaves_behind(finished: Path, source: Path):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "recipe.yaml",
        "versions.json",
        "tokenizer",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
        "summary.json",
        "report.html",
    }
    assert checkpoints(finished) == ["step-00000009", "step-00000012"]
    versions = json.loads((finished / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert {"python", "transformers", "commit", "precision"} <= versions.keys()
    assert (finished / "tokenizer" / "tokenizer.json").is_file()
    assert (finished / "model" / "tokenizer.json").is_file()
    assert "<h1>" in (finished / "report.html").read_text()
    evaluations = [row for row in rows(finished) if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [2, 4, 6, 8, 10, 12]
    losses = [row["loss"] for row in evaluations]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int):
    kept = Checkpoints(tmp_path, keep)
    for step in (2, 4, 6, 8):
        kept.save(step, {"step": step})
    assert kept.steps() == [2, 4, 6, 8][-keep:]
    assert kept.load(8) == {"step": 8}
    assert len(list(tmp_path.iterdir())) == keep


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path):
    kept = Checkpoints(tmp_path, 2)
    kept.save(1, {"value": 1})
    kept.save(1, {"value": 2})
    assert kept.load(1) == {"value": 1}


def test_a_finished_run_is_not_trained_again(
    finished: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    before = json.loads((finished / "summary.json").read_text())
    recorded, learned = rows(finished), weights(finished)

    def update(run: Run) -> dict[str, Any]:
        raise AssertionError("trained again")

    monkeypatch.setattr(Run, "update", update)
    assert train(make_recipe(tiny(source, before["method"])), finished) == before
    assert json.loads((finished / "summary.json").read_text()) == before
    assert (rows(finished), weights(finished)) == (recorded, learned)


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, source: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*give another --run-dir"):
        Run(make_recipe(tiny(source)), tmp_path / "file" / "run")
