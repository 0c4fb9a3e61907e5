"""The store against the predicate: a pass over slots equals attention over all slots, masked."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcot.core import cache as cache_module
from latentcot.core import slots as slots_module
from latentcot.core.cache import SlotCache
from latentcot.core.packing import PAD_POSITION, Packing
from latentcot.core.slots import visible

HEADS, KV_HEADS, WIDTH = 4, 2, 3


def test_predicate_is_the_papers_mask():
    steps = torch.arange(1, 4)
    positions = torch.arange(3)
    grid = [(t, k) for t in positions.tolist() for k in steps.tolist()]
    for t, k in grid:
        for other_t, other_k in grid:
            sees = visible(torch.tensor(t), k, torch.tensor(other_t), other_k)
            assert bool(sees) == (other_t <= t and other_k <= k)


def test_latest_sees_one_slot_a_position():
    last = torch.tensor([3, 1, 2])  # K* of positions 0, 1, 2
    for k in range(1, 4):
        seen = [
            (t, j)
            for t in range(3)
            for j in range(1, int(last[t]) + 1)
            if visible(torch.tensor(2), k, torch.tensor(t), j, last[t], "latest")
        ]
        assert seen == [(t, min(k, int(last[t]))) for t in range(3)]


def test_window_and_padding():
    assert not visible(torch.tensor(5), 1, torch.tensor(2), 1, window=3)
    assert visible(torch.tensor(5), 1, torch.tensor(3), 1, window=3)
    assert not visible(torch.tensor(5), 1, torch.tensor(PAD_POSITION), 1)
    assert visible(torch.tensor(PAD_POSITION), 1, torch.tensor(0), 1, window=3)


class Reference:
    """Every slot ever executed, in lists; attention by the predicate, query by query."""

    def __init__(self, visibility, window):
        self.slots, self.last = [], {}
        self.visibility, self.window = visibility, window

    def attend(self, row, position, step, query, slots_of_pass):
        scores, values = [], []
        for other, t, k, key, value in self.slots + slots_of_pass:
            last = torch.tensor(self.last[other, t])
            if other == row and visible(
                torch.tensor(position), step, torch.tensor(t), k, last, self.visibility, self.window
            ):
                scores.append(torch.einsum("hd,hd->h", query, key.repeat_interleave(2, 0)))
                values.append(value.repeat_interleave(2, 0))
        weights = (torch.stack(scores) / math.sqrt(WIDTH)).softmax(0)
        return torch.einsum("sh,shd->hd", weights, torch.stack(values))


@pytest.fixture(autouse=True, params=["in place", "padded", "row by row"])
def _layout(request, monkeypatch):
    """Every test with slots read in place, with gathered ones, and with rows one by one."""
    if request.param != "in place":
        monkeypatch.setattr(cache_module, "FEW_QUERIES", 0)
    if request.param == "row by row":
        monkeypatch.setattr(slots_module, "RAGGED_MIN_WIDTH", 0)
        monkeypatch.setattr(slots_module, "RAGGED_MIN_WASTE", 0)


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    visibility=st.sampled_from(["all", "latest", "own"]),
    backend=st.sampled_from(["sdpa", "eager"]),
    window=st.sampled_from([None, 2]),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    grad=st.booleans(),
)
def test_passes_over_chunks_equal_the_predicate(seed, visibility, backend, window, lengths, grad):
    """Several chunks (prefill, then decode) of a padded batch with ragged halting."""
    generator = torch.Generator().manual_seed(seed)
    rows, num_steps = 3, 3
    cache, reference = SlotCache(), Reference(visibility, window)
    seen = [0] * rows
    with torch.set_grad_enabled(grad):
        for length in lengths:
            mask = torch.rand(rows, length, generator=generator) < 0.8
            if not mask.any():
                mask[0, 0] = True
            packing = cache.begin(mask, (rows, length), torch.device("cpu"))
            for row in range(rows):
                own = packing.positions[packing.rows == row].tolist()
                assert own == list(range(seen[row], seen[row] + int(mask[row].sum())))
                seen[row] += len(own)
            for step in range(1, num_steps + 1):
                slots = cache.step(step, packing, visibility, backend)
                shape = (len(packing), HEADS, WIDTH)
                query = torch.randn(shape, generator=generator, dtype=torch.float64)
                key, value = torch.randn(
                    2, len(packing), KV_HEADS, WIDTH, generator=generator, dtype=torch.float64
                )
                heads_first = (x.transpose(0, 1) for x in (query, key, value))
                out = slots.attend(0, *heads_first, WIDTH**-0.5, 0.0, window).transpose(0, 1)
                new = []
                for n, (row, t) in enumerate(
                    zip(packing.rows.tolist(), packing.positions.tolist(), strict=True)
                ):
                    reference.last[row, t] = step
                    new.append((row, t, step, key[n], value[n]))
                for n, (row, t) in enumerate(
                    zip(packing.rows.tolist(), packing.positions.tolist(), strict=True)
                ):
                    want = reference.attend(row, t, step, query[n], new)
                    torch.testing.assert_close(out[n], want, rtol=1e-10, atol=1e-12)
                reference.slots += new
                packing = packing.select(torch.rand(len(packing), generator=generator) < 0.6)
                if not len(packing):
                    break
    num_slots = sum(int(step.lengths.sum()) for step in cache.steps)
    assert num_slots == len(reference.slots)


def filled_cache(num_tokens):
    cache = SlotCache()
    packing = cache.begin(None, (2, num_tokens), torch.device("cpu"))
    for step in (1, 2):
        slots = cache.step(step, packing)
        states = torch.arange(len(packing)).double().view(1, -1, 1).repeat(1, 1, 2)
        slots.attend(0, states, states, states, 1.0)
        packing = packing.select(packing.positions % 2 == 0)
    return cache


@pytest.mark.parametrize(("max_length", "kept"), [(3, 3), (-2, 3), (9, 5), (0, 5), (-9, 0)])
def test_crop_drops_the_tail_of_every_step(max_length, kept):
    cache = filled_cache(5)
    cache.crop(max_length)
    assert cache.get_seq_length() == kept
    assert cache.num_tokens.tolist() == [kept, kept]
    for step, positions in zip(cache.steps, (range(kept), range(0, kept, 2)), strict=True):
        assert step.used == len(positions)
        assert step.positions[0, : step.used].tolist() == list(positions)


def test_crop_counts_columns_of_padded_rows():
    cache = SlotCache()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    packing = cache.begin(mask, (2, 5), torch.device("cpu"))
    states = torch.zeros(1, len(packing), 2)
    cache.step(1, packing).attend(0, states, states, states, 1.0)
    cache.crop(4)
    assert cache.num_tokens.tolist() == [2, 4]
    assert cache.get_seq_length() == 4
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_cropped_cache_is_written_again():
    cache = filled_cache(5)
    cache.crop(2)
    packing = cache.begin(None, (2, 1), torch.device("cpu"))
    assert packing.positions.tolist() == [2, 2]
    key = torch.full((1, 2, 2), 7.0, dtype=torch.float64)
    with torch.no_grad():
        cache.step(1, packing).attend(0, key, key, key, 1.0)
    assert cache.steps[0].positions[0, :3].tolist() == [0, 1, 2]
    assert cache.steps[0].keys[0][0, 0, :3, 0].tolist() == [0.0, 1.0, 7.0]


def test_slots_grow_in_place():
    """Decoding writes a slot once: the buffer stays until it is full, and is never much larger."""
    cache = filled_cache(3)
    buffers = set()
    with torch.no_grad():
        for _ in range(200):
            packing = cache.begin(None, (2, 1), torch.device("cpu"))
            key = torch.zeros(1, 2, 2, dtype=torch.float64)
            cache.step(1, packing).attend(0, key, key, key, 1.0)
            step = cache.steps[0]
            buffers.add(step.keys[0].data_ptr())
            assert step.keys[0].shape[2] <= 1.25 * step.used
    assert len(buffers) <= 40


def test_rows_are_selected_and_another_batch_is_refused():
    cache = filled_cache(4)
    cache.batch_repeat_interleave(3)
    assert cache.num_tokens.tolist() == [4] * 6
    assert cache.steps[0].keys[0][2, 0, 0, 0] == 0
    assert cache.steps[0].keys[0][3, 0, 0, 0] == 4
    with pytest.raises(ValueError, match="holds 6 rows and the input has 2"):
        cache.begin(None, (2, 1), torch.device("cpu"))


def test_packing_of_a_continued_row_starts_at_its_length():
    packing = Packing.of(None, torch.tensor([3, 5]), (2, 2))
    assert packing.positions.tolist() == [3, 4, 5, 6]
