"""The packed, batched, cached baselines equal their equations written out one query at a time."""

import itertools

import pytest
import torch

from models.helpers import ids_of, tiny_llama, tiny_model
from models.naive_baselines import (
    IGNORED,
    naive_looped,
    naive_mor,
    naive_paused,
    naive_ponderlm,
    naive_ponderlm2,
    naive_ponderlm2_decode,
)

RELATIVE = 1e-9
NUM_ITEMS = 11
NAIVE = {
    "looped": naive_looped,
    "paused": naive_paused,
    "ponderlm": naive_ponderlm,
    "ponderlm2": naive_ponderlm2,
    "mor": naive_mor,
}


def narrow(**changes):
    return tiny_llama(hidden_size=16, intermediate_size=24, **changes)


def jacobi(thoughts, training=1, evaluation=1):
    iterations = {"min_iterations": training, "max_iterations": training}
    return {"thoughts": thoughts, **iterations, "eval_iterations": evaluation}


def mor(*capacities, **options):
    """Factors large enough that an error in any of them shows."""
    return {"capacities": list(capacities), "alpha": 0.4, "aux_weight": 0.7, **options}


MIDDLE = {"sharing": "middle_cycle", "backbone": narrow(num_hidden_layers=4)}
VARIANTS = [
    ("looped", {"loops": 3}, True),
    ("looped", {"loops": 3, "reinject": True}, True),
    ("paused", {"num_pauses": 3}, True),
    ("ponderlm", {"steps": 3}, True),
    ("ponderlm", {"steps": 3, "cumulative": False}, True),
    ("ponderlm", {"steps": 2, "scale_input": True}, True),
    ("ponderlm2", jacobi(1, training=2), True),
    ("ponderlm2", jacobi(1, training=3), True),
    ("ponderlm2", jacobi(2, training=2), True),
    ("ponderlm2", jacobi(2, training=3), True),
    ("ponderlm2", jacobi(1, evaluation=3), False),
    ("ponderlm2", jacobi(2, evaluation=3), False),
    *(
        ("mor", mor(*capacities, **options), training)
        for training in (True, False)
        for capacities, options in (
            ((1, 0.8, 0.5), {}),
            ((1, 0.8, 0.8, 0.5), {}),
            ((1, 0.8, 0.5), MIDDLE),
            ((1, 0.8, 0.5), {"routing": "token"}),
            ((1, 0.8, 0.5), {"routing": "token", **MIDDLE}),
        )
    ),
    ("mor", mor(1, 0.15), True),  # keeps a single token of the first row, and none of the others
]


def name_of(variant):
    method, options, training = variant
    values = (
        f"{key}={value}" for key, value in options.items() if key not in ("backbone", "aux_weight")
    )
    return "-".join([method, *values, "train" if training else "eval"]).replace(" ", "")


def padded_batch():
    """Three rows of 8 columns: one full, one padded on the left, one on the right."""
    ids = ids_of(3, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, 6:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, 4] = labels[2, 2] = IGNORED
    return ids, mask, labels


def assert_close(ours, theirs, name=""):
    """Largest difference below RELATIVE times the largest value."""
    error = float((ours - theirs).detach().abs().max())
    assert error < RELATIVE * float(theirs.detach().abs().max().clamp(min=1e-12)), name


@pytest.mark.parametrize(("method", "options", "training"), VARIANTS, ids=map(name_of, VARIANTS))
def test_values_and_gradients(method, options, training):
    model = tiny_model(method, **{"backbone": narrow()} | options).train(training)
    ids, mask, labels = padded_batch()
    out = model(ids, mask, labels, num_items_in_batch=NUM_ITEMS)
    out.loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    ce_sum = penalty = torch.zeros((), dtype=torch.float64)
    executed = []
    for row in range(3):
        real = mask[row].bool()
        targets = [*labels[row][real][1:].tolist(), IGNORED]
        naive = NAIVE[method](model, ids[row][real], targets)
        assert out.passes[row][real].tolist() == naive.passes
        assert not out.passes[row][~real].any()
        executed.append(naive.passes)
        logits = torch.stack([model.lm_head.weight @ state for state in naive.states])
        assert_close(out.logits[row][real], logits)
        for logit, target in zip(logits, targets, strict=True):
            if target != IGNORED:
                ce_sum = ce_sum - logit.log_softmax(-1)[target]
        penalty = penalty + naive.penalty
    loss = (ce_sum + penalty) / NUM_ITEMS
    assert_close(out.ce_loss, ce_sum / NUM_ITEMS)
    assert_close(out.adaptive_loss, penalty / NUM_ITEMS)
    assert_close(out.loss, loss)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(ours[name], parameter.grad, name)
        assert parameter.grad.any(), name
    if method == "mor":
        assert_recursions_differ(model, executed)


def assert_recursions_differ(model, executed):
    """The comparison means something only if tokens really stopped at different recursions."""
    capacities = model.config.capacities
    if model.config.routing == "expert" and model.training:
        for passes, (r, capacity) in itertools.product(executed, enumerate(capacities, start=1)):
            assert sum(p >= r for p in passes) == int(capacity * len(passes))
    else:  # a recursion that keeps all that came stops nobody
        stops = {r for r in range(1, len(capacities)) if capacities[r - 1] != capacities[r]}
        assert {p for passes in executed for p in passes} == stops | {len(capacities)}


@pytest.mark.parametrize("thoughts", [1, 2])
@torch.no_grad()
def test_ponderlm2_decodes_sequentially(thoughts):
    """Cached decoding is the sequence itself; Jacobi reaches it, but not by three iterations."""
    ids, mask, _ = padded_batch()
    length = ids.shape[1]
    model = tiny_model("ponderlm2", thoughts=thoughts, backbone=narrow()).eval()
    cache, columns = None, []
    for t in range(length):
        one = slice(t, t + 1)
        out = model(ids[:, one], mask[:, one], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        columns.append(out.logits)
        assert torch.equal(out.passes, (thoughts + 1) * mask[:, one])
    decoded = torch.cat(columns, dim=1)
    # The first thought is right from the start, and every iteration makes one more right.
    model.config.eval_iterations = thoughts * length - 1
    at_fixed_point = model(ids, mask).logits
    model.config.eval_iterations = 3
    at_three = model(ids, mask).logits
    for row in range(3):
        real = mask[row].bool()
        states = naive_ponderlm2_decode(model, ids[row][real])
        want = torch.stack([model.lm_head.weight @ state for state in states])
        assert_close(decoded[row][real], want)
        assert_close(at_fixed_point[row][real], want)
        assert (at_three[row][real] - want).abs().max() > 100 * RELATIVE
