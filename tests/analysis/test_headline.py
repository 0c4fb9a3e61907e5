import math

import pytest

from latentcot.analysis.headline import all_numbers, headline

SUMMARY: dict[str, float | int | str] = {
    "val_loss": 3.26412,
    "test_loss": 3.2713,
    "passes_per_token": 2.953,
    "prune_ratio": 0.349,
    "steps_vs_ptarget": -0.4123,
    "exact_flops": 4.414e13,
    "perplexity": 26.153,
    "bits_per_byte": 1.9131,
    "tokens": 2_050_000,
    "kaplan_flops": 3.2e-2,
    "seconds": 4212.0,
}


def test_numbers_are_printed_in_their_units() -> None:
    printed = [f"{n.value} {n.unit}".strip() for n in all_numbers(SUMMARY)]
    assert printed == [
        "3.264 nats/token",
        "3.271 nats/token",
        "2.95 passes",
        "34.9 %",
        "−0.41 Spearman ρ",
        "4.41 × 10¹³ FLOPs",
        "26.15",
        "1.913 bits/byte",
        "2.05 M tokens",
        "3.20 × 10⁻² FLOPs",
        "1 h 10 min",
    ]


@pytest.mark.parametrize(
    ("key", "value", "printed"),
    [
        ("seconds", 59.94, "59.9 s"),
        ("seconds", 119.0, "2 min"),
        ("tokens", 512, "512"),
        ("tokens", 26_200_000_000, "26.2 B"),
        ("val_loss", math.nan, "nan"),
        ("val_loss", "not measured", "not measured"),
        ("my_metric", -0.00012345, "−0.0001234"),
        ("my_metric", 1.5, "1.5000"),
        ("my_metric", 12, "12"),
    ],
)
def test_odd_values(key: str, value: float | str, printed: str) -> None:
    assert all_numbers({key: value})[0].value == printed


def test_six_tiles_in_order_of_importance() -> None:
    labels = [number.label for number in headline(SUMMARY)]
    assert len(labels) == 6
    assert labels[:3] == ["Validation loss", "Test loss", "Passes per token"]
    assert all(number.explanation for number in headline(SUMMARY))


def test_an_undefined_number_gives_its_tile_away_but_a_lost_loss_does_not() -> None:
    tiles = headline({**SUMMARY, "steps_vs_ptarget": math.nan, "val_loss": math.nan})
    assert [tile.label for tile in tiles] == [
        "Validation loss",
        "Test loss",
        "Passes per token",
        "Prune ratio",
        "Training compute",
        "Perplexity",
    ]
    assert tiles[0].value == "nan"


def test_unknown_numbers_are_in_the_table_only() -> None:
    summary: dict[str, float | int | str] = {"my_metric": 1.0, "val_loss": 3.0}
    assert [number.label for number in headline(summary)] == ["Validation loss"]
    assert [number.label for number in all_numbers(summary)] == ["Validation loss", "my_metric"]
