"""The viewer as a part of a page, as its own page, and in a notebook."""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar

from attnlab.files import write_text
from attnlab.report.packing import pack_view
from attnlab.report.page import render_page
from attnlab.report.view import View

HEIGHT = 900  # pixels of the frame in a notebook


@dataclass(frozen=True, eq=False)
class Viewer:
    """Interactive attention maps: a part for `render_page`, and an output in a notebook."""

    view: View
    modules: ClassVar[tuple[str, ...]] = ("viewer.js",)

    def html(self) -> str:
        fallback = "Turn on JavaScript to see the attention maps."
        return (
            f"<div class='viewer' role='group' aria-label='attention viewer'><noscript>{fallback}</noscript>"
            f"<script type='application/json'>{escape_script(self.json())}</script></div>"
        )

    def json(self) -> str:
        """Return the JSON document that docs/viewer.md describes."""
        return json.dumps(pack_view(self.view), ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def page(self) -> str:
        """Return an HTML page with only the viewer."""
        return render_page(self.view.title or "attention", [("", [self])])

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or only its data (.json). Raises ValueError for another suffix."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"{path} must end in .html (a page) or .json (its data)")
        write_text(path, self.page() if path.suffix == ".html" else self.json() + "\n")
        return path

    def _repr_html_(self) -> str:
        """Return an iframe with the page, because a notebook runs scripts only in a frame."""
        style = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:8px"
        return f"<iframe title='attention viewer' style='{style}' srcdoc='{escape(self.page(), quote=True)}'></iframe>"

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self.view.runs)
        return f"Viewer({self.view.title!r}; {len(self.view.examples)} examples; {names})"


def escape_script(text: str) -> str:
    """Escape JSON for a script element, so that no character ends the element or begins another."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
