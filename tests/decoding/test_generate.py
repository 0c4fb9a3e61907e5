"""What transformers' `generate` does over the store of slots, one token after the other."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import latentcot
from latentcot.core.cache import SlotCache
from latentcot.decoding.sampling import KeyedGumbel, gumbel, is_pure
from latentcot.errors import UserError
from models.helpers import ids_of, tiny_llama, tiny_model

every_method = pytest.mark.parametrize("method", latentcot.METHODS)
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@every_method
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
        {"do_sample": True, "seed": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.5},
    ],
    ids=["greedy", "beams", "sampled", "several", "penalty"],
)
def test_a_cache_changes_no_token(method, options):
    model, ids = tiny_model(method).eval(), ids_of(1, 6)
    settings = OPTIONS | {"wavefront": False} | options
    want = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, use_cache=True, **settings), want)


@every_method
def test_a_left_padded_batch_decodes_as_its_rows_do(method):
    model, ids = tiny_model(method).eval(), ids_of(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :7] = 0, 0
    batch = model.generate(ids, attention_mask=mask, **OPTIONS)
    for row, skipped in enumerate((0, 4, 7)):
        own = ids[row : row + 1, skipped:]
        every = torch.ones_like(own)  # else transformers takes its pad_token_id for padding
        alone = model.generate(own, attention_mask=every, wavefront=False, **OPTIONS)
        assert torch.equal(batch[row, 9:], alone[0, 9 - skipped :])


@every_method
def test_a_second_turn_goes_on_from_the_cache(method):
    model, ids = tiny_model(method).eval(), ids_of(2, 5)
    first = model.generate(ids, return_dict_in_generate=True, **OPTIONS)
    longer = torch.cat([first.sequences, ids_of(2, 4)], 1)
    want = model.generate(longer, **OPTIONS)
    got = model.generate(longer, past_key_values=first.past_key_values, **OPTIONS)
    assert torch.equal(got, want)


def test_a_cache_of_another_model_is_refused():
    ours, theirs = (tiny_model("adaptive").eval() for _ in range(2))
    cache = theirs(ids_of(1, 5), use_cache=True).past_key_values
    with pytest.raises(UserError, match="another model"):
        ours(ids_of(1, 1), past_key_values=cache)
    same = copy.deepcopy(ours)
    same(ids_of(1, 1), past_key_values=ours(ids_of(1, 5), use_cache=True).past_key_values)


@torch.no_grad()
def test_pruned_rows_execute_nothing_and_store_nothing():
    """At batch 32 the linear layers see the realised passes; the store holds little else."""
    backbone = tiny_llama(num_key_value_heads=4)
    model = tiny_model("adaptive", backbone=backbone, l_max=3, tau=0.4).eval()
    model.set_attn_implementation("eager")
    ids = ids_of(32, 40)
    mask = torch.ones_like(ids)
    for row in range(32):
        mask[row, :row] = 0
    cache = model(ids, mask, use_cache=True).past_key_values
    before = [step.lengths.clone() for step in cache.steps]
    with FlopCounterMode(display=False) as counter:
        model.generate(
            torch.cat([ids, ids_of(32, 1)], 1),
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            past_key_values=cache,
            **OPTIONS | {"max_new_tokens": 24},
        )
    counts = counter.get_flop_counts()["Global"]
    linear = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    new = torch.stack([after.lengths for after in cache.steps]) - torch.stack(before)
    passes = int(new.sum())
    assert 24 * 32 < passes < 4 * 24 * 32
    per_pass = model.count_flops(torch.ones(1, 1, dtype=torch.int64))
    heads, routers = 24 * 32 * per_pass.head, 2 * 32 * int(new[:3].sum())
    assert linear == passes * (per_pass.linear - 2 * 32) + heads + routers
    for step in cache.steps:
        assert step.used == int(step.lengths.max())
        for layer in step.keys:
            assert step.keys[layer].shape[2] <= 1.25 * step.used


def test_keyed_noise_is_a_pure_function_of_seed_row_and_position():
    cpu = torch.device("cpu")
    noise = gumbel(1, 2, 3, 50, cpu)
    assert torch.equal(noise, gumbel(1, 2, 3, 50, cpu))
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3), (1 + 2**40, 2, 3)):
        assert not torch.equal(noise, gumbel(*other, 50, cpu))


def test_keyed_noise_samples_the_softmax():
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    sampler = KeyedGumbel(seed=11, padding=[0])
    draws = [int(sampler.choose(0, column, probs.log())) for column in range(20_000)]
    share = torch.bincount(torch.tensor(draws), minlength=5) / len(draws)
    assert float((share - probs).abs().max()) < 0.012  # 3.4 standard errors


def test_keyed_noise_leaves_one_token():
    sampler = KeyedGumbel(seed=1, padding=[0, 2])
    scores = torch.randn(2, 30)
    kept = sampler(ids_of(2, 6), scores)
    assert kept.isfinite().sum(1).tolist() == [1, 1]
    choices = [int(sampler.choose(row, 6, scores[row])) for row in (0, 1)]
    assert kept.argmax(1).tolist() == choices
    assert is_pure(sampler)


def test_a_seed_decides_what_is_sampled():
    model, ids = tiny_model("adaptive").eval(), ids_of(1, 4)
    options = OPTIONS | {"do_sample": True}
    texts = [model.generate(ids, seed=seed, **options).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(5)
    first = model.generate(ids, **options)
    second = model.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, **options), first)
    assert not torch.equal(first, second)


def test_the_cache_knows_the_passes_of_each_token():
    model, ids = tiny_model("adaptive", l_max=3, tau=0.4).eval(), ids_of(2, 30)
    want = model(ids).passes
    cache = SlotCache()
    with torch.no_grad():
        for columns in ids.split([20, 1, 1, 8], 1):
            model(columns, past_key_values=cache)
    assert torch.equal(cache.depth[:, :30], want)
