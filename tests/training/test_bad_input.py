"""What a user can get wrong: exit code 2, one line that says what and how to mend it, no traceback.

All through the entry point of the command line; what a message must name is what a user would look
for in it.
"""

import errno
import os
from pathlib import Path

import pytest

from latentcot.training import run_dir as run_dir_module
from latentcot.training.loop import train
from latentcot.training.recipe import make_recipe
from training.helpers import Latentcot, Outcome, tiny, write_recipe


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one update."""
    run_dir = tmp_path_factory.mktemp("run")
    train(make_recipe(tiny(source, max_steps=1)), run_dir)
    return run_dir


@pytest.fixture
def recipe(tmp_path: Path, source: Path) -> Path:
    return write_recipe(tmp_path / "tiny.yaml", tiny(source))


def assert_refused(left: Outcome, message: str) -> None:
    *progress, last = left.err.splitlines()
    assert left.code == 2, left.err
    assert last.startswith("error: ")
    assert message in last
    assert not any(line.startswith("error: ") for line in progress)
    assert "Traceback" not in left.err + left.out
    assert left.out == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.bach_size=3", "unknown key 'training.bach_size': did you mean 'batch_size'?"),
        ("model.method=adaptve", "unknown method 'adaptve': choose one of adaptive, "),
        ("model.tau=1.5", "tau is 1.5: give a probability from 0 to 1"),
        ("model.tau=-0.1", "tau is -0.1: give a probability from 0 to 1"),
        ("model.l_max=-1", "l_max is -1: give 0 (no latent steps) or more"),
        ("model.initial_gate=1.0", "initial_gate is 1.0: give a value between 0 and 1"),
        ("model.lambda_adaptive=-1", "step_loss_weight must be 0 or more"),
        ("model.backbone.num_attention_heads=3", "(16) is not a multiple of"),
        ("training.block_length=64", "64 is longer than the backbone's max_position_embeddings 32"),
        ("training.device=cuda:99", "device 'cuda:99' is not available"),
        ("training.device=abacus", "device 'abacus' is not available"),
        ("training.budget_flops=1e9", "exactly one of budget_tokens and budget_flops"),
        ("data.source=no/such/folder/at.all", "no/such/folder/at.all"),
        ("data.tokenizer.vocab_size=350", "the tokenizer has 350 tokens but the model only 300"),
        ("data.validation_fraction=0.99", "leave nothing to train on"),
        ("model.tau", "override 'model.tau' is not of the form key.sub=value"),
        ("model.tau=[", "override 'model.tau=[' is not valid YAML"),
    ],
)
def test_values(tmp_path: Path, recipe: Path, latentcot: Latentcot, override: str, message: str):
    left = latentcot("train", recipe, override, "--run-dir", tmp_path / "run")
    assert_refused(left, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no recipe at "),
        (b"", "holds no keys"),
        (b"- a list\n", "holds no keys"),
        (b"model: {method: adaptive\n", "is not valid YAML"),
        (b"model:\n\tmethod: adaptive\n", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not a text file"),
        (b"base: nowhere.yaml\n", "nowhere.yaml"),
        (b"training: {budget_tokens: 1}\n", "model.method is missing: give one of adaptive, "),
        (b"model: {method: vanilla}\n", "training is missing"),
    ],
)
def test_recipes(tmp_path: Path, latentcot: Latentcot, content: bytes | None, message: str):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    assert_refused(latentcot("train", path, "--run-dir", tmp_path / "run"), message)


def test_a_folder_is_no_recipe(tmp_path: Path, latentcot: Latentcot):
    assert_refused(latentcot("train", tmp_path), "no recipe at ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "corpus holds no text"),
        ({"a.txt": b" \n"}, "corpus holds no text"),
        ({"a.bin": b"\0\1\2" * 400}, "corpus holds no text"),
        ({"a.jsonl": b'{"text": "a"}\n{"txt": "b"}\n'}, "a.jsonl, row 2"),
        ({"a.txt": b"gr\xfc\xdfe " * 400}, "UTF-8"),
        ({"a.txt": b"A few words only.\n"}, "fewer than one block of 16: give more text"),
    ],
)
def test_corpora(tmp_path: Path, latentcot: Latentcot, files: dict[str, bytes], message: str):
    (tmp_path / "corpus").mkdir()
    for name, content in files.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    path = write_recipe(tmp_path / "tiny.yaml", tiny(tmp_path / "corpus"))
    assert_refused(latentcot("train", path, "--run-dir", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_binary_corpus_file(tmp_path: Path, latentcot: Latentcot):
    (tmp_path / "corpus.bin").write_bytes(b"\0\1\2" * 400)
    path = write_recipe(tmp_path / "tiny.yaml", tiny(tmp_path / "corpus.bin"))
    assert_refused(latentcot("train", path, "--run-dir", tmp_path / "run"), "corpus.bin")


COMMANDS = [("eval",), ("generate", "--prompt", "x")]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_run(tmp_path: Path, latentcot: Latentcot, command: tuple[str, ...]):
    assert_refused(latentcot(*command, tmp_path), "no run and no exported model at ")
    assert_refused(latentcot(*command, tmp_path / "gone"), "no run and no exported model at ")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unfinished_run(tmp_path: Path, latentcot: Latentcot, command: tuple[str, ...]):
    path = write_recipe(tmp_path / "tiny.yaml", tiny(tmp_path))
    path.rename(tmp_path / "recipe.yaml")
    assert_refused(latentcot(*command, tmp_path), "has not finished: train it to its end first")


def test_an_exported_model_has_no_corpus(run_dir: Path, latentcot: Latentcot):
    assert_refused(latentcot("eval", run_dir / "model"), "give a run directory")


def test_a_damaged_export(tmp_path: Path, run_dir: Path, latentcot: Latentcot):
    (tmp_path / "config.json").write_bytes((run_dir / "model" / "config.json").read_bytes())
    assert_refused(latentcot("generate", tmp_path, "--prompt", "x"), "cannot load the model in ")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty: give some text to go on from"),
        ("~" * 32, "the prompt has 32 tokens and the model's context holds 32: shorten the prompt"),
        ("~" * 99, "the prompt has 99 tokens and the model's context holds 32: shorten the prompt"),
    ],
)
def test_prompts(run_dir: Path, latentcot: Latentcot, prompt: str, message: str):
    assert_refused(latentcot("generate", run_dir, "--prompt", prompt), message)
    if prompt:
        assert latentcot("generate", run_dir, "--prompt", prompt[:31]).code == 0


def test_a_disk_that_is_full_at_the_end(
    tmp_path: Path, recipe: Path, latentcot: Latentcot, monkeypatch: pytest.MonkeyPatch
):
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    command = ("train", recipe, "training.max_steps=1", "--run-dir", tmp_path / "run", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(run_dir_module, "write_report", write)
        assert_refused(latentcot(*command), "No space left on device")
    assert latentcot(*command).code == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_another_corpus_than_that_of_the_run(tmp_path: Path, source: Path, latentcot: Latentcot):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for path in source.iterdir():
        (corpus / path.name).write_bytes(path.read_bytes())
    train(make_recipe(tiny(corpus, max_steps=1)), tmp_path / "run")
    for path in corpus.iterdir():
        path.write_text(path.read_text().replace("and", "plus"))
    assert_refused(latentcot("eval", tmp_path / "run"), "has changed since it was trained")
