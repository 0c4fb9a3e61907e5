"""The table of a comparison against a few lines of numpy, on made-up runs."""

import math

import numpy as np
import pytest
from scipy import stats

from latentcot.analysis.comparison import (
    RunRecord,
    compare_lines,
    markdown,
    mean_interval,
    table,
)
from latentcot.analysis.comparison_page import ComparisonPage, draw, write_comparison

LOSSES = {"ours": [3.50, 3.54, 3.51], "theirs": [3.55, 3.56, 3.57], "third": [3.4]}


def record(name: str, seed: int, loss: float, match: str = "tokens", budget: float = 2e6):
    curve = [
        {
            "tokens": 1e6 * step,
            "loss": loss + 2 / step,
            "passes_per_token": 2.0,
            "exact_flops": 1e12 * step,
            "kaplan_flops": 2e12 * step,
        }
        for step in (1, 2)
    ]
    summary = {
        "test_loss": loss,
        "parameters": 1_050_000,
        "tokens": 2_000_000,
        "passes_per_token": 3.0,
        "train_passes_per_token": 3.2,
        "prune_ratio": 0.25,
        "kaplan_flops": 4e12,
        "exact_flops": 2e12,
        "peak_bytes": 5e8 + seed,
    }
    speed = 1000.0 + seed
    return RunRecord(name, "adaptive", seed, match, budget, None, summary, curve, speed, {})


@pytest.fixture
def records():
    return [record(n, s, loss) for n, losses in LOSSES.items() for s, loss in enumerate(losses)]


def test_lines_are_means_and_paired_differences(records):
    lines = {line.name: line for line in compare_lines(reversed(records), "ours")}
    assert [line.name for line in compare_lines(records, "ours")] == ["third", "ours", "theirs"]
    ours, theirs = (np.array(LOSSES[name]) for name in ("ours", "theirs"))
    assert lines["ours"].test_loss == pytest.approx(ours.mean())
    assert lines["ours"].loss_std == pytest.approx(ours.std(ddof=1))
    assert lines["ours"].difference is None
    interval = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert lines["theirs"].difference == pytest.approx((theirs - ours).mean())
    assert (lines["theirs"].low, lines["theirs"].high) == pytest.approx(tuple(interval))
    # One seed: a difference to the same seed, and nothing about its spread.
    assert lines["third"].difference == pytest.approx(3.4 - 3.5)
    assert math.isnan(lines["third"].low)
    assert math.isnan(lines["third"].loss_std)
    assert lines["ours"].seeds == [0, 1, 2]
    assert (lines["ours"].tokens_per_s, lines["ours"].peak_bytes) == (1001.0, 5e8 + 2)


def test_differences_need_a_common_seed_and_budget(records):
    later = record("theirs", 7, 3.3, "flops", 1e13)
    lines = compare_lines([*records, later], "ours")
    assert [line.match for line in lines] == ["tokens"] * 3 + ["flops"]
    assert lines[-1].difference is None


def test_interval_of_one_value_and_of_equal_values():
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = mean_interval([1.5])
    assert mean == 1.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_the_table_as_markdown(records):
    lines = markdown(table(compare_lines(records, "ours"))).splitlines()
    assert len(lines) == 2 + 3
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "| theirs | adaptive | 1.05 |" in lines[-1]
    assert "+0.0433" in lines[-1]


def test_the_page_holds_everything_and_asks_for_nothing(records, tmp_path):
    hostile = record("<img src=x>", 0, 3.6)
    records = [*records, hostile, record("ours", 0, 3.45, "flops", 1e13)]
    lines = compare_lines(records, "ours")
    page = ComparisonPage(
        title="Three systems",
        protocol="Text: a book.",
        reference="ours",
        command="latentcot compare a.yaml",
        versions="{}",
        recipes=dict.fromkeys([*LOSSES, "<img src=x>"], "a: 1"),
        missing=["theirs, seed 3"],
    )
    write_comparison(tmp_path, page, lines, records)
    html = (tmp_path / "comparison.html").read_text()
    assert "<img" not in html
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org", "")
    for wanted in ("Equal tokens: 2 million", "Equal training FLOPs: 1.00e+13", "theirs, seed 3"):
        assert wanted in html
    for name in ("iso_data", "iso_exact_flops", "iso_kaplan_flops"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert "latentcot compare a.yaml" in (tmp_path / "table.md").read_text()


def test_curves_show_the_numbers(records):
    page = ComparisonPage("t", "p", "ours", "c", "v", dict.fromkeys(LOSSES, ""), [])
    records = [*records, record("ours", 0, 3.45, "flops", 1e13)]
    drawn = {one.name: one.figure for one in draw(page, compare_lines(records, "ours"), records)}
    (axes,) = drawn["iso_data"].axes
    curves = {line.get_label(): line.get_xydata() for line in axes.lines}
    want = [(step, np.mean(LOSSES["ours"]) + 2 / step) for step in (1, 2)]
    np.testing.assert_allclose(curves["ours"], want)
    (axes,) = drawn["iso_kaplan_flops"].axes
    points = {line.get_label(): line.get_xydata() for line in axes.lines}["ours"]
    # Where a schedule ended: once for equal tokens (three seeds), once for equal FLOPs.
    ends = sorted([(4e12, np.mean(LOSSES["ours"]) + 1), (4e12, 3.45 + 1)])
    np.testing.assert_allclose(points, ends)


def test_every_line_looks_different_and_every_end_is_in_the_frame():
    records = [record(f"system {n}", 0, 3 + 0.3 * n) for n in range(9)]
    records += [record("system 8", 0, 9.0, "flops", 1e10)]
    page = ComparisonPage("t", "p", "system 0", "c", "v", {}, [])
    drawn = {one.name: one.figure for one in draw(page, [], records)}
    (axes,) = drawn["iso_exact_flops"].axes
    lines = [line for line in axes.lines if line.get_label().startswith("system")]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 9
    assert max(line.get_ydata().max() for line in lines) < axes.get_ylim()[1]


def test_ablation_has_two_axes(records):
    page = ComparisonPage(
        "t", "p", "ours", "c", "v", dict.fromkeys(LOSSES, ""), [], swept="model.beta"
    )
    drawn = draw(page, compare_lines(records, "ours"), records)
    left, right = drawn[0].figure.axes
    assert left.get_ylabel().startswith("test loss")
    assert right.get_ylabel() == "prune ratio (%)"
    assert [label.get_text() for label in left.get_xticklabels()] == ["None"] * 3
    np.testing.assert_allclose(right.lines[0].get_ydata(), [25, 25, 25])
