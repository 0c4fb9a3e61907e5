import json

import pytest

from analysis.conftest import make_token
from latentcot.analysis.tokens import TextView, profile_by_steps


@pytest.mark.parametrize("name", ["gates", "reach", "exits", "p_target"])
def test_lists_have_one_entry_per_executed_step(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 2 entries for 3 executed steps"):
        make_token(latent_steps=2, **{name: [0.5, 0.5]})


def test_methods_without_a_router_leave_lists_empty() -> None:
    token = make_token(latent_steps=3, gates=[], reach=[], exits=[], p_target=None)
    assert token.as_dict()["gates"] == []


def test_a_token_cannot_pass_the_models_limit() -> None:
    with pytest.raises(ValueError, match="took 4 latent steps, above max_latent_steps=3"):
        TextView("text", [make_token(latent_steps=4)], max_latent_steps=3)


def test_view_is_json_with_five_significant_digits() -> None:
    token = make_token(loss=1.23456789, p_target=[1.23456789e-7])
    data = json.loads(json.dumps(TextView("text", [token], 3).as_dict()))
    assert data["max_latent_steps"] == 3
    assert data["tokens"][0]["loss"] == 1.2346
    assert data["tokens"][0]["p_target"] == [1.2346e-7]
    assert data["tokens"][0]["target"] == "b"


def test_means_skip_tokens_without_loss() -> None:
    view = TextView("text", [make_token(loss=None), make_token(latent_steps=3, loss=2.0)], 3)
    assert view.mean_loss == 2.0
    assert view.mean_latent_steps == 1.5
    empty = TextView("text", [], 3)
    assert empty.mean_loss is None
    assert empty.mean_latent_steps is None


def test_profile_by_steps_uses_the_last_step() -> None:
    first = TextView("first", [make_token(latent_steps=2, p_target=[0.1, 0.2, 0.3])], 3)
    tokens = [make_token(latent_steps=2, p_target=[0, 0, 0.5]), make_token(p_target=None)]
    second = TextView("second", [*tokens, make_token(latent_steps=2, p_target=None)], 3)
    assert profile_by_steps([first, second]) == [
        {"latent_steps": 0, "share": 0.25, "mean_p_target": None},
        {"latent_steps": 2, "share": 0.75, "mean_p_target": 0.4},
    ]
    assert profile_by_steps([]) == []
