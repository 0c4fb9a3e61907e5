"""Documents from the standard library, local files and folders, or a hub dataset."""

import gzip
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from latentcot.data.config import STDLIB, DataConfig
from latentcot.errors import UserError

_ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FILE_SUFFIX = re.compile(r".*\.(jsonl?|gz|parquet|txt|text|md|rst|py|csv|zst)", re.IGNORECASE)
_SNIFFED_BYTES = 8192


class Document(NamedTuple):
    """One text of the corpus; `name` tells a reader where it stands in the source."""

    name: str
    text: str


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Yield the documents of `config.source` in an order that never changes, at most
    `config.max_documents` of them; documents without a visible character are left out.

    - "stdlib": each `.py` file of the running interpreter's standard library, without its tests.
    - A file: the rows of a `.jsonl`, `.jsonl.gz` or `.parquet`; any other file is one document
      of UTF-8 text.
    - A folder: its files, recursively, sorted by path; hidden and binary files and linked folders
      are left out.
    - Anything else: the rows of a hub dataset, streamed.

    Raises `UserError` while iterating: source missing or unreadable, no document at all, text
    that is not UTF-8, a broken row, or a row without `config.text_field`.
    """
    visible = (document for document in _all_documents(config) if document.text.strip())
    found = False
    for document in islice(visible, config.max_documents):
        found = True
        yield document
    if not found:
        raise UserError(
            f"{config.source} holds no text: data.source must name a text, .jsonl, .jsonl.gz or "
            ".parquet file, a folder of these, or a hub dataset, with at least one document"
        )


def source_signature(config: DataConfig) -> list[object]:
    """What changes when the documents of `config.source` change, ready for JSON.

    Local files are told apart by path, size and modification time; the standard library by the
    version of Python and the sizes of its files; a hub dataset by what `config` says of it.
    """
    files = _local_files(config.source)
    if files is None:
        return []
    if config.source == STDLIB:
        return [sys.version, [(name, path.stat().st_size) for name, path in files]]
    stats = [(str(path.resolve()), path.stat()) for _, path in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _all_documents(config: DataConfig) -> Iterator[Document]:
    files = _local_files(config.source)
    if files is None:
        for index, row in enumerate(_hub_rows(config)):
            where = f"{config.source}, row {index}"
            yield Document(f"{config.source}:{index}", _text_of(row, config.text_field, where))
        return
    for name, path in files:
        if not path.name.endswith(_ROW_SUFFIXES):
            yield Document(name, _read_text(path))
            continue
        read_rows = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
        for number, row in read_rows(path, config.text_field):
            where = f"{path}, row {number}"
            yield Document(f"{name}:{number}", _text_of(row, config.text_field, where))


def _local_files(source: str) -> list[tuple[str, Path]] | None:
    """(name, path) of each file of a local source, sorted by name; None for a hub dataset."""
    if source == STDLIB:
        files = _walk(Path(sysconfig.get_path("stdlib")), _STDLIB_SKIPPED)
        return [(name, path) for name, path in files if path.suffix == ".py"]
    path = Path(source).expanduser()
    if path.is_dir():
        files = _walk(path, skipped=set())
        return [(name, path) for name, path in files if _is_readable_kind(path)]
    if path.is_file():
        return [(path.name, path)]
    if _FILE_SUFFIX.fullmatch(source) or not _HUB_NAME.fullmatch(source):
        raise UserError(f"there is no file or folder {source}: check the path in data.source")
    return None


def _walk(root: Path, skipped: set[str]) -> list[tuple[str, Path]]:
    """The files below `root`, without hidden ones and without the folders called as in `skipped`.

    Names are paths relative to `root`, with forward slashes; the list is sorted by them.
    """
    files = []
    with _readable(root):
        for folder, subfolders, names in os.walk(root, onerror=_raise):
            subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped]
            paths = [Path(folder, name) for name in names if not name.startswith(".")]
            files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_readable_kind(path: Path) -> bool:
    """Rows, or text by git's rule: no NUL among the first bytes."""
    if path.name.endswith(_ROW_SUFFIXES):
        return True
    with _readable(path), path.open("rb") as file:
        return b"\0" not in file.read(_SNIFFED_BYTES)


def _read_text(path: Path) -> str:
    with _readable(path):
        data = path.read_bytes()
    if b"\0" in data:
        raise UserError(
            f"{path} is a binary file: give UTF-8 text, or rows as .jsonl, .jsonl.gz or .parquet"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8 or leave it out"
        ) from None


def _jsonl_rows(path: Path, text_field: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield (line number from 1, row), without blank lines."""
    opener = gzip.open if path.suffix == ".gz" else open
    with _readable(path), opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{path}, line {number}, is not valid JSON ({error}): mend or remove the line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, line {number}, is not a JSON object: write each document as "
                    f'{{"{text_field}": "..."}} on one line'
                )
            yield number, row


def _parquet_rows(path: Path, text_field: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield (row number from 0, row); of the columns, only the text is read."""
    with _readable(path), pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise _missing_field(str(path), text_field, columns)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for row in batch.to_pylist():
                yield number, row
                number += 1


def _hub_rows(config: DataConfig) -> Iterator[Mapping[str, object]]:
    import datasets  # here, because it takes seconds and local corpora do without it

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            config.source,
            name=config.name,
            split=config.split,
            revision=config.revision,
            streaming=True,
        )
    except Exception as error:  # of the hub, of HTTP, of the file format: no common base
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{config.source} is no local file or folder, and reading it as a hub dataset failed "
            f"({reason}): check data.source, data.name, data.split and the network"
        ) from None


def _text_of(row: Mapping[str, object], text_field: str, where: str) -> str:
    """The text of a row; a null is an empty document."""
    if text_field not in row:
        raise _missing_field(where, text_field, list(row))
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f'the field "{text_field}" of {where} is a {type(text).__name__}, not a string: '
            "set data.text_field to the field that holds the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds half a surrogate pair (character {error.start}), which is not Unicode "
            "text: mend or remove the row"
        ) from None
    return text


def _missing_field(where: str, text_field: str, fields: list[str]) -> UserError:
    return UserError(
        f'{where} has no field "{text_field}": set data.text_field to one of '
        f"{', '.join(fields) or '(the row is empty)'}"
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the system or the decompressor raises for a bad file into a `UserError`."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
        raise UserError(f"cannot read {path} ({reason}): check it and its permissions") from None
