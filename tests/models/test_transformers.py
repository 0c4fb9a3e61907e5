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
