"""`python crash.py PLAN`: run the command line again and again, each time killed at one moment.

PLAN is a JSON file with a list of [arguments, moment, count]. Each entry is a process of its own,
forked from this one, which has imported everything and computed nothing; it runs `python -m
latentcot ARGUMENTS` and is killed with SIGKILL the `count`-th time that it reaches `moment`, or
never if that is null. Prints the list of what `os.waitpid` said of them.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaModel  # noqa: F401 - imported lazily, and slowly, when it is named

from latentcot.training.loop import Run
from latentcot.training.metrics import Metrics


def moment_of(event: str, path: str, target: str) -> str | None:
    """The name of the moment just before an operation on files, as Python's audit hooks see it."""
    match event, Path(path).name, Path(target).name:
        case "os.rename", _, "recipe.yaml":
            return "before the first file"
        case "os.rename", _, "summary.json":
            return "before the summary"
        case "os.rename", "metrics.partial", _:
            return "rewriting the metrics"
        case "open", "meta.json", "w":
            return "state without its checksum"
        case "os.rename", _, name if name.startswith("step-"):
            return "before the rename"
        case "open", "checkpoints", _:
            return "after the rename"
        case "os.remove", "state.pt" | "meta.json", _:
            return "removing an old checkpoint"
    return None


AT_END = "before the summary"
AT_START = ("before the first file", "rewriting the metrics")
WHILE_TRAINING = (
    "after an update",
    "half a metrics line",
    "half a state file",
    "state without its checksum",
    "before the rename",
    "after the rename",
    "removing an old checkpoint",
)


def install(moment: str, count: int) -> None:
    """Have this process killed the `count`-th time that it reaches `moment`."""
    left = count

    def reach(name: str, torn: Path | None = None, lost_bytes: int = 0) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and left == 0:
            if torn:
                os.truncate(torn, torn.stat().st_size - lost_bytes)
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove"):
            path, target = str(arguments[0]), str(arguments[1])
            if name := moment_of(event, path, target):
                reach(name)

    def after(function: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            result = function(*arguments)
            then(*arguments)
            return result

        return wrapped

    sys.addaudithook(audit)
    torch.save = after(torch.save, lambda _, path: reach("half a state file", path, 5000))
    Metrics.add = after(Metrics.add, lambda m, _: reach("half a metrics line", m.path, 40))
    Run.update = after(Run.update, lambda _: reach("after an update"))


def run_forked(arguments: list[str], moment: str | None, count: int) -> int:
    """The wait status of a child that runs the command line and is killed at the moment."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    os.dup2(2, 1)
    if moment:
        install(moment, count)
    sys.argv = ["latentcot", *arguments]
    code = 1
    try:
        runpy.run_module("latentcot", run_name="__main__")
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([run_forked(*entry) for entry in plan]))
