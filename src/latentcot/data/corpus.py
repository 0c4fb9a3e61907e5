"""From text to a corpus on disk that any number of runs can share."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from latentcot.data import shards
from latentcot.data.config import DataConfig
from latentcot.data.shards import FORMAT_VERSION, Manifest, SplitWriter, TokenStream
from latentcot.data.sources import read_documents, source_signature
from latentcot.data.splits import SPLITS, Split, SplitRule, pieces, plan_splits
from latentcot.data.tokenizer import (
    fingerprint,
    load_tokenizer,
    num_token_ids,
    plain_text_encoder,
    train_tokenizer,
)
from latentcot.errors import UserError

_PIECE_CHARS = 2**20
_BATCH_CHARS = 2**22
_TOKENIZER = "tokenizer"


class Corpus:
    """A prepared corpus: three token streams and the tokenizer they were made with."""

    def __init__(self, directory: Path) -> None:
        """Open what `prepare` wrote into `directory`.

        Raises `UserError` where a file is missing or has not the size that the manifest says.
        """
        self.directory = directory
        self.manifest = Manifest.load(directory)
        self._streams = {s: TokenStream.open(directory, s, self.manifest) for s in SPLITS}
        try:
            self.tokenizer = load_tokenizer(str(directory / _TOKENIZER))
        except UserError:
            raise shards.damaged(directory, _TOKENIZER) from None

    def stream(self, split: Split) -> TokenStream:
        """All tokens of a split: documents in the order of the source, an EOS after each."""
        return self._streams[split]

    def bytes_per_token(self, split: Split) -> float:
        """UTF-8 bytes of text per token, EOS counted as a token of no bytes.

        Mean loss in nats per token / (bytes_per_token * ln 2) = bits per byte.
        """
        info = self.manifest.splits[split]
        return info.num_bytes / info.num_tokens


def prepare(config: DataConfig, progress: Callable[[str], None] | None = None) -> Corpus:
    """Tokenise the corpus that `config` describes, or open it where that was done before.

    The result lies in `<cache>/data/<key>`, <cache> being `config.cache_dir`, $LATENTCOT_CACHE or
    ~/.cache/latentcot, and <key> a hash of all that determines it. It is written under another
    name and renamed at the end, so that it is there completely or not at all; of processes that
    prepare the same corpus at once, all use the first that is ready. A killed one leaves a folder
    `.<key>-*` that can be deleted.

    Memory stays bounded by one shard per split, a batch of text and the longest document.
    `progress` is called with a line of text now and then.

    Raises `UserError` for all that `read_documents` and `load_tokenizer` find wrong, for a corpus
    too small to have three splits, a cache that cannot be written, and a damaged one.
    """
    given = load_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    target = _cache_root(config) / "data" / _key(config, given)
    if not target.exists():
        try:
            _build(config, given, target, progress or (lambda line: None))
        except OSError as error:
            raise UserError(
                f"cannot write the prepared corpus to {target.parent} ({error.strerror or error}): "
                "set data.cache_dir to a folder with room that you may write to"
            ) from None
    return Corpus(target)


def _cache_root(config: DataConfig) -> Path:
    default = os.environ.get("LATENTCOT_CACHE") or "~/.cache/latentcot"
    return Path(config.cache_dir or default).expanduser()


def _key(config: DataConfig, given: PreTrainedTokenizerFast | None) -> str:
    described = config.model_dump(exclude={"cache_dir"})
    if given is not None:
        described["tokenizer"] = fingerprint(given)
    everything = [FORMAT_VERSION, described, source_signature(config)]
    return blake2b(json.dumps(everything).encode(), digest_size=16).hexdigest()


def _build(
    config: DataConfig,
    given: PreTrainedTokenizerFast | None,
    target: Path,
    progress: Callable[[str], None],
) -> None:
    """Write the corpus beside `target` and rename it, unless another process did so first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as private:
        draft = Path(private) / target.name
        draft.mkdir()
        _write(config, given, draft, progress)
        shards.sync_tree(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():
                raise
        shards.sync(target.parent)


def _write(
    config: DataConfig,
    given: PreTrainedTokenizerFast | None,
    draft: Path,
    progress: Callable[[str], None],
) -> None:
    progress(f"reading {config.source}")
    rule = plan_splits(read_documents(config), config)
    tokenizer = given
    if tokenizer is None:
        progress(f"training a tokenizer of {config.tokenizer.vocab_size} tokens")
        train_texts = (text for split, text in _split_texts(config, rule) if split == "train")
        tokenizer = train_tokenizer(train_texts, config.tokenizer.vocab_size)
    tokenizer.save_pretrained(draft / _TOKENIZER)

    vocab_size = num_token_ids(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    writers = {split: SplitWriter(draft, split, dtype, shards.SHARD_TOKENS) for split in SPLITS}
    _tokenise(_split_texts(config, rule), tokenizer, writers, progress)
    splits = {split: writer.finish() for split, writer in writers.items()}
    for split, info in splits.items():
        if not info.num_tokens:
            raise UserError(
                f"the {split} split of {config.source} is empty: give more text, or raise "
                "data.validation_fraction and data.test_fraction"
            )
    Manifest(
        format_version=FORMAT_VERSION,
        library_version=_library_version(),
        config=config.model_copy(update={"cache_dir": None}),
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=vocab_size,
        dtype=dtype,
        splits=splits,
    ).save(draft)


def _split_texts(config: DataConfig, rule: SplitRule) -> Iterator[tuple[Split, str]]:
    for document in read_documents(config):
        yield from rule.parts(document.text)


class _Piece(NamedTuple):
    split: Split
    text: str
    ends_document: bool


def _tokenise(
    texts: Iterable[tuple[Split, str]],
    tokenizer: PreTrainedTokenizerFast,
    writers: dict[Split, SplitWriter],
    progress: Callable[[str], None],
) -> None:
    """Encode all texts, an EOS after each, into the writer of their split.

    Texts above a million characters are encoded in pieces of whole lines, so that neither memory
    nor time grows with the longest document; a merge across such a cut is lost.
    """
    encoder = plain_text_encoder(tokenizer)
    num_chars = 0
    for batch in _batches(texts):
        encodings = encoder.encode_batch_fast(
            [piece.text for piece in batch], add_special_tokens=False
        )
        for piece, encoding in zip(batch, encodings, strict=True):
            end = [tokenizer.eos_token_id] if piece.ends_document else []
            num_bytes = len(piece.text.encode())
            writers[piece.split].append(encoding.ids + end, num_bytes, piece.ends_document)
        num_chars += sum(len(piece.text) for piece in batch)
        progress(f"tokenised {num_chars / 1e6:.1f} million characters")


def _batches(texts: Iterable[tuple[Split, str]]) -> Iterator[list[_Piece]]:
    """Pieces of texts in order, in lists of at least `_BATCH_CHARS` characters but for the last."""
    batch: list[_Piece] = []
    size = 0
    for split, text in texts:
        left = len(text)
        for part in pieces(text, _PIECE_CHARS):
            left -= len(part)
            batch.append(_Piece(split, part, ends_document=left == 0))
            size += len(part)
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _library_version() -> str:
    try:
        return metadata.version("latentcot")
    except metadata.PackageNotFoundError:
        return "not installed"
