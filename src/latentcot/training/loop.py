"""The training loop: read `train` and `Run.update` from top to bottom."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from latentcot.data import Blocks, Corpus, check_vocabulary, prepare
from latentcot.errors import UserError
from latentcot.evaluation.perplexity import evaluate, prune_ratio
from latentcot.models.base import LatentLM
from latentcot.training import run_dir as files
from latentcot.training.checkpoint import Checkpoints
from latentcot.training.hardware import (
    autocast,
    choose_device,
    peak_memory,
    resolve_attention,
    resolve_precision,
)
from latentcot.training.metrics import Metrics, RouterWatch, Row
from latentcot.training.optimization import build_optimizer, learning_rate
from latentcot.training.progress import Progress
from latentcot.training.recipe import Recipe


@dataclass
class Counters:
    """What has been spent so far; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    passes: int = 0
    exact_flops: float = 0.0
    kaplan_flops: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0

    def share_of(self, recipe: Recipe) -> float:
        """The spent share of the budget, from 0 to 1 (or a little more at the end)."""
        return recipe.training.share_spent(self.tokens, self.exact_flops)


def train(recipe: Recipe, run_dir: Path, resume: str = "auto") -> dict[str, Any]:
    """Train `recipe` in `run_dir`, from its last checkpoint if there is one.

    Args:
        resume: `auto` goes on where a checkpoint is; `must` asks for one; `never` asks for none.

    Returns:
        The content of summary.json.

    Raises:
        UserError: anything that the user can mend; checkpoints stay as they are.
        SystemExit: SIGINT or SIGTERM came; a checkpoint was saved.
    """
    config = recipe.training
    with files.locked(run_dir):
        run = Run(recipe, run_dir, resume)
        with closing(run.metrics), run.progress, stop_signals() as stopped:
            while not run.is_done():
                row = run.update()
                is_last = run.is_done()
                if row["step"] % config.eval_every == 0 or is_last:
                    run.evaluate()
                if row["step"] % config.checkpoint_every == 0 or is_last:
                    run.save()
                if stopped:
                    run.save()
                    raise SystemExit(128 + stopped[0])
        return files.finish(run_dir, run.model, run.corpus, recipe, run.amp, asdict(run.counters))


