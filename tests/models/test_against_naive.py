"""The parallel, packed, pruned pass is the paper's model: equal to one (t, k) at a time."""

import pytest
import torch

from latentcot.core import attention, slots
from models.helpers import ids_of, tiny_model
from models.naive import naive_forward

RELATIVE = 1e-9


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours - theirs).detach().abs().max()
    return float(difference / theirs.detach().abs().max().clamp(min=1e-12))


@pytest.fixture(params=["padded", "row by row", "in parts"])
def _layout(request, monkeypatch):
    if request.param == "row by row":
        monkeypatch.setattr(slots, "RAGGED_MIN_WIDTH", 0)
        monkeypatch.setattr(slots, "RAGGED_MIN_WASTE", 0)
    if request.param == "in parts":
        monkeypatch.setattr(attention, "CPU_SCORES", 1)


@pytest.mark.usefixtures("_layout")
@pytest.mark.parametrize("visibility", ["all", "latest", "own"])
@pytest.mark.parametrize("router", ["none", "linear", "mlp", "multi_linear", "multi_mlp"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_values_and_gradients(visibility, router, backend):
    options = {"l_max": 3, "tau": 0.25, "beta": 0.7, "lambda_adaptive": 0.9}
    options["step_loss_weight"] = 0.3 if visibility == "latest" else 0
    model = tiny_model("adaptive", router=router, visibility=visibility, **options)
    model.set_attn_implementation(backend)
    ids = ids_of(3, 11)
    labels = ids.clone()
    labels[0, 4] = labels[2, 9] = -100
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # left padding
    mask[2, 9:] = 0  # right padding
    num_items = 17

    out = model(ids, mask, labels, num_items_in_batch=num_items, output_steps=True)
    out.loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    loss = 0.0
    executed = set()
    for row in range(3):
        real = mask[row].bool()
        naive = naive_forward(model, ids[row][real], labels[row][real])
        assert out.passes[row][real].tolist() == naive.passes
        assert relative_error(out.logits[row][real], naive.logits) < RELATIVE
        penalty = 0.0 if router == "none" else 0.9 * naive.penalty_sum
        penalty = penalty + options["step_loss_weight"] * naive.step_sum
        loss = loss + (naive.ce_sum + penalty) / num_items
        for place, t in enumerate(real.nonzero().flatten().tolist()):
            k = naive.passes[place]
            executed.add(k)
            for record, values in (
                (out.exit_probs, naive.exits[place]),
                (out.gates, naive.gates[place]),
                (out.reach_probs, naive.reach[place]),
                (out.step_target_probs, naive.p_targets[place]),
            ):
                want = torch.stack(values) if values else torch.zeros(k, dtype=torch.float64)
                torch.testing.assert_close(record[row, t, :k], want, rtol=RELATIVE, atol=1e-14)
                assert not record[row, t, k:].any()
    assert relative_error(out.loss, loss) < RELATIVE
    loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative_error(gradient, theirs[name]) < RELATIVE, name
    # The comparison means something only if tokens really stopped at different steps.
    assert executed == ({4} if router == "none" else {1, 2, 3, 4} & executed)
    assert router == "none" or len(executed) >= 3


@pytest.mark.parametrize("visibility", ["all", "latest", "own"])
def test_exit_masses_sum_to_one_and_padding_executes_nothing(visibility):
    model = tiny_model("adaptive", visibility=visibility, tau=0.3)
    ids = ids_of(4, 31)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[3] = 0  # a row without a single token
    out = model(ids, mask, output_steps=True)
    sums = out.exit_probs.sum(-1)
    torch.testing.assert_close(sums, mask.double(), rtol=0, atol=1e-14)
    assert torch.equal(out.passes > 0, mask.bool())


def test_target_probabilities_get_no_gradient():
    """With the gates held constant, the adaptive loss moves nothing but the router."""
    model = tiny_model("adaptive", tau=0.0, beta=1.0)
    ids = ids_of(2, 9)
    model(ids, labels=ids).adaptive_loss.backward()
    assert model.lm_head.weight.grad is None or not model.lm_head.weight.grad.any()
    assert all(p.grad.any() for p in model.router.parameters())
