import os
import random

import numpy as np
import pytest
import torch

# No test needs the network. Read when huggingface_hub is imported, so it is set before that.
os.environ["HF_HUB_OFFLINE"] = "1"

# The order of floating-point sums depends on the number of threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries may draw from it
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of tokenised text for a test session, commands that it starts included."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    os.environ["LATENTCOT_CACHE"] = str(root / "latentcot-cache")
