"""Our models are transformers models: saved, loaded, adapted and generated with as such."""

import subprocess
import sys

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
)

import latentcot
from latentcot.errors import UserError
from models.helpers import VOCABULARY, ids_of, tiny_llama, tiny_model

every_method = pytest.mark.parametrize("method", latentcot.METHODS)


@every_method
@torch.no_grad()
def test_saved_and_loaded(method, tmp_path):
    model = tiny_model(method).eval()
    model.save_pretrained(tmp_path, figures={"test_loss": 1.25})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is type(model)
    ids = ids_of(2, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={"": "cpu"}, dtype=torch.float64
    )
    assert torch.equal(mapped(ids).logits, model(ids).logits)
    card = (tmp_path / "README.md").read_text()
    assert "| test_loss | 1.25 |" in card
    assert method in card


@every_method
def test_loaded_by_a_program_that_never_imports_latentcot(method, tmp_path):
    tiny_model(method).save_pretrained(tmp_path / "model")
    program = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(type(model).__module__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model", tmp_path / "again"],
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.stdout.strip() == latentcot.METHODS[method].__module__
    # What it saved again is as good: still the stub, no copied source.
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert files == {path.name for path in (tmp_path / "model").iterdir()}


@every_method
def test_tied_embeddings_stay_tied(method, tmp_path):
    model = latentcot.build_model(method, tiny_llama(tie_word_embeddings=True))
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight.data_ptr() == embedding.data_ptr()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    torch.testing.assert_close(loaded.lm_head.weight, embedding)


# PEFT reads a property that transformers has renamed:
# https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py#L184
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@every_method
def test_lora_attaches_to_the_backbone(method):
    model = tiny_model(method)
    ids = ids_of(2, 9)
    want = model(ids).logits.detach()
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2)
    adapted = peft.get_peft_model(model, config).double()
    # LoRA starts as the identity.
    torch.testing.assert_close(adapted(ids).logits.detach(), want)
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)


@every_method
@torch.no_grad()
def test_generate_equals_a_loop_without_cache(method):
    model = tiny_model(method).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    prompts = [ids_of(5), ids_of(9)]
    want = []
    for prompt in prompts:
        ids = prompt[None]
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        want.append(ids[0, len(prompt) :].tolist())
    padded = torch.zeros(2, 9, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, 9 - len(prompt) :] = prompt
        mask[row, 9 - len(prompt) :] = 1
    for use_cache in (True, False):
        out = model.generate(
            padded, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=use_cache
        )
        assert out[:, 9:].tolist() == want


