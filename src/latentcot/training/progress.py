"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from latentcot.data import Corpus
from latentcot.training.metrics import Row
from latentcot.training.recipe import Recipe

SMOOTHING = 0.95


class Progress:
    """Bar with loss, passes per token, tokens/s and time left; lines for everything else."""

    def __init__(self, recipe: Recipe, num_passes: int):
        self.console = Console(stderr=True, highlight=False)
        self.name = recipe.name
        self.num_passes = num_passes
        self.row: Row = {}
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _Figures(self),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(recipe.name, total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)

    def describe(
        self, num_parameters: int, precision: str, device: torch.device, corpus: Corpus
    ) -> None:
        """One line about what is trained on what."""
        tokens = corpus.manifest.splits["train"].num_tokens
        self.say(
            f"{self.name}: {num_parameters / 1e6:.2f}M parameters, up to {self.num_passes} passes, "
            f"{precision} on {device}, {tokens / 1e6:.2f}M training tokens"
        )

    def update(self, row: Row, share: float) -> None:
        smooth = ("loss", "passes_per_token", "tokens_per_s")
        old = self.row or row
        self.row = row | {k: SMOOTHING * old[k] + (1 - SMOOTHING) * row[k] for k in smooth}
        self._bar.update(self._task, completed=min(share, 1.0))

    def evaluated(self, row: Row) -> None:
        speed = self.row.get("tokens_per_s", 0.0)
        self.say(
            f"step {row['step']:>6}  {row['tokens'] / 1e6:7.2f}M tokens  "
            f"validation loss {row['loss']:.4f}  passes {row['passes_per_token']:.2f}  "
            f"{speed:,.0f} tokens/s"
        )


class _Figures(ProgressColumn):
    def __init__(self, progress: Progress):
        super().__init__()
        self.progress = progress

    def render(self, task: Task) -> Text:
        row: dict[str, Any] = self.progress.row
        if not row:
            return Text("")
        return Text(
            f"loss {row['loss']:.3f}  passes {row['passes_per_token']:.2f}  "
            f"{row['tokens_per_s']:,.0f} tok/s"
        )
