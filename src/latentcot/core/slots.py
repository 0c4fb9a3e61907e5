"""Slots: the executed (position, step) pairs, the one visibility predicate, and their store.

Shapes: B rows, N active tokens, n the largest number of them in a row, S slots, H heads, D head
width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache

from latentcot.core.attention import BACKENDS
from latentcot.core.packing import PAD_POSITION, Packing

Visibility = Literal["all", "latest", "own"]

RAGGED_MIN_WIDTH = 64
RAGGED_MIN_WASTE = 1.1
"""On a CPU, rows attend one by one if the longest has so many queries and padding all rows to it
would make so many times the real queries."""


def visible(
    query_position: Tensor,
    query_step: Tensor | int,
    slot_position: Tensor,
    slot_step: Tensor | int,
    slot_last: Tensor | int | None = None,
    visibility: Visibility = "all",
    window: int | None = None,
) -> Tensor:
    """The predicate: may the query at (t, k) see the slot at (t', k')?  Broadcasts its arguments.

    `all`: t' <= t and k' <= k (the paper's parallel attention mask).
    `latest`: of these, for each t' only its deepest, k' = min(k, last executed step of t').
    `own`: of these, only k' = k, the slots of the query's own step (looped models, PonderLM, MoR).
    A sliding window also asks for t - t' < window.

    Args:
        slot_last: last executed step K* of the slot's position; needed for `latest`.
    """
    sees = visible_positions(query_position, slot_position, window)
    sees = sees & torch.as_tensor(slot_step <= query_step)
    if visibility == "latest":
        assert slot_last is not None, (
            "`latest` needs the last executed step of each slot's position"
        )
        deepest = torch.minimum(torch.as_tensor(slot_last), torch.as_tensor(query_step))
        sees = sees & (torch.as_tensor(slot_step) == deepest)
    if visibility == "own":
        sees = sees & torch.as_tensor(slot_step == query_step)
    return sees


def visible_positions(
    query_position: Tensor, slot_position: Tensor, window: int | None = None, copies: int = 1
) -> Tensor:
    """The part of the predicate that compares positions: t' <= t, and t - t' < window.

    Args:
        copies: positions that share a place in the text (`Packing.interleave`); the window counts
            places.
    """
    sees = slot_position <= query_position
    if window is not None:
        distance = query_position // copies - slot_position // copies
        # Padding queries keep one visible slot at least: an empty softmax would give NaN.
        sees = sees & ((distance < window) | (query_position == PAD_POSITION))
    return sees


def attends_by_row(num_rows: int, width: int, num_tokens: int, device_type: str) -> bool:
    """Whether rows differ so much that attending row by row beats padding them (on a CPU).

    Args:
        width: the largest number of active tokens in a row.
        num_tokens: active tokens in all rows.
    """
    if device_type != "cpu" or width < RAGGED_MIN_WIDTH:
        return False
    return num_rows * width > RAGGED_MIN_WASTE * num_tokens


class StepSlots:
    """The slots of one step, rows packed left: a row is extended at its tail and cropped there.

    Attributes:
        lengths: (B,) number of slots of each row.
        positions: (B, capacity) their positions, ascending, PAD_POSITION behind the last.
        copies: positions that a token of the text takes, see `Packing.interleave`.
        keys, values: per layer (B, capacity, H_kv, D).
    """

    def __init__(self, num_rows: int, device: torch.device):
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.full((num_rows, 0), PAD_POSITION, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.used = 0  # columns in use: the largest length, kept on the host
        self.copies = 1

    def reserve(self, packing: Packing) -> Tensor | None:
        """Make room for one slot for each active token.

        Returns:
            (N,) the column of each new slot, or None when the step was empty: then the packed
            tensors become the buffers as they are, without a copy.
        """
        self.copies = packing.copies
        if self.used == 0:
            self.lengths, self.used = packing.counts, packing.width
            self.positions = packing.padded_positions
            self.keys, self.values = {}, {}
            return None
        columns = self.lengths[packing.rows] + packing.columns
        self.lengths = self.lengths + packing.counts
        self.used = int(self.lengths.max())
        if self.used > self.positions.shape[1]:
            self.positions = _widen(self.positions, 2 * self.used, PAD_POSITION)
        self.positions = self.positions.index_put((packing.rows, columns), packing.positions)
        return columns

    def write(
        self, layer: int, key: Tensor, value: Tensor, packing: Packing, columns: Tensor | None
    ) -> None:
        """Store (N, H_kv, D) keys and values of `layer` in the columns that `reserve` gave."""
        for buffers, new in ((self.keys, key), (self.values, value)):
            if columns is None:
                buffers[layer] = packing.pad(new)
                continue
            buffer = buffers[layer]
            if buffer.shape[1] < self.positions.shape[1]:
                buffer = _widen(buffer, self.positions.shape[1], 0)
            put = Tensor.index_put_ if _may_overwrite(buffer, new) else Tensor.index_put
            buffers[layer] = put(buffer, (packing.rows, columns), new.to(buffer.dtype))

    def crop(self, num_tokens: Tensor) -> None:
        """Drop the slots of row b behind its first num_tokens[b] tokens: a crop of its tail."""
        kept = self.positions[:, : self.used] < self.copies * num_tokens[:, None]
        self.lengths = kept.sum(1)
        self.positions = self.positions[:, : self.used].masked_fill(~kept, PAD_POSITION)
        self.used = int(self.lengths.max())

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given rows, in this order; a row may be repeated."""
        self.lengths, self.positions = self.lengths[rows], self.positions[rows]
        self.keys = {layer: keys[rows] for layer, keys in self.keys.items()}
        self.values = {layer: values[rows] for layer, values in self.values.items()}
        self.used = int(self.lengths.max())


def _widen(buffer: Tensor, columns: int, fill: int) -> Tensor:
    """`buffer` (B, S, ...) with `columns` columns, the new ones filled with `fill`."""
    wide = buffer.new_full((buffer.shape[0], columns, *buffer.shape[2:]), fill)
    wide[:, : buffer.shape[1]] = buffer
    return wide


def _may_overwrite(buffer: Tensor, new: Tensor) -> bool:
    """Whether autograd lets us write in place: no graph, and the same inference mode."""
    in_graph = buffer.requires_grad or new.requires_grad
    return not in_graph and buffer.is_inference() == torch.is_inference_mode_enabled()


class SlotCache(Cache):
    """The store of slots, one `StepSlots` for each step; a transformers cache for generation.

    A slot is written once, when it is executed. Tokens that were pruned have no slots beyond their
    last step. `get_seq_length` counts input columns, left padding included, as transformers does;
    `num_tokens` counts the real tokens of each row.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.steps: list[StepSlots] = []
        self.is_real: Tensor | None = None  # (B, columns seen): which of them were no padding
        self.num_tokens = torch.zeros(0, dtype=torch.int64)  # (B,) real tokens seen so far

    def begin(self, mask: Tensor | None, batch_shape: tuple[int, int], device: Any) -> Packing:
        """Take in a chunk of (B, L) new columns and return the packing of its real tokens.

        Raises:
            ValueError: the cache holds another number of rows.
        """
        num_rows = batch_shape[0]
        if self.is_real is None:
            self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        if self.num_tokens.shape[0] != num_rows:
            raise ValueError(
                f"the cache holds {self.num_tokens.shape[0]} rows and the input has {num_rows}: "
                "pass the cache of this batch or start without one"
            )
        packing = Packing.of(mask, self.num_tokens, batch_shape)
        self.num_tokens = self.num_tokens + packing.counts
        if mask is None:
            real = torch.ones(batch_shape, dtype=torch.bool, device=device)
        else:
            real = mask.bool()
        self.is_real = real if self.is_real is None else torch.cat([self.is_real, real], dim=1)
        return packing

    def step(
        self, step: int, packing: Packing, visibility: Visibility = "all", backend: str = "sdpa"
    ) -> SlotPass:
        """One pass over the active tokens at `step` (from 1): the backbone takes it as `slots`."""
        while len(self.steps) < step:
            self.steps.append(StepSlots(packing.batch_shape[0], packing.index.device))
        columns = self.steps[step - 1].reserve(packing)
        first = step - 1 if visibility == "own" else 0
        return SlotPass(self.steps[first:step], packing, visibility, backend, columns)

    def rewind(self, packing: Packing) -> None:
        """Drop the slots of this chunk's tokens, as if no pass had run over them yet."""
        for slots in self.steps:
            slots.crop(self.num_tokens - packing.counts)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.is_real is None else self.is_real.shape[1]

    def __len__(self) -> int:
        return len(self.steps[0].keys) if self.steps else 0

    def __bool__(self) -> bool:
        return True

    @property
    def is_initialized(self) -> bool:
        return self.is_real is not None

    @property
    def is_compileable(self) -> bool:
        return False

    def crop(self, max_length: int) -> None:
        """Forget the last -max_length columns, or all but the first `max_length`; 0 drops nothing.

        This is what transformers' caches do, 0 included.
        """
        if self.is_real is None or max_length == 0:
            return
        kept = max_length if max_length > 0 else max(0, self.get_seq_length() + max_length)
        self.is_real = self.is_real[:, :kept]
        self.num_tokens = self.is_real.sum(1)
        for slots in self.steps:
            slots.crop(self.num_tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_real is not None:
            self.is_real = self.is_real[indices]
            self.num_tokens = self.num_tokens[indices]
        for slots in self.steps:
            slots.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.num_tokens.shape[0], device=self.num_tokens.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))


@dataclass
class SlotPass:
    """One pass of the backbone: the queries are the active tokens of `packing` at the last step.

    Masks and indices are made once and shared by all layers.

    Attributes:
        steps: the slots of this step (the last) and of those before it.
        columns: where this step's new slots go, see `StepSlots.reserve`.
    """

    steps: list[StepSlots]
    packing: Packing
    visibility: Visibility
    backend: str
    columns: Tensor | None
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        dropout: float = 0.0,
        window: int | None = None,
    ) -> Tensor:
        """Store the new slots of `layer` and attend from the queries to all that they see.

        Args:
            query: (N, H, D); key and value: (N, H_kv, D).
            window: sliding window in positions, or None.

        Returns:
            (N, H, D).
        """
        self.steps[-1].write(layer, key, value, self.packing, self.columns)
        keys, values = (view.to(query.dtype) for view in self._view(layer))
        mask = self._mask(window)
        backend = BACKENDS[self.backend]
        if mask is None or not self._is_ragged:
            q, k, v = (x.transpose(1, 2) for x in (self.packing.pad(query), keys, values))
            out = backend(q, k, v, mask, scaling, dropout)
            return self.packing.unpad(out.transpose(1, 2))
        rows = []
        for row, (own, slots) in enumerate(self._own_slots):
            q = query[own].transpose(0, 1)[None]
            k, v = (x[row].index_select(0, slots).transpose(0, 1)[None] for x in (keys, values))
            own_mask = mask[row : row + 1, :, : q.shape[2]].index_select(-1, slots)
            rows.append(backend(q, k, v, own_mask, scaling, dropout)[0].transpose(0, 1))
        return torch.cat(rows)

    @functools.cached_property
    def _is_ragged(self) -> bool:
        """See `attends_by_row`."""
        packing = self.packing
        device = packing.index.device.type
        return attends_by_row(packing.batch_shape[0], packing.width, len(packing), device)

    @functools.cached_property
    def _own_slots(self) -> list[tuple[slice, Tensor]]:
        """For each row: its queries among all N, and the columns of `_view` that are its slots."""
        ends = self.packing.counts.cumsum(0).tolist()
        real = self._slot_positions != PAD_POSITION
        return [
            (slice(start, end), real[row].nonzero().squeeze(1))
            for row, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    @property
    def _visible_steps(self) -> list[StepSlots]:
        return [slots for slots in self.steps if slots.used]

    def _view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, H_kv, D) that this pass may see, at `_slot_positions`."""
        steps = self._visible_steps
        keys = [slots.keys[layer][:, : slots.used] for slots in steps]
        values = [slots.values[layer][:, : slots.used] for slots in steps]
        if self.visibility == "latest":
            return self._overlay(keys), self._overlay(values)
        return _concatenate(keys), _concatenate(values)

    def _overlay(self, tensors: list[Tensor]) -> Tensor:
        """`latest`: the first step's slots, each replaced by the deeper one of its position."""
        view = tensors[0]
        if len(tensors) == 1:
            return view
        flat = view.flatten(0, 1)
        for (places, chosen), deeper in zip(self._replacements, tensors[1:], strict=True):
            flat = flat.index_copy(0, places, deeper.flatten(0, 1).index_select(0, chosen))
        return flat.unflatten(0, view.shape[:2])

    @functools.cached_property
    def _replacements(self) -> list[tuple[Tensor, Tensor]]:
        """For each visible step after the first: places in the flat view, and the flat slots."""
        first, *deeper_steps = self._visible_steps
        pairs = []
        for slots in deeper_steps:
            positions = slots.positions[:, : slots.used]
            chosen = (positions != PAD_POSITION).flatten().nonzero().squeeze(1)
            # A step-1 slot exists for every position from 0: its column is the position itself.
            rows = chosen // slots.used
            pairs.append((rows * first.used + positions.flatten()[chosen], chosen))
        return pairs

    def _mask(self, window: int | None) -> Tensor | None:
        """(B, 1, n, S) what each query sees, or None if that is plain causal attention."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        steps = self._visible_steps
        one_slot_a_position = self.visibility == "latest" or len(steps) == 1
        all_are_queries = self.packing.is_full and self.packing.width == steps[0].used
        if window is None and one_slot_a_position and all_are_queries:
            return None
        # `_view` holds no slot of a deeper step, and for `latest` only the deepest of each
        # position: of the predicate, the positions are left to compare.
        query_positions = self.packing.padded_positions[:, :, None]
        slot_positions = self._slot_positions[:, None, :]
        sees = visible_positions(query_positions, slot_positions, window, self.packing.copies)
        return sees[:, None]

    @functools.cached_property
    def _slot_positions(self) -> Tensor:
        """(B, S) positions of the slots of `_view`, PAD_POSITION where there is none."""
        steps = self._visible_steps
        seen = steps[:1] if self.visibility == "latest" else steps
        return _concatenate([slots.positions[:, : slots.used] for slots in seen])


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
