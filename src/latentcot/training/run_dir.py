"""The run directory: what is written at the start, at the end, and how a run is opened again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from latentcot.analysis.collect import collect_text
from latentcot.analysis.report import RunReport, write_report
from latentcot.core.halting import KeepRule
from latentcot.data import Blocks, Corpus, Split, fingerprint, load_tokenizer, prepare
from latentcot.data.shards import sync
from latentcot.errors import UserError
from latentcot.evaluation.perplexity import Amp, Evaluation, evaluate, shuffled_passes
from latentcot.models.base import LatentLM
from latentcot.training.hardware import (
    autocast,
    choose_device,
    resolve_attention,
    resolve_precision,
)
from latentcot.training.metrics import read_rows
from latentcot.training.recipe import Recipe, difference, make_recipe

CHECKPOINTS = "checkpoints"
RECIPE = "recipe.yaml"
TOKENIZER = "tokenizer"
EXPORT = "model"
SUMMARY = "summary.json"
VERSIONS = "versions.json"
REPORT = "report.html"

LOCK = ".lock"
LOCK_SECONDS = 60
"""A process that was told to stop is given so long to save and leave."""

REPORT_TEXTS = 3
REPORT_TOKENS = 512
FREE_TO_CHANGE = ("training.max_steps", "training.checkpoint_every", "training.keep_checkpoints")
"""Recipe keys that a resumed run may change: they leave every number as it is."""


def check_resume(run_dir: Path, recipe: Recipe, resume: str, has_checkpoint: bool) -> None:
    """Whether `recipe` may train in `run_dir`.

    Raises:
        UserError: a checkpoint is there and `resume` is `never`, or missing and it is `must`; the
            directory belongs to another recipe or is not a run.
    """
    if resume == "must" and not has_checkpoint:
        raise UserError(f"no checkpoint to resume in {run_dir}: use --resume auto to start anew")
    if resume == "never" and (run_dir / RECIPE).exists():
        raise UserError(
            f"{run_dir} already holds a run: give another --run-dir, delete it, or use "
            "--resume auto"
        )
    if not (run_dir / RECIPE).exists():
        # Hidden files do not count: a kill at the very start leaves a half-written recipe.
        if any(run_dir.glob("[!.]*")):
            raise UserError(f"{run_dir} is not empty and holds no run: give another --run-dir")
        return
    there = make_recipe(read_recipe(run_dir), str(run_dir / RECIPE)).model_dump(mode="json")
    here = recipe.model_dump(mode="json")
    for key in FREE_TO_CHANGE:
        section, name = key.split(".")
        there[section].pop(name)
        here[section].pop(name, None)
    if changed := difference(here, there):
        raise UserError(
            f"{run_dir} was started with another recipe: {changed}; give another --run-dir or the "
            "recipe it was started with"
        )


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in `run_dir`; leaves no directory that nothing was put in.

    Raises:
        UserError: another process trains there and goes on doing so, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / LOCK)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise UserError(
            f"another process is training in {run_dir}: wait for it, or give another --run-dir"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to {run_dir} ({error}): give another --run-dir") from error
    try:
        yield
    finally:
        # While it is ours: filelock takes a lock again that was removed under it.
        (run_dir / LOCK).unlink(missing_ok=True)
        lock.release()
        if not any(run_dir.iterdir()):
            run_dir.rmdir()


def read_recipe(run_dir: Path) -> dict[str, Any]:
    """Content of the resolved recipe of a run. Raises UserError where it cannot be read."""
    try:
        content = yaml.safe_load((run_dir / RECIPE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{run_dir / RECIPE} is damaged: restore it, or give another --run-dir")
    return content


def begin(run_dir: Path, recipe: Recipe, corpus: Corpus, precision: str) -> None:
    """Write what a run is: resolved recipe, versions, tokenizer."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / SUMMARY).unlink(missing_ok=True)  # of a part of this run: not finished any more
        write_text(run_dir / RECIPE, recipe.to_yaml())
        facts = versions() | {"precision": precision, "corpus": corpus_id(corpus)}
        write_text(run_dir / VERSIONS, json.dumps(facts, indent=2))
        corpus.tokenizer.save_pretrained(run_dir / TOKENIZER)
    except OSError as error:
        raise UserError(f"cannot write to {run_dir} ({error}): give another --run-dir") from error


