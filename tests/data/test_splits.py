from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcot.data import SPLITS, DataConfig, Document, plan_splits
from latentcot.data.splits import cut, pieces


def documents(texts) -> list[Document]:
    return [Document(str(i), text) for i, text in enumerate(texts)]


def assignment(texts, **fields) -> dict[str, str]:
    rule = plan_splits(documents(texts), DataConfig(**fields))
    assert not rule.divide
    return {text: rule.split_of(text) for text in texts}


def test_shares_are_those_asked_for():
    counts = Counter(
        assignment(
            [str(i) for i in range(20_000)], validation_fraction=0.2, test_fraction=0.1
        ).values()
    )
    assert counts["validation"] / 20_000 == pytest.approx(0.2, abs=0.01)  # 3.5 standard deviations
    assert counts["test"] / 20_000 == pytest.approx(0.1, abs=0.01)


def test_the_split_of_a_text_is_written_in_stone():
    """Another Python, machine or version must not move a document between splits."""
    split_of = plan_splits(documents(map(str, range(500))), DataConfig()).split_of
    assert [i for i in range(100) if split_of(str(i)) == "test"] == [10, 42, 45, 48, 85]
    assert [i for i in range(100) if split_of(str(i)) == "validation"] == [39, 70, 95]


def test_more_documents_in_another_order_move_none():
    few = [f"text {i}" for i in range(300)]
    many = [f"other {i}" for i in range(300)] + few[::-1]
    assert assignment(few).items() <= assignment(many).items()


def test_another_seed_draws_others():
    texts = [str(i) for i in range(1000)]
    assert assignment(texts) != assignment(texts, split_seed=1)


@given(
    num=st.integers(3, 60),
    validation=st.floats(0.001, 0.499),
    test=st.floats(0.001, 0.499),
    seed=st.integers(-5, 5),
)
def test_no_split_of_three_documents_or_more_is_empty(num, validation, test, seed):
    fields = {"validation_fraction": validation, "test_fraction": test, "split_seed": seed}
    splits = assignment([str(i) for i in range(num)], **fields)
    assert set(splits.values()) == set(SPLITS)


def test_copies_stay_together_and_do_not_count_as_different():
    rule = plan_splits(documents(["a"] * 5 + ["b"] * 5), DataConfig())
    assert rule.divide
    splits = assignment(["a"] * 5 + ["b", "c"])
    assert sorted(splits.values()) == sorted(SPLITS)


def test_planning_reads_no_more_than_it_needs():
    def endless():
        i = 0
        while True:
            yield Document("", str(i))
            i += 1

    assert not plan_splits(endless(), DataConfig()).divide


@pytest.mark.parametrize("num", [1, 2])
def test_one_or_two_documents_are_cut_between_lines(num):
    texts = [f"title {i}\n" + "a line\n" * 200 for i in range(num)]
    rule = plan_splits(documents(texts), DataConfig(validation_fraction=0.1, test_fraction=0.2))
    for text in texts:
        parts = rule.parts(text)
        assert [split for split, _ in parts] == list(SPLITS)
        assert "".join(part for _, part in parts) == text
        assert all(part.endswith("\n") for _, part in parts)
        shares = [len(part) / len(text) for _, part in parts]
        assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.01)


@pytest.mark.parametrize(("text", "end"), [("a\nb c d e", 2), ("a bcdef", 2), ("abcdef", 4)])
def test_cut_prefers_lines_to_words_to_characters(text, end):
    assert cut(text, 0, 4) == end


@given(st.text(alphabet="ab \n"), st.integers(2, 9))
def test_pieces_are_short_and_lose_nothing(text, max_length):
    parts = list(pieces(text, max_length))
    assert "".join(parts) == text
    assert all(0 < len(part) <= max_length for part in parts) or text == ""
