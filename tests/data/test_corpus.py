import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from latentcot.data import (
    SPLITS,
    Corpus,
    DataConfig,
    corpus,
    fingerprint,
    prepare,
    shards,
    train_tokenizer,
)
from latentcot.errors import UserError


@pytest.fixture
def config(jsonl, tmp_path) -> DataConfig:
    return DataConfig(
        source=str(jsonl),
        validation_fraction=0.2,
        test_fraction=0.1,
        tokenizer={"vocab_size": 300},
        cache_dir=str(tmp_path / "cache"),
    )


def change(config: DataConfig, **fields) -> DataConfig:
    return DataConfig(**{**config.model_dump(), **fields})


def prepared_folders(config: DataConfig) -> list[Path]:
    """All that lies in the cache, unfinished folders included."""
    return sorted(Path(config.cache_dir, "data").iterdir())


def documents_of(prepared: Corpus, split) -> list[str]:
    stream = prepared.stream(split)
    tokens = stream.read(0, len(stream))
    ends = np.flatnonzero(tokens == prepared.tokenizer.eos_token_id)
    assert ends[-1] == len(tokens) - 1, "each document ends with EOS"
    starts = [0, *(ends[:-1] + 1)]
    return [prepared.tokenizer.decode(tokens[s:e]) for s, e in zip(starts, ends, strict=True)]


def all_documents_of(prepared: Corpus) -> list[str]:
    return [text for split in SPLITS for text in documents_of(prepared, split)]


def test_the_streams_hold_every_document_once_and_in_order(config, texts):
    prepared = prepare(config)
    parts = {split: documents_of(prepared, split) for split in SPLITS}
    assert sorted(all_documents_of(prepared)) == sorted(texts)
    for split, found in parts.items():
        assert found == sorted(found, key=texts.index)
        info = prepared.manifest.splits[split]
        assert info.num_documents == len(found)
        assert info.num_bytes == sum(len(text.encode()) for text in found)
        assert info.num_tokens == len(prepared.stream(split))
        assert prepared.bytes_per_token(split) == info.num_bytes / info.num_tokens


def test_the_manifest_tells_what_was_done(config):
    prepared = prepare(config)
    manifest = prepared.manifest
    assert manifest.config == change(config, cache_dir=None)
    assert manifest.tokenizer_fingerprint == fingerprint(prepared.tokenizer)
    assert manifest.vocab_size == len(prepared.tokenizer) == 300
    assert manifest.dtype == "uint16"


def test_the_tokenizer_sees_the_train_split_alone(config, monkeypatch):
    seen = []

    def train(texts, vocab_size):
        seen.extend(texts)
        return train_tokenizer(seen, vocab_size)

    monkeypatch.setattr(corpus, "train_tokenizer", train)
    prepared = prepare(config)
    assert seen == documents_of(prepared, "train")


def test_a_second_call_does_no_work(config, monkeypatch):
    lines = []
    first = prepare(config, lines.append)
    assert lines
    monkeypatch.setattr(corpus, "read_documents", lambda _: pytest.fail("read again"))
    second = prepare(config, lambda line: pytest.fail(line))
    assert second.directory == first.directory
    assert second.manifest == first.manifest


def test_the_result_is_the_same_every_time(config, tmp_path):
    here, there = prepare(config), prepare(change(config, cache_dir=str(tmp_path / "there")))
    assert here.directory.name == there.directory.name
    assert here.manifest == there.manifest  # checksums included


def test_what_changes_the_result_changes_the_folder(config, jsonl):
    names = {prepare(config).directory.name}
    names.add(prepare(change(config, split_seed=1)).directory.name)
    names.add(prepare(change(config, tokenizer={"vocab_size": 301})).directory.name)
    os.utime(jsonl, ns=(0, 0))
    names.add(prepare(config).directory.name)
    assert len(names) == 4


def test_a_given_tokenizer_is_used_and_told_apart_by_content_not_path(config, tmp_path):
    first = prepare(config)
    for name in ("a", "b"):
        first.tokenizer.save_pretrained(tmp_path / name)
    a, b = (prepare(change(config, tokenizer={"path": str(tmp_path / name)})) for name in "ab")
    assert a.directory == b.directory != first.directory
    assert a.manifest.splits == first.manifest.splits
    with pytest.raises(UserError, match="there is no folder"):
        prepare(change(config, tokenizer={"path": str(tmp_path / "missing")}))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_large_vocabulary_takes_four_bytes(config, texts, monkeypatch, vocab_size, dtype):
    monkeypatch.setattr(corpus, "num_token_ids", lambda _: vocab_size)
    prepared = prepare(config)
    assert prepared.manifest.dtype == dtype
    assert sorted(all_documents_of(prepared)) == sorted(texts)


