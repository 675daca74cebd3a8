"""Prepare Markdown for the site: tokens as text, columns as code, folds, and a page of each notebook.

mkdocs calls `on_config` and `on_files` (mkdocs.yml). Pages may fold a part, for readers on GitHub and on the site:

    <details>
    <summary>37 rows</summary>

    Markdown, such as a table.

    </details>
"""

import json
import re
from pathlib import Path
from typing import Any

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

ROOT = Path(__file__).resolve().parent.parent


class Literal(Extension):
    """Markdown without HTML, so that tokens such as <s> are text; with folds, and columns of docstrings as code."""

    def extendMarkdown(self, md: Any) -> None:  # noqa: N802 (Python-Markdown's name)
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")
        md.preprocessors.register(Folds(md), "folds", 40)  # before fenced code is extracted
        md.preprocessors.register(Columns(md), "columns", 20)  # after fenced code is extracted


class Folds(Preprocessor):
    """Write <details> as the blocks of pymdownx.details: an indented text below its title."""

    SUMMARY = re.compile(r"<summary>(.*)</summary>")

    def run(self, lines: list[str]) -> list[str]:
        output: list[str] = []
        inside = False
        for line in lines:
            if line in ("<details>", "</details>"):
                inside = line == "<details>"
                output.append("")
            elif inside and (title := self.SUMMARY.fullmatch(line)):
                text = title[1].replace('"', "&quot;")
                output.append(f'??? abstract "{text}"')
            else:
                output.append(f"    {line}" if inside and line else line)
        return output


class Columns(Preprocessor):
    """Turn lines such as "layers   only these", which describe arguments in docstrings, into a code block."""

    SET = re.compile(r"(?![|>#*+-])\S.*? {2,}\S")

    def run(self, lines: list[str]) -> list[str]:
        output: list[str] = []
        inside = False
        for line in lines:
            columns = bool(self.SET.match(line)) or (inside and line.startswith("  "))
            if columns != inside:
                output.append("")
            output.append(f"    {line}" if columns else line)
            inside = columns
        return output


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Literal())
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in render_notebooks().items():
        files.append(File.generated(config, name, content=content))
    return files


def render_notebooks() -> dict[str, str]:
    """Return a page of each notebook by its path under docs/: its text and code, and a link to the file."""
    paths = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    return {f"notebooks/{path.stem}.md": render_notebook(path) for path in paths}


def render_notebook(path: Path) -> str:
    """Return a notebook as Markdown; the title comes first, then the link to the file."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]).strip()
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    link = f"Download [this notebook]({path.name}) and open it in Jupyter or Colab. A test runs every cell."
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, link, rest.strip(), *parts[1:]]) + "\n"
