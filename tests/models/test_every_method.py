"""What holds for every method: picked up from METHODS; VARIANTS adds options of some."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MistralConfig, Qwen3Config

import latentcot
from latentcot.core.router import RouterName
from latentcot.core.slots import Visibility
from models.helpers import VOCABULARY, ids_of, tiny_llama, tiny_model

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
BACKBONES = {
    "llama": tiny_llama(),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "qwen3-window": Qwen3Config(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=5),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
}
VARIANTS = [(name, {}) for name in latentcot.METHODS]
VARIANTS += [
    ("adaptive", {"router": router, "visibility": visibility})
    for router in RouterName.__args__
    for visibility in Visibility.__args__
]
VARIANTS += [
    ("looped", {"reinject": True}),
    ("ponderlm", {"cumulative": False}),
    ("ponderlm", {"scale_input": True}),
    ("ponderlm2", {"thoughts": 2}),
    ("mor", {"sharing": "middle_cycle", "backbone": tiny_llama(num_hidden_layers=4)}),
    ("mor", {"routing": "token"}),
]
every_variant = pytest.mark.parametrize(
    ("method", "options"),
    VARIANTS,
    ids=[
        "-".join([m, *(str(v) for v in o.values() if type(v) is str or v)])[:40]
        for m, o in VARIANTS
    ],
)
every_method = pytest.mark.parametrize("method", latentcot.METHODS)


@every_variant
@torch.no_grad()
def test_a_later_token_moves_no_earlier_logit(method, options):
    model = tiny_model(method, **options).eval()
    ids = ids_of(2, 17)
    logits = model(ids).logits
    for place in (1, 8, 16):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCABULARY
        moved = (model(changed).logits - logits).abs().amax((0, 2))
        assert not moved[:place].any()
        assert moved[place] > 0


@every_variant
@torch.no_grad()
def test_cached_equals_uncached(method, options):
    model = tiny_model(method, **options).eval()
    ids = ids_of(3, 21)
    want = model(ids, output_steps=True)
    cache, logits, passes = None, [], []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 15), (15, 21)):
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
        passes.append(out.passes)
    torch.testing.assert_close(torch.cat(logits, 1), want.logits, rtol=0, atol=1e-10)
    if not model.config.exact_options:  # else a parallel pass executes more than decoding does
        assert torch.equal(torch.cat(passes, 1), want.passes)
    assert cache.get_seq_length() == 21


@every_variant
@torch.no_grad()
def test_padding_changes_nothing(method, options):
    model = tiny_model(method, **options).eval()
    ids = ids_of(2, 12)
    labels = ids.clone()
    want = model(ids, labels=labels)
    for left, right in ((5, 0), (0, 4), (2, 3)):
        padded = torch.nn.functional.pad(ids, (left, right), value=7)
        padded_labels = torch.nn.functional.pad(labels, (left, right), value=-100)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        out = model(padded, mask, padded_labels)
        torch.testing.assert_close(out.logits[:, left : left + 12], want.logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-12, atol=0)
        assert int((out.passes * (1 - mask)).sum()) == 0


@every_method
@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_every_backbone(method, kind):
    """Causal, cached = uncached and left-padded = unpadded, windows included."""
    model = tiny_model(method, backbone=BACKBONES[kind]).eval()
    ids = ids_of(2, 14)
    want = model(ids).logits
    first = model(ids[:, :9], use_cache=True)
    rest = model(ids[:, 9:], past_key_values=first.past_key_values)
    cached = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(cached, want, rtol=0, atol=1e-10)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    padded = model(torch.nn.functional.pad(ids, (3, 0)), mask).logits[:, 3:]
    torch.testing.assert_close(padded, want, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_sliding_window_is_respected():
    backbone = MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=3)
    backbone.num_hidden_layers = 1
    model = latentcot.build_model("adaptive", backbone, l_max=0).double().eval()
    ids = ids_of(1, 12)
    changed = ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % VOCABULARY
    moved = (model(ids).logits - model(changed).logits).abs().amax((0, 2)) > 0
    assert moved.tolist() == [t in (4, 5, 6) for t in range(12)]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vanilla", {}),
        ("adaptive", {"l_max": 0}),
        ("looped", {"loops": 1}),
        ("ponderlm", {"steps": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_neox", "qwen3"])
@torch.no_grad()
def test_one_pass_equals_the_stock_model(method, options, kind):
    """One pass with scale 1 is transformers' own causal LM, bit for bit."""
    backbone = BACKBONES[kind]
    model = latentcot.build_model(method, backbone, embedding_scale=1, **options).eval()
    stock = AutoModelForCausalLM.from_config(backbone).eval()
    stock.base_model.load_state_dict(model.backbone.state_dict())
    stock.get_output_embeddings().load_state_dict(model.lm_head.state_dict())
    ids = ids_of(3, 19)
    assert torch.equal(model(ids).logits, stock(ids).logits)
    torch.testing.assert_close(
        model(ids, labels=ids).loss, stock(ids, labels=ids).loss, rtol=1e-6, atol=0
    )


