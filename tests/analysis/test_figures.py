import math
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from latentcot.analysis.figures import loss_curves, passes_curve, steps_profile, to_svg
from latentcot.analysis.tokens import StepsRow

BY_STEPS: list[StepsRow] = [
    {"latent_steps": 0, "share": 0.25, "mean_p_target": 0.74},
    {"latent_steps": 3, "share": 0.75, "mean_p_target": None},
]


def lines(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[0].lines
    }


def test_loss_curves_show_cross_entropy_over_tokens(history: list[dict[str, Any]]) -> None:
    history.append({"kind": "eval", "split": "test", "tokens": 2_000_000, "loss": 0.0})
    figure = loss_curves(history)
    drawn = lines(figure)
    assert drawn["validation"] == ([0.5, 1.0, 1.5, 2.0], pytest.approx([6.1, 5.1, 4.1, 3.1]))
    tokens, smooth = drawn["training (smoothed)"]
    assert tokens[-1] == 2.0
    np.testing.assert_allclose(smooth, [7 - i / 10 for i in range(1, 41)], rtol=1e-12)
    assert figure.axes[0].get_xlabel() == "training tokens (millions)"
    assert figure.axes[0].get_ylabel() == "cross-entropy (nats per token)"


def test_smoothing_keeps_a_constant_up_to_the_ends() -> None:
    rows = [{"kind": "train", "tokens": i, "ce_loss": 3.0} for i in range(1, 400)]
    smooth = lines(loss_curves(rows))["training (smoothed)"][1]
    np.testing.assert_allclose(smooth, 3.0, rtol=1e-12)


def test_long_runs_stay_small() -> None:
    rows = [{"kind": "train", "tokens": i, "ce_loss": 3.0 + i % 2} for i in range(20_000)]
    assert len(to_svg(loss_curves(rows))) < 100_000


@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_rows_that_are_not_finite_are_not_drawn(lost: float | None) -> None:
    rows = [{"kind": "train", "tokens": i, "ce_loss": value} for i, value in enumerate([3.0, lost])]
    assert lines(loss_curves(rows))["training (smoothed)"] == ([0.0], [3.0])


@pytest.mark.parametrize("draw", [loss_curves, passes_curve, steps_profile])
def test_nothing_to_draw_is_an_empty_frame(draw: Any) -> None:
    assert "<svg" in to_svg(draw([]))


def test_passes_start_at_one_pass(history: list[dict[str, Any]]) -> None:
    axes = passes_curve(history).axes[0]
    bottom, top = axes.get_ylim()
    assert bottom == 1
    assert top > 3.975
    assert axes.get_ylabel() == "passes per token"


def test_steps_profile_leaves_out_unknown_targets() -> None:
    shares, targets = steps_profile(BY_STEPS).axes
    assert [bar.get_height() for bar in shares.patches] == [25, 75]
    assert [bar.get_height() for bar in targets.patches] == [0.74]
    assert [text.get_text() for text in shares.texts] == ["25", "75"]


def test_svg_is_deterministic_and_fit_for_a_page(history: list[dict[str, Any]]) -> None:
    svg = to_svg(loss_curves(history))
    assert svg == to_svg(loss_curves(history))
    assert svg.startswith("<svg ")
    for unwanted in ("<?xml", "<style", "<metadata", "<g id=", "<image"):
        assert unwanted not in svg
    assert "var(--figure-ink, #1b1f24)" in svg
    assert ">training tokens (millions)</text>" in svg


def test_figures_neither_change_nor_follow_the_users_settings(
    history: list[dict[str, Any]],
) -> None:
    expected = to_svg(loss_curves(history))
    with mpl.rc_context({"font.size": 40, "axes.facecolor": "black", "lines.linewidth": 9}):
        before = dict.copy(mpl.rcParams)
        assert to_svg(loss_curves(history)) == expected
        assert dict.copy(mpl.rcParams) == before
