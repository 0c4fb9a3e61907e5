import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from latentcot.data import (
    check_vocabulary,
    fingerprint,
    load_tokenizer,
    num_token_ids,
    tokenizer,
    train_tokenizer,
)
from latentcot.data.tokenizer import plain_text_encoder
from latentcot.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n\n\n" * 20, "Straße, naïve, 日本語, 🙂🙂 " * 20]


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 300)


def saved_without_eos(folder):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing \n\n",
        "\t\r\n\v\f\x00\x7f\u200b\ufeff",
        "e\u0301 é ﬁ ① \u202e rtl",
        "👩‍👩‍👧‍👦🏳️‍🌈 𝕏 \U0010ffff",
        "a , b . c ! don 't",
        "<|endoftext|><|pad|> are just text",
    ],
)
def test_text_comes_back_unchanged(trained, text):
    ids = plain_text_encoder(trained).encode(text).ids
    assert trained.decode(ids) == text
    assert trained.eos_token_id not in ids
    assert trained.pad_token_id not in ids


@given(st.text())
def test_any_text_comes_back_unchanged(text):
    bpe = train_tokenizer(TEXTS, 300)
    assert bpe.decode(plain_text_encoder(bpe).encode(text).ids) == text


def test_special_tokens(trained):
    assert (trained.eos_token_id, trained.bos_token_id, trained.pad_token_id) == (0, 0, 1)
    batch = trained(["return", "return x + 1"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][0][0] == 0, "padding belongs on the left"
    assert batch["input_ids"][0][0] == trained.pad_token_id
    assert trained.decode(trained("x")["input_ids"]) == "x", "nothing is added when encoding"


def test_size_is_what_was_asked_for_or_what_the_text_gives(trained):
    assert num_token_ids(trained) == len(trained) == 300
    assert len(train_tokenizer(["ab"], 300)) == 259  # the bytes, two special tokens, "ab"


def test_training_is_deterministic_and_stops_after_enough_text(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TRAINING_CHARS", 1000)
    text = TEXTS[0] * 9

    def endless():
        while True:
            yield text

    assert fingerprint(train_tokenizer(endless(), 300)) == fingerprint(
        train_tokenizer([text[:1000]], 300)
    )
    assert fingerprint(train_tokenizer([text[:1000]], 300)) != fingerprint(
        train_tokenizer([TEXTS[1]], 300)
    )


def test_a_saved_tokenizer_is_the_same(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    trained(["a", "a b c"], padding=True, truncation=True, max_length=2)
    loaded = load_tokenizer(str(tmp_path))
    assert fingerprint(loaded) == fingerprint(trained)
    assert loaded.padding_side == "left"
    assert loaded.special_tokens_map == trained.special_tokens_map
    assert loaded(TEXTS)["input_ids"] == trained(TEXTS)["input_ids"]


def test_the_fingerprint_sees_what_ends_documents(tmp_path):
    bpe = train_tokenizer(TEXTS, 300)
    before = fingerprint(bpe)
    bpe.eos_token = "<|pad|>"
    assert fingerprint(bpe) != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "cannot load the tokenizer"),
        ({"tokenizer.json": "{"}, "cannot load the tokenizer"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "cannot load the tokenizer"),
    ],
)
def test_a_broken_folder_is_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_a_file_and_no_eos_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*/missing"):
        load_tokenizer(str(tmp_path / "missing"))
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"there is no folder .*/tokenizer.json"):
        load_tokenizer(str(file))
    with pytest.raises(UserError, match="no EOS token"):
        load_tokenizer(str(saved_without_eos(tmp_path / "saved")))


def test_a_slow_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    with pytest.raises(UserError, match="no fast implementation"):
        load_tokenizer("org/name")


def test_a_model_needs_an_embedding_per_token(trained):
    check_vocabulary(trained, 300)
    with pytest.raises(UserError, match="has 300 tokens but the model only 299 embeddings"):
        check_vocabulary(trained, 299)
