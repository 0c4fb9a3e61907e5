"""Wavefront decoding against decoding one token after the other: same tokens, same slots."""

import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from latentcot.core.cache import SlotCache
from latentcot.decoding.policies import POLICIES, Confident
from latentcot.decoding.wavefront import wavefront
from latentcot.errors import UserError
from models.helpers import VOCABULARY, ids_of, tiny_llama, tiny_model

NEW_TOKENS = 12
PROMPTS = 1000
ROWS = 10
BACKBONE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def stored(cache: SlotCache, row: int, num_tokens: int | None = None):
    """What the store holds of a row: step -> positions, and all keys and values."""
    slots, tensors = {}, []
    for step, own in enumerate(cache.steps, 1):
        count = int(own.lengths[row])
        positions = own.positions[row, :count].tolist()
        if positions:
            slots[step] = positions
            for layer in own.keys:
                tensors += [view[row, :, :count].flatten() for view in own.view(layer)]
    return slots, torch.cat(tensors)


def check_same(model, ids, mask, **options):
    """Decode both ways; returns both outputs."""
    options |= {"attention_mask": mask, "return_dict_in_generate": True}
    options.setdefault("max_new_tokens", NEW_TOKENS)
    policy = options.pop("wavefront", True)
    plain = model.generate(ids, wavefront=False, **options)
    wave = model.generate(ids, wavefront=policy, **options)
    assert torch.equal(plain.sequences, wave.sequences)
    for row in range(len(ids)):
        slots, tensors = stored(plain.past_key_values, row)
        wave_slots, wave_tensors = stored(wave.past_key_values, row)
        assert slots == wave_slots
        torch.testing.assert_close(wave_tensors, tensors, rtol=0, atol=1e-10)
    assert torch.equal(plain.past_key_values.num_tokens, wave.past_key_values.num_tokens)
    assert plain.past_key_values.get_seq_length() == wave.past_key_values.get_seq_length()
    return plain, wave


def prompts(rows: int, longest: int):
    """Left-padded prompts of random lengths."""
    ids, mask = ids_of(rows, longest), torch.ones(rows, longest, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : random.randrange(longest)] = 0
    return ids, mask


def random_model(seed: int):
    """A float64 model of random depth, router, tau and visibility."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = tiny_model(
        "adaptive",
        backbone=tiny_llama(**BACKBONE, num_hidden_layers=random.choice([1, 2])),
        l_max=random.choice([1, 2, 3, 5]),
        router=random.choice(["linear", "mlp", "multi_linear", "none"]),
        visibility=random.choice(["all", "latest", "own"]),
        tau=random.choice([0.0, 0.1, 0.3, 0.5, 0.8]),
    ).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("shard", range(4))
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_same_tokens_and_slots_for_a_thousand_prompts(do_sample, shard):
    """In batches with ragged halting: each row has a wave of its own."""
    for seed in range(shard, PROMPTS // ROWS, 4):
        model = random_model(seed)
        ids, mask = prompts(ROWS, random.randint(1, 9))
        sampling = {"do_sample": do_sample}
        if do_sample:
            sampling |= {"seed": seed, "temperature": random.choice([0.5, 1.0, 3.0]), "top_k": 0}
        policy = random.choice([*POLICIES, Confident(random.random())])
        check_same(model, ids, mask, wavefront=policy, **sampling)


@pytest.mark.parametrize("seed", range(20))
def test_one_sequence_with_an_end_of_text(seed):
    model = random_model(seed)
    model.generation_config.eos_token_id = [3, 5, 7, 11, 13]
    model.generation_config.pad_token_id = 0
    ids = ids_of(1, 1 + seed % 7)
    sampling = {"do_sample": bool(seed % 2)} | ({"seed": 1} if seed % 2 else {})
    check_same(model, ids, None, max_new_tokens=25, **sampling)


def fixed_depth(final_norm: float, l_max: int):
    """Layers that add nothing: z^(k) is final_norm^k times the normed embedding."""
    model = tiny_model("adaptive", router="none", l_max=l_max).eval()
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.backbone.norm.weight.fill_(final_norm)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("l_max", [1, 3, 5])
def test_right_drafts_cost_one_pass_a_token(l_max, policy):
    model = fixed_depth(1, l_max)
    _, wave = check_same(model, ids_of(1, 4), None, wavefront=policy, do_sample=False)
    assert wave.num_passes == (NEW_TOKENS - 1) + l_max
    assert wave.num_executed == (NEW_TOKENS - 1) * (l_max + 1)


@pytest.mark.parametrize("policy", ["at_end", "at_once"])
@pytest.mark.parametrize("l_max", [1, 3, 5])
def test_wrong_drafts_cost_no_more_passes_than_plain_decoding(l_max, policy):
    """Every step takes back what the one before predicted."""
    model = fixed_depth(-1, l_max)
    _, wave = check_same(model, ids_of(1, 4), None, wavefront=policy, do_sample=False)
    assert wave.num_passes == (NEW_TOKENS - 1) * (l_max + 1)


def test_a_second_turn_goes_on_from_the_cache():
    model = random_model(2)
    ids = ids_of(1, 5)
    turns = []
    for policy in (False, True):
        first = model.generate(
            ids, max_new_tokens=6, do_sample=False, wavefront=policy, return_dict_in_generate=True
        )
        longer = torch.cat([first.sequences, ids_of(1, 3) * 0 + 9], 1)
        second = model.generate(
            longer,
            past_key_values=first.past_key_values,
            max_new_tokens=6,
            do_sample=False,
            wavefront=policy,
            return_dict_in_generate=True,
        )
        fresh = model.generate(longer, max_new_tokens=6, do_sample=False, wavefront=policy)
        assert torch.equal(second.sequences, fresh)
        turns.append(second)
    assert torch.equal(turns[0].sequences, turns[1].sequences)
    slots, tensors = stored(turns[0].past_key_values, 0)
    wave_slots, wave_tensors = stored(turns[1].past_key_values, 0)
    assert slots == wave_slots
    torch.testing.assert_close(wave_tensors, tensors, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": 3},
        {"do_sample": True, "top_p": 0.7, "top_k": 9, "temperature": 1.5, "seed": 4},
        {"do_sample": True, "num_return_sequences": 3, "seed": 4},
        {
            "suppress_tokens": [1, 2],
            "exponential_decay_length_penalty": (2, 1.5),
            "eos_token_id": 3,
        },
    ],
    ids=lambda options: next(iter(options)) + str(len(options)),
)
def test_usual_arguments(options):
    for seed in range(4):
        every = {"do_sample": False, "pad_token_id": 0}
        check_same(random_model(seed), ids_of(1, 6), None, **every | options)


class Recorder(TextStreamer):
    """Keeps what is streamed."""

    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.has_ended = True


def test_streamers_and_stopping_criteria_see_settled_tokens_only():
    model = random_model(3)
    ids, seen, streamer = ids_of(1, 4), [], Recorder()

    def stop(input_ids, scores, **kwargs):
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= 11])

    out = model.generate(
        ids,
        max_new_tokens=20,
        do_sample=False,
        wavefront=True,
        streamer=streamer,
        stopping_criteria=[stop],
    )
    assert out.shape[1] == 11
    assert streamer.tokens == out[0].tolist()
    assert streamer.has_ended
    assert seen == [out[0, :length].tolist() for length in range(5, 12)]


class Counting(LogitsProcessor):
    """Not a function of the tokens."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class Pure(LogitsProcessor):
    pure = True

    def __call__(self, input_ids, scores):
        return scores + input_ids.sum() % 3


