"""Decoding speed: plain, by wavefront and at full depth, beside a one-pass model of the same size.

Everything is measured in one run, in turns, so that the ratios hold on a machine that is shared.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from latentcot.core.cache import SlotCache
from latentcot.core.halting import Threshold
from latentcot.data import prepare
from latentcot.errors import UserError
from latentcot.models.base import LatentLM
from latentcot.training.hardware import choose_device
from latentcot.training.recipe import load_recipe
from latentcot.training.run_dir import open_model

PREFILLED_ROWS = 4
"""So many rows of a batch have prompts of their own, the others repeat them."""
PREFILL_CHUNK = 256
COPIED_BYTES = 2**28


@dataclass(frozen=True)
class DecodeRow:
    """How fast one way of decoding is, at one batch size and context.

    Attributes:
        mode: `plain` (one token after the other), `wavefront`, `full_depth` (plain, tau = 0), or
            `one_pass` (transformers' own `generate` on the backbone as a causal LM).
        l_max: latent steps at most.
        batch, context: sequences, and tokens before the generated ones.
        passes_per_token: passes of the backbone for a new token of each sequence.
        plain_passes_per_token: the same of plain decoding: the mean passes of a token, or at a
            batch size above one, of the tokens that wait for each other.
        executed_slots_per_settled_slot: 1 where nothing is drafted.
        pass_cost_ratio: time of a pass with l_max + 1 queries over one with a single query.
        ratio_to_plain, ratio_to_one_pass: tokens per second over theirs.
        peak_bytes: of the device's allocator, or on a CPU parameters and stored slots.
        bandwidth_ratio: bytes that a token must read (parameters once a pass, and the store) over
            the time it took, over the memory bandwidth measured in the same run.
    """

    mode: str
    method: str
    l_max: int
    batch: int
    context: int
    tokens_per_s: float
    passes_per_token: float
    plain_passes_per_token: float
    executed_slots_per_settled_slot: float
    pass_cost_ratio: float
    ratio_to_plain: float
    ratio_to_one_pass: float
    peak_bytes: int
    bandwidth_ratio: float


@dataclass
class _Run:
    """One timed decode."""

    seconds: float
    passes: float
    slots_ratio: float
    stored_bytes: int


def subject(path: Path, dtype: torch.dtype, length: int) -> tuple[LatentLM, Tensor]:
    """What is to be measured, and (T,) tokens to feed it: a run's own text, or any tokens.

    Contexts beyond the trained one are allowed: rotary positions go on, and only speed is measured.

    Raises:
        UserError: neither a run, nor a model, nor a recipe.
    """
    if path.suffix in (".yaml", ".yml"):
        untrained = load_recipe(path, [])
        torch.manual_seed(untrained.seed)
        model = untrained.build_model()
        ids = torch.randint(model.config.vocab_size, (PREFILLED_ROWS * length,))
    else:
        model, tokenizer, recipe = open_model(path)
        if recipe is None:
            ids = torch.randint(len(tokenizer), (PREFILLED_ROWS * length,))
        else:
            stream = prepare(recipe.data).stream("test")
            ids = torch.from_numpy(stream.read(0, len(stream)).astype("int64"))
    device = choose_device("auto")
    model.config.backbone_config.max_position_embeddings = max(
        length, model.config.max_position_embeddings
    )
    return model.to(device, dtype).eval(), ids


@torch.no_grad()
def bench_decode(
    model: LatentLM,
    ids: Tensor,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int = 32,
    repeats: int = 3,
) -> Iterator[DecodeRow]:
    """Measure `model`, in evaluation mode on its device.

    Args:
        ids: (T,) tokens of some text, from which the prompts are cut.
        new_tokens: tokens to decode each time.
        repeats: turns; the median counts.

    Yields:
        a row for each batch size, context and mode.

    Raises:
        UserError: a text that is too short for the contexts.
    """
    if len(ids) < PREFILLED_ROWS + max(contexts):
        raise UserError(
            f"the text has {len(ids)} tokens and a context of {max(contexts)} was asked for: give "
            "smaller --contexts"
        )
    one_pass = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config.backbone_config), attn_implementation="sdpa"
    )
    one_pass = one_pass.to(model.device, model.dtype).eval()
    bandwidth = _bandwidth(model.device)
    for context in contexts:
        for batch in batches:
            yield from _measure(
                model, one_pass, ids, batch, context, new_tokens, repeats, bandwidth
            )


def _measure(
    model: LatentLM,
    one_pass: PreTrainedModel,
    ids: Tensor,
    batch: int,
    context: int,
    new_tokens: int,
    repeats: int,
    bandwidth: float,
) -> Iterator[DecodeRow]:
    starts = torch.arange(batch) % PREFILLED_ROWS * ((len(ids) - context) // PREFILLED_ROWS)
    prompts = torch.stack([ids[start : start + context] for start in starts.tolist()])
    prompts = prompts.to(model.device)
    modes: dict[str, dict[str, Any]] = {"plain": {"wavefront": False}}
    if model.can_wavefront and model.config.num_passes > 1:
        modes["wavefront"] = {"wavefront": True}
        modes["full_depth"] = {"wavefront": False, "tau": 0.0}
    caches = {"plain": _prefilled(model, prompts), "one_pass": _prefilled(one_pass, prompts)}
    if "full_depth" in modes:
        caches["full_depth"] = _prefilled(model, prompts, keep_rule=Threshold(0))
        caches["wavefront"] = caches["plain"]
    runs: dict[str, list[_Run]] = {name: [] for name in [*modes, "one_pass"]}
    for _ in range(repeats):
        for mode, own in runs.items():
            decoder = one_pass if mode == "one_pass" else model
            options = modes.get(mode, {})
            own.append(_decode(decoder, prompts, caches[mode], new_tokens, options))
    pass_cost = float("nan")
    if "wavefront" in modes:
        pass_cost = _pass_cost_ratio(model, caches["full_depth"], repeats * new_tokens)
    plain_seconds = _seconds(runs["plain"])
    for mode, own in runs.items():
        seconds, last = _seconds(own), own[-1]
        owner = one_pass if mode == "one_pass" else model
        read = (
            last.passes * _bytes(owner.parameters()) * new_tokens + last.stored_bytes * new_tokens
        )
        yield DecodeRow(
            mode=mode,
            method=model.config.model_type.removeprefix("latentcot_"),
            l_max=model.config.num_passes - 1,
            batch=batch,
            context=context,
            tokens_per_s=batch * new_tokens / seconds,
            passes_per_token=last.passes,
            plain_passes_per_token=runs["plain"][-1].passes,
            executed_slots_per_settled_slot=last.slots_ratio,
            pass_cost_ratio=pass_cost,
            ratio_to_plain=plain_seconds / seconds,
            ratio_to_one_pass=_seconds(runs["one_pass"]) / seconds,
            peak_bytes=_peak_bytes(owner, last),
            bandwidth_ratio=read / seconds / bandwidth,
        )


def _prefilled(model: PreTrainedModel, prompts: Tensor, **options: Any) -> Any:
    """A cache of all columns of the prompts but the last."""
    rows = min(len(prompts), PREFILLED_ROWS)
    cache = None
    for chunk in prompts[:rows, :-1].split(PREFILL_CHUNK, dim=1):
        cache = model(
            chunk, past_key_values=cache, use_cache=True, logits_to_keep=1, **options
        ).past_key_values
    assert cache is not None
    cache.batch_select_indices(torch.arange(len(prompts), device=prompts.device) % rows)
    return cache


def _decode(
    model: PreTrainedModel, prompts: Tensor, cache: Any, new_tokens: int, options: dict[str, Any]
) -> _Run:
    cache = copy.deepcopy(cache)
    seen = cache.get_seq_length()
    _wait(prompts.device)
    start = time.perf_counter()
    out = model.generate(
        prompts,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )
    _wait(prompts.device)
    seconds = time.perf_counter() - start
    if not isinstance(cache, SlotCache):
        stored = _bytes(t for own in cache.layers for t in (own.keys, own.values))
        return _Run(seconds, 1.0, 1.0, stored)
    depth = cache.depth[:, seen : seen + new_tokens]
    stored = sum(_bytes([*step.keys.values(), *step.values.values()]) for step in cache.steps)
    if (waves := getattr(out, "num_passes", None)) is not None:
        # The first token comes with the prompt's last column, as in plain decoding.
        first = float(depth[:, 0].max())
        slots = out.num_executed / max(1, int(depth[:, 1:].sum()))
        return _Run(seconds, (waves + first) / new_tokens, slots, stored)
    return _Run(seconds, float(depth.max(0).values.double().mean()), 1.0, stored)


def _pass_cost_ratio(model: LatentLM, cache: SlotCache, repeats: int) -> float:
    """Time of a pass with K queries of one row over a pass with one, both at the end of `cache`."""
    cache = copy.deepcopy(cache)
    cache.batch_select_indices(torch.zeros(1, dtype=torch.int64, device=model.device))
    num_tokens, num_passes = int(cache.num_tokens), model.config.num_passes
    kept = torch.tensor([num_tokens - num_passes], device=model.device)
    times: dict[int, list[float]] = {1: [], num_passes: []}
    for _ in range(max(20, repeats)):
        for count, own in times.items():
            cache.crop_slots(kept)
            steps = list(range(count, 0, -1))
            positions = list(range(int(kept), int(kept) + count))
            states = torch.randn(count, model.config.hidden_size, device=model.device)
            _wait(model.device)
            start = time.perf_counter()
            slots = cache.wave([0] * count, positions, steps, model.config.visibility)
            model.run(states.to(model.dtype), slots)
            _wait(model.device)
            own.append(time.perf_counter() - start)
    return statistics.median(times[num_passes]) / statistics.median(times[1])


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes: the best of some."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / min(_timed(lambda: target.copy_(source), device) for _ in range(5))


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(runs: Sequence[_Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak_bytes(model: PreTrainedModel, run: _Run) -> int:
    if model.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(model.device))
    return _bytes(model.parameters()) + run.stored_bytes


def as_rows(rows: Sequence[DecodeRow]) -> list[dict[str, Any]]:
    """The rows as JSON values; what was not measured is null."""
    return [
        {key: None if value != value else value for key, value in asdict(row).items()}
        for row in rows
    ]
