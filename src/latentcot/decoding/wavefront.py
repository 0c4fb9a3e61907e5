"""Wavefront decoding: the latent steps of several tokens in one pass, and the same tokens.

A query (t, k) sees only slots (t', k') with t' <= t and k' <= k. So step 1 of token t + 1 needs of
the tokens before it their first steps, which are there, and the token itself. Let the prediction at
hand, from the mixture that t would have if it stopped now, stand in for it: then one pass carries

    (t, 1), (t - 1, 2), (t - 2, 3), ...

along the diagonal. Each pass drafts a token. Where a deeper step predicts another token than the
draft, the tokens behind it are dropped (a crop of each step's tail) and the wave restarts there. A
draft is settled when the tokens before it are, and the chain that predicts it has ended on it.
Settled tokens, and the slots that stay, are those of decoding one token after the other.

Shapes: B rows, M queries of a pass (at most one for each row and step), d width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from latentcot.core.cache import SlotCache
from latentcot.core.halting import Threshold, halt
from latentcot.decoding.policies import Policy, policy_of
from latentcot.decoding.sampling import KeyedGumbel, is_pure
from latentcot.errors import UserError

if TYPE_CHECKING:
    from latentcot.models.adaptive import AdaptiveLM
    from latentcot.models.base import LatentLM


NO_CROP = torch.iinfo(torch.int64).max


@dataclass
class WavefrontOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns on `return_dict_in_generate` when it decoded by wavefront.

    Attributes:
        num_passes: passes of the backbone after the prompt's, for the whole batch.
        num_executed: slots that they executed, dropped ones included.
    """

    num_passes: int | None = None
    num_executed: int | None = None


@dataclass
class Flight:
    """A token whose chain of latent steps has begun, or is about to.

    Attributes:
        column: its column in the sequence.
        token: which one it is: settled, or a draft.
        steps: passes that it has executed.
        query: which query of the last pass was its, None before its first.
        has_ended: whether its chain has ended.
    """

    column: int
    token: int
    steps: int = 0
    query: int | None = None
    has_ended: bool = False


@dataclass
class Row:
    """A sequence of the batch.

    Attributes:
        number: its row.
        padding: columns that are no tokens: position = column - padding.
        length: tokens and padding that are settled.
        flights: tokens in flight, oldest first; the first of them is settled.
        pending: the token that takes off in the next pass, if there is one.
    """

    number: int
    padding: int
    length: int
    flights: list[Flight] = field(default_factory=list)
    pending: Flight | None = None


