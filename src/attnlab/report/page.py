"""One HTML file that needs nothing else: no network, and no script but its own. All text from data is escaped.

A page is a title and headed sections of parts: Table, Facts, Picture, Text, Command, Files, and the Viewer of
`embedded`. Tables are sorted by a click on a column and copied as CSV or LaTeX.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol
from urllib.parse import quote

from attnlab.report.bundle import build_policy, join_scripts, join_styles

MODULES = ("theme.js", "tables.js")
LONG = 24  # characters beyond which a cell is a text of several lines; what is shorter is never broken


class Part(Protocol):
    def html(self) -> str: ...


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    verdicts: str | None = None  # the column whose cells are verdicts, and are marked as such

    def html(self) -> str:
        head = "".join(f"<th scope='col'>{escape(str(c))}</th>" for c in self.columns)
        body = "".join(f"<tr>{''.join(map(self._cell, self.columns, row))}</tr>" for row in self.rows)
        return f"<div class='table'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _cell(self, column: str, content: object) -> str:
        text = escape(str(content))
        if column == self.verdicts and content in MARKS:
            return f"<td><span class='verdict {MARKS[str(content)]}'>{text}</span></td>"
        return f"<td class='long'>{text}</td>" if len(str(content)) > LONG else f"<td>{text}</td>"


MARKS = {
    "reproduced": "good",
    "same direction": "fair",
    "not reproduced": "poor",
    "no verdict": "open",
    "not run": "open",
}  # how a verdict is coloured; it is told by its words


@dataclass(frozen=True)
class Facts:
    """Names with what they are: a configuration, versions, hardware, seeds."""

    facts: Mapping[str, object]

    def html(self) -> str:
        rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_format_value(v))}</dd>" for k, v in self.facts.items())
        return f"<dl class='facts'>{rows}</dl>"


@dataclass(frozen=True)
class Picture:
    png: bytes
    caption: str  # also the alternative text

    def html(self) -> str:
        data = base64.b64encode(self.png).decode()
        told = escape(self.caption, quote=True)
        return f"<figure><img alt='{told}' src='data:image/png;base64,{data}'><figcaption>{told}</figcaption></figure>"


@dataclass(frozen=True)
class Text:
    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Command:
    command: str

    def html(self) -> str:
        return f"<pre class='command'><code>{escape(self.command)}</code></pre>"


@dataclass(frozen=True)
class Files:
    """What lies beside the page: paths from its folder, each with what it holds."""

    files: Mapping[str, str]

    def html(self) -> str:
        links = "".join(
            f"<li><a href='./{quote(path)}'>{escape(path)}</a>: {escape(says)}</li>"
            for path, says in self.files.items()
        )
        return f"<ul class='files'>{links}</ul>"


def render_page(title: str, sections: Sequence[tuple[str, Sequence[Part]]]) -> str:
    """A title and headed sections of parts, as one document; a section without a heading has none."""
    headings = [heading for heading, _ in sections if heading]
    links = "".join(f"<li><a href='#{_name_anchor(n)}'>{escape(h)}</a></li>" for n, h in enumerate(headings))
    contents = f"<nav aria-label='contents'><ul>{links}</ul></nav>" if len(headings) > 2 else ""
    parts, number = "", 0
    for heading, body in sections:
        shown = "".join(part.html() for part in body)
        if heading:
            shown, number = f"<h2 id='{_name_anchor(number)}'>{escape(heading)}</h2>{shown}", number + 1
        parts += f"<section>{shown}</section>"
    wanted = [name for _, body in sections for part in body for name in getattr(part, "modules", ())]
    scripts, styles = join_scripts((*MODULES, *dict.fromkeys(wanted))), join_styles()
    allowed = build_policy(scripts=scripts, styles=styles)
    head = (
        f"<meta charset='utf-8'><meta http-equiv='Content-Security-Policy' content=\"{allowed}\">"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>{escape(title)}</title>"
        f"<style>{styles}</style>"
    )
    whole = f"<header><h1>{escape(title)}</h1></header>{contents}<main>{parts}</main>"
    whole += f"<script type='module'>{scripts}</script>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{whole}</body></html>\n"


def _name_anchor(number: int) -> str:
    return f"section-{number + 1}"


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