class Run:
    """A run in progress: model, optimizer, data, counters, and where they are recorded."""

    def __init__(self, recipe: Recipe, run_dir: Path, resume: str = "auto"):
        config = recipe.training
        self.recipe = recipe
        self.checkpoints = Checkpoints(run_dir / files.CHECKPOINTS, config.keep_checkpoints)
        saved_steps = self.checkpoints.steps()
        files.check_resume(run_dir, recipe, resume, bool(saved_steps))

        self.device = choose_device(config.device)
        precision = resolve_precision(config.precision, self.device)
        self.amp = autocast(precision, self.device)
        seed_everything(recipe.seed, "weights")
        model = recipe.build_model()
        self.progress = Progress(recipe, model.config.num_passes)
        self.corpus = prepare(recipe.data, progress=self.progress.say)
        check_vocabulary(self.corpus.tokenizer, model.config.vocab_size)
        set_special_tokens(model, self.corpus)
        model.set_attn_implementation(resolve_attention(config.attention, precision, self.device))
        dtype = torch.float64 if precision == "float64" else torch.float32
        self.model: LatentLM = model.to(self.device, dtype)
        self.num_parameters = self.model.num_parameters()
        self.optimizer = build_optimizer(self.model, config)
        self.blocks = Blocks(self.corpus.stream("train"), config.block_length, recipe.seed)
        self.validation = Blocks(self.corpus.stream("validation"), config.block_length)
        Blocks(self.corpus.stream("test"), config.block_length)  # too short a split: fail now

        self.counters = Counters()
        self.watch = RouterWatch(model.config.num_passes - 1 if model.config.is_watched else 0)
        if saved_steps:
            self._load(saved_steps[-1])
        files.begin(run_dir, recipe, self.corpus, precision)
        self.metrics = Metrics(run_dir, self.counters.step)
        self.progress.describe(self.num_parameters, precision, self.device, self.corpus)

    def is_done(self) -> bool:
        limit = self.recipe.training.max_steps or math.inf
        return self.counters.share_of(self.recipe) >= 1 or self.counters.step >= limit

    def update(self) -> Row:
        """One optimizer step over `batch_size` sequences; returns the recorded row."""
        started = time.perf_counter()
        config, counters = self.recipe.training, self.counters
        # All randomness of an update is a function of seed and step: nothing to save or restore.
        seed_everything(self.recipe.seed, f"step {counters.step}")
        rate = learning_rate(self._share_after_this_step(), config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        batch = torch.from_numpy(self.blocks.batch(counters.step, config.batch_size))
        num_targets = batch.shape[0] * (batch.shape[1] - 1)
        self.model.train()
        self.model.draw()
        ce_loss = adaptive_loss = 0.0
        num_passes = 0
        for ids in batch.to(self.device).split(config.micro_batch):
            with self.amp():
                out = self.model(
                    ids,
                    labels=ids,
                    num_items_in_batch=num_targets,
                    skip_logits=True,
                    use_cache=False,
                )
            out.loss.backward()
            ce_loss += float(out.ce_loss.detach())
            adaptive_loss += float(out.adaptive_loss.detach())
            num_passes += int(out.passes.sum())
            flops = self.model.count_flops(out.passes)
            counters.exact_flops += flops.training
            counters.kaplan_flops += flops.kaplan(self.num_parameters)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        loss = ce_loss + adaptive_loss
        if not math.isfinite(loss) or not math.isfinite(float(grad_norm)):
            raise UserError(
                f"the loss of step {counters.step + 1} is {loss} (gradient norm "
                f"{float(grad_norm)}): lower training.learning_rate or training.grad_clip; "
                "the last checkpoint is unharmed"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        counters.step += 1
        counters.tokens += batch.numel()
        counters.passes += num_passes
        elapsed = time.perf_counter() - started
        counters.seconds += elapsed
        counters.peak_bytes = max(counters.peak_bytes, peak_memory(self.device))
        passes_per_token = num_passes / batch.numel()
        row = {
            "kind": "train",
            "step": counters.step,
            "tokens": counters.tokens,
            "loss": loss,
            "ce_loss": ce_loss,
            "adaptive_loss": adaptive_loss,
            "passes_per_token": passes_per_token,
            "prune_ratio": prune_ratio(passes_per_token, self.model.config),
            "learning_rate": rate,
            "grad_norm": float(grad_norm),
            "tokens_per_s": batch.numel() / elapsed,
            "exact_flops": counters.exact_flops,
            "kaplan_flops": counters.kaplan_flops,
            "seconds": counters.seconds,
        }
        self.metrics.add(row)
        share = counters.share_of(self.recipe)
        self.progress.update(row, share)
        if warning := self.watch.update(passes_per_token, share):
            self.metrics.add({"kind": "warning", "step": counters.step, "message": warning})
            self.progress.warn(warning)
        return row

    def evaluate(self) -> None:
        """Record loss and passes on the first validation blocks."""
        config, counters = self.recipe.training, self.counters
        batches = self.validation.sequential(config.eval_batch_size, config.eval_blocks)
        result = evaluate(self.model, batches, self.amp)
        row = {
            "kind": "eval",
            "split": "validation",
            "step": counters.step,
            "tokens": counters.tokens,
            "loss": result.loss,
            "passes_per_token": result.passes_per_token,
            "prune_ratio": result.prune_ratio,
            "exact_flops": counters.exact_flops,
            "kaplan_flops": counters.kaplan_flops,
        }
        self.metrics.add(row)
        self.progress.evaluated(row)

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        self.metrics.sync()
        self.checkpoints.save(
            self.counters.step,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "counters": asdict(self.counters),
                "watch": asdict(self.watch),
                "corpus": files.checksums(self.corpus),
            },
        )

    def _load(self, step: int) -> None:
        state = self.checkpoints.load(step)
        if state["corpus"] != files.checksums(self.corpus):
            raise UserError(
                f"the corpus {self.recipe.data.source} is not what this run was started on: "
                "give another --run-dir, or the text and tokenizer as they were"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.counters = Counters(**state["counters"])
        self.watch = RouterWatch(**state["watch"])
        self.progress.say(f"going on after step {step}")

    def _share_after_this_step(self) -> float:
        """Share of the budget at the end of the coming update, as far as it is known."""
        share, done = self.counters.share_of(self.recipe), self.counters.step
        config = self.recipe.training
        if config.budget_tokens is not None:
            return share + config.batch_size * config.block_length / config.budget_tokens
        if done:
            return share + share / done
        assert config.budget_flops is not None
        all_passes = torch.full(
            (config.batch_size, config.block_length), self.model.config.num_passes
        )
        return self.model.count_flops(all_passes).training / config.budget_flops


def seed_everything(seed: int, purpose: str) -> None:
    """Seed torch with a hash of `seed` and `purpose`."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))


def set_special_tokens(model: LatentLM, corpus: Corpus) -> None:
    """Tell the model the tokenizer's special tokens, for generation and for the export."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(corpus.tokenizer, name)
        setattr(model.config, name, token)
        setattr(model.generation_config, name, token)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the loop can save and leave between two updates."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(number, lambda n, _: received.append(n)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
