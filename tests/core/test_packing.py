import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcot.core.packing import PAD_POSITION, Packing

masks = st.integers(1, 4).flatmap(
    lambda rows: st.integers(1, 7).flatmap(
        lambda columns: st.lists(
            st.lists(st.booleans(), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
)


@settings(deadline=None)
@given(masks)
def test_layouts_equal_plain_loops(mask):
    mask = torch.tensor(mask)
    rows, columns = mask.shape
    offsets = torch.arange(rows) * 10
    packing = Packing.of(mask, offsets, (rows, columns))
    values = torch.randn(rows, columns, 2)

    flat, positions, by_row = [], [], []
    for row in range(rows):
        place = 0
        by_row.append([])
        for column in range(columns):
            if mask[row, column]:
                flat.append(values[row, column])
                by_row[row].append(values[row, column])
                positions.append(10 * row + place)
                place += 1
    assert len(packing) == len(flat)
    assert packing.positions.tolist() == positions
    if not flat:
        return
    gathered = packing.gather(values)
    assert torch.equal(gathered, torch.stack(flat))
    assert packing.width == max(map(len, by_row))
    padded = packing.pad(gathered)
    for row, items in enumerate(by_row):
        for place, item in enumerate(items):
            assert torch.equal(padded[row, place], item)
        assert (packing.padded_positions[row, len(items) :] == PAD_POSITION).all()
    assert torch.equal(packing.unpad(padded), gathered)
    assert torch.equal(packing.scatter(gathered), values * mask[..., None])


def test_select_keeps_order_and_row():
    packing = Packing.of(None, torch.zeros(2, dtype=torch.int64), (2, 4))
    kept = packing.select(torch.tensor([0, 1, 0, 1, 1, 0, 0, 0]).bool())
    assert kept.index.tolist() == [1, 3, 4]
    assert kept.positions.tolist() == [1, 3, 0]
    assert kept.counts.tolist() == [2, 1]
    assert kept.padded_positions.tolist() == [[1, 3], [0, PAD_POSITION]]


@pytest.mark.parametrize("full", [True, False])
def test_gradients_pass_through_both_layouts(full):
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 0] = full
    packing = Packing.of(mask, torch.zeros(2, dtype=torch.int64), (2, 3))
    x = torch.randn(len(packing), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: packing.unpad(packing.pad(v) * 2), x)
    assert torch.autograd.gradcheck(lambda v: packing.gather(packing.scatter(v) * 2), x)
