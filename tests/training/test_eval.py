"""Evaluation against a few lines of plain torch, and the commands `eval` and `generate`."""

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from latentcot.data import Blocks, prepare
from latentcot.evaluation.perplexity import evaluate, prune_ratio, shuffled_passes
from latentcot.evaluation.statistics import ranks, spearman
from latentcot.models import LatentLM
from latentcot.training.loop import train
from latentcot.training.recipe import make_recipe
from models.helpers import VOCABULARY, tiny_model
from training.helpers import Latentcot, tiny


@pytest.fixture(scope="module")
def model() -> LatentLM:
    """Float64, four passes at most, gates spread: some tokens are pruned after each step."""
    torch.manual_seed(0)
    return tiny_model("adaptive", l_max=3, tau=0.3, router="mlp")


@pytest.fixture
def batches() -> list[np.ndarray]:
    """Three blocks, the last in a batch of its own."""
    ids = torch.randint(VOCABULARY, (3, 17)).numpy()
    return [ids[:2], ids[2:]]


def test_evaluate_equals_plain_torch(model: LatentLM, batches: list[np.ndarray]):
    ids = torch.from_numpy(np.concatenate(batches))
    with torch.no_grad():
        out = model.eval()(ids)
    logits, targets = out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss, p_target = losses.mean().item(), losses.neg().exp()
    passes = out.passes[:, :-1].flatten().double()
    assert len(passes.unique()) >= 3

    result = evaluate(model, batches, nullcontext, bytes_per_token=2.5)
    assert result.tokens == 3 * 16
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / 2.5, rel=1e-12)
    assert result.passes_per_token == pytest.approx(passes.mean().item(), rel=1e-12)
    assert result.prune_ratio == pytest.approx(1 - (passes.mean().item() - 1) / 3, rel=1e-12)
    expected = naive_spearman((passes - 1).tolist(), p_target.tolist())
    assert result.steps_vs_ptarget == pytest.approx(expected, rel=1e-12)
    for row in result.by_steps:
        chosen = passes == row["latent_steps"] + 1
        assert row["share"] == pytest.approx(chosen.double().mean().item())
        assert row["mean_p_target"] == pytest.approx(p_target[chosen].mean().item())
    assert sum(row["share"] for row in result.by_steps) == pytest.approx(1)


def test_evaluate_leaves_the_mode_alone_and_has_no_gradient(
    model: LatentLM, batches: list[np.ndarray]
):
    for mode in (True, False):
        model.train(mode)
        evaluate(model, batches, nullcontext)
        assert model.training is mode
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_bytes_there_are_no_bits_per_byte(model: LatentLM, batches: list[np.ndarray]):
    assert evaluate(model, batches, nullcontext).bits_per_byte is None


def test_a_method_of_one_pass(batches: list[np.ndarray]):
    result = evaluate(tiny_model("vanilla"), batches, nullcontext)
    assert (result.passes_per_token, result.prune_ratio) == (1, 0)
    assert result.steps_vs_ptarget is None
    assert [row["latent_steps"] for row in result.by_steps] == [0]


def test_prune_ratio():
    config = tiny_model("adaptive", l_max=3).config
    assert [prune_ratio(passes, config) for passes in (1, 2.5, 4)] == [1, 0.5, 0]
    assert prune_ratio(1, tiny_model("vanilla").config) == 0
    assert prune_ratio(7, tiny_model("ponderlm2").config) == 0  # nobody chose that


def naive_spearman(x: list[float], y: list[float]) -> float:
    """Pearson's correlation of the ranks; the rank of v is how many are below, plus half the ties.

    That differs from the usual rank by a constant, which a correlation does not see.
    """

    def centred_ranks(values: list[float]) -> list[float]:
        found = [sum(w < v for w in values) + sum(w == v for w in values) / 2 for v in values]
        return [rank - sum(found) / len(found) for rank in found]

    a, b = centred_ranks(x), centred_ranks(y)
    covariance = sum(p * q for p, q in zip(a, b, strict=True))
    return covariance / math.sqrt(sum(p * p for p in a) * sum(q * q for q in b))


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [1, 2, 3, 5, 4], 0.9),  # 1 - 6 * 2 / (5 * 24)
        ([0, 0, 1, 1], [1, 2, 3, 4], 2 / math.sqrt(5)),  # ranks 1.5, 1.5, 3.5, 3.5
        ([0, 0, 1, 1], [1, 2, 1, 2], 0.0),
    ],
)
def test_spearman(x: list[float], y: list[float], expected: float):
    assert spearman(np.array(x), np.array(y)) == pytest.approx(expected, abs=1e-15)
    assert naive_spearman(x, y) == pytest.approx(expected, abs=1e-15)


