import sys
from pathlib import Path

import pytest

from latentcot import cli
from training.helpers import Latentcot, Outcome


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 24 small texts; a session tokenises it once."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(24):
        sums = [f"{number} and {other} make {number + other}.\n" for other in range(60)]
        (folder / f"{number:02}.txt").write_text(f"Page {number}\n" + "".join(sums))
    return folder


@pytest.fixture
def latentcot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Latentcot:
    """`latentcot("train", path, ...)` is the command line, in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["latentcot", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Outcome(int(left.value.code or 0), *capsys.readouterr())

    return run
