"""Flat token streams: memory-mapped `.npy` shards and the manifest that lists them."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from latentcot.data.config import DataConfig
from latentcot.data.splits import Split
from latentcot.errors import UserError

FORMAT_VERSION: Literal[1] = 1
SHARD_TOKENS = 2**26
"""Tokens of a shard: 128 MiB of uint16."""
_MANIFEST = "manifest.json"


class ShardInfo(BaseModel):
    """One `.npy` file: a flat array of `num_tokens` ids; `sha256` is that of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    num_tokens: int
    sha256: str


class SplitInfo(BaseModel):
    """One split: `num_bytes` of UTF-8 text in `num_tokens` tokens, an EOS per document included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_documents: int
    num_tokens: int
    num_bytes: int
    shards: tuple[ShardInfo, ...]


class Manifest(BaseModel):
    """What a prepared corpus holds and what it was made from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1]
    library_version: str
    config: DataConfig
    tokenizer_fingerprint: str
    vocab_size: int
    dtype: str
    splits: dict[Split, SplitInfo]

    def save(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`."""
        (directory / _MANIFEST).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `manifest.json`; `UserError` where it is missing, damaged or of another version."""
        try:
            return cls.model_validate_json((directory / _MANIFEST).read_bytes())
        except (OSError, ValidationError):
            raise damaged(directory, _MANIFEST) from None


class SplitWriter:
    """Appends documents to one split and cuts it into shards of `shard_tokens` tokens.

    Memory: one shard.
    """

    def __init__(self, directory: Path, split: Split, dtype: str, shard_tokens: int) -> None:
        self._directory = directory
        self._split = split
        self._buffer = np.empty(shard_tokens, dtype)  # the system gives pages when they are filled
        self._filled = 0
        self._shards: list[ShardInfo] = []
        self._num_documents = 0
        self._num_bytes = 0

    def append(self, ids: Sequence[int], num_bytes: int, ends_document: bool) -> None:
        """Add the ids of (a piece of) a document, which encode `num_bytes` bytes of text."""
        self._num_bytes += num_bytes
        self._num_documents += ends_document
        tokens = np.asarray(ids, dtype=self._buffer.dtype)
        while len(tokens):
            room = len(self._buffer) - self._filled
            head, tokens = tokens[:room], tokens[room:]
            self._buffer[self._filled : self._filled + len(head)] = head
            self._filled += len(head)
            if self._filled == len(self._buffer):
                self._flush()

    def finish(self) -> SplitInfo:
        """Write what is left and describe the split."""
        if self._filled:
            self._flush()
        return SplitInfo(
            num_documents=self._num_documents,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_bytes=self._num_bytes,
            shards=tuple(self._shards),
        )

    def _flush(self) -> None:
        path = self._directory / f"{self._split}-{len(self._shards):05d}.npy"
        np.save(path, self._buffer[: self._filled])
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self._shards.append(ShardInfo(file=path.name, num_tokens=self._filled, sha256=sha256))
        self._filled = 0


class TokenStream:
    """The tokens of one split as if they were one array, read from disk as they are needed."""

    def __init__(self, name: str, shards: Sequence[np.ndarray]) -> None:
        """`shards`: flat arrays of token ids; `name`: what error messages call the stream."""
        self.name = name
        self._shards = shards
        self._starts = list(accumulate(map(len, shards), initial=0))

    @classmethod
    def open(cls, directory: Path, split: Split, manifest: Manifest) -> Self:
        """Map the shards of `split`; `UserError` where one is missing or has a wrong size."""
        shards = []
        for info in manifest.splits[split].shards:
            try:
                shard = np.load(directory / info.file, mmap_mode="r")
            except (OSError, ValueError):
                raise damaged(directory, info.file) from None
            if shard.shape != (info.num_tokens,) or shard.dtype != manifest.dtype:
                raise damaged(directory, info.file)
            shards.append(shard)
        return cls(split, shards)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int64 of shape (length,), across shards.

        Raises `IndexError` outside the stream.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)} in {self.name}")
        tokens = np.empty(length, np.int64)
        filled = 0
        shard = bisect_right(self._starts, start) - 1
        while filled < length:
            offset = start + filled - self._starts[shard]
            found = self._shards[shard][offset : offset + length - filled]
            tokens[filled : filled + len(found)] = found
            filled += len(found)
            shard += 1
        return tokens


def damaged(directory: Path, file: str) -> UserError:
    """The error for a prepared corpus that something else has changed."""
    return UserError(
        f"{file} of the prepared corpus in {directory} is missing or damaged: delete that folder, "
        "and it is prepared anew"
    )


def sync_tree(directory: Path) -> None:
    """Have the system write all files and folders below `directory` to the disk, and itself."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Have the system write one file, or the list of names of one folder, to the disk."""
    if os.name == "nt":
        return  # Windows syncs neither folders nor files opened for reading
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
