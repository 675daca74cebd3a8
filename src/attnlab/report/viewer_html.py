"""The viewer as a part of a page, as a page of its own, and in a notebook."""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar

from attnlab.report.packing import pack_view
from attnlab.report.page import render_page
from attnlab.report.view import View

TALL = 900  # pixels of the frame in a notebook


@dataclass(frozen=True, eq=False)
class Viewer:
    """Maps that a reader can choose from; goes among the parts of `page`, and shows itself in a notebook."""

    view: View
    budget: int | None = None  # bytes of its maps; by default what `packed` says
    modules: ClassVar[tuple[str, ...]] = ("viewer.js",)

    def html(self) -> str:
        without = "This part needs JavaScript: it shows the attention maps of the page's data."
        return (
            f"<div class='viewer' role='group' aria-label='attention viewer'><noscript>{without}</noscript>"
            f"<script type='application/json'>{escape_script(self.json())}</script></div>"
        )

    def json(self) -> str:
        """The document that `packed` describes."""
        document = pack_view(self.view, budget=self.budget)
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def page(self) -> str:
        """A page of it alone."""
        return render_page(self.view.title or "attention", [("", [self])])

    def save(self, path: str | Path) -> Path:
        """Write a page (.html), or the document alone (.json)."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"{path} must end in .html, for a page, or .json, for its data")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.page() if path.suffix == ".html" else self.json() + "\n", encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """A frame with the page in it: a notebook runs no script outside of one."""
        look = f"width:100%;height:{TALL}px;border:1px solid #8884;border-radius:8px"
        return f"<iframe title='attention viewer' style='{look}' srcdoc='{escape(self.page(), quote=True)}'></iframe>"

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self.view.runs)
        return f"Viewer({self.view.title!r}; {len(self.view.examples)} examples; {names})"


def escape_script(text: str) -> str:
    """JSON as it can stand in a script element: no character of it ends the element or begins another."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
