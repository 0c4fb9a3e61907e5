"""The store of all slots of a batch: a cache of transformers.

Shapes: B rows, L columns of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from latentcot.core.packing import Packing
from latentcot.core.slot_pass import GatheredPass, Group, InPlacePass, SlotPass
from latentcot.core.slots import SideBySide, StepSlots, Visibility, widen, writable

FEW_QUERIES = 16
"""A chunk of so many columns, or fewer, reads the slots where they lie: gathering them, which pays
when many queries share it, would copy the whole cache for every token."""


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
        self.owner: str | None = None  # what tells the model that filled it from others
        self.steps: list[StepSlots] = []
        self.home: SideBySide | None = None  # the buffers of all steps, once tokens are decoded
        self.is_real: Tensor | None = None  # (B, columns seen): which of them were no padding
        self.num_tokens = torch.zeros(0, dtype=torch.int64)  # (B,) real tokens seen so far
        self.depth = torch.zeros(0, 0, dtype=torch.int64)  # (B, tokens) passes of each

    def begin(self, mask: Tensor | None, batch_shape: tuple[int, int], device: Any) -> Packing:
        """Take in a chunk of (B, L) new columns and return the packing of its real tokens.

        Raises:
            ValueError: the cache holds another number of rows.
        """
        num_rows = batch_shape[0]
        if self.is_real is None:
            self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self.depth = self.num_tokens[:, None][:, :0]
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
        self._make_room(self.is_real.shape[1])
        return packing

    def step(
        self, step: int, packing: Packing, visibility: Visibility = "all", backend: str = "sdpa"
    ) -> SlotPass:
        """One pass over the active tokens at `step` (from 1): the backbone takes it as `slots`."""
        slots = self._slots_of(step, packing)
        few = packing.batch_shape[1] <= FEW_QUERIES and not torch.is_grad_enabled()
        together = few and visibility != "own" and bool(self.steps[0].keys)
        if together:
            self._put_together({step: packing})
        columns = slots.reserve(packing)
        self._deepen(packing, step)
        group = Group(slots, packing, columns)
        if together:
            return self._in_place(packing, [group], step, (1, step), visibility, backend)
        if few and columns is not None:
            buffers, span = (slots.keys, slots.values), (0, slots.used)
            seen = (buffers, span, slots.positions[:, : slots.used], step)
            return InPlacePass(packing, [group], step, *seen, self.depth, visibility, backend)
        first = step if visibility == "own" else 1
        own = [own for own in self.steps[first - 1 : step] if own.used]
        return GatheredPass(own, packing, visibility, backend, columns)

    def wave(
        self,
        rows: list[int],
        positions: list[int],
        steps: list[int],
        visibility: Visibility = "all",
        backend: str = "sdpa",
    ) -> InPlacePass:
        """One pass over N queries, each at a step of its own: the tokens in flight of a wavefront.

        Args:
            rows: row of each query, ascending.
            positions: its position, ascending in a row.
            steps: its step, from 1; all queries of a row are at different steps.
        """
        device = self.num_tokens.device
        shape = (len(self.num_tokens), len(set(steps)))
        index = [row * shape[1] + n - rows.index(row) for n, row in enumerate(rows)]
        self._make_room(1 + max(positions))
        packing = Packing(
            torch.tensor(index, device=device), torch.tensor(positions, device=device), shape
        )
        query_steps = torch.tensor(steps, device=device)
        queries: dict[int, tuple[Packing, slice | Tensor]] = {}
        for step in sorted(set(steps)):
            self._slots_of(step, packing)
            if shape[0] == 1:
                among: slice | Tensor = slice(steps.index(step), steps.index(step) + 1)
            else:
                among = (query_steps == step).nonzero().squeeze(1)
            queries[step] = (packing.select(among), among)
        self._put_together({step: own for step, (own, _) in queries.items()})
        groups = []
        for step, (own, among) in queries.items():
            slots = self.steps[step - 1]
            groups.append(Group(slots, own, slots.reserve(own), among))
        self._deepen(packing, query_steps)
        seen = (min(steps) if visibility == "own" else 1, max(steps))
        return self._in_place(packing, groups, query_steps, seen, visibility, backend)

    def _in_place(
        self,
        packing: Packing,
        groups: list[Group],
        query_steps: Tensor | int,
        steps: tuple[int, int],
        visibility: Visibility,
        backend: str,
    ) -> InPlacePass:
        """A pass over queries that may see the slots of the steps from the first to the last."""
        home = self.home
        assert home is not None
        start, count = home.span(*steps)
        numbers: Tensor | int = home.numbers[start : start + count]
        if steps[0] == steps[1]:
            numbers = steps[0]
        return InPlacePass(
            packing,
            groups,
            query_steps,
            (home.keys, home.values),
            (start, count),
            home.positions[:, start : start + count],
            numbers,
            self.depth,
            visibility,
            backend,
        )

    def _put_together(self, added: dict[int, Packing]) -> None:
        """See that all steps lie side by side, with room for what is added to some of them."""
        needed = [
            slots.needed(added[step]) if step in added else slots.used
            for step, slots in enumerate(self.steps, 1)
        ]
        if self.home is None or not self.home.holds(self.steps, needed):
            self.home = SideBySide(self.steps, needed)

    def _slots_of(self, step: int, packing: Packing) -> StepSlots:
        while len(self.steps) < step:
            self.steps.append(StepSlots(packing.batch_shape[0], packing.index.device))
        return self.steps[step - 1]

    def _deepen(self, packing: Packing, steps: Tensor | int) -> None:
        """Note that the tokens of `packing` execute `steps`."""
        self.depth = writable(self.depth)
        self.depth[packing.rows, packing.position_ids] = steps

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > self.depth.shape[1]:
            self.depth = widen(self.depth, 1, num_tokens, 0)

    def rewind(self, packing: Packing) -> None:
        """Drop the slots of this chunk's tokens, as if no pass had run over them yet."""
        self.crop_slots(self.num_tokens - packing.counts)

    def crop_slots(self, num_tokens: Tensor) -> None:
        """Drop the slots of row b behind its first num_tokens[b] tokens, in flight or not."""
        for slots in self.steps:
            slots.crop(num_tokens)

    def settle(self, lengths: list[int]) -> None:
        """Take over the tokens of waves: row b has lengths[b] columns now, and no slots behind."""
        assert self.is_real is not None
        seen, device = self.is_real.shape[1], self.is_real.device
        new = torch.arange(seen, max(lengths), device=device)
        own = new < torch.tensor(lengths, device=device)[:, None]
        self.is_real = torch.cat([self.is_real, own], dim=1)
        self.num_tokens = self.is_real.sum(1)
        self.crop_slots(self.num_tokens)

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
        self.crop_slots(self.num_tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_real is not None:
            self.is_real = self.is_real[indices]
            self.num_tokens = self.num_tokens[indices]
            self.depth = self.depth[indices]
        for slots in self.steps:
            slots.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.num_tokens.shape[0], device=self.num_tokens.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))
