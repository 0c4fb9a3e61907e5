"""The token view: one script and one style sheet that every page showing tokens embeds.

A page inlines `css_text()` in a `<style>` and `js_text()` in a `<script>`, and calls
`LatentTokenView.mount(element, TextView.as_dict(), {onSelect})` (documented in `tokenview.js`).
"""

import json
import math
from importlib.resources import files
from typing import Any

from markupsafe import Markup

_UNSAFE_IN_HTML = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def css_text() -> str:
    """The component's style sheet."""
    return _resource("tokenview.css")


def js_text() -> str:
    """The component's script; it defines the global `LatentTokenView`."""
    return _resource("tokenview.js")


def to_json_script(data: Any) -> Markup:
    """`data` as JSON that may stand between `<script>` tags, whatever strings it holds.

    `<`, `>` and `&` are written as escapes, so that no string can close the element or open a
    comment; so is every character outside ASCII, U+2028, U+2029 and lone surrogates included.
    Numbers that JSON lacks (NaN and the infinities) become null. The result is valid JSON and a
    valid JavaScript expression.
    """
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_UNSAFE_IN_HTML))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _resource(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
