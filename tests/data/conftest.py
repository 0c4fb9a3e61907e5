import json
from pathlib import Path

import pytest


@pytest.fixture
def texts() -> list[str]:
    """Forty different small documents of several lines."""
    return [
        f"# Page {i}\n\n" + f"The number {i} is one more than {i - 1}.\n" * 9 for i in range(40)
    ]


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
