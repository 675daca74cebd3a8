"""One self-contained HTML file: no network, and no script but its own. All text from data is escaped.

A page has a title, its findings in a few sentences, sections that are visible, and sections that are folded. A section
has parts: Table, Facts, Picture, Text, Command, Files, Bars, and the Viewer of `viewer_html`. A click on a column sorts
a table; buttons copy it as CSV or LaTeX. A link to a folded section unfolds it.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol
from urllib.parse import quote

from attnlab.report.bundle import build_policy, join_scripts, join_styles

MODULES = ("theme.js", "tables.js", "folds.js")
LONG = 24  # characters; a longer cell wraps, a shorter one never does


class Part(Protocol):
    """Anything that renders itself as HTML."""

    def html(self) -> str: ...


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    verdicts: str | None = None  # the column whose cells are coloured as verdicts

    def html(self) -> str:
        head = "".join(f"<th scope='col'>{escape(str(c))}</th>" for c in self.columns)
        body = "".join(f"<tr>{''.join(map(self._cell, self.columns, row))}</tr>" for row in self.rows)
        return f"<div class='table'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _cell(self, column: str, content: object) -> str:
        text = escape(str(content))
        if column == self.verdicts and (mark := MARKS.get(str(content).partition(":")[0])):
            return f"<td><span class='verdict {mark}'>{text}</span></td>"
        return f"<td class='long'>{text}</td>" if len(str(content)) > LONG else f"<td>{text}</td>"


MARKS = {  # the class of each verdict in page.css: a colour, and a sign for those who do not see it
    "reproduced": "good", "same direction": "along", "opposite": "against", "different": "apart", "open": "open",
    "no verdict": "none", "not run": "unrun",
}  # fmt: skip


@dataclass(frozen=True)
class Bars:
    """Counts of verdicts as one bar for each row; a bar is as long as the row's share of the largest total."""

    rows: Mapping[str, Mapping[str, int]]  # counts by verdict, by row
    caption: str

    def html(self) -> str:
        most = max((sum(counts.values()) for counts in self.rows.values()), default=0) or 1
        lines = "".join(self._draw_row(name, counts, most) for name, counts in self.rows.items())
        every = dict.fromkeys(kind for counts in self.rows.values() for kind in counts)
        kinds = [kind for kind in every if any(counts.get(kind) for counts in self.rows.values())]
        keys = "".join(f"<li>{_draw_sample(kind)}{escape(kind)}</li>" for kind in kinds)
        caption = f"<figcaption><ul>{keys}</ul>{escape(self.caption)}</figcaption>"
        return f"<figure class='bars'><table><tbody>{lines}</tbody></table>{caption}</figure>"

    def _draw_row(self, name: str, counts: Mapping[str, int], most: int) -> str:
        start, pieces = 0.0, ""
        for kind, count in counts.items():
            wide = 100 * count / most
            text = escape(f"{count} {kind}")
            box = f"x='{start:.3f}%' width='{wide:.3f}%' height='100%' class='{MARKS.get(kind, 'none')}'"
            pieces += f"<rect {box}><title>{text}</title></rect>" if count else ""
            start += wide
        label = escape("; ".join(f"{count} {kind}" for kind, count in counts.items() if count), quote=True)
        bar = f"<svg role='img' aria-label='{label}'>{pieces}</svg>"
        total = sum(counts.values())
        return f"<tr><th scope='row'>{escape(name)}</th><td>{bar}</td><td class='number'>{total}</td></tr>"


def _draw_sample(kind: str) -> str:
    return f"<svg aria-hidden='true'><rect width='100%' height='100%' class='{MARKS.get(kind, 'none')}'></rect></svg>"


@dataclass(frozen=True)
class Facts:
    """Names with values: a configuration, versions, hardware, seeds."""

    facts: Mapping[str, object]

    def html(self) -> str:
        rows = ""
        for name, value in self.facts.items():
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows += f"<dt>{escape(str(name))}</dt><dd>{escape(text)}</dd>"
        return f"<dl class='facts'>{rows}</dl>"


@dataclass(frozen=True)
class Picture:
    png: bytes
    caption: str  # also the alternative text

    def html(self) -> str:
        data = base64.b64encode(self.png).decode()
        text = escape(self.caption, quote=True)
        return f"<figure><img alt='{text}' src='data:image/png;base64,{data}'><figcaption>{text}</figcaption></figure>"


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
    """Files beside the page: paths relative to its folder, each with a description."""

    files: Mapping[str, str]

    def html(self) -> str:
        links = ((f"<a href='./{quote(path)}'>{escape(path)}</a>", about) for path, about in self.files.items())
        return f"<ul class='files'>{''.join(f'<li>{link}: {escape(about)}</li>' for link, about in links)}</ul>"


Sections = Sequence[tuple[str, Sequence[Part]]]  # heading and parts


def render_page(title: str, sections: Sections, *, findings: Sequence[str] = (), folded: Sections = ()) -> str:
    """Render one HTML document. A section with an empty heading has no link in the contents.

    findings   sentences that say what the page shows, on top of it
    folded     sections of which only the heading is visible until a reader unfolds them
    """
    links, parts = list[str](), ""
    for number, (heading, body) in enumerate((*sections, *folded)):
        content = "".join(part.html() for part in body)
        if heading:
            anchor = f"section-{len(links) + 1}"
            links.append(f"<li><a href='#{anchor}'>{escape(heading)}</a></li>")
            head = f"<h2 id='{anchor}'>{escape(heading)}</h2>"
            folds = number >= len(sections)
            content = f"<details><summary>{head}</summary>{content}</details>" if folds else head + content
        parts += f"<section>{content}</section>"
    contents = f"<nav aria-label='contents'><ul>{''.join(links)}</ul></nav>" if len(links) > 2 else ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings)
    summary = f"<section class='findings' aria-label='findings'><ul>{items}</ul></section>" if items else ""
    modules = [name for _, body in (*sections, *folded) for part in body for name in getattr(part, "modules", ())]
    scripts, styles = join_scripts((*MODULES, *dict.fromkeys(modules))), join_styles()
    allowed = build_policy(scripts=scripts, styles=styles)
    head = (
        f"<meta charset='utf-8'><meta http-equiv='Content-Security-Policy' content=\"{allowed}\">"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>{escape(title)}</title>"
        f"<style>{styles}</style>"
    )
    content = f"<header><h1>{escape(title)}</h1></header><main>{summary}{contents}{parts}</main>"
    content += f"<script type='module'>{scripts}</script>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{content}</body></html>\n"