def test_long_documents_and_small_shards_change_nothing(config, texts, monkeypatch):
    whole = {split: documents_of(prepare(config), split) for split in SPLITS}
    monkeypatch.setattr(corpus, "_PIECE_CHARS", 50)
    monkeypatch.setattr(corpus, "_BATCH_CHARS", 120)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 64)
    cut = prepare(change(config, cache_dir=config.cache_dir + "2"))
    assert {split: documents_of(cut, split) for split in SPLITS} == whole
    info = cut.manifest.splits["train"]
    assert len(info.shards) == -(-info.num_tokens // 64) > 10
    assert info.num_documents == len(whole["train"])


def test_one_book_is_cut_into_train_validation_and_test(config, tmp_path):
    text = "".join(f"Line {i} of the only book.\n" for i in range(500))
    (tmp_path / "book.txt").write_text(text)
    prepared = prepare(change(config, source=str(tmp_path / "book.txt")))
    assert [prepared.manifest.splits[split].num_documents for split in SPLITS] == [1, 1, 1]
    assert "".join(all_documents_of(prepared)) == text


def test_written_out_special_tokens_do_not_end_documents(config, tmp_path):
    lines = [f"{i} <|endoftext|> {i}\n" for i in range(9)]
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, line in enumerate(lines):
        (folder / f"{i}.txt").write_text(line)
    prepared = prepare(change(config, source=str(folder)))
    assert sorted(all_documents_of(prepared)) == lines


def test_the_standard_library_is_the_default(tmp_path):
    prepared = prepare(DataConfig(max_documents=30, cache_dir=str(tmp_path)))
    assert "import" in prepared.tokenizer.decode(prepared.stream("train").read(0, 2000))


def test_the_cache_is_where_the_environment_says(config, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTCOT_CACHE", str(tmp_path / "elsewhere"))
    prepared = prepare(change(config, cache_dir=None))
    assert prepared.directory.parent == tmp_path / "elsewhere" / "data"


def test_too_little_text_is_refused_and_leaves_nothing(config, tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    config = change(config, source=str(tmp_path / "short.txt"))
    with pytest.raises(UserError, match=r"the validation split of .*short.txt is empty: give more"):
        prepare(config)
    assert prepared_folders(config) == []


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/data \(.*set data.cache_dir"):
        prepare(change(config, cache_dir=str(tmp_path / "file")))


@pytest.mark.parametrize(
    "name", ["manifest.json", "test-00000.npy", "tokenizer/tokenizer.json", "tokenizer"]
)
def test_a_damaged_cache_is_named(config, name):
    path = prepare(config).directory / name
    path.rename(path.with_name("moved"))
    with pytest.raises(UserError, match=f"{name.split('/')[0]} of the prepared .* delete"):
        prepare(config)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("bad row on the way")])
def test_an_interrupted_prepare_leaves_nothing(config, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(shards, "sync_tree", fail)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        prepare(config)
    assert prepared_folders(config) == []


KILLED = """
import os, signal, sys
from latentcot.data import DataConfig, prepare, shards
shards.sync_tree = lambda _: os.kill(os.getpid(), signal.SIGKILL)
prepare(DataConfig.model_validate_json(sys.argv[1]))
"""


def test_a_killed_prepare_is_not_used_and_a_new_process_does_the_same_work(config):
    killed = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILLED, config.model_dump_json()], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = prepared_folders(config)
    prepared = prepare(config)
    assert left.name.startswith(f".{prepared.directory.name}-")
    (draft,) = left.iterdir()
    names = sorted(path.name for path in draft.iterdir())
    assert names == sorted(path.name for path in prepared.directory.iterdir())
    for name in names:
        if (draft / name).is_file():
            assert (draft / name).read_bytes() == (prepared.directory / name).read_bytes()


def test_of_two_processes_the_first_that_is_ready_wins(config, monkeypatch):
    sync_tree = shards.sync_tree
    first = []

    def be_overtaken(draft):
        monkeypatch.setattr(shards, "sync_tree", sync_tree)
        first.append(prepare(config))
        (draft / "mine").touch()

    monkeypatch.setattr(shards, "sync_tree", be_overtaken)
    second = prepare(config)
    assert second.directory == first[0].directory
    assert prepared_folders(config) == [second.directory]
    assert not (second.directory / "mine").exists()


def test_gzip_and_plain_rows_give_the_same_streams(config, jsonl, texts):
    packed = jsonl.with_suffix(".jsonl.gz")
    with gzip.open(packed, "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in texts)
    other = prepare(change(config, source=str(packed), text_field="body"))
    assert other.manifest.splits == prepare(config).manifest.splits
