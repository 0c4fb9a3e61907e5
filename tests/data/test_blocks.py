from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcot.data import Blocks, TokenStream
from latentcot.data.blocks import permuted
from latentcot.errors import UserError


def blocks_of(num_tokens: int, block_length: int = 4, seed: int = 0) -> Blocks:
    shards = np.array_split(np.arange(num_tokens, dtype=np.uint16), 3)
    return Blocks(TokenStream("train", shards), block_length, seed)


@given(st.integers(1, 3000), st.text(max_size=3))
def test_permuted_is_a_permutation(size, key):
    images = permuted(np.arange(size), size, key)
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(size))


@given(st.integers(1, 2**40), st.data())
def test_permuted_stays_one_to_one_at_any_size_and_in_any_company(size, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    images = permuted(np.array(positions), size, "key")
    assert images.min() >= 0
    assert images.max() < size
    assert len(set(images.tolist())) == len(positions)
    assert permuted(np.array(positions[:1]), size, "key") == images[0]


@pytest.mark.parametrize("size", [2, 3, 5, 47])
def test_all_places_are_equally_likely(size):
    """Chi-square over (position, image); its mean is 1 per degree of freedom."""
    num = 2000
    counts = np.zeros((size, size))
    for key in range(num):
        counts[np.arange(size), permuted(np.arange(size), size, str(key))] += 1
    expected = num / size
    per_degree = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert per_degree < 1 + 6 * np.sqrt(2) / (size - 1), "six standard deviations"


def test_neighbours_are_torn_apart():
    images = permuted(np.arange(10_000), 10_000, "key")
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.04  # four standard deviations


@given(st.integers(4, 200), st.integers(1, 9), st.integers(0, 3))
def test_each_epoch_visits_each_block_once(num_tokens, batch_size, seed):
    blocks = blocks_of(num_tokens, seed=seed)
    assert blocks.num_blocks == num_tokens // 4
    epochs = 3
    steps = -(-epochs * blocks.num_blocks // batch_size)
    rows = np.concatenate([blocks.batch(step, batch_size) for step in range(steps)])
    np.testing.assert_array_equal(rows - rows[:, :1], np.tile(np.arange(4), (len(rows), 1)))
    for epoch in range(epochs):
        visited = rows[epoch * blocks.num_blocks : (epoch + 1) * blocks.num_blocks, 0]
        assert Counter(visited.tolist()) == Counter(range(0, 4 * blocks.num_blocks, 4))


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return blocks_of(400, seed=seed).batch(epoch, 100)[:, 0].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_order_is_written_in_stone():
    """A run that is resumed with another version must go on in the same order."""
    assert (blocks_of(40, seed=7).batch(0, 10)[:, 0] // 4).tolist() == [
        3,
        7,
        5,
        8,
        9,
        6,
        0,
        1,
        2,
        4,
    ]


def test_a_batch_is_the_same_whole_or_in_parts():
    blocks = blocks_of(100)
    whole = blocks.batch(5, 12)
    assert whole.shape == (12, 4)
    assert whole.dtype == np.int64
    parts = [blocks.samples(60 + first, 3) for first in range(0, 12, 3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(("limit", "sizes"), [(None, [3, 3, 1]), (4, [3, 1]), (99, [3, 3, 1])])
def test_sequential_follows_the_text(limit, sizes):
    batches = list(blocks_of(31).sequential(3, max_blocks=limit))
    assert [len(batch) for batch in batches] == sizes
    np.testing.assert_array_equal(np.concatenate(batches).ravel(), np.arange(4 * sum(sizes)))


def test_less_than_a_block_is_refused():
    assert blocks_of(4).num_blocks == 1
    with pytest.raises(UserError) as caught:
        blocks_of(3)
    assert str(caught.value) == (
        "split train has 3 tokens, fewer than one block of 4: "
        "give more text or set training.block_length to at most 3"
    )
