"""docs/add-a-method.md is true: its method, from outside the package, passes and is compared."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "add-a-method.md").read_text()


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (found,) = (body for body in blocks if containing in body)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader of the page has: the module, the recipe, and the repository's recipes."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "refined.py").write_text(block("python", "RefinedLM"))
    (folder / "refined.yaml").write_text(block("yaml", "plugins"))
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_shared_suite_finds_it(folder):
    words = shlex.split(block("bash", "pytest -p refined"))
    words = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
    done = run(folder, *words, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 20, done.stdout


def test_it_is_compared(folder):
    words = shlex.split(block("bash", "latentcot compare"))
    short = ["training.max_steps=2", "training.eval_blocks=2", "data.max_documents=40"]
    cut = [word for word in words if "looped" not in word]
    cut[cut.index("--seeds") + 1], cut[cut.index("--match") + 1] = "0", "tokens"
    done = run(folder, *cut, *short, "--json")
    assert done.returncode == 0, done.stderr
    names = {line["name"]: line for line in json.loads(done.stdout)}
    assert names.keys() == {"micro-refined", "micro-adaptive"}
    assert names["micro-refined"]["passes"] == 3
    # What it leaves is loaded by its own class.
    config = json.loads(next(folder.glob("runs/**/micro-refined/*/model/config.json")).read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].endswith("RefinedLM")


def test_a_plugin_that_is_not_there_is_named(folder):
    content = yaml.safe_load((folder / "refined.yaml").read_text())
    (folder / "typo.yaml").write_text(yaml.safe_dump(content | {"plugins": ["refned"]}))
    done = run(folder, "latentcot", "train", "typo.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the plugin 'refned' cannot be imported")
