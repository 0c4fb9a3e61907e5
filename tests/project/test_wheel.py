"""The wheel is whole, and works with nothing but the base dependencies."""

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a virtual environment with the wheel and the closure of its base dependencies.

    The closure is linked from the environment that runs the tests: as strict as an install of its
    own, without its minute and its gigabyte.
    """
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    link(closure(wheel), site)
    binaries = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    run(*pip, "check", cwd=folder)
    return binaries


def run(*command: str | Path, cwd: Path) -> str:
    variables = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def closure(wheel: Path) -> set[str]:
    """Names of the distributions that the wheel needs without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = importlib.metadata.PathDistribution(zipfile.Path(archive, name).parent)
        todo = [(line, "") for line in metadata.requires or []]
    seen = set()
    while todo:
        requirement, extra = Requirement(todo[-1][0]), todo.pop()[1]
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(r, wanted) for r in importlib.metadata.requires(name) or []]
    return {name for name, _ in seen}


def link(names: set[str], site: Path) -> None:
    """Link the files of the named distributions into `site`, and no other's."""
    owners = Counter(
        top
        for distribution in importlib.metadata.distributions()
        for top in {file.parts[0] for file in distribution.files or []}
    )
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            if file.parts[0] == "..":  # scripts
                continue
            entry = Path(file) if owners[file.parts[0]] > 1 else Path(file.parts[0])
            if not (site / entry).exists():
                (site / entry).parent.mkdir(parents=True, exist_ok=True)
                (site / entry).symlink_to(distribution.locate_file(entry))


def test_the_wheel_has_every_file_of_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "latentcot").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files
    assert {Path(name).suffix for name in files} >= {".py", ".js", ".css", ".j2"}


def test_the_package_works_with_base_dependencies_only(environment: Path, tmp_path: Path):
    code = """
import importlib, pkgutil, sys
import latentcot

assert latentcot.__file__.startswith(sys.prefix), latentcot.__file__
assert "adaptive" in latentcot.METHODS
optional = {"lm_eval"}
assert not any(importlib.util.find_spec(name) for name in optional | {"pytest", "peft"})
for module in pkgutil.walk_packages(latentcot.__path__, "latentcot."):
    if module.name != "latentcot.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in optional:
                raise
print(latentcot.__version__)
"""
    printed = run(environment / "python", "-W", "error", "-c", code, cwd=tmp_path)
    assert printed.strip() == importlib.metadata.version("latentcot")


def test_the_command_is_installed(environment: Path, tmp_path: Path):
    assert "train" in run(environment / "latentcot", "--help", cwd=tmp_path)
