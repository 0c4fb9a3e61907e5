"""Packing: which tokens are active at a step, flat for the matmuls and by row for attention.

Shapes: B rows, L columns of the input, N active tokens, n the largest number of them in a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

PAD_POSITION = torch.iinfo(torch.int64).max
"""Position of padding: larger than any query's, so the slot predicate hides it by itself."""


@dataclass(frozen=True)
class Packing:
    """Active tokens of a (B, L) batch, in ascending order, so that positions stay sorted by row.

    Tensors of the active tokens are flat, (N, ...): every matmul of the backbone has exactly N
    rows, however unevenly they are spread over the batch. Attention, which needs rows, sees them
    packed left as (B, n, ...) through `pad` and `unpad`.

    Attributes:
        index: (N,) places of the active tokens in the flattened (B * L) input, ascending.
        positions: (N,) position of each active token in its sequence, from 0. Causality compares
            these.
        batch_shape: (B, L) of the input.
        copies: consecutive positions that share a token's place in the text, see `interleave`.
    """

    index: Tensor
    positions: Tensor
    batch_shape: tuple[int, int]
    copies: int = 1

    @classmethod
    def of(cls, mask: Tensor | None, offsets: Tensor, batch_shape: tuple[int, int]) -> Packing:
        """All tokens where `mask` (B, L) is true; row b's first one gets position offsets[b]."""
        rows, columns = batch_shape
        if mask is None:
            index = torch.arange(rows * columns, device=offsets.device)
            positions = torch.arange(columns, device=offsets.device) + offsets[:, None]
            return cls(index, positions.flatten(), batch_shape)
        mask = mask.bool()
        index = mask.flatten().nonzero().squeeze(1)
        positions = (mask.cumsum(1) - 1 + offsets[:, None]).flatten()[index]
        return cls(index, positions, batch_shape)

    def select(self, keep: Tensor | slice) -> Packing:
        """The active tokens where `keep` (N,) is true, or those at ascending places `keep`."""
        return Packing(self.index[keep], self.positions[keep], self.batch_shape, self.copies)

    def without_empty_rows(self) -> tuple[Tensor, Packing]:
        """(A,) the rows that have active tokens, and the packing of these A rows alone."""
        rows = self.counts.nonzero().squeeze(1)
        number = torch.zeros_like(self.counts).index_put((rows,), torch.arange(len(rows)).to(rows))
        index = self.index + (number[self.rows] - self.rows) * self.batch_shape[1]
        shape = (len(rows), self.batch_shape[1])
        return rows, Packing(index, self.positions, shape, self.copies)

    def interleave(self, copies: int) -> Packing:
        """Each token followed by `copies` - 1 slots of its own: N * copies tokens of a (B, L *
        copies) sequence, in which copy j of the token at t has position t * copies + j.
        """
        offsets = torch.arange(copies, device=self.index.device)
        rows, columns = self.batch_shape
        return Packing(
            (self.index[:, None] * copies + offsets).flatten(),
            (self.positions[:, None] * copies + offsets).flatten(),
            (rows, columns * copies),
            copies,
        )

    @property
    def position_ids(self) -> Tensor:
        """(N,) places in the text, for rotary embeddings: all copies of a token share one."""
        return self.positions if self.copies == 1 else self.positions // self.copies

    def __len__(self) -> int:
        return self.index.numel()

    @functools.cached_property
    def rows(self) -> Tensor:
        """(N,) row of each active token."""
        return self.index // self.batch_shape[1]

    @functools.cached_property
    def counts(self) -> Tensor:
        """(B,) number of active tokens of each row."""
        return torch.bincount(self.rows, minlength=self.batch_shape[0])

    @functools.cached_property
    def columns(self) -> Tensor:
        """(N,) place of each active token among those of its row."""
        starts = self.counts.cumsum(0) - self.counts
        return torch.arange(len(self), device=self.index.device) - starts[self.rows]

    @functools.cached_property
    def width(self) -> int:
        """n, the largest number of active tokens in a row."""
        if len(self) == self.batch_shape[0] * self.batch_shape[1]:
            return self.batch_shape[1]
        return int(self.counts.max())

    @property
    def is_full(self) -> bool:
        """Whether every row has n active tokens: then (N, ...) is a view of (B, n, ...)."""
        return len(self) == self.batch_shape[0] * self.width

    @functools.cached_property
    def padded_index(self) -> Tensor:
        """(N,) place of each active token in the flattened (B * n) layout."""
        return self.rows * self.width + self.columns

    @functools.cached_property
    def padded_positions(self) -> Tensor:
        """(B, n) positions by row, PAD_POSITION behind a row's last active token."""
        return self.pad(self.positions, fill=PAD_POSITION)

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """(N, ...) to (B, n, ...), packed left, `fill` behind a row's last active token."""
        if not self.is_full:
            padded = values.new_full((self.batch_shape[0] * self.width, *values.shape[1:]), fill)
            values = padded.index_copy(0, self.padded_index, values)
        return values.unflatten(0, (self.batch_shape[0], self.width))

    def unpad(self, padded: Tensor) -> Tensor:
        """(B, n, ...) to (N, ...): the inverse of `pad`."""
        flat = padded.flatten(0, 1)
        return flat if self.is_full else flat.index_select(0, self.padded_index)

    def pad_heads(self, values: Tensor) -> Tensor:
        """(H, N, D) to (B, H, n, D), zero behind a row's last active token."""
        if self.batch_shape[0] == 1:
            return values[None]
        return self.pad(values.transpose(0, 1)).transpose(1, 2)

    def unpad_heads(self, padded: Tensor) -> Tensor:
        """(B, H, n, D) to (H, N, D): the inverse of `pad_heads`."""
        if self.batch_shape[0] == 1:
            return padded[0]
        return self.unpad(padded.transpose(1, 2)).transpose(0, 1)

    def gather(self, values: Tensor) -> Tensor:
        """(B, L, ...) to (N, ...): what belongs to the active tokens."""
        flat = values.flatten(0, 1)
        return flat if len(self) == flat.shape[0] else flat.index_select(0, self.index)

    def scatter(self, values: Tensor, fill: int = 0) -> Tensor:
        """(N, ...) to (B, L, ...), `fill` where a token is not active: the inverse of `gather`."""
        rows, columns = self.batch_shape
        if len(self) != rows * columns:
            spread = values.new_full((rows * columns, *values.shape[1:]), fill)
            values = spread.index_copy(0, self.index, values)
        return values.unflatten(0, self.batch_shape)