def test_spearman_of_many_ties():
    generator = np.random.default_rng(0)
    x, y = generator.integers(4, size=200), generator.normal(size=200).round(1)
    expected = naive_spearman(x.tolist(), y.tolist())
    assert spearman(x, y) == pytest.approx(expected, rel=1e-12)
    assert ranks(np.array([3.0, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]


def test_spearman_of_a_constant_is_undefined():
    constant, other = np.full(4, 0.1), np.arange(4.0)
    assert spearman(constant, other) is None
    assert spearman(other, constant) is None


def test_shuffled_passes_keep_their_number_and_change_their_place(
    model: LatentLM, batches: list[np.ndarray]
):
    rule_for = shuffled_passes(model, nullcontext)
    ids = torch.from_numpy(batches[0])
    with torch.no_grad():
        own = model.eval()(ids).passes
        dealt = [model(ids, keep_rule=rule_for(ids)).passes for _ in range(2)]
    for passes in dealt:
        assert torch.equal(passes.flatten().bincount(), own.flatten().bincount())
        assert not torch.equal(passes, own)
    assert not torch.equal(*dealt)
    again = shuffled_passes(model, nullcontext)
    with torch.no_grad():
        assert torch.equal(model(ids, keep_rule=again(ids)).passes, dealt[0])


def test_shuffled_passes_are_a_control_of_the_same_cost(model: LatentLM, batches: list[np.ndarray]):
    own = evaluate(model, batches, nullcontext)
    rule_for = shuffled_passes(model, nullcontext)
    control = evaluate(model, batches, nullcontext, keep_rule_for=rule_for)
    assert control.loss != own.loss
    # The last token of a block executes passes and predicts nothing: 3 of 51 tokens are not scored.
    assert control.passes_per_token == pytest.approx(own.passes_per_token, abs=3 * 3 / 48)


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    train(make_recipe(tiny(source)), run_dir)
    return run_dir


def test_eval_repeats_the_summary(run_dir: Path, latentcot: Latentcot):
    summary = json.loads((run_dir / "summary.json").read_text())
    test = json.loads(latentcot("eval", run_dir, "--json").out)
    for key in ("perplexity", "bits_per_byte", "passes_per_token", "prune_ratio"):
        assert test[key] == summary[key]
    assert test["loss"] == summary["test_loss"]
    assert test["steps_vs_ptarget"] == summary["steps_vs_ptarget"]
    validation = json.loads(latentcot("eval", run_dir, "--split", "validation", "--json").out)
    assert validation["loss"] == summary["val_loss"]
    table = latentcot("eval", run_dir)
    assert table.code == 0
    assert f"{summary['test_loss']:.6g}" in table.out


def test_eval_reads_as_many_blocks_as_it_is_told(run_dir: Path, source: Path, latentcot: Latentcot):
    first = json.loads(latentcot("eval", run_dir, "--blocks", 2, "--json").out)
    assert first["tokens"] == 2 * 15
    corpus = prepare(make_recipe(tiny(source)).data)
    whole = json.loads(latentcot("eval", run_dir, "--json").out)
    assert whole["tokens"] == 15 * Blocks(corpus.stream("test"), 16).num_blocks


def test_bits_per_byte_are_those_of_the_text(run_dir: Path, source: Path):
    summary = json.loads((run_dir / "summary.json").read_text())
    corpus = prepare(make_recipe(tiny(source)).data)
    tokens = len(corpus.stream("test"))
    text = corpus.tokenizer.decode(corpus.stream("test").read(0, tokens), skip_special_tokens=True)
    bits = summary["test_loss"] * tokens / math.log(2)
    assert summary["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-12)


@pytest.mark.parametrize("sampling", [(), ("--temperature", 1.0, "--top-k", 5, "--seed", 3)])
def test_generation_is_the_same_with_and_without_cache(
    run_dir: Path, latentcot: Latentcot, sampling: tuple[object, ...]
):
    command = ("generate", run_dir, "--prompt", "3 and 4 make", "--max-new-tokens", 9, "--json")
    cached = json.loads(latentcot(*command, *sampling).out)
    uncached = json.loads(latentcot(*command, *sampling, "--no-cache").out)
    assert cached.pop("wavefront_passes_per_token") is not None
    assert uncached.pop("wavefront_passes_per_token") is None
    assert cached["text"] == uncached["text"]
    for token, same in zip(cached["tokens"], uncached["tokens"], strict=True):
        assert token == same
        assert len(token["exits"]) == token["latent_steps"] + 1
        assert sum(token["exits"]) == pytest.approx(1, abs=1e-5)
    assert cached["prompt"] == "3 and 4 make"
    assert 0 < len(cached["tokens"]) <= 9


def test_seeds_sample_different_texts(run_dir: Path, latentcot: Latentcot):
    command = ("generate", run_dir, "--prompt", "3", "--temperature", 1.0, "--json", "--seed")
    texts = [json.loads(latentcot(*command, seed).out)["text"] for seed in (0, 1, 2)]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


def test_an_exported_model_generates_like_its_run(run_dir: Path, latentcot: Latentcot):
    options = ("--prompt", "3 and", "--max-new-tokens", 5, "--json")
    whole = latentcot("generate", run_dir, *options)
    assert latentcot("generate", run_dir / "model", *options).out == whole.out


def test_generation_prints_the_text_once(run_dir: Path, latentcot: Latentcot):
    options = ("--prompt", "3 and 4 make", "--max-new-tokens", 5)
    text = json.loads(latentcot("generate", run_dir, *options, "--json").out)["text"]
    assert latentcot("generate", run_dir, *options).out == f"3 and 4 make{text}\n"


def test_steps_are_shown_in_colour(
    run_dir: Path, latentcot: Latentcot, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = ("--prompt", "3 and 4 make", "--max-new-tokens", 6, "--show-steps")
    outs = []
    for wavefront in ("--wavefront", "--no-wavefront"):
        outs.append(latentcot("generate", run_dir, *options, wavefront).out)
        assert outs[-1].startswith("3 and 4 make\x1b[")
        assert "passes per token, decoded" in outs[-1]
    coloured = [out[: out.index("latent steps:")] for out in outs]
    assert coloured[0] == coloured[1]


def test_tau_of_the_command_prunes(run_dir: Path, latentcot: Latentcot):
    command = ("generate", run_dir, "--prompt", "3 and", "--max-new-tokens", 9, "--json", "--tau")
    passes = [json.loads(latentcot(*command, tau).out)["passes_per_token"] for tau in (0, 1)]
    assert passes == [3, 1]
