"""What an inspection leaves in its folder.

    tables/NAME.csv, .parquet (where pyarrow is there)    each table; SCHEMA says what its columns are
    statistics.json        all tables of statistics with their schema, and what was inspected
    figures/NAME.png       weights beside norms; also as .svg and .pdf
    examples/N/            layers and heads: every weight and norm of one text; maps-KIND-FROM.png, some layers each
    report.html            a page of it all, with a viewer of the texts

Every file is written whole or not at all.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from attnlab.analysis.contribution import norms
from attnlab.analysis.contribution_table import contribution, read_side, select_layers
from attnlab.analysis.statistics import extremes
from attnlab.files import write_bytes
from attnlab.reading.maps import CELLS, joined, named, view
from attnlab.records.record import KINDS, Layer, Record
from attnlab.report.drawing import save_figure
from attnlab.report.norm_figures import draw_category_lines, draw_head_maps, draw_text_maps
from attnlab.report.page import Command, Facts, Files, Part, Picture, Table, Text, render_page
from attnlab.report.view import View
from attnlab.report.viewer_html import Viewer

FORMAT = "attnlab-inspection-1"
DRAWN = 6  # layers of a text in one figure
ROWS = 300_000  # of a text's table of heads
WHERE = {
    "kind": "encoder-self, decoder-self or cross",
    "layer": "among the layers of its kind, from 0",
    "head": "from 0",
}
BOUND = "the most by which Spearman's ρ of the numbers themselves differs from this one, which is of binned numbers"
SCHEMA: dict[str, dict[str, str]] = {
    "heads": WHERE
    | {
        "norm_mean": "mean of ‖f(x)‖ over all tokens x of the corpus",
        "norm_sd": "its standard deviation (population)",
        "norm_cv": "coefficient of variation, norm_sd / norm_mean",
        "norm_min": "least ‖f(x)‖",
        "norm_max": "greatest ‖f(x)‖",
        "entropy_nats": "of the weights of a query; mean over queries, then over examples",
        "first_token_share": "weight on the first token; mean over queries, then over examples",
    },
    "categories": WHERE
    | {
        "category": "of the key",
        "tokens": "how many of the corpus are in it",
        "weight_share": "Σ α over its keys; mean over queries, then over examples",
        "norm_sum": "Σ ‖α f(x)‖ over its keys; mean over queries, then over examples",
        "norm_mean": "mean of ‖f(x)‖ over its tokens; empty where it has none",
    },
    "spearman": {
        "kind": WHERE["kind"],
        "category": "of the key, or all",
        "pairs": "of a query and a key that it sees, in every layer and head",
        "spearman": "Spearman's ρ of |α| and ‖f(x)‖ over the pairs",
        "error_bound": BOUND,
    },
    "frequency": {
        "kind": WHERE["kind"],
        "of": "norm: ‖f(x)‖, or weight: |α|, averaged over layers and heads, |α| also over queries",
        "tokens": "occurrences whose frequency is known",
        "spearman": "Spearman's ρ of the frequency rank (1 = most frequent) and that average over occurrences",
        "error_bound": BOUND,
    },
}


@dataclass(frozen=True, eq=False)
class Shown:
    """One text with its record, as it is shown."""

    number: int  # from 1
    record: Record
    heads: tuple[int, ...] | None
    layers: tuple[int, ...] | None


def write(
    folder: Path,
    about: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    shown: Sequence[Shown],
    command: str,
    made: Mapping[str, Any],
) -> Path:
    """All of it; returns where the page is. about: what was inspected; made: with what versions, on what machine."""
    for name, table in tables.items():
        write_table(folder / "tables" / name, table)
    whole = {"format": FORMAT, "about": dict(about), "schema": SCHEMA}
    whole["tables"] = {name: _records(table) for name, table in tables.items()}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(folder / "statistics.json", (text + "\n").encode())
    sections: list[tuple[str, Sequence[Part]]] = []
    if shown:
        written = [_example(folder / "examples" / str(one.number), one) for one in shown]
        first, *others = written  # the pictures of one text are on the page, of others beside it
        files = [part for parts in others for part in parts if not isinstance(part, Picture)]
        sections.append(("What it attends to", [*_viewed(shown), *first, *files]))
    sections += _statistics(folder, tables)
    told = {key: value for key, value in {**about, **made}.items() if value is not None}
    sections.append(("Make it again", [Command(command), Facts(told)]))
    report = folder / "report.html"
    write_bytes(report, render_page(f"attnlab inspect: {named(str(about['model']))}", sections).encode())
    return report


def write_table(stem: Path, table: pd.DataFrame) -> None:
    """stem.csv, and stem.parquet where pyarrow is installed."""
    write_bytes(stem.with_suffix(".csv"), table.to_csv(index=False, lineterminator="\n").encode())
    if find_spec("pyarrow") is not None:
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        write_bytes(stem.with_suffix(".parquet"), buffer.getvalue())


def _statistics(folder: Path, tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, Sequence[Part]]]:
    categories = tables["categories"]
    sections: list[tuple[str, Sequence[Part]]] = []
    for kind, part in categories.groupby("kind", sort=False):
        pictures = {f"{kind}-categories": (draw_category_lines(part), f"{kind}: weight and norm by category and layer")}
        for category in part["category"].unique():
            says = f"{kind}: weight on {category}, and the mean norm of its vectors, by layer and head"
            if part.loc[part["category"] == category, "tokens"].any():
                pictures[f"{kind}-heads-{_file_name(category)}"] = (draw_head_maps(part, category), says)
        body: list[Part] = [
            Text("Left what a reader of weights sees; right what really arrives: ‖α f(x)‖, and how long f(x) is.")
        ]
        body += [save_figure(folder / "figures" / name, *drawn) for name, drawn in pictures.items()]
        sections.append((f"{kind}: weights beside norms", body))
    numbers: list[Part] = [
        Text("How ‖f(x)‖ varies over the tokens of the corpus."),
        _shown_table(extremes(tables["heads"])),
        Text("Spearman's ρ of weight and norm. Below 0: where a head looks, there is little to take."),
        _shown_table(tables["spearman"]),
    ]
    if "frequency" in tables:
        numbers += [Text("Spearman's ρ with the frequency rank of a token."), _shown_table(tables["frequency"])]
    return [*sections, ("Numbers", numbers)]


def _viewed(shown: Sequence[Shown]) -> list[Part]:
    """The viewer of the texts: as many of them as a page can hold."""
    views: list[View] = []
    cells = 0
    for one in shown:
        made = view(one.record, layers=one.layers, heads=one.heads)
        cells += made.cells
        if views and cells > CELLS:
            break
        views.append(made)
    left = [str(one.number) for one in shown[len(views) :]]
    said: list[Part] = [Text(f"Too large for the page beside the others: text {', '.join(left)}.")] if left else []
    return [Viewer(joined(views)), *said]


def _example(folder: Path, shown: Shown) -> list[Part]:
    """Write the maps and tables of one text; the pictures, and where the files are."""
    record, where = shown.record, f"{folder.parent.name}/{folder.name}"
    pictures: list[Part] = []
    files: dict[str, str] = {}
    for kind in dict.fromkeys(record.kinds):
        layers = list(select_layers(record, [kind], shown.layers))
        for start in range(0, len(layers), DRAWN):
            some = layers[start : start + DRAWN]
            says = (
                f"Text {shown.number}, {kind}: in each layer, the mean weight of each token on each other, above the "
                "norm of what it brings"
            )
            name = f"maps-{kind}-{some[0].index}"
            pictures.append(save_figure(folder / name, _maps(record, some), says))
            files[f"{where}/{name}.pdf"] = f"text {shown.number}, {kind}: the maps, for print"
    write_table(folder / "layers", contribution(record, level="layer", layers=shown.layers))
    files[f"{where}/layers.csv"] = f"text {shown.number}, every weight and norm, heads together"
    pairs = sum(layer.context.shape[2] * layer.grouped_values.shape[2] for layer in select_layers(record, None, shown.layers))
    rows = pairs * (record.layers[0].context.shape[1] if shown.heads is None else len(shown.heads))
    if rows > ROWS:
        left = Text(f"Head by head it would be {rows:,} rows and is not written: choose --layers or --heads.")
        return [*pictures, Files(files), left]
    write_table(folder / "heads", contribution(record, layers=shown.layers, heads=shown.heads))
    files[f"{where}/heads.csv"] = "the same, head by head"
    return [*pictures, Files(files)]


def _maps(record: Record, layers: Sequence[Layer]) -> Figure:
    """Layers of one kind, as a reader of weights sees the first example, and by norm."""
    sizes = layers[0].context.shape[2], layers[0].grouped_values.shape[2]
    query, key = (read_side(record, name, 0, n, False) for name, n in zip(KINDS[layers[0].kind], sizes, strict=True))
    found = [norms(layer) for layer in layers]
    weights, sums = (
        [x[0][query.places][:, key.places] for x in maps]
        for maps in ([n.weight for n in found], [n.layer for n in found])
    )
    return draw_text_maps([f"layer {layer.index}" for layer in layers], weights, sums, list(query.labels), list(key.labels))


def _shown_table(table: pd.DataFrame) -> Table:
    return Table(list(table.columns), [[_number(x) for x in row] for row in table.itertuples(index=False)])


def _number(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON has them: no number is null."""
    return json.loads(table.to_json(orient="records", double_precision=15))


def _file_name(category: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in category)
