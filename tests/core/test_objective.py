import pytest
import torch
from torch.nn import functional as F

from latentcot.core import objective
from latentcot.core.objective import (
    IGNORE_INDEX,
    adaptive_penalty,
    cross_entropy_sum,
    shift_labels,
    target_probs,
    token_losses,
)


@pytest.fixture(params=[1, 3, 2**24], ids=lambda size: f"chunk{size}")
def _chunk(request, monkeypatch):
    monkeypatch.setattr(objective, "CHUNK_TOKENS", request.param)
    monkeypatch.setattr(objective, "CPU_CHUNK_LOGITS", 0)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("num_tokens", [1, 4, 31])
def test_chunked_cross_entropy_equals_torch(num_tokens):
    hidden = torch.randn(num_tokens, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (num_tokens,))
    targets[num_tokens // 2] = IGNORE_INDEX
    ours = cross_entropy_sum(hidden, weight, targets)
    theirs = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad(ours * 0.37, (hidden, weight)),
        torch.autograd.grad(theirs * 0.37, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

    each = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, targets), each.detach())
    probs = target_probs(hidden, weight, targets)
    assert probs[num_tokens // 2] == 0
    kept = targets != IGNORE_INDEX
    torch.testing.assert_close(probs[kept], (-each[kept]).exp().detach())
    assert not probs.requires_grad


def test_no_gradient_is_computed_that_nobody_wants():
    hidden = torch.randn(5, 7, requires_grad=True)
    weight = torch.randn(13, 7)
    cross_entropy_sum(hidden, weight, torch.randint(13, (5,))).backward()
    assert hidden.grad is not None


def test_logits_are_wide_under_autocast():
    hidden = torch.randn(64, 32)
    weight = torch.randn(50, 32)
    targets = torch.randint(50, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        ours = cross_entropy_sum(hidden, weight, targets)
    assert ours.dtype == torch.float32
    # bf16 matmuls keep 8 bits: each logit (std 5.7) is off by about 0.02.
    torch.testing.assert_close(
        ours, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"), rtol=5e-3, atol=0
    )


def test_adaptive_penalty_and_its_stopped_gradient():
    gate = torch.tensor([0.2, 0.9], requires_grad=True)
    prob = torch.tensor([0.5, 0.1], requires_grad=True)
    penalty = adaptive_penalty(gate, prob, beta=2.0)
    assert float(penalty.detach()) == pytest.approx(0.2 * 0.25 + 0.9 * 0.01)
    penalty.backward()
    torch.testing.assert_close(gate.grad, torch.tensor([0.25, 0.01]))
    assert prob.grad is None


def test_labels_shift_by_one():
    labels = torch.tensor([[5, 6, -100, 8]])
    assert shift_labels(labels).tolist() == [[6, -100, 8, -100]]
