"""Tables and headings of the pages that benchmarks write: docs/results.md, conclusions.md and replication.md."""

import json
import re
from pathlib import Path

from attnlab.experiments.significance import compute_interval

SHORT = 8  # rows of a table that is not folded


def read_results(path: Path) -> tuple[dict, list[dict]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    about, rows = content["about"], content["rows"]
    commits = dict.fromkeys([about.get("commit"), *(row["commit"] for row in rows if "commit" in row)])
    return about | {"commit": " and ".join(map(str, commits))}, rows


def render_head(title: str, about: dict, command: str) -> str:
    """Return the heading of a benchmark, its command, versions, commit and seed."""
    versions = f"torch {about['torch']}, Python {about['python']}, commit {about['commit']}, seed {about['seed']}"
    note = f" {about['note']}" if "note" in about else ""
    return f"## {title} on {about['hardware']}\n\n`python benchmarks/{command}`. {versions}.{note}"


def format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def format_number(x: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{0.0 if abs(x) < 1e-12 else x:.3g}"


def format_spread(values: list[float], digits: int, between: tuple[float, float] | None = None) -> str:
    """Format the mean with its 95 % t-interval, by default of these values; or the values, if there are too few."""
    if (between := between or compute_interval(values)) is None:
        return ", ".join(f"{x:.{digits}f}" for x in values)
    low, high = between
    return f"{(low + high) / 2:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def quote_tokens(text: str) -> str:
    """Quote tokens such as <s> as code, because Markdown reads them as HTML."""
    return re.sub(r"</?\w+>", r"`\g<0>`", text)


def format_table(table: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(map(quote_tokens, row)) + " |" for row in table)


def fold_table(table: list[list[str]], found: str = "", *, short: int = SHORT) -> str:
    """Return a table that a click unfolds, below its number of rows and a summary; a short table stays open."""
    content, count = format_table(table), len(table) - 2
    if count <= short:
        return content
    summary = f"{count} rows: {found}" if found else f"{count} rows"
    return fold_text(summary, content)


def fold_text(summary: str, text: str) -> str:
    """Return Markdown that a click on its summary unfolds, on the site and on GitHub."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
