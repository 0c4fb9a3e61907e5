"""Blocks of tokens in an order that is a pure function of seed and step."""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from latentcot.data.shards import TokenStream
from latentcot.errors import UserError


class Blocks:
    """A stream as consecutive, non-overlapping blocks of `block_length` tokens.

    What is left after the last whole block is not used. Each epoch visits each block once, in an
    order of its own. Nothing is remembered between calls: a resumed run asks for its step and gets
    what an uninterrupted one would.
    """

    def __init__(self, stream: TokenStream, block_length: int, seed: int = 0) -> None:
        """Raises `UserError` where the stream is shorter than one block."""
        if len(stream) < block_length:
            raise UserError(
                f"split {stream.name} has {len(stream)} tokens, fewer than one block of "
                f"{block_length}: give more text or set training.block_length to at most "
                f"{len(stream)}"
            )
        self.block_length = block_length
        self.num_blocks = len(stream) // block_length
        self._stream = stream
        self._seed = seed

    def batch(self, step: int, batch_size: int) -> np.ndarray:
        """The samples of training step `step` (from 0), int64 of shape (batch_size, block_length).

        They are samples step * batch_size to (step + 1) * batch_size - 1.
        """
        return self.samples(step * batch_size, batch_size)

    def samples(self, first: int, count: int) -> np.ndarray:
        """Samples first .. first + count - 1 of the endless sequence of shuffled epochs.

        int64 of shape (count, block_length); any batch is the same whole or in parts, so each rank
        can read its own rows alone.
        """
        epochs, positions = np.divmod(np.arange(first, first + count), self.num_blocks)
        blocks = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            key = f"{self._seed}:{epoch}"
            blocks[rows] = permuted(positions[rows], self.num_blocks, key)
        return self.at(blocks)

    def sequential(self, batch_size: int, max_blocks: int | None = None) -> Iterator[np.ndarray]:
        """Yield all blocks, or the first `max_blocks`, in the order of the text, for evaluation.

        int64 of shape (batch_size, block_length); the last batch may be smaller.
        """
        num_blocks = self.num_blocks if max_blocks is None else min(max_blocks, self.num_blocks)
        for first in range(0, num_blocks, batch_size):
            yield self.at(np.arange(first, min(first + batch_size, num_blocks)))

    def at(self, blocks: np.ndarray) -> np.ndarray:
        """The blocks of these numbers in the text, int64 of shape (len(blocks), block_length)."""
        length = self.block_length
        return np.stack([self._stream.read(int(block) * length, length) for block in blocks])


def permuted(positions: np.ndarray, size: int, key: str) -> np.ndarray:
    """Images of `positions` under the pseudo-random permutation of range(size) that `key` selects.

    An 8-round Feistel network permutes the smallest range(4**h) that holds range(size), without a
    table; images outside are mapped again until they fall inside (cycle walking), which takes
    fewer than 4 rounds on average and keeps the map one-to-one.

    `positions`: integers in range(size), any shape; the result is int64 of the same shape.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    round_keys = np.frombuffer(blake2b(key.encode()).digest(), dtype="<u8")
    images = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half_bits, round_keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    """Permute range(4**half_bits); `values`: uint64."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return left << half_bits | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: each bit of a uint64 moves about half of the others."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
