"""The page of a long text: totals, strongest links, a level of blocks and windows, and no map of all pairs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from attnlab.analysis.categories import Categories, parse_categories
from attnlab.commands.inspect.inspection_findings import list_findings
from attnlab.commands.inspect.inspection_page import FORMAT, SCHEMA, draw_kinds, write_table
from attnlab.commands.inspect.inspection_tables import explain_missing_layers, render_numbers
from attnlab.commands.inspect.sink_section import build_sink_section, describe_sinks
from attnlab.files import write_text
from attnlab.files.user_files import read_text
from attnlab.provenance import collect_provenance
from attnlab.reading.long_text import LONG, LongReading, Progress, name_places, read_long_text
from attnlab.reading.reader import PretrainedReader
from attnlab.reading.text_stream import TextExample
from attnlab.report.numbers import format_real
from attnlab.report.page import Command, Facts, Part, Table, Text, render_page
from attnlab.report.viewer_html import Viewer

SHOWN = 40  # rows of a table on the page; its file has all
LEFT_OUT = (
    f"A text of more than {LONG:,} tokens is read by totals: sums over all pairs, without a map of them. So the page "
    "has no correlations, no rollout, no ranking of heads and no predictions of each token."
)


def inspect_long_text(
    reader: PretrainedReader, example: TextExample, request: Any, folder: Path, command: str, progress: Progress
) -> Path:
    """Read one long text, write its tables and its page, and return the path of the page."""
    short_only = {"analysis": request.analyses, "importance": request.importance, "frequency": request.frequency}
    for option, value in short_only.items():
        if value:
            limit = f"--{option} is for texts of at most {LONG:,} tokens"
            advice = f"--max-length {LONG} reads the beginning of this one"
            raise ValueError(f"{limit}; longer ones have totals only. {advice}")
    side = reader.sides["source"]
    groups = Categories.default(side.texts, side.special)
    if request.categories is not None:
        own = parse_categories(read_text(Path(request.categories)), request.categories)
        groups = Categories.from_groups(own, side.pieces, side.texts)
    places = {"layers": request.layers, "heads": request.heads}
    where = {"windows": request.windows, "pan": request.pan}
    reading = read_long_text(reader, example, groups, progress=progress, **where, **places)
    about = {"model": reader.name, "document": request.document, "tokens": reading.tokens, **places}
    about |= {"tokens of a block": reading.block, "windows": list(reading.windows), "max_length": request.max_length}
    return write_long_report(folder, about, reading, reader.title, command, collect_provenance(reader.device))


def write_long_report(
    folder: Path, about: dict[str, Any], reading: LongReading, title: str, command: str, provenance: dict[str, Any]
) -> Path:
    """Write tables, statistics.json, figures and the page."""
    tables = reading.tables
    stored = {name: table for name, table in tables.items() if len(table)}
    for name, table in stored.items():
        write_table(folder / "tables" / name, table)
    rows = {name: json.loads(x.to_json(orient="records", double_precision=15)) for name, x in stored.items()}
    whole = {"format": FORMAT, "about": about, "schema": SCHEMA, "tables": rows | {"tokens": "tables/tokens.csv"}}
    write_text(folder / "statistics.json", json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    viewer: list[Part] = [Text(_describe_view(reading)), Viewer(reading.view)]
    visible: list[tuple[str, Sequence[Part]]] = [
        ("What the model attends to", viewer),
        ("Strongest links", _show_links(tables["links"])),
    ]
    sinks = build_sink_section(folder, tables["sinks"], tables["activations"])
    folded: list[tuple[str, Sequence[Part]]] = [] if sinks is None else [sinks]
    folded += [("Tokens that receive most", _show_tokens(tables["tokens"])), *draw_kinds(folder, tables["categories"])]
    folded += [("Lengths", [*render_numbers(tables), Text(LEFT_OUT)])]
    facts = {key: x for key, x in {**about, **provenance}.items() if x is not None}
    folded.append(("How to reproduce this page", [Command(command), Facts(facts)]))
    found = [*list_findings(tables, [])[:2], describe_sinks(tables["sinks"]), LEFT_OUT]
    if reading.unrecorded:
        found.append(explain_missing_layers(reading.unrecorded))
    report = folder / "report.html"
    write_text(report, render_page(f"attnlab inspect: {title}", visible, findings=found, folded=folded))
    return report


def _describe_view(reading: LongReading) -> str:
    return (
        f"Choose an example to move through the text. The first shows all {reading.tokens:,} tokens, {reading.block:,} "
        f"in each cell; the others are windows of {reading.window} tokens, at {name_places(reading.windows)}. "
        "--window N shows another one, --pan shows one after another. "
        "Each row attends, each column is attended to. Left: the weight. Right: the norm, how much is taken."
    )


def _show_links(links: pd.DataFrame) -> list[Part]:
    """Show the links with the largest norms of all heads."""
    best = links.nlargest(SHOWN, "norm")
    columns = ("layer", "head", "from", "reads", "distance", "weight", "norm ‖αf(x)‖")
    rows = [
        [str(x["layer"]), str(x["head"]), f"{x['query']:,} {x['query_token']}", f"{x['key']:,} {x['key_token']}",
         f"{x['query'] - x['key']:,}", format_real(x["weight"]), format_real(x["norm"])]
        for x in best.to_dict("records")
    ]  # fmt: skip
    text = (
        f"The {len(best)} pairs of two different tokens with the largest ‖αf(x)‖ over all heads, found among all such "
        "pairs. What a token takes from itself is left out: in most heads it would fill the list. "
        f"tables/links.csv has {len(links):,}, the strongest of each head."
    )
    return [Text(text), Table(columns, rows)]


def _show_tokens(tokens: pd.DataFrame) -> list[Part]:
    best = tokens.nlargest(SHOWN, "received_weight")
    columns = ("token", "weight received", "norm received", "norm taken", "entropy (nats)")
    names = ("received_weight", "received_norm", "taken_norm", "entropy_nats")
    rows = [[f"{x['position']:,} {x['token']}", *(format_real(x[n]) for n in names)] for x in best.to_dict("records")]
    text = (
        f"The {len(best)} tokens that receive most weight: Σ over queries, mean over heads and layers. Much weight and "
        f"little norm is a sink. tables/tokens.csv has all {len(tokens):,}."
    )
    return [Text(text), Table(columns, rows)]
