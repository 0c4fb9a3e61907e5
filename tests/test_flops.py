"""FLOPs against loops over pairs and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

import latentcot
from latentcot.core.slots import visible
from latentcot.flops import kaplan_flops, visible_pairs
from models.helpers import ids_of, tiny_llama, tiny_model


@pytest.mark.parametrize("visibility", ["all", "latest"])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_pairs_equal_a_loop_over_the_predicate(visibility, window):
    passes = torch.randint(1, 5, (3, 9))
    want = 0
    for row in passes.tolist():
        slots = [(t, k, last) for t, last in enumerate(row) for k in range(1, last + 1)]
        for t, k, _ in slots:
            for other_t, other_k, last in slots:
                arguments = (torch.tensor(t), k, torch.tensor(other_t), other_k, last)
                want += bool(visible(*arguments, visibility, window))
    assert visible_pairs(passes, visibility, window) == want


@pytest.mark.parametrize("length", [1, 24])
def test_linear_layers_and_head_equal_pytorchs_counter(length):
    """The counter counts masked pairs too: hold it against dense pairs, L for (L + 1) / 2."""
    model = latentcot.build_model("adaptive", tiny_llama(num_key_value_heads=4), l_max=2, tau=0)
    model.set_attn_implementation("eager")
    ids = ids_of(2, length)
    with FlopCounterMode(display=False) as counter:
        out = model(ids, labels=ids, skip_logits=True)
        out.loss.backward()
    flops = model.count_flops(out.passes)
    dense_pairs = 2 * 2 * sum(length * k * length for k in (1, 2, 3))
    dense = 3 * (flops.linear + flops.head + 4 * dense_pairs * 32) + flops.forward_only
    # The embedding needs a gradient only through pass 1's projections: nothing is left out.
    assert counter.get_total_flops() == pytest.approx(dense, rel=1e-3)


def test_windows_are_counted_layer_by_layer():
    backbone = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=2,
        max_window_layers=3,
    )
    model = latentcot.build_model("vanilla", backbone)
    assert model.config.layer_windows() == [None, None, None, 2]
    full, windowed = 16 * 17 // 2, 16 * 2 - 1
    passes = torch.ones(1, 16, dtype=torch.int64)
    assert model.count_flops(passes).attention == 4 * 32 * (3 * full + windowed)


def test_pruning_saves_what_was_not_executed():
    model = tiny_model("adaptive", l_max=3, tau=0.5)
    passes = torch.tensor([[4, 1, 2]])
    flops, full = model.count_flops(passes), model.count_flops(torch.full((1, 3), 4))
    assert flops.linear / full.linear == pytest.approx(7 / 12, rel=0.01)
    assert flops.head == full.head
    assert flops.forward_only / full.forward_only == pytest.approx((3 + 1 + 2) / 9)
    assert kaplan_flops(100, passes) == 6 * 100 * 7
