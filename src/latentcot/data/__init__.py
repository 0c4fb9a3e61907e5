"""Text in, blocks of tokens out: sources, splits, tokenizers, shards on disk, training order."""

from latentcot.data.blocks import Blocks
from latentcot.data.config import DataConfig, TokenizerConfig
from latentcot.data.corpus import Corpus, prepare
from latentcot.data.shards import Manifest, SplitInfo, TokenStream
from latentcot.data.sources import Document, read_documents
from latentcot.data.splits import SPLITS, Split, SplitRule, plan_splits
from latentcot.data.tokenizer import (
    check_vocabulary,
    fingerprint,
    load_tokenizer,
    num_token_ids,
    train_tokenizer,
)

__all__ = [
    "SPLITS",
    "Blocks",
    "Corpus",
    "DataConfig",
    "Document",
    "Manifest",
    "Split",
    "SplitInfo",
    "SplitRule",
    "TokenStream",
    "TokenizerConfig",
    "check_vocabulary",
    "fingerprint",
    "load_tokenizer",
    "num_token_ids",
    "plan_splits",
    "prepare",
    "read_documents",
    "train_tokenizer",
]
