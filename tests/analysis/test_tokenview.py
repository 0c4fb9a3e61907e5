import json
import math
import re
from dataclasses import fields

import pytest
from markupsafe import Markup

from analysis.conftest import HOSTILE
from latentcot.analysis.tokens import TextView, TokenView
from latentcot.analysis.tokenview import css_text, js_text, to_json_script


@pytest.mark.parametrize("text", HOSTILE)
def test_json_script_is_inert_and_lossless(text: str) -> None:
    data = {"tokens": [text], text: 1}
    script = to_json_script(data)
    assert isinstance(script, Markup)
    assert not set(script) & set("<>&\u2028\u2029\x00\n")
    assert json.loads(script) == data


def test_json_script_has_no_numbers_that_json_lacks() -> None:
    data = {"loss": math.nan, "values": [math.inf, (-math.inf, 1.5)]}
    assert to_json_script(data) == '{"loss":null,"values":[null,[null,1.5]]}'


def test_script_never_parses_html() -> None:
    script = js_text()
    sinks = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|setHTML|eval|Function"
    assert not re.search(rf"\b(?:{sinks})\b", script)
    assert "textContent" in script


def test_resources_can_stand_inline_and_load_nothing() -> None:
    assert not re.search(r"</script|<!--", js_text(), re.IGNORECASE)
    assert not re.search(r"</style|url\(|@import", css_text(), re.IGNORECASE)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\s*\(|https?:", js_text() + css_text())


def test_tokens_are_isolated_from_each_others_direction() -> None:
    rules = dict(re.findall(r"^(\.[\w-]+) \{(.*?)\}", css_text(), re.MULTILINE | re.DOTALL))
    assert "unicode-bidi: isolate" in rules[".lt-token"]
    assert "unicode-bidi: isolate" in rules[".lt-quote"]


def test_script_reads_the_fields_that_python_writes() -> None:
    names = {field.name for view in (TextView, TokenView) for field in fields(view)}
    assert {name for name in names if re.search(rf"\b{name}\b", js_text())} == names