def obstacle(
    model: LatentLM,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    num_rows: int,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why these arguments of `generate` cannot be decoded by wavefront; None if they can."""
    if not model.can_wavefront:
        return "this method does not halt step by step: only adaptive models do"
    if model.config.num_passes == 1:
        return "the model has no latent steps"
    if not model_kwargs.get("use_cache"):
        return "it needs the cache: leave out use_cache=False"
    if not isinstance(model_kwargs.get("keep_rule") or Threshold(0), Threshold):
        return "it knows no keep_rule but Threshold"
    if model_kwargs.get("inputs_embeds") is not None:
        return "it reads input_ids, not inputs_embeds"
    if generation_config.do_sample and not isinstance(logits_processor[-1], KeyedGumbel):
        return "it samples with keyed noise, which this call has switched off"
    for processor in logits_processor:
        if not is_pure(processor):
            name = type(processor).__name__
            return (
                f"{name} may give other scores when it sees a token again: if it is a function of "
                f"the tokens alone, say so by {name}.pure = True"
            )
    if streamer is not None and num_rows > 1:
        return "it streams one sequence only"
    for name in ("output_scores", "output_logits"):
        if getattr(generation_config, name):
            return f"{name} is for decoding one token after the other"
    return None


@torch.no_grad()
def wavefront(
    model: AdaptiveLM,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> WavefrontOutput | Tensor:
    """Greedy search or sampling by wavefront: transformers' `custom_generate` takes it as it is.

    Args:
        input_ids: (B, L) prompts, padded on the left.

    Returns:
        (B, L + new tokens), or a `WavefrontOutput`.

    Raises:
        UserError: arguments that a wavefront cannot honour, see `obstacle`.
    """
    reason = obstacle(
        model, logits_processor, generation_config, streamer, len(input_ids), model_kwargs
    )
    if reason or synced_gpus:
        raise UserError(
            f"no wavefront: {reason or 'sharded models wait for each other'}; or leave out "
            "wavefront=True"
        )
    prompt = model._prefill(input_ids, generation_config, model_kwargs)
    wave = _Wave(
        model,
        prompt.past_key_values,
        model_kwargs.get("keep_rule") or Threshold(model.config.tau),
        policy_of(getattr(generation_config, "wavefront", None)),
        _Sequences(input_ids, logits_processor, stopping_criteria, generation_config, streamer),
    )
    wave.start(prompt.logits[:, -1])
    while wave.is_moving:
        wave.advance()
    sequences = wave.finish()
    if not generation_config.return_dict_in_generate:
        return sequences
    return WavefrontOutput(
        sequences=sequences,
        past_key_values=wave.cache,
        num_passes=wave.num_passes,
        num_executed=wave.num_executed,
    )


class _Sequences:
    """The tokens of all rows, drafts included, and who chooses, checks and shows them.

    Attributes:
        ids: (B, max_length) tokens.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        stopping: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.max_length = int(config.max_length)
        shape = (len(input_ids), max(self.max_length, input_ids.shape[1] + 1))
        padding = getattr(config, "_pad_token_tensor", None)
        self.padding = 0 if padding is None else int(padding)
        self.ids = input_ids.new_full(shape, self.padding)
        self.ids[:, : input_ids.shape[1]] = input_ids
        self.noise = None
        if processors and isinstance(processors[-1], KeyedGumbel):
            self.noise = processors[-1]
            processors = LogitsProcessorList(processors[:-1])
        self.processors = processors
        self.stopping = stopping
        self.streamer = streamer

    def choices(self, logits: Tensor, rows: list[int], columns: list[int]) -> list[int]:
        """The token behind each of M columns, given (M, V) logits there."""
        scores = logits.to(torch.float32)  # as transformers' own loop
        if not self.processors and self.noise is None:
            return scores.argmax(-1).tolist()
        chosen = []
        for own, row, column in zip(scores, rows, columns, strict=True):
            own = self.processors(self.ids[row : row + 1, : column + 1], own[None])[0]
            chosen.append(
                own.argmax() if self.noise is None else self.noise.choose(row, column + 1, own)
            )
        return torch.stack(chosen).tolist()

    def is_last(self, row: int, length: int) -> bool:
        """Whether the row stops at so many columns; shows the last of them."""
        if self.streamer is not None:
            self.streamer.put(self.ids[row : row + 1, length - 1].cpu())
        return bool(self.stopping(self.ids[row : row + 1, :length], None))


class _Wave:
    """The tokens in flight, and the tensors of their last pass.

    Attributes:
        rows: the sequences.
        z, mixture, reach: (M, d), (M, d), (M,) of the queries of the last pass, as in `AdaptiveLM`.
    """

    def __init__(
        self,
        model: AdaptiveLM,
        cache: SlotCache,
        rule: Threshold,
        policy: Policy,
        sequences: _Sequences,
    ):
        self.model, self.cache, self.rule, self.policy = model, cache, rule, policy
        self.sequences = sequences
        prompt = cache.get_seq_length()
        self.rows = [
            Row(number, prompt - num_tokens, prompt)
            for number, num_tokens in enumerate(cache.num_tokens.tolist())
        ]
        self.num_passes = self.num_executed = 0

    def start(self, logits: Tensor) -> None:
        """Choose the first token of each row from (B, V) logits."""
        last = [row.length - 1 for row in self.rows]
        tokens = self.sequences.choices(logits, [row.number for row in self.rows], last)
        for row, token in zip(self.rows, tokens, strict=True):
            self._draft(row, row.length, token)
            self._settle(row)
        width, wide = (
            self.model.config.hidden_size,
            torch.promote_types(logits.dtype, torch.float32),
        )
        self.z = logits.new_zeros(0, width)
        self.mixture = logits.new_zeros((0, width), dtype=wide)
        self.reach = logits.new_zeros(0, dtype=wide)

    @property
    def is_moving(self) -> bool:
        """Whether a token is in flight."""
        return any(row.flights or row.pending for row in self.rows)

    def advance(self) -> None:
        """One pass: every token in flight executes its next step, and predicts the one behind."""
        fleet, states = self._board()
        model = self.model
        rows = [row.number for row, _ in fleet]
        columns = [flight.column for _, flight in fleet]
        slots = self.cache.wave(
            rows,
            [flight.column - row.padding for row, flight in fleet],
            [flight.steps for _, flight in fleet],
            model.config.visibility,
            model.attention_backend,
        )
        z = model.run(states, slots)
        steps = torch.as_tensor(slots.query_steps)
        is_last = steps == model.config.num_passes
        gate = model.gate(z, steps).masked_fill(is_last, 0)
        keep = self.rule(self.reach * gate, slots.packing.index, 0) & ~is_last
        exit_prob, next_reach = halt(gate, self.reach, keep)
        mixture_if_stopped = self.mixture + self.reach[:, None] * z
        logits = model.lm_head(mixture_if_stopped.to(z.dtype))
        self.z, self.reach = z, next_reach
        self.mixture = self.mixture + exit_prob[:, None] * z
        self.num_passes += 1
        self.num_executed += len(fleet)

        tokens = self.sequences.choices(logits, rows, columns)
        goes_on = keep.tolist()
        kept = [NO_CROP] * len(self.rows)
        for query, (row, flight) in enumerate(fleet):
            if flight not in row.flights:
                continue  # dropped in this very pass
            flight.query, flight.has_ended = query, not goes_on[query]
            if self._replaces_draft(row, flight, tokens[query], logits[query]):
                kept[row.number] = flight.column + 1 - row.padding
        if min(kept) < NO_CROP:
            self.cache.crop_slots(torch.tensor(kept, device=z.device))
        for row in self.rows:
            while row.flights and row.flights[0].has_ended:
                row.flights.pop(0)
                self._settle(row)

    def _board(self) -> tuple[list[tuple[Row, Flight]], Tensor]:
        """The flights that execute a step now, and the (M, d) states with which they enter it."""
        fleet: list[tuple[Row, Flight]] = []
        order: list[int] = []
        fresh: list[int] = []
        for row in self.rows:
            if row.pending is not None:
                row.flights.append(row.pending)
                row.pending = None
            for flight in row.flights:
                if flight.has_ended:
                    continue
                flight.steps += 1
                if flight.query is None:
                    flight.query = len(self.z) + len(fresh)
                    fresh.append(flight.token)
                order.append(flight.query)
                fleet.append((row, flight))
        places = torch.tensor(order, device=self.z.device)
        states, mixture, reach = self.z, self.mixture, self.reach
        if fresh:
            embeds = self.model.embed(torch.tensor(fresh, device=places.device))
            states = torch.cat([states, embeds])
            mixture = torch.cat([mixture, torch.zeros_like(embeds, dtype=mixture.dtype)])
            reach = torch.cat([reach, reach.new_ones(len(fresh))])
        self.mixture, self.reach = mixture[places], reach[places]
        return fleet, states[places]

    def _replaces_draft(self, row: Row, flight: Flight, token: int, logits: Tensor) -> bool:
        """Draft `token` behind this flight; true if another stood there, which is dropped now."""
        behind = row.flights[row.flights.index(flight) + 1 :]
        if not behind:
            self._draft(row, flight.column + 1, token)
            return False
        if token == behind[0].token:
            return False
        if not (flight.has_ended or self.policy.trusts(flight.steps, logits)):
            return False
        del row.flights[-len(behind) :]
        self._draft(row, flight.column + 1, token)
        return True

    def _draft(self, row: Row, column: int, token: int) -> None:
        self.sequences.ids[row.number, column] = token
        if column + 1 < self.sequences.max_length:  # else nobody asks what comes behind it
            row.pending = Flight(column, token)

    def _settle(self, row: Row) -> None:
        """The token behind the settled ones is settled, too."""
        row.length += 1
        if self.sequences.is_last(row.number, row.length):
            row.flights, row.pending = [], None

    def finish(self) -> Tensor:
        """(B, L) all tokens; leaves in the cache what plain decoding would leave there."""
        lengths = [row.length for row in self.rows]
        self.cache.settle(lengths=[length - 1 for length in lengths])
        if self.sequences.streamer is not None:
            self.sequences.streamer.end()
        sequences = self.sequences.ids[:, : max(lengths)]
        for row, length in zip(sequences, lengths, strict=True):
            row[length:] = self.sequences.padding
        return sequences
