"""The rules of the house that no linter knows."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import latentcot
from latentcot.cli import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "latentcot"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported(source: str) -> set[str]:
    """Every module that may be imported by `source`: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imported_sees_every_form():
    source = "import a.b as c\nfrom d import e, f\ndef g():\n    from h.i import j\n"
    assert imported(source) == {"a.b", "d", "d.e", "d.f", "h.i", "h.i.j"}


def test_a_method_is_one_file_that_nothing_else_in_models_imports():
    methods = [cls.__module__ for cls in latentcot.METHODS.values()]
    assert methods
    assert len(set(methods)) == len(methods)
    for path in (SOURCE / "models").glob("*.py"):
        assert not imported(path.read_text()) & set(methods), path.name


@pytest.mark.parametrize("name", latentcot.METHODS)
def test_a_method_is_final(name):
    assert getattr(latentcot.METHODS[name], "__final__", False)


def test_source_files_stay_short():
    files = [p for p in SOURCE.rglob("*") if p.suffix in {".py", ".js", ".css", ".html", ".j2"}]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_every_import_is_a_declared_dependency():
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(r for e in extras if e != "dev" for r in extras[e])]
    declared = {canonicalize_name(Requirement(line).name) for line in listed} | {"latentcot"}
    distributions = packages_distributions()
    missing = {}
    for path in SOURCE.rglob("*.py"):
        for module in {name.partition(".")[0] for name in imported(path.read_text())}:
            owners = {canonicalize_name(d) for d in distributions.get(module, [])}
            if owners and not owners & declared:
                missing[module] = path.name
    assert missing == {}


def test_the_documentation_shows_every_command():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    commands = typer.main.get_command(app).commands
    assert {c for c in commands if not re.search(rf"\blatentcot {c}\b", text)} == set()


def test_the_citation_has_the_version():
    assert f"\nversion: {latentcot.__version__}\n" in (ROOT / "CITATION.cff").read_text()
