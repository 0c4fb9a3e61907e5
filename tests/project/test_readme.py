"""What README.md shows is run: every block, in its order, in one folder, cut to a few updates.

A block below a line `<!-- not run: the reason -->` is left out.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n+)?```(?P<language>bash|python)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# What makes a command of the README quick; where it has the option already, the last one counts.
SHORT = {
    "train": ["training.max_steps=2", "training.eval_blocks=2", "data.max_documents=40"],
    "eval": ["--blocks", "2"],
    "generate": ["--max-new-tokens", "4"],
    "dial": ["--blocks", "1", "--taus", "0,1"],
    "bench": ["--batches", "1", "--contexts", "16", "--new-tokens", "2", "--repeats", "1"],
    "compare": [
        *("training.max_steps=2", "training.eval_blocks=2", "data.max_documents=40"),
        *("--seeds", "0"),
    ],
    "flops": [],
}


class Block(NamedTuple):
    language: str
    body: str


def blocks(text: str) -> list[Block]:
    """The bash and python blocks that are meant to be run."""
    return [Block(m["language"], m["body"]) for m in BLOCK.finditer(text) if not m["skip"]]


def commands(script: str) -> list[list[str]]:
    """The latentcot commands of a bash block, those behind its `make` targets included."""
    found = []
    for line in re.split(r"\n|&&", script.replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        match words:
            case [] | ["git", "clone", *_] | ["cd", _]:
                pass
            case ["pip", "install", *options]:
                assert "constraints.txt" in options, f"an install without constraints: {line}"
            case ["make", *arguments]:
                found += behind_make(arguments)
            case ["latentcot" | "torchrun", *_]:
                found.append([part for word in words for part in braces(word)])
            case _:
                raise AssertionError(f"README.md shows a command that no test can run: {line}")
    return found


def braces(word: str) -> list[str]:
    """`a{b,c}d` as a shell expands it: abd acd."""
    if not (match := re.search(r"\{([^{}]*,[^{}]*)\}", word)):
        return [word]
    return [word[: match.start()] + part + word[match.end() :] for part in match[1].split(",")]


def behind_make(arguments: list[str]) -> list[list[str]]:
    """The latentcot commands that `make` would run with these arguments."""
    lines = [shlex.split(line) for line in dry_make(*arguments)]
    return [["latentcot", *w[1:]] for w in lines if w and w[0] == ".venv/bin/latentcot"]


def dry_make(*arguments: str) -> list[str]:
    """The lines that `make` would run."""
    variables = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL"}}
    printed = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return printed.replace("\\\n", " ").splitlines()


def cut_short(words: list[str]) -> list[str]:
    """A latentcot command as the argument list of a quick process of this Python."""
    launcher, *arguments = words
    subcommand = words[words.index("latentcot") + 1]
    module = "latentcot" if launcher == "latentcot" else "torch.distributed.run"
    return [sys.executable, "-m", module, *arguments, *SHORT.get(subcommand, [])]


def test_blocks_are_found_and_marked_ones_left_out():
    text = (
        "# Title\n```bash\nmake setup\n```\ntext\n\n```python\nprint(1)\n```\n"
        "<!-- not run: needs a GPU -->\n\n```bash\ntorchrun train.py\n```\n```yaml\na: 1\n```\n"
    )
    assert blocks(text) == [Block("bash", "make setup\n"), Block("python", "print(1)\n")]


def test_commands_are_read_as_a_shell_would():
    script = (
        "git clone https://example.org/x.git && cd x && latentcot eval runs/demo  # all\n"
        "pip install -c constraints.txt -e .\n"
        "\n"
        "# a comment\n"
        "latentcot train recipes/demo.yaml \\\n  model.tau=0.3   # think less\n"
        "latentcot generate runs/demo --prompt 'def main('\n"
        "latentcot compare recipes/{a,b}.yaml\n"
    )
    assert commands(script) == [
        ["latentcot", "eval", "runs/demo"],
        ["latentcot", "train", "recipes/demo.yaml", "model.tau=0.3"],
        ["latentcot", "generate", "runs/demo", "--prompt", "def main("],
        ["latentcot", "compare", "recipes/a.yaml", "recipes/b.yaml"],
    ]


@pytest.mark.parametrize("line", ["./train.sh", "pip install latentcot", "python train.py"])
def test_a_command_that_cannot_be_run_is_refused(line):
    with pytest.raises(AssertionError, match=re.escape(line)):
        commands(line)


def test_commands_are_cut_short():
    single = cut_short(["latentcot", "eval", "runs/demo"])
    assert single == [sys.executable, "-m", "latentcot", "eval", "runs/demo", "--blocks", "2"]
    double = cut_short(shlex.split("torchrun --nproc-per-node 2 -m latentcot train a.yaml"))
    assert double[1:3] == ["-m", "torch.distributed.run"]
    assert double[5:8] == ["-m", "latentcot", "train"]
    assert double[9:] == SHORT["train"]


def test_make_targets_are_what_they_say():
    train = ["latentcot", "train", "recipes/demo.yaml", "--run-dir", "runs/demo"]
    assert behind_make(["train"]) == [train]
    assert behind_make(["train", "ARGS=model.tau=0.3"]) == [[*train, "model.tau=0.3"]]
    setup = "\n".join(dry_make("--always-make", "setup"))
    assert "pip install --quiet -c constraints.txt -e '.[dev]'" in setup
    test = "\n".join(dry_make("test"))
    for tool in ("ruff check", "ruff format --check", "lint-imports", "mypy", "pytest"):
        assert f"{tool}" in test
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_true(tmp_path: Path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    shown = blocks((ROOT / "README.md").read_text())
    processes = []
    for block in shown:
        if block.language == "python":
            processes.append([sys.executable, "-c", block.body])
        else:
            processes += [cut_short(words) for words in commands(block.body)]
    assert any("train" in process for process in processes)
    for process in processes:
        done = subprocess.run(
            process, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{shlex.join(process)}\n{done.stdout}\n{done.stderr}"
