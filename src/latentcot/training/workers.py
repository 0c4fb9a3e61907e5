"""Several runs at a time, each in a process of its own, with one bar for each."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from latentcot.errors import UserError
from latentcot.training import run_dir as files
from latentcot.training.hardware import choose_device
from latentcot.training.loop import train
from latentcot.training.recipe import Recipe, make_recipe

LOG_SUFFIX = ".log"
TAIL_BYTES = 4096


@dataclass(frozen=True)
class Task:
    """A run to train: its recipe, its run directory, and what people call it."""

    recipe: Recipe
    directory: Path
    label: str

    @property
    def log(self) -> Path:
        """What the process printed."""
        return self.directory.with_name(self.directory.name + LOG_SUFFIX)


@dataclass
class _Worker:
    task: Task
    process: Any
    message: Any
    slot: int
    bar: TaskID


def default_workers(recipe: Recipe) -> int:
    """Runs at a time: one for each GPU if the recipe trains on one, else one for each core."""
    device = choose_device(recipe.training.device).type
    return {"cuda": torch.cuda.device_count(), "cpu": num_cores()}.get(device, 1)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def train_all(tasks: Iterable[Task], workers: int) -> dict[str, str]:
    """Train every task, `workers` at a time, each on its share of the cores or on its own GPU.

    A task whose directory holds a checkpoint goes on from there. If this process dies, however,
    its workers save a checkpoint and leave.

    Returns:
        label -> what went wrong, for the tasks that failed; the others have finished.
    """
    waiting: list[Task] = list(reversed(list(tasks)))
    failures: dict[str, str] = {}
    num_tasks, num_done = len(waiting), 0
    workers = max(1, min(workers, num_tasks))
    with _bars() as (bars, console), _pool() as running:
        total = bars.add_task(f"{num_tasks} runs", total=num_tasks, figures="")
        while waiting or running:
            while waiting and len(running) < workers:
                free = min(set(range(workers)) - {worker.slot for worker in running})
                _start(running, waiting.pop(), free, workers, bars)
            connection.wait([worker.process.sentinel for worker in running], timeout=0.5)
            for worker in list(running):
                _show(worker, bars)
                if worker.process.is_alive():
                    continue
                running.remove(worker)
                worker.process.join()
                bars.remove_task(worker.bar)
                num_done += 1
                bars.update(total, completed=num_done)
                message = _outcome(worker)
                if message:
                    failures[worker.task.label] = message
                outcome = f"failed: {message}" if message else _result(worker.task)
                console.print(
                    f"[{num_done}/{num_tasks}] {worker.task.label}: {outcome}",
                    markup=False,
                    soft_wrap=True,
                )
    return failures


def _start(running: list[_Worker], task: Task, slot: int, workers: int, bars: Progress) -> None:
    task.directory.parent.mkdir(parents=True, exist_ok=True)
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    content = task.recipe.model_dump(mode="json")
    threads = max(1, num_cores() // workers)
    gpu = slot if choose_device(task.recipe.training.device).type == "cuda" else None
    process = context.Process(
        target=_work, args=(content, task.directory, task.log, gpu, threads, sender)
    )
    bar = bars.add_task(task.label, total=1.0, figures="")
    process.start()
    running.append(_Worker(task, process, receiver, slot, bar))
    sender.close()


def _context() -> Any:
    """Processes that share nothing but what is imported, which is imported once where possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _work(
    content: dict[str, Any],
    directory: Path,
    log: Path,
    gpu: int | None,
    threads: int,
    sender: Any,
) -> None:
    """The life of a worker: train one run, tell the parent what a user can mend, leave."""
    with log.open("a", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu % torch.cuda.device_count())
    try:
        train(make_recipe(content), directory)
    except (UserError, OSError) as error:
        sender.send(str(error))
        sys.exit(2)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # the loop saves a checkpoint and leaves


@contextmanager
def _pool() -> Iterator[list[_Worker]]:
    """The running workers; those that still run at the end are told to save and leave."""
    running: list[_Worker] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield running
    finally:
        signal.signal(signal.SIGTERM, old)
        if running:
            print("saving the runs in progress ...", file=sys.stderr)
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.join()


@contextmanager
def _bars() -> Iterator[tuple[Progress, Console]]:
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield bars, console


def _show(worker: _Worker, bars: Progress) -> None:
    """Bring the bar of a worker up to the last row that it has recorded."""
    row = _last_row(worker.task.directory / "metrics.jsonl")
    if not row:
        return
    share = worker.task.recipe.training.share_spent(row["tokens"], row["exact_flops"])
    figures = (
        f"loss {row['loss']:.3f}  passes {row['passes_per_token']:.2f}  "
        f"{row['tokens_per_s']:,.0f} tok/s"
    )
    bars.update(worker.bar, completed=min(1.0, share), figures=figures)


def _last_row(path: Path) -> dict[str, Any]:
    """The last whole training row of a metrics file; nothing if there is none yet."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if row.get("kind") == "train":
            return row
    return {}


def _outcome(worker: _Worker) -> str | None:
    """Why a worker failed, or None if its run has finished."""
    if worker.message.poll():
        try:
            return str(worker.message.recv())
        except EOFError:
            pass
    if (worker.task.directory / files.SUMMARY).is_file():
        return None
    code = worker.process.exitcode
    reason = f"signal {-code}, out of memory?" if code and code < 0 else f"exit code {code}"
    return f"its process ended early ({reason}): see {worker.task.log}"


def _result(task: Task) -> str:
    summary = json.loads((task.directory / files.SUMMARY).read_text(encoding="utf-8"))
    return (
        f"test loss {summary['test_loss']:.4f}, {summary['passes_per_token']:.2f} passes, "
        f"{summary['seconds'] / 60:.1f} min"
    )
