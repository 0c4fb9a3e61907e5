"""The command line: `latentcot train | compare | eval | generate | dial | bench | flops`."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from latentcot.console import flops_text, numbers, show, show_cells, shower, step_style
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


class Match(StrEnum):
    """What compared systems have in common."""

    tokens = "tokens"
    flops = "flops"
    both = "both"


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
        Path | None, typer.Option(help="where the run is kept (default: runs/NAME)")
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


@app.command()
def compare(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="recipes, then changes to all as key.sub=value")
    ] = None,
    seeds: Annotated[str, typer.Option(help="seeds of weights and data order")] = "0",
    match: Annotated[
        Match, typer.Option(help="what the systems have in common: tokens, training FLOPs, or both")
    ] = Match.tokens,
    flops: Annotated[
        str | None,
        typer.Option(help="FLOPs budgets (default: 1, 2, 4 times the cheapest system's)"),
    ] = None,
    flops_seeds: Annotated[
        str | None, typer.Option(help="seeds of runs matched by FLOPs (default: --seeds)")
    ] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="a sweep instead of recipes, see recipes/ablations/")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="recipe that the sweep varies, instead of its own")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="recipe that differences are taken to (default: adaptive)")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="runs at a time (default: one a GPU, or one a core)", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="where the runs and results are kept")] = Path(
        "runs/compare"
    ),
    as_json: AsJson = False,
) -> None:
    """Train several recipes under one protocol; leaves a table, curves and a page."""
    from dataclasses import asdict

    from latentcot.analysis.comparison import heading, table
    from latentcot.compare import compare as run_comparison
    from latentcot.compare import plan, without_nan
    from latentcot.training.recipe import load_recipe
    from latentcot.training.sweep import load_sweep

    paths = [word for word in recipes or [] if "=" not in word or Path(word).is_file()]
    overrides = [word for word in recipes or [] if word not in paths]
    if (sweep is None) == (not paths):
        raise UserError("give recipes or --sweep FILE, one of them")
    if taken := [word for word in overrides if word.startswith("seed=")]:
        raise UserError(f"{taken[0]} would be overruled: give --seeds")
    if match is Match.tokens and (flops or flops_seeds):
        raise UserError("--flops and --flops-seeds are for runs matched by FLOPs: add --match both")
    values: list[Any] = []
    swept_key = None
    if sweep is not None:
        swept = load_sweep(sweep, base, overrides)
        resolved, values, swept_key = swept.recipes, swept.values, swept.key
    elif base is not None:
        raise UserError("--base is for --sweep: give the recipes as they are, or a sweep")
    else:
        resolved = [load_recipe(path, overrides) for path in paths]
    jobs = plan(
        resolved,
        numbers(seeds, "--seeds", int),
        out,
        match.value,
        numbers(flops, "--flops", float) if flops else (),
        numbers(flops_seeds, "--flops-seeds", int) if flops_seeds else None,
        values,
        swept_key,
    )
    lines = run_comparison(
        jobs,
        out,
        workers=workers,
        reference=reference,
        swept=swept_key,
        command=shlex.join(["latentcot", *sys.argv[1:]]),
    )
    if as_json:
        print(json.dumps(without_nan([asdict(line) for line in lines])))
        return
    for key, own in itertools.groupby(lines, key=lambda line: (line.match, line.budget)):
        titles, *rows = table(list(own), short=True)  # the page has all columns
        show_cells(heading(*key), titles, rows)
    print(f"page: {out / 'comparison.html'}")


@app.command(name="eval")
def evaluate(
    run: RunPath,
    split: Annotated[SplitName, typer.Option(help="split of the run's corpus")] = SplitName.test,
    blocks: Annotated[int | None, typer.Option(help="only the first blocks", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Loss, perplexity, bits per byte and passes per token on the corpus of a run."""
    from latentcot.training.run_dir import open_run

    figures = open_run(run).evaluate(split.value, blocks).as_dict()
    show(figures, as_json, title=f"{run}, {split.value} text")


