"""Write the folder of an inspection.

    tables/NAME.csv        each table, with the columns of SCHEMA; also as .parquet if pyarrow is installed
    statistics.json        all tables with their schema, and the settings of the inspection
    figures/NAME.png       weights beside norms; also as .svg and .pdf
    examples/N/            tables layers and heads with every weight and norm of one text; maps-KIND-LAYER.png
    report.html            a page with all of this and a viewer of the texts

Every file is written atomically.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from attnlab.analysis.contribution import average_heads, is_linear, norms
from attnlab.analysis.contribution_table import contribution, read_side, select_layers
from attnlab.commands.inspect.inspection_findings import describe_view, list_findings, tabulate_predictions
from attnlab.commands.inspect.inspection_tables import (
    SCHEMA,
    describe_importance,
    name_kind,
    render_analysis,
    render_numbers,
)
from attnlab.commands.inspect.sink_section import build_sink_section, measure_record
from attnlab.files import write_bytes, write_text
from attnlab.reading.maps import HEAD_CELLS, build_view, join_views
from attnlab.reading.predictions import Prediction
from attnlab.records.record import KINDS, Layer, Record
from attnlab.report.figures import save_figure
from attnlab.report.norm_figures import draw_category_lines, draw_head_maps, draw_text_maps
from attnlab.report.page import Command, Facts, Files, Part, Text, render_page
from attnlab.report.view import View
from attnlab.report.viewer_html import Viewer

Numbers = tuple[int, ...] | None

FORMAT = "attnlab-inspection-1"
LAYERS_PER_FIGURE = 6
MAX_ROWS = 300_000  # maximum number of rows in a table of one text
AXES = {
    "encoder-self": ("token (attending)", "token (attended to)"),
    "decoder-self": ("token read (attending)", "token (attended to)"),
    "cross": ("target token read (attending)", "source token (attended to)"),
}
BESIDE = (
    "Left: the weight that it puts there. Right: how much it takes from there, ‖αf(x)‖. A category that is high left "
    "and low right is looked at, but hardly used."
)
FACTS = {
    "ranked_texts": "texts that rank the heads",
    "corpus_sha256": "SHA-256 of the texts", "batch_tokens": "tokens per batch", "examples": "texts",
    "max_length": "tokens per text at most", "dtype": "number format",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class ShownTexts:
    """The texts that a page shows with full maps, and the name of the model that read them."""

    title: str
    records: Sequence[Record] = ()
    predictions: Sequence[Sequence[Prediction]] = ()  # of each text; empty if the model predicts nothing
    translation: str | None = None  # the model's own, of the text
    left_out: str = ""  # a sentence on layers that could not be recorded


def write_report(
    folder: Path,
    about: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    shown: ShownTexts,
    command: str,
    provenance: Mapping[str, Any],
) -> Path:
    """Write all files and return the path of the page.

    about        settings of the inspection, among them the layers and heads to show
    shown        the texts that the page shows with full maps
    provenance   versions and hardware
    """
    for name, table in tables.items():
        write_table(folder / "tables" / name, table)
    whole = {"format": FORMAT, "about": dict(about), "schema": SCHEMA}
    rows = {name: table.to_json(orient="records", double_precision=15) for name, table in tables.items()}  # NaN: null
    whole["tables"] = {name: json.loads(table) for name, table in rows.items()}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "statistics.json", text + "\n")
    visible: list[tuple[str, Sequence[Part]]] = []
    folded: list[tuple[str, Sequence[Part]]] = []
    places = about["layers"], about["heads"]
    if shown.records:
        viewer = [Text(describe_view(shown.records[0])), *_build_viewer(shown.records, *places)]
        visible.append(("What the model attends to", viewer))
        folded += tabulate_predictions(shown.predictions)
        sinks, activations = measure_record(shown.records[0], *places)
        if (section := build_sink_section(folder, sinks, activations)) is not None:
            write_table(folder / "tables" / "sinks", sinks)
            folded.append(section)
    figures = draw_kinds(folder, tables["categories"])
    first = folded if shown.records else visible
    first.append(next(figures))
    folded += [*figures, ("Lengths and correlations", render_numbers(dict(tables)))]
    for name, table in tables.items():
        if name not in SCHEMA:
            notes = [Text(describe_importance(table, about["ranked_texts"]))] if name == "importance" else []
            folded.append((f"Analysis: {name}", [*notes, *render_analysis(name, table)]))
    if shown.records:
        written = [_write_example(folder, n, one, *places) for n, one in enumerate(shown.records, start=1)]
        folded.append(("Maps and tables of each text, as files", [part for parts in written for part in parts]))
    facts = {FACTS.get(key, key): x for key, x in {**about, **provenance}.items() if x is not None}
    folded.append(("How to reproduce this page", [Command(command), Facts(facts)]))
    report, found = folder / "report.html", list_findings(tables, shown.predictions, shown.translation)
    found += [shown.left_out] if shown.left_out else []
    write_text(report, render_page(f"attnlab inspect: {shown.title}", visible, findings=found, folded=folded))
    return report


def write_table(stem: Path, table: pd.DataFrame) -> None:
    """Write stem.csv, and stem.parquet if pyarrow is installed."""
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False, lineterminator="\n"))
    if find_spec("pyarrow") is not None:
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        write_bytes(stem.with_suffix(".parquet"), buffer.getvalue())


def draw_kinds(folder: Path, categories: pd.DataFrame) -> Iterator[tuple[str, Sequence[Part]]]:
    """Yield a section for each kind of attention: what each category receives, by weight and by norm."""
    kinds = list(categories["kind"].unique())
    for kind, part in categories.groupby("kind", sort=False):
        name = name_kind(str(kind), kinds)
        there = part[part.groupby("category")["tokens"].transform("sum") > 0]
        has_norms = bool(there["norm_sum"].notna().any())
        caption = f"What the {name} reads from each category of tokens, layer by layer. "
        caption += BESIDE if has_norms else "Higher: more weight on its tokens."
        pictures = {f"{kind}-categories": (draw_category_lines(there), caption)}
        for category in there["category"].unique():
            caption = (
                f"Each cell is a head. Left: the weight on {category} tokens. Right: the mean length ‖f(x)‖ of their "
                "vectors. Dark left and pale right: the head looks at them and takes little."
            )
            caption = caption if has_norms else f"Each cell is a head. Darker: more weight on {category} tokens."
            pictures[f"{kind}-heads-{_file_name(category)}"] = (draw_head_maps(there, category), caption)
        body = [save_figure(folder / "figures" / stem, *picture) for stem, picture in pictures.items()]
        yield f"{'Weights beside norms' if has_norms else 'Weights'}: {name}", body


def _build_viewer(shown: Sequence[Record], layers: Numbers, heads: Numbers) -> list[Part]:
    """Build the viewer of the texts, with as many texts as a page can hold."""
    views: list[View] = []
    cells = 0
    for record in shown:
        view = build_view(record, layers=layers, heads=heads)
        cells += view.cells
        if views and cells > HEAD_CELLS:
            break
        views.append(view)
    left = ", ".join(str(number + 1) for number in range(len(views), len(shown)))
    note: list[Part] = [Text(f"The viewer omits text {left}, because the page would be too large.")] if left else []
    return [Viewer(join_views(views)), *note]


def _write_example(folder: Path, number: int, record: Record, layers: Numbers, heads: Numbers) -> list[Part]:
    """Write the maps and tables of one text. Return links to its files: the viewer shows the same maps."""
    where = f"examples/{number}"
    kinds = list(dict.fromkeys(record.kinds))
    has_norms = any(is_linear(layer) for layer in record.layers)
    maps, numbers = ("mean weights above norms", "weight and norm") if has_norms else ("mean weights", "weight")
    files: dict[str, str] = {}
    for kind in kinds:
        known = list(select_layers(record, [kind], layers))
        for start in range(0, len(known), LAYERS_PER_FIGURE):
            some = known[start : start + LAYERS_PER_FIGURE]
            name = f"{where}/maps-{kind}-{some[0].index}"
            save_figure(folder / name, _draw_maps(record, some), "")
            about = f"text {number}, {name_kind(kind, kinds)}: {maps}, from layer {some[0].index}"
            files[f"{name}.pdf"] = f"{about}; also as PNG and SVG"
    shapes = [(x.context.shape[2], x.grouped_values.shape[2]) for x in select_layers(record, None, layers)]
    rows = sum(i * j for i, j in shapes)
    count = record.layers[0].context.shape[1] if heads is None else len(heads)
    left_out = [
        f"of {what}, which has {n:,}" for what, n in (("layers", rows), ("heads", rows * count)) if n > MAX_ROWS
    ]
    if rows <= MAX_ROWS:
        write_table(folder / where / "layers", contribution(record, level="layer", layers=layers))
        files[f"{where}/layers.csv"] = f"text {number}: every {numbers}, heads together"
    if rows * count <= MAX_ROWS:
        write_table(folder / where / "heads", contribution(record, layers=layers, heads=heads))
        files[f"{where}/heads.csv"] = f"text {number}: every {numbers} of each head"
    limit = f"Tables of more than {MAX_ROWS:,} rows are not written: the table {' and the table '.join(left_out)}."
    return [Files(files), *([Text(f"{limit} Choose --layers or --heads.")] if left_out else [])]


def _draw_maps(record: Record, layers: Sequence[Layer]) -> Figure:
    """Draw weights and norms of the first example in layers of one kind; a layer with finish has weights alone."""
    sizes = layers[0].context.shape[2], layers[0].grouped_values.shape[2]
    query, key = (read_side(record, name, 0, n, False) for name, n in zip(KINDS[layers[0].kind], sizes, strict=True))
    titles = [f"layer {layer.index}" for layer in layers]
    weights = [average_heads(x)[0][query.places][:, key.places] for x in layers]
    sums = [norms(x).layer[0][query.places][:, key.places] if is_linear(x) else None for x in layers]
    b, _, i, j = layers[0].context.shape[0], 1, *sizes
    hidden = [~x.mask.expand(b, 1, i, j)[0, 0][query.places][:, key.places] for x in layers]
    return draw_text_maps(titles, weights, sums, list(query.labels), list(key.labels), hidden, AXES[layers[0].kind])


def _file_name(category: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in category)
