import gzip
import json
import os
import re
import sysconfig
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latentcot.data import DataConfig, Document, read_documents
from latentcot.data.sources import source_signature
from latentcot.errors import UserError


def read(source, **fields) -> list[Document]:
    return list(read_documents(DataConfig(source=str(source), **fields)))


def error_of(source, **fields) -> str:
    """The message of the error that reading raises: one sentence, and no chained exception."""
    with pytest.raises(UserError) as caught:
        read(source, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_the_standard_library_comes_sorted_and_without_its_tests():
    documents = read("stdlib")
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    argparse = next(document.text for document in documents if document.name == "argparse.py")
    path = Path(sysconfig.get_path("stdlib"), "argparse.py")
    assert argparse == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_rows_are_documents(tmp_path, suffix):
    rows = [{"text": "one\r\n"}, {"text": " \n"}, {"text": None}, {"text": "zwei ü 🙂"}]
    documents = read(write_rows(tmp_path / f"rows{suffix}", rows))
    assert [document.text for document in documents] == ["one\r\n", "zwei ü 🙂"]
    assert len({document.name for document in documents}) == 2


def test_another_field_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "a", "id": 1}\n\n{"body": "b", "id": 2}\n')
    documents = read(path, text_field="body")
    assert documents == [Document("rows.jsonl:1", "a"), Document("rows.jsonl:3", "b")]


def test_a_text_file_is_one_document_unchanged_but_for_the_byte_order_mark(tmp_path):
    path = tmp_path / "book.text"
    path.write_bytes("\ufeffa\r\nb\tü\n".encode())
    assert read(path) == [Document("book.text", "a\r\nb\tü\n")]


def test_a_folder_gives_its_files_in_order_without_hidden_and_binary_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "z.md").write_text("z")
    (tmp_path / "a.rs").write_text("a")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_text("\n")
    write_rows(tmp_path / "b" / "rows.jsonl.gz", [{"text": "r1"}, {"text": "r2"}])
    names = [document.name for document in read(tmp_path)]
    assert names == ["a.rs", "b/rows.jsonl.gz:1", "b/rows.jsonl.gz:2", "b/z.md"]


def test_max_documents_takes_the_first_that_are_not_empty(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": t} for t in ["", "a", "b", "c"]])
    assert [document.text for document in read(path, max_documents=2)] == ["a", "b"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_missing_field_lists_those_there_are(tmp_path, suffix):
    path = write_rows(tmp_path / f"rows{suffix}", [{"id": 1, "content": "a"}])
    assert re.search(r'no field "text": set data.text_field to one of id, content$', error_of(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "rows.jsonl, line 2, is not valid JSON"),
        (b'{"text": "\xff"}\n', "rows.jsonl, line 1, is not valid JSON"),
        (b'["a"]\n', 'line 1, is not a JSON object: write each document as {"text": "..."}'),
        (b'{"text": 3}\n', 'the field "text" of .*, row 1 is a int, not a string'),
        (b'{"text": "\\ud800"}\n', "row 1 holds half a surrogate pair"),
        (b"{}\n", "one of \\(the row is empty\\)"),
        (b"\n\n", "holds no text"),
    ],
)
def test_a_bad_row_is_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert re.search(message, error_of(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.txt", b"a\0b", "binary.txt is a binary file: give UTF-8 text"),
        ("latin.txt", "für".encode("latin-1"), "latin.txt is not UTF-8 text \\(byte 1\\)"),
        ("plain.jsonl.gz", b'{"text": "a"}\n', "cannot read .*plain.jsonl.gz \\(Not a gzipped"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12],
            "cannot read .*cut.jsonl",
        ),
        ("broken.parquet", b"PAR1 no more", "cannot read .*broken.parquet"),
        ("empty.txt", b"", "holds no text"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert re.search(message, error_of(path))


def test_a_folder_of_binary_files_is_no_corpus(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    assert "holds no text" in error_of(tmp_path)


def test_a_subfolder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.txt").write_text("a")
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "(Permission denied)" in error_of(tmp_path)


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "data/no_such.txt", "rows.jsonl", "./a/b", "~/no_such", "a b/c"]
)
def test_a_missing_path_is_not_looked_up_on_the_hub(source, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert error_of(source) == f"there is no file or folder {source}: check the path in data.source"


def test_a_hub_dataset_is_streamed(monkeypatch):
    def load_dataset(path, *, name, split, revision, streaming):
        assert (path, name, split, revision) == ("org/name", "en", "validation", "abc")
        assert streaming
        return datasets.Dataset.from_list([{"t": "a"}, {"t": "b"}]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fields = {"name": "en", "split": "validation", "revision": "abc"}
    assert read("org/name", text_field="t", **fields) == [("org/name:0", "a"), ("org/name:1", "b")]
    assert "row 0 has no field" in error_of("org/name", **fields)


@pytest.mark.parametrize("error", [ConnectionError("no\nnetwork"), ValueError("bad split")])
def test_a_failing_hub_is_one_sentence(monkeypatch, error):
    def load_dataset(*_, **__):
        yield {"text": "a"}
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = error_of("org/name")
    assert "org/name is no local file or folder, and reading it as a hub dataset failed" in message
    assert str(error).split("\n")[0] in message


def test_the_signature_changes_with_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    config = DataConfig(source=str(tmp_path))
    before = source_signature(config)
    assert source_signature(config) == before
    (tmp_path / "b.txt").write_text("b")
    added = source_signature(config)
    assert added != before
    os.utime(tmp_path / "b.txt", ns=(0, 0))
    assert source_signature(config) != added
    assert source_signature(DataConfig()) == source_signature(DataConfig(split_seed=1))
    assert source_signature(DataConfig(source="org/name")) == []
