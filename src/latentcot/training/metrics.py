"""What a run records while it trains: metrics.jsonl, TensorBoard, the router watch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.jsonl; a last line that a kill cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class Metrics:
    """Appends rows to metrics.jsonl and TensorBoard; on resume, drops what the kill made void."""

    def __init__(self, run_dir: Path, step: int):
        """Open the records of a run that continues after `step` updates."""
        self.path = run_dir / "metrics.jsonl"
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def add(self, row: Row) -> None:
        """Record a row with `kind` and `step`."""
        self._file.write(json.dumps(row) + "\n")
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                self._board.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def sync(self) -> None:
        """Have the system write all rows to the disk: a checkpoint relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._board.close()


@dataclass
class RouterWatch:
    """Warns once when the router has died (nobody thinks) or sleeps (nothing is pruned).

    A dead router does not come back: a pruned token sends it no cross-entropy gradient. A sleeping
    one saves nothing. Both are judged on a running mean, and sleep only after a share of the run.
    Saved with every checkpoint: a resumed run does not warn again.
    """

    DEAD_PASSES = 1.05
    ASLEEP_RATIO = 1e-3
    ASLEEP_AFTER = 0.5
    SMOOTHING = 0.95

    l_max: int
    passes: float | None = None
    warned: list[str] = field(default_factory=list)

    def update(self, passes_per_token: float, share_spent: float) -> str | None:
        """Take in an update; returns a warning the first time there is one."""
        if not self.l_max:
            return None
        old = passes_per_token if self.passes is None else self.passes
        self.passes = self.SMOOTHING * old + (1 - self.SMOOTHING) * passes_per_token
        if self.passes < self.DEAD_PASSES:
            return self._once(
                "dead",
                f"the router has died: {self.passes:.3f} passes per token; raise model.beta or "
                "model.initial_gate, or lower model.tau or model.lambda_adaptive",
            )
        prune_ratio = 1 - (self.passes - 1) / self.l_max
        if share_spent > self.ASLEEP_AFTER and prune_ratio < self.ASLEEP_RATIO:
            return self._once(
                "asleep",
                f"the router sleeps: {prune_ratio:.2%} of the latent steps are pruned; lower "
                "model.beta or model.initial_gate, or raise model.tau or model.lambda_adaptive",
            )
        return None

    def _once(self, kind: str, message: str) -> str | None:
        if kind in self.warned:
            return None
        self.warned.append(kind)
        return message
