import pytest
from pydantic import ValidationError

from latentcot.data import DataConfig, TokenizerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_fraction": 0.0}, "greater than 0"),
        ({"test_fraction": 1.0}, "less than 1"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave nothing to train on"),
        ({"tokenizer": {"vocab_size": 258}}, "greater than or equal to 259"),
        ({"max_documents": 0}, "greater than or equal to 1"),
        ({"source": ""}, "at least 1 character"),
        ({"sauce": "stdlib"}, "Extra inputs are not permitted"),
    ],
)
def test_a_bad_field_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**fields)


@pytest.mark.parametrize("model", [DataConfig, TokenizerConfig])
def test_every_field_is_described_and_none_can_be_changed(model):
    assert all(field.description for field in model.model_fields.values())
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model(), next(iter(model.model_fields)), None)
