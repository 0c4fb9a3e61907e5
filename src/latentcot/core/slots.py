"""Slots: the executed (position, step) pairs, the one visibility predicate, and those of one step.

Shapes: B rows, N active tokens, H_kv heads of keys and values, D head width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
    copies: int = 1,
) -> Tensor:
    """The predicate: may the query at (t, k) see the slot at (t', k')?  Broadcasts its arguments.

    `all`: t' <= t and k' <= k (the paper's parallel attention mask).
    `latest`: of these, for each t' only its deepest, k' = min(k, last executed step of t').
    `own`: of these, only k' = k, the slots of the query's own step (looped models, PonderLM, MoR).
    A sliding window also asks for t - t' < window.

    Args:
        slot_last: last executed step K* of the slot's position; needed for `latest`.
        copies: see `visible_positions`.
    """
    sees = visible_positions(query_position, slot_position, window, copies)
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


Columns = Tensor | int | None
"""Where new slots go: (N,) columns; the first of consecutive ones, in a batch of one row; or None,
where they are the whole store."""

SPARE = 8
"""A full buffer grows by one column in so many, so it is hardly larger than what it holds."""


class StepSlots:
    """The slots of one step, rows packed left: a row is extended at its tail and cropped there.

    A slot is written once and stays where it is until its buffer is full.

    Attributes:
        lengths: (B,) number of slots of each row.
        positions: (B, capacity) their positions, ascending, PAD_POSITION behind the last.
        copies: positions that a token of the text takes, see `Packing.interleave`.
        keys, values: per layer (B, H_kv, capacity, D).
        home: the buffers that these are part of, None where they stand alone.
    """

    def __init__(self, num_rows: int, device: torch.device):
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.full((num_rows, 0), PAD_POSITION, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.used = 0  # columns in use: the largest length, kept on the host
        self.copies = 1
        self.home: SideBySide | None = None

    def needed(self, packing: Packing) -> int:
        """Columns that it takes to add one slot for each active token."""
        if len(self.lengths) == 1:
            return self.used + len(packing)
        return int((self.lengths + packing.counts).max())

    def reserve(self, packing: Packing) -> Columns:
        """Make room for one slot for each active token: says where they go.

        In an empty step the packed tensors become the buffers as they are, without a copy.
        """
        self.copies = packing.copies
        if self.used == 0 and self.home is None:
            self.lengths, self.used = packing.counts, packing.width
            self.positions = packing.padded_positions.clone()
            self.keys, self.values = {}, {}
            return None
        columns: Tensor | int
        needed = self.needed(packing)
        if len(self.lengths) == 1:
            columns = self.used
            self.lengths = self.lengths + len(packing)
        else:
            columns = self.lengths[packing.rows] + packing.columns
            self.lengths = self.lengths + packing.counts
        self.used = needed
        if self.used > self.positions.shape[1]:
            self.home = None
            self.positions = widen(self.positions, 1, self.used, PAD_POSITION)
        self.positions = self._mine(self.positions)
        if isinstance(columns, int):
            self.positions[0].narrow(0, columns, len(packing)).copy_(packing.positions)
        else:
            self.positions[packing.rows, columns] = packing.positions
        return columns

    def write(
        self, layer: int, key: Tensor, value: Tensor, packing: Packing, columns: Columns
    ) -> None:
        """Store (H_kv, N, D) keys and values of `layer` in the columns that `reserve` gave."""
        for buffers, new in ((self.keys, key), (self.values, value)):
            if columns is None:
                buffers[layer] = packing.pad_heads(new)
                continue
            buffer = buffers[layer]
            if buffer.shape[2] < self.used:
                buffer = widen(buffer, 2, self.used, 0)
            buffer = buffers[layer] = self._mine(buffer, new)
            if isinstance(columns, int):
                buffer[0].narrow(1, columns, len(packing)).copy_(new)
            else:
                by_column = buffer.transpose(1, 2)
                by_column[packing.rows, columns] = new.transpose(0, 1).to(buffer.dtype)

    def _mine(self, buffer: Tensor, new: Tensor | None = None) -> Tensor:
        mine = writable(buffer, new)
        if mine is not buffer:
            self.home = None
        return mine

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H_kv, used, D) of `layer`, where they lie."""
        used = (2, 0, self.used)
        return self.keys[layer].narrow(*used), self.values[layer].narrow(*used)

    def crop(self, num_tokens: Tensor) -> None:
        """Drop the slots of row b behind its first num_tokens[b] tokens: a crop of its tail."""
        self.positions = self._mine(self.positions)
        dropped = self.positions >= self.copies * num_tokens[:, None]
        self.positions.masked_fill_(dropped, PAD_POSITION)
        self.lengths = (~dropped).sum(1)
        self.used = int(self.lengths.max())

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given rows, in this order; a row may be repeated."""
        self.lengths, self.positions = self.lengths[rows], self.positions[rows]
        self.keys = {layer: keys[rows] for layer, keys in self.keys.items()}
        self.values = {layer: values[rows] for layer, values in self.values.items()}
        self.used = int(self.lengths.max())
        self.home = None


class SideBySide:
    """The buffers of all steps, one behind the other in one tensor a layer: a view of some is free.

    Each has a little room at its end, where nothing is seen.

    Args:
        steps: the slots of steps 1, 2, ...; they become views of these buffers.
        needed: columns that each of them needs.

    Attributes:
        positions: (B, S) of all columns, PAD_POSITION where there is no slot.
        numbers: (S,) the step of each column.
    """

    def __init__(self, steps: list[StepSlots], needed: list[int]):
        capacities = [columns + columns // SPARE for columns in needed]
        self.starts = [sum(capacities[:number]) for number in range(len(steps))]
        first, total = steps[0], sum(capacities)
        num_rows, device = len(first.lengths), first.lengths.device
        self.steps = steps
        self.positions = torch.full((num_rows, total), PAD_POSITION, device=device)
        self.numbers = torch.cat(
            [torch.full((own,), step, device=device) for step, own in enumerate(capacities, 1)]
        )
        self.keys, self.values = (
            {
                layer: buffer.new_zeros(num_rows, buffer.shape[1], total, buffer.shape[3])
                for layer, buffer in buffers.items()
            }
            for buffers in (first.keys, first.values)
        )
        for slots, start, capacity in zip(steps, self.starts, capacities, strict=True):
            positions = self.positions.narrow(1, start, capacity)
            positions[:, : slots.used] = slots.positions[:, : slots.used]
            slots.positions, slots.home = positions, self
            for ours, theirs in ((self.keys, slots.keys), (self.values, slots.values)):
                for layer, buffer in ours.items():
                    own = buffer.narrow(2, start, capacity)
                    if slots.used:
                        own[:, :, : slots.used] = theirs[layer][:, :, : slots.used]
                    theirs[layer] = own

    def holds(self, steps: list[StepSlots], needed: list[int]) -> bool:
        """Whether these steps are here, have the room that they need, and may be written."""
        if self.positions.is_inference() != torch.is_inference_mode_enabled():
            return False
        return len(steps) == len(self.steps) and all(
            slots.home is self and columns <= slots.positions.shape[1]
            for slots, columns in zip(steps, needed, strict=True)
        )

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Start and number of the columns from step `first` to the last slot of step `last`."""
        start = self.starts[first - 1]
        return start, self.starts[last - 1] + self.steps[last - 1].used - start


def widen(buffer: Tensor, dim: int, used: int, fill: int) -> Tensor:
    """`buffer` with room for `used` columns along `dim` and some more, filled with `fill`."""
    shape = list(buffer.shape)
    shape[dim] = used + used // SPARE
    wide = buffer.new_full(shape, fill)
    wide.narrow(dim, 0, buffer.shape[dim]).copy_(buffer)
    return wide


def writable(buffer: Tensor, new: Tensor | None = None) -> Tensor:
    """`buffer`, or a copy where autograd or inference mode forbid that `new` is written into it."""
    in_graph = buffer.requires_grad or (new is not None and new.requires_grad)
    if in_graph or buffer.is_inference() != torch.is_inference_mode_enabled():
        return buffer.clone()
    return buffer
