"""One HTML file that needs nothing else: no network, no script. All text from data is escaped."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: #fff; border-radius: 4px; }
code { background: #8882; padding: .1rem .3rem; border-radius: 3px; }
"""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def html(self) -> str:
        head = "".join(f"<th scope='col'>{escape(str(c))}</th>" for c in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(str(x))}</td>" for x in row) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Picture:
    png: bytes
    says: str  # what one sees in it, for those who cannot

    def html(self) -> str:
        data = base64.b64encode(self.png).decode()
        return f"<p><img alt='{escape(self.says, quote=True)}' src='data:image/png;base64,{data}'></p>"


@dataclass(frozen=True)
class Text:
    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Command:
    command: str

    def html(self) -> str:
        return f"<p><code>{escape(self.command)}</code></p>"


def page(title: str, sections: Sequence[tuple[str, Sequence[Table | Picture | Text | Command]]]) -> str:
    """A title and headed sections of tables, pictures, text and commands, as one document."""
    parts = "".join(f"<h2>{escape(heading)}</h2>" + "".join(p.html() for p in body) for heading, body in sections)
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    body = f"<h1>{escape(title)}</h1>{parts}"
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n"
