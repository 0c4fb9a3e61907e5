"""A run that was stopped, in whatever way, ends as if it had never been stopped: bit for bit.

Kills: `crash.py` imports everything once, then forks a process for each attempt, which runs
`python -m latentcot train` with `--resume auto` and is killed with SIGKILL from inside at a chosen
moment: after an update, or just before or after one of the file operations of a checkpoint, with
the last bytes of a file lost or not. Order and counts come from a seeded generator: a failure can
be repeated, and each attempt is known to die before it finishes. A killer outside, with a clock,
would rarely hit the milliseconds in which a checkpoint is written.
"""

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcot.errors import UserError
from latentcot.models import METHODS
from latentcot.training import run_dir as files
from latentcot.training.checkpoint import Checkpoints
from latentcot.training.loop import Run, train
from latentcot.training.recipe import Recipe, make_recipe
from training.crash import AT_END, AT_START, WHILE_TRAINING
from training.helpers import Latentcot, checkpoints, rows, tiny, train_rows, weights, write_recipe

Interrupt = Callable[[int, Callable[[], None]], None]


@pytest.fixture(scope="module")
def recipe(source: Path) -> Recipe:
    return make_recipe(tiny(source))


@pytest.fixture(scope="module")
def quiet(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 12 updates, checkpoints after 3, 6, 9, 12, evaluations after 2."""
    run_dir = tmp_path_factory.mktemp("quiet")
    train(recipe, run_dir)
    return run_dir


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """`interrupt(step, action)` has the action done in the middle of the update `step`, once."""

    def install(step: int, action: Callable[[], None]) -> None:
        update = Run.update

        def interrupted(self: Run) -> dict[str, Any]:
            if self.counters.step == step - 1:
                monkeypatch.setattr(Run, "update", update)
                action()
            return update(self)

        monkeypatch.setattr(Run, "update", interrupted)

    return install


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def assert_same_run(run_dir: Path, quiet: Path) -> None:
    assert rows(run_dir) == rows(quiet)
    assert weights(run_dir) == weights(quiet)
    assert checkpoints(run_dir) == checkpoints(quiet)
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in quiet.iterdir()}


def test_the_quiet_run_prunes_some_tokens_and_not_others(quiet: Path):
    ratios = [row["prune_ratio"] for row in train_rows(quiet)]
    assert sum(0.02 < ratio < 0.48 for ratio in ratios) > len(ratios) / 2


@pytest.mark.parametrize("step", [1, 3, 8, 12])
def test_resumed_equals_uninterrupted(
    tmp_path: Path, recipe: Recipe, quiet: Path, interrupt: Interrupt, step: int
):
    interrupt(step, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path)
    assert len(train_rows(tmp_path)) == step - 1
    train(recipe, tmp_path)
    assert_same_run(tmp_path, quiet)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resumes(tmp_path: Path, source: Path, method: str):
    """What a method draws at random included."""
    quiet, parts = tmp_path / "quiet", tmp_path / "parts"
    train(make_recipe(tiny(source, method)), quiet)
    for max_steps in (4, None):
        train(make_recipe(tiny(source, method, max_steps=max_steps)), parts)
    assert train_rows(parts) == train_rows(quiet)
    assert weights(parts) == weights(quiet)


def test_two_processes_never_train_in_one_directory(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with (
        files.locked(tmp_path / "run"),
        pytest.raises(UserError, match="another process is training in"),
    ):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing was put in it


def test_a_run_may_be_continued_in_parts(tmp_path: Path, source: Path, quiet: Path):
    for max_steps in (5, 9, None):
        train(make_recipe(tiny(source, max_steps=max_steps)), tmp_path)
    assert train_rows(tmp_path) == train_rows(quiet)
    assert weights(tmp_path) == weights(quiet)


def test_kill_9_at_any_moment_changes_nothing(tmp_path: Path, source: Path):
    chance = random.Random(0)
    kills = [(moment, 1) for moment in AT_START]
    kills += [(moment, chance.randint(1, 2)) for moment in WHILE_TRAINING]
    kills += [("after an update", chance.randint(1, 6)) for _ in range(3)]
    kills += [("removing an old checkpoint", 2)]  # the first of its two files is gone
    chance.shuffle(kills)
    kills.append((AT_END, 1))
    content = tiny(source, budget_tokens=28 * 64, checkpoint_every=2)
    path = write_recipe(tmp_path / "tiny.yaml", content)

    def command(run_dir: str) -> list[str]:
        return ["train", str(path), "--run-dir", str(tmp_path / run_dir), "--resume", "auto"]

    plan = [(command("killed"), *kill) for kill in kills]
    plan += [(command("killed"), None, 0), (command("quiet"), None, 0)]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("crash.py"), tmp_path / "plan.json"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    assert statuses == [signal.SIGKILL] * len(kills) + [0, 0], f"{kills}\n{done.stderr}"
    assert_same_run(tmp_path / "killed", tmp_path / "quiet")


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(1, {"step": 1})
    unlink = os.unlink

    def unlink_one(*arguments: Any, **options: Any) -> None:
        unlink(*arguments, **options)
        crash()

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_one)
        with pytest.raises(Crash):
            kept.save(2, {"step": 2})
    assert [kept.load(step) for step in kept.steps()] == [{"step": 2}]
    kept.save(3, {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_half_a_line_of_metrics_is_dropped(
    tmp_path: Path, recipe: Recipe, quiet: Path, interrupt: Interrupt
):
    interrupt(5, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path)
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 40)
    train(recipe, tmp_path)
    assert_same_run(tmp_path, quiet)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [4, 12])
def test_a_signal_saves_and_leaves(
    tmp_path: Path,
    recipe: Recipe,
    quiet: Path,
    interrupt: Interrupt,
    number: signal.Signals,
    step: int,
):
    handler = signal.getsignal(number)
    interrupt(step, lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit) as left:
        train(recipe, tmp_path)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) is handler
    assert checkpoints(tmp_path)[-1] == f"step-{step:08}"
    assert not (tmp_path / "summary.json").exists()
    train(recipe, tmp_path)
    assert rows(tmp_path) == rows(quiet)
    assert weights(tmp_path) == weights(quiet)


def test_a_warning_is_given_once_over_all_parts(tmp_path: Path, source: Path, interrupt: Interrupt):
    dead = tiny(source)
    dead["model"]["tau"] = 1
    interrupt(5, crash)
    with pytest.raises(Crash):
        train(make_recipe(dead), tmp_path)
    train(make_recipe(dead), tmp_path)
    assert [row["step"] for row in rows(tmp_path) if row["kind"] == "warning"] == [1]


def test_must_asks_for_a_checkpoint(tmp_path: Path, recipe: Recipe):
    with pytest.raises(UserError, match="no checkpoint to resume in .*--resume auto"):
        train(recipe, tmp_path / "run", "must")
    assert not (tmp_path / "run").exists()


def test_must_goes_on_where_there_is_one(
    tmp_path: Path, recipe: Recipe, quiet: Path, interrupt: Interrupt
):
    interrupt(5, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path)
    train(recipe, tmp_path, "must")
    assert_same_run(tmp_path, quiet)


def test_never_asks_for_an_empty_place(recipe: Recipe, quiet: Path):
    with pytest.raises(UserError, match="already holds a run.*--resume auto"):
        train(recipe, quiet, "never")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, recipe: Recipe):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        train(recipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("key", "here", "there"),
    [("model.tau", 0.25, 0.49), ("training.batch_size", 8, 4), ("seed", 1, 0)],
)
def test_another_recipe_is_refused(source: Path, quiet: Path, key: str, here: float, there: float):
    content = tiny(source)
    section, _, name = key.rpartition(".")
    (content[section] if section else content)[name] = here
    with pytest.raises(UserError, match=f"{key} is {here} here and {there} there"):
        train(make_recipe(content), quiet)


def test_another_corpus_is_refused(tmp_path: Path, interrupt: Interrupt):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for letter in "abc":
        (corpus / letter).write_text(f"{letter} is a letter.\n" * 200)
    recipe = make_recipe(tiny(corpus))
    interrupt(5, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path / "run")
    (corpus / "b").write_text("b is not what it was.\n" * 200)
    with pytest.raises(UserError, match="corpus .* is not what this run was started on"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize("file", ["state.pt", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_checkpoint_is_found_and_can_be_deleted(
    tmp_path: Path, recipe: Recipe, quiet: Path, interrupt: Interrupt, file: str, damage: str
):
    interrupt(8, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000006" / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if damage == "cut" else data[:9] + b"?" + data[10:])
    with pytest.raises(UserError, match="checkpoint .*step-00000006 is damaged: delete this"):
        train(recipe, tmp_path)


def test_the_checkpoint_before_a_damaged_one_serves(
    tmp_path: Path, recipe: Recipe, quiet: Path, interrupt: Interrupt
):
    interrupt(8, crash)
    with pytest.raises(Crash):
        train(recipe, tmp_path)
    for path in (tmp_path / "checkpoints" / "step-00000006").iterdir():
        path.unlink()
    (tmp_path / "checkpoints" / "step-00000006").rmdir()
    train(recipe, tmp_path)
    assert_same_run(tmp_path, quiet)


def test_a_full_disk_leaves_the_checkpoints_whole(
    tmp_path: Path, source: Path, quiet: Path, latentcot: Latentcot, monkeypatch: pytest.MonkeyPatch
):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(source))
    run_dir = tmp_path / "run"
    save, calls = torch.save, itertools.count(1)

    def save_until_full(state: object, target: Path) -> None:
        save(state, target)
        if next(calls) == 3:
            os.truncate(target, 1000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", save_until_full)
    left = latentcot("train", path, "--run-dir", run_dir)
    assert left.code == 2
    (message,) = (line for line in left.err.splitlines() if line.startswith("error: "))
    assert "step 9" in message
    assert "No space left on device" in message
    assert "the checkpoint of step 6 is whole" in message
    assert checkpoints(run_dir) == ["step-00000003", "step-00000006"]
    assert latentcot("train", path, "--run-dir", run_dir, "--resume", "must").code == 0
    assert_same_run(run_dir, quiet)
