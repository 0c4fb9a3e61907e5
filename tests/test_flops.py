"""FLOPs against loops over pairs and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

import latentcot
from latentcot.core import slots
from latentcot.core.slots import visible
from latentcot.flops import interleave, visible_pairs
from models.helpers import ids_of, tiny_llama, tiny_model


@pytest.mark.parametrize("visibility", ["all", "latest", "own"])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_pairs_equal_a_loop_over_the_predicate(visibility, window):
    passes = torch.randint(1, 5, (3, 9))
    want = 0
    for row in passes.tolist():
        executed = [(t, k, last) for t, last in enumerate(row) for k in range(1, last + 1)]
        for t, k, _ in executed:
            for other_t, other_k, last in executed:
                arguments = (torch.tensor(t), k, torch.tensor(other_t), other_k, last)
                want += bool(visible(*arguments, visibility, window))
    assert visible_pairs(passes, visibility, window) == want


VARIANTS = [(method, {}) for method in latentcot.METHODS] + [
    ("adaptive", {"visibility": "latest", "router": "multi_mlp"}),
    ("adaptive", {"visibility": "own"}),
    ("adaptive", {"step_loss_weight": 0.1}),
    ("ponderlm2", {"thoughts": 2}),
    ("mor", {"sharing": "middle_cycle"}),
    ("mor", {"routing": "token"}),
]


@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize("length", [24, 80])
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_executed_equals_pytorchs_counter(method, options, length, mask):
    """Training with realised steps under eager attention: both count masked pairs."""
    backbone = tiny_llama(num_hidden_layers=3, num_key_value_heads=4)
    model = tiny_model(method, backbone=backbone, **options)
    model.set_attn_implementation("eager")
    ids = ids_of(3, length)
    if mask:
        mask = torch.ones_like(ids)
        mask[0, : length // 2] = 0
    with FlopCounterMode(display=False) as counter:
        out = model(ids, mask, labels=ids, skip_logits=True)
        out.loss.backward()
    counted = counter.get_total_flops()
    # The head also runs over padding.
    padding = 0 if mask is None else int((mask == 0).sum()) * 3 * 2 * 32 * 61
    executed, exact = (model.count_flops(out.passes, executed=e) for e in (True, False))
    assert counted == pytest.approx(executed.training + padding, rel=1e-3)
    # `exact` is the same but for the pairs that a mask hides, and recomputation.
    for part in ("passes", "linear", "head", "forward_only"):
        assert getattr(exact, part) == getattr(executed, part)
    assert exact.attention < executed.attention


@pytest.fixture
def no_spare_columns(monkeypatch):
    """The ledger does not count the columns that a buffer keeps for slots to come."""
    monkeypatch.setattr(slots, "SPARE", 10**9)


def decode(model, num_tokens):
    """One row, token by token with a cache: exact and executed FLOPs, and PyTorch's count."""
    model.set_attn_implementation("eager")
    ids = ids_of(1, num_tokens)
    cache, passes = None, []
    with FlopCounterMode(display=False) as counter:
        for place in range(num_tokens):
            out = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            passes.append(out.passes)
    passes = torch.cat(passes, 1)
    exact, executed = (model.count_flops(passes, executed=e, decoding=True) for e in (False, True))
    return exact, executed, counter.get_total_flops()


@pytest.mark.parametrize(("method", "options"), VARIANTS)
@pytest.mark.usefixtures("no_spare_columns")
@torch.no_grad()
def test_decoding_costs_what_pytorch_counts(method, options):
    backbone = tiny_llama(num_hidden_layers=3, num_key_value_heads=4)
    model = tiny_model(method, backbone=backbone, **options).eval()
    exact, executed, counted = decode(model, num_tokens=12)
    assert counted == pytest.approx(executed.forward, rel=1e-6)
    if method == "paused":  # m slots at once, of which m (m - 1) / 2 pairs hide from each other
        m = model.config.num_passes
        assert executed.attention - exact.attention == 12 * 3 * m * (m - 1) / 2 * 4 * 32
    elif model.config.visibility != "latest":  # which masks slots where they lie
        assert executed.forward == exact.forward


@pytest.mark.usefixtures("no_spare_columns")
@torch.no_grad()
def test_decoding_computes_what_lies_outside_the_window():
    backbone = tiny_qwen3()
    model = tiny_model("adaptive", backbone=backbone, tau=0.4, l_max=2).eval()
    exact, executed, counted = decode(model, num_tokens=12)
    assert counted == pytest.approx(executed.forward, rel=1e-6)
    assert exact.attention < executed.attention


@pytest.mark.parametrize("window", [None, 2, 3, 50])
@pytest.mark.parametrize("copies", [2, 4])
def test_pairs_of_interleaved_slots_equal_a_loop(window, copies):
    tokens = torch.ones(2, 7, dtype=torch.int64)
    tokens[1, 4:] = 0
    want = 0
    for length in (7, 4):
        order = [(t, j) for t in range(length) for j in range(copies)]
        want += sum(
            theirs <= ours and (window is None or ours[0] - theirs[0] < window)
            for ours in order
            for theirs in order
        )
    assert visible_pairs(interleave(tokens, copies), "own", window, copies) == want


def tiny_qwen3():
    """Four layers, the last of which sees two positions."""
    return Qwen3Config(
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


def test_windows_are_counted_layer_by_layer():
    model = latentcot.build_model("vanilla", tiny_qwen3())
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
    assert flops.kaplan(100) == 6 * 100 * 7
