"""Train, load and check tokenizers."""

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from latentcot.data.config import END_OF_TEXT, PAD
from latentcot.errors import UserError

MAX_TRAINING_CHARS = 20_000_000
"""Merges hardly change after this much text, and training stays a matter of seconds."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens on the first 20 million characters.

    Any Unicode text comes back unchanged from encoding and decoding. The result depends on
    `texts` and `vocab_size` alone; short texts may yield fewer merges than asked for.

    `<|endoftext|>` (id 0) ends each document and so also stands before each: it is the EOS and
    the BOS token, and none is added when encoding. `<|pad|>` (id 1) is a token of its own, so that
    masks and labels never confuse an end with a filling; padding goes to the left, for generation.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_first_chars(texts, MAX_TRAINING_CHARS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path_or_name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder or, where there is none of that name, from the hub.

    Raises `UserError` where it is missing or broken, has no EOS token (documents could not be
    told apart), or has no fast implementation.
    """
    folder = Path(path_or_name).expanduser()
    if folder.is_file() or (folder.is_absolute() and not folder.exists()):
        raise UserError(f"there is no folder {path_or_name}: check data.tokenizer.path")
    source = str(folder) if folder.exists() else path_or_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError or, from Rust, a bare Exception
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"cannot load the tokenizer {path_or_name} ({reason}): data.tokenizer.path must be a "
            "folder that save_pretrained wrote, or a hub name"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"the tokenizer {path_or_name} has no fast implementation (tokenizer.json): convert "
            "it or choose another in data.tokenizer.path"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {path_or_name} has no EOS token to end documents with: set its "
            "eos_token and save it again"
        )
    return tokenizer


def num_token_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """The highest token id plus one: what an embedding needs (ids may have gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Raise `UserError` where a model of `vocab_size` embeddings lacks some of the tokens."""
    needed = num_token_ids(tokenizer)
    if needed > vocab_size:
        raise UserError(
            f"the tokenizer has {needed} tokens but the model only {vocab_size} embeddings: "
            f"set model.backbone.vocab_size to at least {needed}"
        )


def plain_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer's fast core that takes all text as text.

    `<|endoftext|>` written out in a document becomes ordinary tokens, nothing is truncated or
    padded.
    """
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.encode_special_tokens = True
    core.no_truncation()
    core.no_padding()
    return core


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """32 hex digits that tell apart tokenizers which encode text or end documents differently.

    The same before and after saving, and whatever padding or truncation was last used.
    """
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["truncation"] = core["padding"] = None
    canonical = json.dumps([core, tokenizer.eos_token_id], sort_keys=True)
    return blake2b(canonical.encode(), digest_size=16).hexdigest()


def _first_chars(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