def test_stateful_processors_are_refused_and_pure_ones_are_not():
    model, ids = random_model(4), ids_of(1, 4)
    with pytest.raises(UserError, match=r"Counting may give other scores.*Counting.pure = True"):
        model.generate(
            ids,
            logits_processor=LogitsProcessorList([Counting()]),
            wavefront=True,
            max_new_tokens=5,
        )
    counting = Counting()
    model.generate(
        ids, logits_processor=LogitsProcessorList([counting]), max_new_tokens=5, do_sample=False
    )
    assert counting.calls == 5  # one for each token: decoded one after the other
    check_same(model, ids, None, logits_processor=LogitsProcessorList([Pure()]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "it needs the cache"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is for"),
        ({"wavefront": "sometimes"}, "'sometimes': give True, False, or one of"),
        ({"wavefront": 3}, "or an object with a method trusts"),
        ({"keep_rule": lambda *_: None}, "no keep_rule but Threshold"),
    ],
)
def test_what_a_wavefront_cannot_do_is_said(options, message):
    with pytest.raises(UserError, match=message):
        random_model(4).generate(ids_of(1, 4), max_new_tokens=3, **{"wavefront": True} | options)


@pytest.mark.parametrize(("method", "message"), [("vanilla", "halt"), ("adaptive", "no latent")])
def test_models_without_steps_say_so(method, message):
    options = {"l_max": 0} if method == "adaptive" else {}
    model = tiny_model(method, **options).eval()
    with pytest.raises(UserError, match=message):
        model.generate(ids_of(1, 4), wavefront=True, max_new_tokens=3)
    assert model.generate(ids_of(1, 4), max_new_tokens=3).shape == (1, 7)


def test_it_is_the_default_for_one_sequence():
    model = random_model(5)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    assert hasattr(model.generate(ids_of(1, 4), **options), "num_passes")
    assert not hasattr(model.generate(ids_of(2, 4), **options), "num_passes")
    model.generation_config.wavefront = False
    assert not hasattr(model.generate(ids_of(1, 4), **options), "num_passes")


def test_it_is_a_decoding_method_for_custom_generate():
    model, ids = random_model(6), ids_of(1, 4)
    options = {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(ids, wavefront=False, **options)
    assert torch.equal(model.generate(ids, custom_generate=wavefront, **options), want)


def test_the_generation_config_keeps_the_options(tmp_path):
    model = random_model(7)
    model.generation_config.tau, model.generation_config.wavefront = 0.25, "at_end"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert (loaded.generation_config.tau, loaded.generation_config.wavefront) == (0.25, "at_end")


def test_tau_of_the_call_is_the_models_for_that_call():
    model, ids = random_model(8), ids_of(1, 6)
    model.config.tau = 0.3
    for policy in (False, True):
        want = model.generate(ids, max_new_tokens=9, do_sample=False, wavefront=policy)
        model.config.tau = 0.9
        out = model.generate(ids, max_new_tokens=9, do_sample=False, wavefront=policy, tau=0.3)
        model.config.tau = 0.3
        assert torch.equal(out, want)
    with pytest.raises(UserError, match="tau is 2"):
        model.generate(ids, tau=2)
    with pytest.raises(UserError, match="no threshold of halting"):
        tiny_model("vanilla").generate(ids, tau=0.5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), "the prompt is empty"),
        (
            torch.zeros(1, 200, dtype=torch.int64),
            "has 200 tokens and the model's context holds 128",
        ),
        (torch.tensor([[1, VOCABULARY]]), f"has token {VOCABULARY} and the vocabulary ends at 60"),
        (torch.tensor([[1, -1]]), "has token -1"),
    ],
)
def test_bad_prompts_are_refused(ids, message):
    with pytest.raises(UserError, match=message):
        tiny_model("adaptive").generate(ids, max_new_tokens=2)
