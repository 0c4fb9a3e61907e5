"""What text to read, how to split it, and which tokenizer to use."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

STDLIB = "stdlib"
"""The source that needs no network: the running interpreter's own standard library."""

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
MIN_VOCAB_SIZE = 256 + len((END_OF_TEXT, PAD)) + 1
"""All bytes, the special tokens and one merge."""


class TokenizerConfig(BaseModel):
    """An existing tokenizer, or the size of one to train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(
        default=None,
        description="Folder or hub name of an existing tokenizer; "
        "null trains a byte-level BPE on the train split.",
    )
    vocab_size: int = Field(
        default=2048,
        ge=MIN_VOCAB_SIZE,
        description="Number of tokens of the BPE to train, the special ones included; "
        "not used when `path` is given.",
    )


class DataConfig(BaseModel):
    """A corpus: its source, its three splits and its tokenizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        default=STDLIB,
        min_length=1,
        description='"stdlib" (the Python standard library of the running interpreter), a local '
        'file or folder (text, .jsonl, .jsonl.gz, .parquet), or a hub dataset such as "org/name".',
    )
    name: str | None = Field(
        default=None, description="Configuration of the hub dataset, where it has several."
    )
    split: str = Field(
        default="train",
        description="Split of the hub dataset to read; train, validation and test are cut from it.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, branch or tag of the hub dataset; a commit makes the corpus "
        "reproducible, null takes what the hub has when the corpus is first prepared.",
    )
    text_field: str = Field(
        default="text", description="Field of a jsonl, parquet or hub row that holds the text."
    )
    max_documents: int | None = Field(
        default=None, ge=1, description="Read only the first documents; null reads all."
    )
    validation_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Share of the documents that validates; of one or two documents, the share "
        "of the text of each.",
    )
    test_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="Share kept for the final test, taken likewise."
    )
    split_seed: int = Field(
        default=0, description="Another seed draws other validation and test documents."
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="The tokenizer to load or train."
    )
    cache_dir: str | None = Field(
        default=None,
        description="Folder for the tokenised corpus; null takes $LATENTCOT_CACHE, "
        "or ~/.cache/latentcot where that is not set.",
    )

    @model_validator(mode="after")
    def _leave_text_to_train_on(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"validation_fraction {self.validation_fraction} and test_fraction "
                f"{self.test_fraction} leave nothing to train on: their sum must be below 1"
            )
        return self
