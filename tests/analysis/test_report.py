import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from analysis.conftest import HOSTILE, make_token
from latentcot.analysis.report import RunReport, write_report
from latentcot.analysis.tokens import TextView


class Page(HTMLParser):
    """The elements of a page as a browser's parser finds them, and the text within each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[list[str]] = [[]]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in ("meta", "path", "use", "rect"):
            self._open.append(text)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "path", "use", "rect"):
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.elements if name == tag]

    @property
    def data(self) -> list[Any]:
        """The embedded text views."""
        return [
            json.loads("".join(text))
            for tag, attributes, text in self.elements
            if tag == "script" and attributes.get("type") == "application/json"
        ]


@pytest.fixture
def run(history: list[dict[str, Any]], hostile_text: TextView) -> RunReport:
    return RunReport(
        title="adaptive",
        summary={"val_loss": 3.26412, "prune_ratio": 0.349},
        recipe_yaml="method: adaptive\n",
        history=history,
        texts=[hostile_text, TextView("second", [make_token("x")], 3)],
        controls={"one pass only": 3.8912},
    )


def render(tmp_path: Path, run: RunReport) -> Page:
    path = tmp_path / "report.html"
    write_report(path, run)
    return Page(path.read_text(encoding="utf-8"))


def test_page_holds_the_runs_numbers(tmp_path: Path, run: RunReport) -> None:
    page = render(tmp_path, run)
    assert page.texts("h1") == ["adaptive"]
    assert page.texts("dd")[0].startswith("3.264")
    assert page.texts("dd")[2].startswith("34.9")
    assert "3.8912" in page.texts("td")
    assert page.texts("pre") == ["method: adaptive\n"]
    assert len(page.texts("svg")) == 3


def test_hostile_texts_add_no_element_and_lose_nothing(tmp_path: Path, run: RunReport) -> None:
    page = render(tmp_path, run)
    assert len(page.texts("script")) == len(run.texts) + 1
    assert not page.texts("img")
    assert page.data == [text.as_dict() for text in run.texts]
    assert "\u2028" not in "".join(page.texts("script"))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_labels_show_as_text(tmp_path: Path, run: RunReport, text: str) -> None:
    benign = render(tmp_path, run)
    page = render(
        tmp_path,
        replace(
            run, title=text, recipe_yaml=text, controls={text: 1.0}, summary={text: text}, texts=[]
        ),
    )
    assert not page.texts("img")
    assert len(page.texts("script")) == 1
    shown = text.encode("utf-8", "replace").decode().replace("\r\n", "\n")
    assert page.texts("h1") == page.texts("pre") == [shown]
    assert benign.texts("style") == page.texts("style")


def test_page_is_self_contained(tmp_path: Path, run: RunReport) -> None:
    page = render(tmp_path, run)
    for tag, attributes, _ in page.elements:
        assert tag not in ("link", "iframe", "object", "base", "embed")
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"url\((?!#)|@import", page.html)
    addresses = set(re.findall(r"https?://[^\"<\s]+", page.html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_policy_admits_exactly_the_pages_script(tmp_path: Path, run: RunReport) -> None:
    page = render(tmp_path, run)
    policies = [
        attributes["content"] or ""
        for tag, attributes, _ in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = hashlib.sha256(page.texts("script")[-1].encode()).digest()
    hashed = base64.b64encode(digest).decode()
    expected = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
    assert policies == [expected]


def test_same_run_same_bytes(tmp_path: Path, run: RunReport) -> None:
    assert render(tmp_path, run).html == render(tmp_path, run).html


def test_empty_run(tmp_path: Path) -> None:
    page = render(tmp_path, RunReport("empty", {}, ""))
    assert "No training log was recorded." in page.html
    assert not page.texts("svg")
    assert page.texts("h2") == ["Training", "Details"]


def test_a_text_without_tokens(tmp_path: Path) -> None:
    page = render(tmp_path, RunReport("run", {}, "", texts=[TextView("empty", [], 3)]))
    assert "0 tokens</span>" in page.html


def test_a_lost_loss_of_a_token_is_null(tmp_path: Path) -> None:
    view = TextView("diverged", [make_token(loss=math.nan)], 3)
    page = render(tmp_path, RunReport("run", {}, "", texts=[view]))
    assert page.data[0]["tokens"][0]["loss"] is None


@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_lost_losses_are_counted(tmp_path: Path, run: RunReport, lost: float | None) -> None:
    run.history[3] = {**run.history[3], "loss": lost, "ce_loss": lost}
    assert "1 of the 44 logged losses is not finite" in render(tmp_path, run).html
    run.history[4] = {**run.history[4], "loss": lost, "ce_loss": lost}
    assert "2 of the 44 logged losses are not finite" in render(tmp_path, run).html


def test_lost_losses_are_not_mentioned_where_there_are_none(tmp_path: Path, run: RunReport) -> None:
    assert "not finite" not in render(tmp_path, run).html


def test_vanilla_says_that_passes_are_constant(tmp_path: Path, run: RunReport) -> None:
    tokens = [make_token(gates=[]), make_token(gates=[], loss=None, p_target=None, target=None)]
    vanilla = replace(
        run,
        summary={"val_loss": 3.4, "passes_per_token": 1.0, "steps_vs_ptarget": math.nan},
        history=[{**row, "passes_per_token": 1.0} for row in run.history],
        texts=[TextView("vanilla", tokens, max_latent_steps=0)],
    )
    page = render(tmp_path, vanilla)
    assert "Passes per token stayed at 1 throughout training." in page.html
    assert "Latent steps and difficulty" not in page.html
    assert len(page.texts("svg")) == 1
    assert len(page.texts("dt")) == 2


def test_given_profile_takes_the_place_of_the_texts(tmp_path: Path, run: RunReport) -> None:
    assert "Over the texts below." in render(tmp_path, run).html
    run.by_steps = [
        {"latent_steps": 0, "share": 0.123, "mean_p_target": 0.9},
        {"latent_steps": 1, "share": 0.877, "mean_p_target": 0.1},
    ]
    page = render(tmp_path, run)
    assert "Over the texts below." not in page.html
    assert ">12</text>" in page.html
