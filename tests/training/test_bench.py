"""`latentcot bench decode`: what its rows hold, not how fast this machine is."""

import json
from pathlib import Path

import pytest
import yaml

from training.helpers import Latentcot, tiny

KEYS = {
    *("mode", "method", "l_max", "batch", "context", "tokens_per_s", "passes_per_token"),
    *("plain_passes_per_token", "executed_slots_per_settled_slot", "pass_cost_ratio"),
    *("ratio_to_plain", "ratio_to_one_pass", "peak_bytes", "bandwidth_ratio"),
}
QUICK = ("--batches", "1,3", "--contexts", "24", "--new-tokens", 6, "--repeats", 1, "--json")


@pytest.mark.parametrize(
    ("method", "modes"),
    [
        ("adaptive", ["plain", "wavefront", "full_depth", "one_pass"]),
        ("looped", ["plain", "one_pass"]),
    ],
)
def test_rows(source: Path, tmp_path: Path, latentcot: Latentcot, method: str, modes: list[str]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny(source, method)))
    rows = json.loads(latentcot("bench", "decode", recipe, *QUICK).out)
    assert [row["mode"] for row in rows] == modes * 2
    assert all(set(row) == KEYS for row in rows)
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["peak_bytes"] > 0
        if row["mode"] == "plain":
            assert row["ratio_to_plain"] == 1
            assert row["passes_per_token"] == row["plain_passes_per_token"]
        if row["mode"] == "one_pass":
            assert (row["ratio_to_one_pass"], row["passes_per_token"]) == (1, 1)
        if row["mode"] == "full_depth":
            assert row["passes_per_token"] == row["l_max"] + 1
        if row["mode"] == "wavefront":
            assert row["executed_slots_per_settled_slot"] >= 1
            assert row["pass_cost_ratio"] > 0
        else:
            assert row["executed_slots_per_settled_slot"] == 1


def test_bad_sizes_are_refused(source: Path, tmp_path: Path, latentcot: Latentcot):
    done = latentcot("bench", "decode", tmp_path / "nothing", *QUICK)
    assert done.code == 2
    assert "no run and no exported model" in done.err
    done = latentcot("bench", "decode", tmp_path, "--batches", "one")
    assert (done.code, "--batches is 'one'" in done.err) == (2, True)
