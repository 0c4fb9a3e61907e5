"""A tiny recipe, and what a run of it left behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Content = dict[str, Any]


class Outcome(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Latentcot = Callable[..., Outcome]

WALL_CLOCK = ("tokens_per_s", "seconds", "peak_bytes")


def tiny(source: Path, method: str = "adaptive", **training: Any) -> Content:
    """A recipe of 12 updates, a tenth of a second, whose router prunes some tokens, not all."""
    options: Content = {}
    if method == "adaptive":
        options = {"l_max": 2, "tau": 0.49, "initial_gate": 0.7, "beta": 1}
    return {
        "name": "tiny",
        "model": {
            "method": method,
            **options,
            "backbone": {
                "vocab_size": 300,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 32,
            },
        },
        "data": {"source": str(source), "tokenizer": {"vocab_size": 300}},
        "training": {
            "budget_tokens": 12 * 4 * 16,
            "block_length": 16,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "precision": "float32",
            "device": "cpu",
            "eval_every": 2,
            "eval_blocks": 3,
            "checkpoint_every": 3,
            **training,
        },
    }


def write_recipe(path: Path, content: Content) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, without what the clock decides."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in WALL_CLOCK}
        for line in lines
    ]


def train_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["kind"] == "train"]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def checkpoints(run_dir: Path) -> list[str]:
    """Every name in the folder of the checkpoints, hidden ones included."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
