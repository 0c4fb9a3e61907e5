"""Atomic checkpoints: written beside, synced, renamed; the last few are kept."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from latentcot.data.shards import sync, sync_tree
from latentcot.errors import UserError

STATE_FILE = "state.pt"
META_FILE = "meta.json"
_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints of a run, one folder each, named by the number of updates done.

    A folder bears its name only once all its files are on disk, so a checkpoint that can be seen
    is whole unless somebody changed it; its checksum tells.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, ascending."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` (tensors, numbers, strings, nested) as the checkpoint of `step`.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints stay as they are.
        """
        target = self.directory / f"step-{step:08d}"
        if target.exists():
            return
        partial = self.directory / f".partial-{step:08d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            torch.save(state, partial / STATE_FILE)
            meta = {"step": step, "sha256": _sha256(partial / STATE_FILE)}
            (partial / META_FILE).write_text(json.dumps(meta), encoding="utf-8")
            sync_tree(partial)
            partial.rename(target)
            sync(self.directory)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = (
                f"the checkpoint of step {self.steps()[-1]} is whole"
                if self.steps()
                else "none yet"
            )
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.directory} ({error}): make "
                f"room and start again with --resume auto; {kept}"
            ) from error
        self._prune()

    def load(self, step: int) -> dict[str, Any]:
        """The state of the checkpoint of `step`.

        Raises:
            UserError: a file is missing or is not what was written.
        """
        directory = self.directory / f"step-{step:08d}"
        try:
            meta = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
            whole = meta["sha256"] == _sha256(directory / STATE_FILE)
        except (OSError, ValueError, KeyError):
            whole = False
        if not whole:
            raise UserError(
                f"the checkpoint {directory} is damaged: delete this folder to go on from the one "
                "before it"
            )
        state: dict[str, Any] = torch.load(
            directory / STATE_FILE, map_location="cpu", weights_only=True
        )
        return state

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            # Renamed first: a kill in the middle of the removal leaves no half checkpoint behind.
            (self.directory / f"step-{step:08d}").rename(self.directory / f".partial-{step:08d}")
        for partial in self.directory.glob(".partial-*"):  # those of earlier kills included
            shutil.rmtree(partial)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
