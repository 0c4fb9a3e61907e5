"""Packed equals masked-dense: all tokens computed at every step, and the pruned ones hidden."""

import pytest
import torch
from transformers import DynamicCache, LlamaModel

from halting_reference import halting_distribution
from latentcot.core.slots import visible
from models.helpers import ids_of, tiny_llama, tiny_model


def masked_dense(model, ids):
    """Logits, passes and reach probabilities with stock LlamaModel passes of full (B, L) width.

    transformers' own cache concatenates the keys of the steps; a 4-D mask made of the predicate
    hides the slots of pruned tokens, which are computed all the same.
    """
    config = model.config
    stock = LlamaModel(tiny_llama(attn_implementation="sdpa")).double()
    stock.load_state_dict(model.backbone.state_dict())
    rows, length = ids.shape
    positions = torch.arange(length)
    cache, states, gates = DynamicCache(), model.embed(ids), []
    zs = []
    last = torch.ones(rows, length, dtype=torch.int64)  # K*, as far as it is known
    for k in range(1, config.num_passes + 1):
        masks = []
        for step in range(1, k + 1):
            sees = visible(positions[:, None], k, positions, step, last[:, None], config.visibility)
            executed = (last >= step)[:, None]
            own = (step == k) & torch.eye(length, dtype=torch.bool)  # pruned queries: no NaN
            masks.append(sees & executed | own)
        mask = torch.zeros(rows, 1, length, k * length, dtype=torch.float64)
        mask.masked_fill_(~torch.cat(masks, -1)[:, None], -torch.inf)
        out = stock(
            inputs_embeds=states,
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=cache,
        )
        states = out.last_hidden_state
        zs.append(states)
        gates.append(model.gate(states, k) if k < config.num_passes else states[..., 0] * 0)
        padded = torch.stack([*gates, gates[0] * 0], -1)
        last = halting_distribution(padded, config.tau)[1].clamp(max=config.num_passes)
    exits, last = halting_distribution(torch.stack(gates, -1), config.tau)
    mixture = (exits[..., None] * torch.stack(zs, -2)).sum(-2)
    return stock, model.lm_head(mixture), last, exits


@pytest.mark.parametrize("visibility", ["all", "latest"])
def test_logits_and_gradients(visibility):
    model = tiny_model("adaptive", l_max=3, tau=0.3, visibility=visibility)
    ids = ids_of(4, 19)
    out = model(ids, output_steps=True)
    stock, logits, last, exits = masked_dense(model, ids)
    assert torch.equal(out.passes, last)
    assert len(last.unique()) == 4
    torch.testing.assert_close(out.exit_probs, exits, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.logits, logits, rtol=1e-9, atol=1e-12)

    weights = torch.randn_like(logits)
    packed = torch.autograd.grad((out.logits * weights).sum(), model.backbone.layers.parameters())
    dense = torch.autograd.grad((logits * weights).sum(), stock.layers.parameters())
    for ours, theirs in zip(packed, dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
