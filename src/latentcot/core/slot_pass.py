"""One pass of the backbone over slots: it stores the new ones, and attends to the visible.

Shapes: B rows, N queries, n the largest number of them in a row, S slots, H heads, D head width.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from latentcot.core.attention import BACKENDS
from latentcot.core.packing import PAD_POSITION, Packing
from latentcot.core.slots import (
    Columns,
    StepSlots,
    Visibility,
    attends_by_row,
    visible,
    visible_positions,
)


class SlotPass(ABC):
    """What the attention of a backbone is given: the queries, and the slots that they see.

    Masks and indices are made once and shared by all layers.

    Attributes:
        packing: the queries, (N,).
    """

    packing: Packing

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers that have stored slots of this pass."""

    @abstractmethod
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
            query: (H, N, D); key and value: (H_kv, N, D).
            window: sliding window in positions, or None.

        Returns:
            (H, N, D).
        """


@dataclass
class Group:
    """Queries of a pass that are at the same step.

    Attributes:
        slots: the store of their step.
        packing: their places.
        columns: where their new slots go, see `StepSlots.reserve`.
        among: which of all queries of the pass they are; None: all.
    """

    slots: StepSlots
    packing: Packing
    columns: Columns
    among: slice | Tensor | None = None


@dataclass
class InPlacePass(SlotPass):
    """A pass of few queries: it reads the slots where they lie, and copies none of them.

    The queries may be at different steps, as in wavefront decoding.

    Attributes:
        packing: all queries.
        groups: the same by step.
        query_steps: (N,) their steps, or the one of all.
        buffers: the keys and values per layer, (B, H_kv, S or more, D), that hold what they see.
        span: start and number of the columns there that they may see.
        positions: (B, S) of these columns.
        numbers: (S,) the steps of these columns, or the one of all.
        depth: (B, tokens) passes of each token so far.
    """

    packing: Packing
    groups: list[Group]
    query_steps: Tensor | int
    buffers: tuple[dict[int, Tensor], dict[int, Tensor]]
    span: tuple[int, int]
    positions: Tensor
    numbers: Tensor | int
    depth: Tensor
    visibility: Visibility
    backend: str
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.buffers[0])

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
        for group in self.groups:
            own = (key, value)
            if group.among is not None:
                own = (key[:, group.among], value[:, group.among])
            group.slots.write(layer, *own, group.packing, group.columns)
        rows, queries = self._rows_with_queries
        keys = self.buffers[0][layer].narrow(2, *self.span)
        values = self.buffers[1][layer].narrow(2, *self.span)
        if rows is not None:
            keys, values = keys[rows], values[rows]
        if keys.dtype != query.dtype:
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        mask = self._masks[window]
        padded = queries.pad_heads(query)
        out = BACKENDS[self.backend](padded, keys, values, mask, scaling, dropout)
        return queries.unpad_heads(out)

    @functools.cached_property
    def _rows_with_queries(self) -> tuple[Tensor | None, Packing]:
        """Rows that have queries, None for all, and the packing of these rows alone."""
        if self.packing.batch_shape[0] == 1 or bool(self.packing.counts.all()):
            return None, self.packing
        return self.packing.without_empty_rows()

    def _make_mask(self, window: int | None) -> Tensor | None:
        """(B, 1, n, S) what each query sees, or None if it sees all."""
        is_newest = isinstance(self.query_steps, int) and len(self.packing) == 1
        is_alone = self.packing.batch_shape[0] == 1 and isinstance(self.numbers, int)
        if is_newest and is_alone and window is None:
            return None
        rows, queries = self._rows_with_queries
        query_steps, positions, depth = self.query_steps, self.positions, self.depth
        if isinstance(query_steps, Tensor):
            query_steps = queries.pad(query_steps)[:, :, None]
        if rows is not None:
            positions, depth = positions[rows], depth[rows]
        last = None
        if self.visibility == "latest":
            last = depth.gather(1, positions.clamp(max=depth.shape[1] - 1))[:, None]
        sees = visible(
            queries.padded_positions[:, :, None],
            query_steps,
            positions[:, None],
            self.numbers,
            last,
            self.visibility,
            window,
            queries.copies,
        )
        return sees[:, None]


@dataclass
class GatheredPass(SlotPass):
    """A pass of many queries, all at the same step: it gathers the slots that they see.

    Attributes:
        steps: the slots of this step (the last) and of those before it.
        packing: the active tokens.
        columns: where this step's new slots go, see `StepSlots.reserve`.
    """

    steps: list[StepSlots]
    packing: Packing
    visibility: Visibility
    backend: str
    columns: Columns
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.steps[-1].keys)

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
        self.steps[-1].write(layer, key, value, self.packing, self.columns)
        keys, values = (view.to(query.dtype) for view in self._view(layer))
        mask = self._mask(window)
        backend = BACKENDS[self.backend]
        if mask is None or not self._is_ragged:
            padded = self.packing.pad_heads(query)
            return self.packing.unpad_heads(backend(padded, keys, values, mask, scaling, dropout))
        rows = []
        for row, (own, slots) in enumerate(self._own_slots):
            q = query[None, :, own]
            k, v = (x[row].index_select(1, slots)[None] for x in (keys, values))
            own_mask = mask[row : row + 1, :, : q.shape[2]].index_select(-1, slots)
            rows.append(backend(q, k, v, own_mask, scaling, dropout)[0])
        return torch.cat(rows, dim=1)

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

    def _view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H_kv, S, D) that this pass may see, at `_slot_positions`."""
        views = [slots.view(layer) for slots in self.steps]
        join = self._overlay if self.visibility == "latest" else _concatenate
        return join([keys for keys, _ in views]), join([values for _, values in views])

    def _overlay(self, tensors: list[Tensor]) -> Tensor:
        """`latest`: the first step's slots, each replaced by the deeper one of its position."""
        if len(tensors) == 1:
            return tensors[0]
        first, *others = (tensor.transpose(1, 2) for tensor in tensors)
        flat = first.flatten(0, 1)
        for (places, chosen), deeper in zip(self._replacements, others, strict=True):
            flat = flat.index_copy(0, places, deeper.flatten(0, 1).index_select(0, chosen))
        return flat.unflatten(0, first.shape[:2]).transpose(1, 2)

    @functools.cached_property
    def _replacements(self) -> list[tuple[Tensor, Tensor]]:
        """For each visible step after the first: places in the flat view, and the flat slots."""
        first, *deeper_steps = self.steps
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
        steps = self.steps
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
        steps = self.steps
        seen = steps[:1] if self.visibility == "latest" else steps
        return torch.cat([slots.positions[:, : slots.used] for slots in seen], dim=1)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=2)