def finish(
    run_dir: Path,
    model: LatentLM,
    corpus: Corpus,
    recipe: Recipe,
    amp: Amp,
    counters: dict[str, Any],
) -> dict[str, Any]:
    """Evaluate on whole validation and test text; write summary, exported model and report."""
    length = recipe.training.block_length
    batch_size = recipe.training.eval_batch_size
    blocks = Blocks(corpus.stream("validation"), length)
    validation = evaluate(model, blocks.sequential(batch_size), amp)
    test_blocks = Blocks(corpus.stream("test"), length)
    bytes_per_token = corpus.bytes_per_token("test")
    test = evaluate(model, test_blocks.sequential(batch_size), amp, bytes_per_token)
    controls = {}
    if test.steps_vs_ptarget is not None:
        rule = shuffled_passes(model, amp)
        shuffled = evaluate(model, test_blocks.sequential(batch_size), amp, keep_rule_for=rule)
        controls["test_loss_shuffled_steps"] = shuffled.loss
    summary = {
        "name": recipe.name,
        "method": recipe.model.method,
        "seed": recipe.seed,
        "val_loss": validation.loss,
        "test_loss": test.loss,
        "perplexity": test.perplexity,
        "bits_per_byte": test.bits_per_byte,
        "passes_per_token": test.passes_per_token,
        "prune_ratio": test.prune_ratio,
        "steps_vs_ptarget": test.steps_vs_ptarget,
        **controls,
        "train_passes_per_token": counters["passes"] / max(1, counters["tokens"]),
        "parameters": model.num_parameters(),
        **{
            key: counters[key]
            for key in ("step", "tokens", "kaplan_flops", "exact_flops", "seconds", "peak_bytes")
        },
    }
    model.save_pretrained(run_dir / EXPORT, figures=summary)
    corpus.tokenizer.save_pretrained(run_dir / EXPORT)

    spread = max(1, test_blocks.num_blocks // REPORT_TEXTS)
    shown = np.arange(spread // 2, test_blocks.num_blocks, spread)[:REPORT_TEXTS]
    texts = [
        collect_text(
            model, corpus.tokenizer, ids[:REPORT_TOKENS], f"Test text, block {number + 1}", amp
        )
        for number, ids in zip(shown, test_blocks.at(shown), strict=True)
    ]
    write_report(
        run_dir / REPORT,
        RunReport(
            title=f"{recipe.name} ({recipe.model.method})",
            summary={key: value for key, value in summary.items() if value is not None},
            recipe_yaml=recipe.to_yaml(),
            history=read_rows(run_dir / "metrics.jsonl"),
            texts=texts,
            controls=controls,
            by_steps=test.by_steps,
        ),
    )
    write_text(run_dir / SUMMARY, json.dumps(summary, indent=2))  # last: it says "finished"
    return summary


def checksums(corpus: Corpus) -> list[str]:
    """Checksums of all tokens of a corpus."""
    return [shard.sha256 for split in corpus.manifest.splits.values() for shard in split.shards]


def corpus_id(corpus: Corpus) -> str:
    """What tells one prepared corpus from another: a digest of its checksums."""
    return hashlib.blake2b(" ".join(checksums(corpus)).encode(), digest_size=8).hexdigest()


def open_model(path: Path) -> tuple[LatentLM, PreTrainedTokenizerBase, Recipe | None]:
    """The model and tokenizer of a run directory (with its recipe) or of an exported model.

    Raises:
        UserError: nothing there, no exported model yet, or a tokenizer that does not fit.
    """
    recipe = None
    export = path
    if (path / RECIPE).is_file():
        recipe = make_recipe(read_recipe(path), str(path))
        export = path / EXPORT
        if not export.is_dir():
            raise UserError(f"the run {path} has not finished: train it to its end first")
    if not (export / "config.json").is_file():
        raise UserError(f"no run and no exported model at {path}: give the folder of one")
    try:
        model = AutoModelForCausalLM.from_pretrained(export)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load the model in {export}: {reason}") from error
    if not isinstance(model, LatentLM):
        raise UserError(f"{export} holds a {type(model).__name__}, not a latentcot model")
    tokenizer = load_tokenizer(str(export))
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer in {export} has {len(tokenizer)} tokens and the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return model.eval(), tokenizer, recipe


@dataclass
class OpenRun:
    """A finished run with its corpus, on the device of its recipe.

    Attributes:
        amp: makes the autocast context that the model is run under.
    """

    path: Path
    model: LatentLM
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    corpus: Corpus
    amp: Amp

    def evaluate(
        self, split: Split, max_blocks: int | None = None, keep_rule: KeepRule | None = None
    ) -> Evaluation:
        """Figures on a split of the corpus, or on its first blocks.

        Args:
            keep_rule: who goes on, instead of the model's own rule.
        """
        config = self.recipe.training
        blocks = Blocks(self.corpus.stream(split), config.block_length)
        return evaluate(
            self.model,
            blocks.sequential(config.eval_batch_size, max_blocks),
            self.amp,
            self.corpus.bytes_per_token(split),
            None if keep_rule is None else lambda ids: keep_rule,
        )


def open_run(path: Path) -> OpenRun:
    """A finished run and its corpus.

    Raises:
        UserError: no finished run at `path`, or another corpus than it was trained on.
    """
    model, tokenizer, recipe = open_model(path)
    if recipe is None:
        raise UserError(f"{path} is an exported model without a corpus: give a run directory")
    config = recipe.training
    device = choose_device(config.device)
    precision = resolve_precision(config.precision, device)
    model.set_attn_implementation(resolve_attention(config.attention, precision, device))
    corpus = prepare(recipe.data)
    if fingerprint(corpus.tokenizer) != fingerprint(tokenizer):
        raise UserError(
            f"the corpus of {path} has changed since it was trained (another tokenizer comes out "
            "of it now): evaluate on the machine and Python that trained it"
        )
    amp = autocast(precision, device)
    return OpenRun(path, model.to(device), tokenizer, recipe, corpus, amp)


def versions() -> dict[str, Any]:
    """What produced the numbers of a run: Python, packages, commit of the working directory."""
    packages = ("latentcot", "torch", "transformers", "tokenizers", "datasets", "numpy")
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        found["commit"] = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = "unknown"
    return found


def write_text(path: Path, text: str) -> None:
    """Write a file beside and rename it: a reader sees the old or the new one, never a half."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