@app.command()
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="text to go on from")],
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token", min=0)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample among so many tokens; 0: all", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="sample among the likeliest tokens of this mass", min=0, max=1)
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="above 1, tokens that were there become less likely", min=0.01)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    tau: Annotated[
        float | None,
        typer.Option(help="threshold of halting (default: the model's, see dial)", min=0, max=1),
    ] = None,
    wavefront: Annotated[
        bool | None,
        typer.Option(help="the steps of several tokens in one pass (default: where it can)"),
    ] = None,
    cache: Annotated[bool, typer.Option(help="reuse slots of earlier tokens")] = True,
    show_steps: Annotated[
        bool, typer.Option("--show-steps", help="colour each token by the latent steps before it")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, and show where the model thinks."""
    from latentcot.decoding.text import generate_text
    from latentcot.training.run_dir import open_model

    model, tokenizer, _ = open_model(run)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    result = generate_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        repetition_penalty=repetition_penalty,
        seed=seed,
        tau=tau,
        wavefront=wavefront,
        use_cache=cache,
        show=None if as_json else shower(model.config.num_passes if show_steps else None),
        **sampling,
    )
    if as_json:
        print(json.dumps(result))
        return
    print()
    if show_steps:
        passes, wave = result["passes_per_token"], result["wavefront_passes_per_token"]
        legend = " ".join(
            f"[{step_style(n, model.config.num_passes)}] {n} [/]"
            for n in range(model.config.num_passes)
        )
        how = "one after the other" if wave is None else f"by wavefront in {wave:.2f}"
        Console(highlight=False).print(
            f"\nlatent steps: {legend}  {passes:.2f} passes per token, decoded {how}"
        )


bench = typer.Typer(help="Measure speed, as ratios in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Dtype(StrEnum):
    """A number format of weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@bench.command(name="decode")
def bench_decode(
    model: Annotated[
        Path, typer.Argument(help="a run, an exported model, or a recipe (untrained)")
    ],
    batches: Annotated[str, typer.Option(help="sequences at a time")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="tokens before the generated ones")] = (
        "128,1024,4096"
    ),
    new_tokens: Annotated[int, typer.Option(help="tokens to decode each time", min=2)] = 32,
    repeats: Annotated[int, typer.Option(help="turns; the median counts", min=1)] = 3,
    dtype: Annotated[Dtype, typer.Option(help="format of the weights")] = Dtype.float32,
    threads: Annotated[
        int | None, typer.Option(help="threads of a CPU (default: all cores)", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second: plain, by wavefront, at full depth, and of a one-pass model."""
    import torch

    from latentcot.bench import as_rows, subject
    from latentcot.bench import bench_decode as measure

    if threads is not None:
        torch.set_num_threads(threads)
    sizes = numbers(batches, "--batches", int)
    lengths = numbers(contexts, "--contexts", int)
    decoder, ids = subject(model, getattr(torch, dtype.value), max(lengths) + new_tokens)
    rows = []
    for row in measure(
        decoder,
        ids,
        batches=sizes,
        contexts=lengths,
        new_tokens=new_tokens,
        repeats=repeats,
    ):
        rows.append(row)
        if not as_json:
            print(
                f"batch {row.batch:3}, context {row.context:5}, {row.mode:10} "
                f"{row.tokens_per_s:8.1f} tokens/s, {row.passes_per_token:.2f} passes per token, "
                f"{row.ratio_to_plain:.2f} x plain, {row.ratio_to_one_pass:.2f} x one pass",
                flush=True,
            )
    if as_json:
        print(json.dumps(as_rows(rows)))
    elif any(row.mode == "wavefront" for row in rows):
        ratios = [row.pass_cost_ratio for row in rows if row.mode == "wavefront"]
        print(
            f"a pass with {rows[0].l_max + 1} queries takes {min(ratios):.2f} to {max(ratios):.2f} "
            "times one with a single query"
        )


@app.command()
def dial(
    run: Annotated[Path, typer.Argument(help="a run directory of an adaptive model")],
    budget: Annotated[
        float | None, typer.Option(help="mean passes per token at most", min=0)
    ] = None,
    max_loss_increase: Annotated[
        float | None, typer.Option(help="nats per token above the best tau at most")
    ] = None,
    taus: Annotated[
        str | None, typer.Option(help="the grid, as 0,0.1,0.5 (default: 13 from 0 to 1)")
    ] = None,
    reference: Annotated[
        list[Path] | None, typer.Option(help="a run of fixed depth, for the picture; repeatable")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="only the first blocks of validation text", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set how much a trained model thinks; leaves dial.json and a picture in the run directory."""
    from latentcot.dial import TAUS, Wish
    from latentcot.dial import dial as turn_dial

    grid = TAUS if taus is None else numbers(taus, "--taus", float)
    wish = Wish(budget, max_loss_increase)
    report = turn_dial(run, wish, taus=grid, references=reference or [], max_blocks=blocks)
    if as_json:
        print(json.dumps(report))
        return
    rows = [("as trained", report["test_before"]), ("now", report["test"])]
    rows += [(point["name"], point) for point in report["test_references"]]
    show_cells(
        f"{run}, test text",
        ["", "tau", "passes per token", "loss"],
        [
            [
                name,
                "" if point["tau"] is None else f"{point['tau']:.4g}",
                f"{point['passes_per_token']:.3f}",
                f"{point['loss']:.4f}",
            ]
            for name, point in rows
        ],
    )
    print(f"picture: {run / 'dial.png'}")


@app.command()
def flops(
    recipe: Annotated[
        Path | None, typer.Argument(help="a YAML recipe, see recipes/; or --paper")
    ] = None,
    overrides: Overrides = None,
    passes: Annotated[
        float | None,
        typer.Option(help="mean passes of a token, where a router decides (default: all)"),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="the FLOPs column of the paper beside ours")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """FLOPs of a recipe before it is run, for each token and in all; or those of the paper."""
    if (recipe is None) != paper:
        raise UserError("give a recipe or --paper, one of them")
    if paper and passes is not None:
        raise UserError("--passes is for a recipe: --paper has the passes of the paper")
    from latentcot.training.ledger import paper_table, recipe_costs
    from latentcot.training.recipe import load_recipe

    if recipe is None:
        rows = paper_table()
        if as_json:
            print(json.dumps(rows))
            return
        marks = {"computed": "", "back-solved": "*"}
        keys = ["paper_1e20", "kaplan_1e20", "kaplan_all_parameters_1e20", "exact_1e20"]
        show_cells(
            "Pretraining FLOPs of the paper's models, in 1e20 (*: passes solved from its FLOPs)",
            ["model", "passes", "paper", "kaplan", "kaplan, all N", "exact"],
            [
                [row["model"], f"{row['passes']:.4g}{marks[row['source']]}"]
                + [f"{row[key]:.2f}" for key in keys]
                for row in rows
            ],
        )
        return
    costs = recipe_costs(load_recipe(recipe, overrides or []), passes)
    if as_json:
        print(json.dumps(costs))
        return
    parts = {"trained_token": "a trained token", "decoded_token": "a decoded token", "run": "run"}
    show_cells(
        f"{costs['name']}: {costs['parameters'] / 1e6:.2f}M parameters, {costs['tokens']:.4g} "
        f"tokens, {costs['passes']:.4g} passes ({costs['decoding_passes']:.4g} in decoding)",
        ["FLOPs", *costs["run"]],
        [[name, *map(flops_text, costs[part].values())] for part, name in parts.items()],
    )


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
