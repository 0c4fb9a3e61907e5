"""Cached = uncached, batch = single, left-padded = unpadded: every method, random shapes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.helpers import VOCABULARY, tiny_llama, tiny_model
from models.test_every_method import VARIANTS

LONGEST = 40  # both above and below the number of columns from which slots are gathered


@st.composite
def batches(draw):
    """Token ids (B, L), the real length of each row, and where the columns are cut into chunks."""
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4))
    longest = max(lengths)
    cuts = sorted(draw(st.sets(st.integers(1, longest), max_size=5)) | {longest})
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.randint(VOCABULARY, (len(lengths), longest), generator=generator)
    return ids, lengths, cuts


@pytest.fixture(scope="module")
def models():
    """Each variant once; all examples share it."""
    made = {}

    def get(method, options):
        key = (method, repr(options))
        if key not in made:
            torch.manual_seed(len(made))
            backbone = tiny_llama(hidden_size=16, intermediate_size=24, num_attention_heads=2)
            own = {"tau": 0.4} if method == "adaptive" else {}
            made[key] = tiny_model(method, **{"backbone": backbone} | own | options).eval()
        return made[key]

    return get


@pytest.mark.parametrize(
    ("method", "options"), VARIANTS, ids=[f"{m}-{n}" for n, (m, _) in enumerate(VARIANTS)]
)
@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=batches())
@torch.no_grad()
def test_chunks_rows_and_padding_change_nothing(models, method, options, batch):
    model, (ids, lengths, cuts) = models(method, options), batch
    longest = ids.shape[1]
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()

    cache, logits, start = None, [], 0
    for end in cuts:
        out = model(ids[:, start:end], mask[:, :end], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, end
        logits.append(out.logits)
    cached = torch.cat(logits, 1)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, longest - length :]).logits[0]
        torch.testing.assert_close(cached[row, longest - length :], alone, rtol=0, atol=1e-10)
