import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcot.data import DataConfig, Manifest, TokenStream
from latentcot.data.shards import SplitWriter
from latentcot.errors import UserError


def write(directory, chunks, dtype="uint16", shard_tokens=10) -> Manifest:
    writer = SplitWriter(directory, "train", dtype, shard_tokens)
    for chunk in chunks:
        writer.append(chunk, num_bytes=2 * len(chunk), ends_document=True)
    return Manifest(
        format_version=1,
        library_version="",
        config=DataConfig(),
        tokenizer_fingerprint="",
        vocab_size=2**16,
        dtype=dtype,
        splits={"train": writer.finish()},
    )


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 2**16 - 1), ("uint32", 2**32 - 1)])
def test_what_is_written_is_read_back_across_shards(tmp_path, dtype, top):
    tokens = np.random.default_rng(0).integers(0, top, 47, endpoint=True)
    tokens[:2] = 0, top
    manifest = write(tmp_path, [tokens[:4], tokens[4:4], tokens[4:40], tokens[40:]], dtype)
    info = manifest.splits["train"]
    assert (info.num_documents, info.num_tokens, info.num_bytes) == (4, 47, 94)
    assert [shard.num_tokens for shard in info.shards] == [10, 10, 10, 10, 7]
    stream = TokenStream.open(tmp_path, "train", manifest)
    assert len(stream) == 47
    for start in range(48):
        for length in (0, 1, 10, 23, 47 - start):
            if start + length <= 47:
                read = stream.read(start, length)
                assert read.dtype == np.int64
                np.testing.assert_array_equal(read, tokens[start : start + length])


def test_files_are_flat_arrays_with_the_checksums_of_the_manifest(tmp_path):
    manifest = write(tmp_path, [range(25)])
    manifest.save(tmp_path)
    shards = Manifest.load(tmp_path).splits["train"].shards
    for shard in shards:
        data = (tmp_path / shard.file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard.sha256
    arrays = [np.load(tmp_path / shard.file) for shard in shards]
    assert all(array.dtype == np.uint16 for array in arrays)
    np.testing.assert_array_equal(np.concatenate(arrays), np.arange(25))


def test_a_token_that_does_not_fit_is_not_wrapped_around(tmp_path):
    with pytest.raises(OverflowError):
        write(tmp_path, [[2**16]])


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_read_equals_slicing(lengths, data):
    shards = np.split(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)[:-1])
    stream = TokenStream("train", shards)
    start = data.draw(st.integers(0, len(stream)))
    length = data.draw(st.integers(0, len(stream) - start))
    assert stream.read(start, length).tolist() == list(range(start, start + length))


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 6), (5, 1), (2, -1)])
def test_reading_outside_is_an_error(start, length):
    with pytest.raises(IndexError, match="of 5 in train"):
        TokenStream("train", [np.arange(5)]).read(start, length)


def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def shorten(path):
    np.save(path, np.load(path)[:-1])


def retype(path):
    np.save(path, np.load(path).astype(np.uint32))


@pytest.mark.parametrize("damage", [remove, truncate, shorten, retype])
def test_a_damaged_shard_is_named(tmp_path, damage):
    manifest = write(tmp_path, [range(25)])
    damage(tmp_path / "train-00001.npy")
    with pytest.raises(UserError, match=r"train-00001.npy of the prepared .* delete that folder"):
        TokenStream.open(tmp_path, "train", manifest)


@pytest.mark.parametrize("content", ["", "{}", '{"format_version": 2}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json of the prepared .* delete that folder"):
        Manifest.load(tmp_path)