@every_method
@torch.no_grad()
def test_assisted_generation_and_chunked_prefill_change_no_token(method):
    """Prompt lookup drafts tokens and crops the cache where they were wrong."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = tiny_model(method).eval()
        model.generation_config.eos_token_id = None
        ids = ids_of(1, 6).repeat(1, 3)
        options = {"max_new_tokens": 12, "do_sample": False}
        want = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)
        assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options), want)
        beams = model.generate(ids, num_beams=2, **options)
        uncached = model.generate(ids, num_beams=2, use_cache=False, **options)
        assert torch.equal(beams, uncached)


@torch.no_grad()
def test_generation_goes_on_from_a_returned_cache():
    model = tiny_model("adaptive").eval()
    model.generation_config.eos_token_id = None
    ids = ids_of(1, 6)
    options = {"max_new_tokens": 5, "do_sample": False}
    first = model.generate(ids, return_dict_in_generate=True, **options)
    turn = torch.cat([first.sequences, ids_of(1, 3)], 1)
    again = model.generate(turn, past_key_values=first.past_key_values, **options)
    assert again.tolist() == model.generate(turn, **options).tolist()


def test_bad_calls():
    model = tiny_model("adaptive")
    ids = ids_of(1, 4)
    with pytest.raises(UserError, match="DynamicCache, not the SlotCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(UserError, match="use output_steps"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="exactly one of"):
        model()
    with pytest.raises(UserError, match="choose one of sdpa, eager"):
        model.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match="call that model instead"):
        model.backbone(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1.5}, "tau is 1.5"),
        ({"l_max": -1}, "l_max is -1"),
        ({"initial_gate": 1.0}, "initial_gate is 1.0"),
        ({"beta": -1}, "must be 0 or more"),
        (
            {"backbone": {"hidden_size": 30, "num_attention_heads": 4}},
            "is not a multiple of the number",
        ),
    ],
)
def test_values_that_make_no_sense(options, message):
    backbone = options.pop("backbone", None)
    with pytest.raises(UserError, match=message):
        latentcot.build_model("adaptive", backbone, **options)


def test_output_is_in_the_order_of_transformers():
    model = tiny_model("adaptive")
    ids = ids_of(2, 7)
    out = model(ids, labels=ids, output_steps=True)
    assert out[0] is out.loss
    assert out.to_tuple()[1] is out.logits
    assert model(ids)[0].shape == (2, 7, VOCABULARY)
    ignored = set(model.config.keys_to_ignore_at_inference)
    assert set(out.keys()) - ignored == {"loss", "logits"}


def test_masks_of_another_shape_are_refused():
    model = tiny_model("adaptive")
    for shape in ((4, 5), (2, 9), (4, 1, 9, 9)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids_of(4, 9), torch.ones(shape))


def test_nothing_but_padding():
    out = tiny_model("adaptive")(ids_of(2, 3), torch.zeros(2, 3))
    assert not out.passes.any()
    assert out.logits.shape == (2, 3, VOCABULARY)


def test_beta_zero_charges_scored_tokens_only():
    model = tiny_model("adaptive", tau=0, beta=0, lambda_adaptive=1)
    ids = ids_of(2, 7)
    labels = torch.full_like(ids, -100)
    labels[0, 3] = 5
    out = model(ids, labels=labels, output_steps=True)
    torch.testing.assert_close(out.adaptive_loss, out.gates[0, 2].sum())


def test_token_embeddings_can_be_resized():
    model = tiny_model("adaptive")
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model(ids_of(1, 3)).logits.shape[-1] == 70


def test_a_cache_written_with_gradients_is_not_overwritten():
    model = tiny_model("adaptive", tau=0)
    ids = ids_of(1, 6)
    first = model(ids[:, :3], use_cache=True)
    second = model(ids[:, 3:5], past_key_values=first.past_key_values)
    with torch.no_grad():
        model(ids[:, 5:], past_key_values=second.past_key_values)
    second.logits.sum().backward()
    with torch.inference_mode():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    with torch.no_grad():
        model(ids[:, 5:], past_key_values=cache)


@pytest.mark.parametrize(
    "backbone",
    [
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        {"model_type": "granite", "logits_scaling": 8.0},
        {"model_type": "bloom"},
    ],
    ids=lambda backbone: backbone["model_type"],
)
def test_backbones_that_would_be_silently_wrong_are_refused(backbone):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61}
    if backbone["model_type"] != "bloom":
        small |= {"intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 8}
    with pytest.raises(UserError, match=r"backbone|positions"):
        latentcot.build_model("adaptive", {**backbone, **small})(ids_of(1, 4))


def test_unknown_method_lists_those_there_are():
    with pytest.raises(UserError, match="unknown method 'adaptve': choose one of adaptive"):
        latentcot.build_model("adaptve")


def test_logits_to_keep_and_embeddings_as_input():
    model = tiny_model("adaptive").eval()
    ids = ids_of(2, 7)
    want = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, want[:, -2:])
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, want)
    assert model(ids, labels=ids, skip_logits=True).logits is None
    assert len(model(ids, return_dict=False)) >= 2
    assert want.shape == (2, 7, VOCABULARY)


def test_layers_are_run_one_by_one_only_where_that_is_all_a_backbone_does():
    granite = {"model_type": "granite", "embedding_multiplier": 3.0, "num_key_value_heads": 4}
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61}
    model = latentcot.build_model("looped", granite | small | {"intermediate_size": 32})
    with pytest.raises(UserError, match="a granite backbone does not allow: choose one of llama"):
        model(ids_of(1, 4))
