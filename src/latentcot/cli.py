"""The command line: `latentcot train | eval | generate`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from latentcot.errors import UserError

app = typer.Typer(
    name="latentcot",
    help="Pretrain language models that think before each token, as long as it needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes to the recipe, as key.sub=value")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
RunPath = Annotated[Path, typer.Argument(help="a run directory or an exported model")]


class Resume(StrEnum):
    """Whether to go on from a checkpoint of the run directory."""

    auto = "auto"
    never = "never"
    must = "must"


class SplitName(StrEnum):
    """A split of the corpus."""

    train = "train"
    validation = "validation"
    test = "test"


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="a YAML recipe, see recipes/")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="where the run is kept [default: runs/NAME]")
    ] = None,
    resume: Annotated[Resume, typer.Option(help="go on from the last checkpoint")] = Resume.auto,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; leaves a model, its figures and report.html in the run directory."""
    from latentcot.training.loop import train as run_training
    from latentcot.training.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    directory = run_dir or Path("runs") / resolved.name
    summary = run_training(resolved, directory, resume.value)
    show(summary, as_json, title=f"{directory}")
    if not as_json:
        print(f"report: {directory / 'report.html'}\nmodel:  {directory / 'model'}")


@app.command(name="eval")
def evaluate(
    run: RunPath,
    split: Annotated[SplitName, typer.Option(help="split of the run's corpus")] = SplitName.test,
    blocks: Annotated[int | None, typer.Option(help="only the first blocks", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Loss, perplexity, bits per byte and passes per token on the corpus of a run."""
    from latentcot.training.run_dir import evaluate_run

    show(evaluate_run(run, split.value, blocks), as_json, title=f"{run}, {split.value} text")


@app.command()
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="text to go on from")],
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token", min=0)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample among so many tokens; 0: all", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    cache: Annotated[bool, typer.Option(help="reuse slots of earlier tokens")] = True,
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt."""
    from latentcot.decoding.text import generate_text
    from latentcot.training.run_dir import open_model

    model, tokenizer, _ = open_model(run)
    result = generate_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        use_cache=cache,
        stream=not as_json,
    )
    if as_json:
        print(json.dumps(result))


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print figures as a table or as JSON."""
    if as_json:
        print(json.dumps(values))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in values.items():
        if not isinstance(value, list):
            table.add_row(key, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console(highlight=False).print(table)


def main() -> None:
    """Entry point: what the user can mend is one sentence on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:  # a full disk, a folder that may not be written, ...
        print(f"error: {error}: mend this and give the same command again", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