@every_method
def test_losses_are_sums_divided_once(method):
    model = tiny_model(method)
    model.draw()
    ids = ids_of(4, 10)
    whole = model(ids, labels=ids)
    parts = [model(part, labels=part, num_items_in_batch=4 * 9).loss for part in ids.split(1)]
    torch.testing.assert_close(sum(parts), whole.loss, rtol=1e-12, atol=0)


@every_method
def test_same_seed_same_backbone(method):
    models = []
    for name in (method, "vanilla"):
        torch.manual_seed(3)
        models.append(latentcot.build_model(name, tiny_llama()))
    ours, theirs = (model.state_dict() for model in models)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@every_method
def test_scaled_initialisation(method):
    backbone = tiny_llama(hidden_size=256, intermediate_size=512, vocab_size=2000)
    model = latentcot.build_model(method, backbone)
    std = (2 / (5 * 256)) ** 0.5
    layer = model.backbone.layers[0]
    # A normal cut at 3 std has 0.9865 of its standard deviation.
    for weight, want in (
        (model.lm_head.weight, std),
        (layer.self_attn.q_proj.weight, std),
        (layer.self_attn.o_proj.weight, std / 2),
        (layer.mlp.down_proj.weight, std / 2),
    ):
        assert float(weight.detach().std()) == pytest.approx(0.9865 * want, rel=0.02)
        assert float(weight.detach().abs().max()) <= 3 * want * 1.001
    assert float(model.embed(ids_of(8, 64)).detach().std()) == pytest.approx(0.9865, rel=0.05)


@every_method
def test_the_passes_of_a_token_share_their_weights(method, tmp_path):
    """Nothing is copied: the backbone has vanilla's parameters, before and after loading."""
    vanilla = latentcot.build_model("vanilla", tiny_llama())
    model = latentcot.build_model(method, tiny_llama())
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        own = {name: p.data_ptr() for name, p in one.named_parameters()}
        assert len(set(own.values())) == len(own)
        assert {n for n in own if n.startswith(("backbone.", "lm_head."))} == {
            name for name, _ in vanilla.named_parameters()
        }
        loss = one.eval()(ids := ids_of(1, 9), labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in one.backbone.layers.parameters())


@every_method
def test_step_records_agree_with_the_passes(method):
    model = latentcot.build_model(method, tiny_llama()).double().eval()
    ids = ids_of(2, 9)
    out = model(ids, labels=ids, output_steps=True)
    steps = torch.arange(1, model.config.num_passes + 1)
    reached = out.passes[..., None] >= steps
    assert torch.equal(out.reach_probs > 0, reached)
    torch.testing.assert_close(out.exit_probs.sum(-1), torch.ones_like(ids).double())
    assert not out.step_target_probs[~reached].any()
