"""Which documents train, which validate and which test."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

from latentcot.data.config import DataConfig
from latentcot.data.sources import Document

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class SplitRule:
    """Assigns each document, by a hash of its text, to one split.

    The hash puts a text at a point of [0, 1); points below `test_below` test, points from
    `validation_from` on validate, the rest trains. So copies of a text never fall into two
    splits, and neither other documents nor the order play a part.

    `divide` is for corpora of one or two documents: each is cut into contiguous ranges instead,
    the first to train on, the next to validate, the last to test.
    """

    seed: int
    test_below: float
    validation_from: float
    divide: bool = False

    def split_of(self, text: str) -> Split:
        """The split that the whole text belongs to; without meaning where `divide` is set."""
        point = _point(text, self.seed)
        if point < self.test_below:
            return "test"
        return "validation" if point >= self.validation_from else "train"

    def parts(self, text: str) -> list[tuple[Split, str]]:
        """What the text gives to which split: itself to one or, divided, a range to each."""
        if not self.divide:
            return [(self.split_of(text), text)]
        train_share, held_out = self.validation_from - self.test_below, 1 - self.test_below
        first, second = int(len(text) * train_share), int(len(text) * held_out)
        first = cut(text, first // 2, first)
        second = cut(text, (first + second) // 2, second)
        ranges = text[:first], text[first:second], text[second:]
        return [(split, part) for split, part in zip(SPLITS, ranges, strict=True) if part]


def plan_splits(documents: Iterable[Document], config: DataConfig) -> SplitRule:
    """The rule that leaves no split of `documents` empty where there are three different ones.

    Reads only until each split has a document: the bounds are then the fractions of `config`, and
    adding documents moves none. A corpus that ends before that is small: its documents are
    ranked by their points and the bounds laid between ranks, so adding documents may move some.
    Of fewer than three different documents each one is divided.
    """
    rule = SplitRule(config.split_seed, config.test_fraction, 1 - config.validation_fraction)
    seen: set[Split] = set()
    points: set[float] = set()
    for document in documents:
        seen.add(rule.split_of(document.text))
        if len(seen) == len(SPLITS):
            return rule
        points.add(_point(document.text, config.split_seed))
    num = len(points)
    if num < len(SPLITS):
        return SplitRule(rule.seed, rule.test_below, rule.validation_from, divide=True)
    num_test = max(1, min(round(num * config.test_fraction), num - 2))
    num_validation = max(1, min(round(num * config.validation_fraction), num - 1 - num_test))
    ranked = sorted(points)
    return SplitRule(rule.seed, ranked[num_test], ranked[num - num_validation])


def cut(text: str, lowest: int, highest: int) -> int:
    """The index of a character in [lowest, highest] to cut `text` at.

    After the last line break there, or else after the last space, or else at `highest`.
    """
    for separator in ("\n", " "):
        found = text.rfind(separator, lowest, highest)
        if found >= 0:
            return found + 1
    return highest


def pieces(text: str, max_length: int) -> Iterator[str]:
    """The text in order, in pieces of at most `max_length` >= 2 characters, cut between lines."""
    start = 0
    while len(text) - start > max_length:
        end = cut(text, start + max_length // 2, start + max_length)
        yield text[start:end]
        start = end
    yield text[start:]


def _point(text: str, seed: int) -> float:
    digest = blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
