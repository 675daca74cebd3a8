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
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from attnlab.analysis.contribution import norms
from attnlab.analysis.contribution_table import contribution, read_side, select_layers
from attnlab.analysis.statistics import extremes
from attnlab.files import write_bytes, write_text
from attnlab.reading.maps import HEAD_CELLS, build_view, join_views, name_model
from attnlab.records.record import KINDS, Layer, Record
from attnlab.report.figures import save_figure
from attnlab.report.norm_figures import draw_category_lines, draw_head_maps, draw_text_maps
from attnlab.report.page import Command, Facts, Files, Part, Picture, Table, Text, render_page
from attnlab.report.view import View
from attnlab.report.viewer_html import Viewer

Numbers = tuple[int, ...] | None

FORMAT = "attnlab-inspection-1"
LAYERS_PER_FIGURE = 6
MAX_ROWS = 300_000  # maximum number of rows in the table of heads of one text
PLACE_COLUMNS = {"kind": "encoder-self, decoder-self or cross", "layer": "from 0, within its kind", "head": "from 0"}
BOUND = "upper bound on the error of Spearman's ρ that comes from binning the numbers"
COMPARE = "Compare the halves of each figure: weights (left) show where heads look, norms (right) how much they take."
SCHEMA: dict[str, dict[str, str]] = {
    "heads": PLACE_COLUMNS
    | {
        "norm_mean": "mean of ‖f(x)‖ over all tokens x of the corpus",
        "norm_sd": "population standard deviation of ‖f(x)‖",
        "norm_cv": "coefficient of variation, norm_sd / norm_mean",
        "norm_min": "smallest ‖f(x)‖",
        "norm_max": "largest ‖f(x)‖",
        "entropy_nats": "entropy of a query's weights; mean over queries, then over examples",
        "first_token_share": "weight on the first token; mean over queries, then over examples",
    },
    "categories": PLACE_COLUMNS
    | {
        "category": "category of the key",
        "tokens": "number of tokens of the category in the corpus",
        "weight_share": "Σ α over keys of the category; mean over queries, then over examples",
        "norm_sum": "Σ ‖α f(x)‖ over keys of the category; mean over queries, then over examples",
        "norm_mean": "mean of ‖f(x)‖ over tokens of the category; empty if it has none",
    },
    "spearman": {
        "kind": PLACE_COLUMNS["kind"],
        "category": "category of the key, or all",
        "pairs": "number of pairs of a query and a key that it sees, in all layers and heads",
        "spearman": "Spearman's ρ of |α| and ‖f(x)‖ over the pairs",
        "error_bound": BOUND,
    },
    "frequency": {
        "kind": PLACE_COLUMNS["kind"],
        "of": "norm: ‖f(x)‖, or weight: |α|; mean over layers and heads, for |α| also over queries",
        "tokens": "number of occurrences of tokens whose frequency is known",
        "spearman": "Spearman's ρ of the frequency rank (1 = most frequent) and that mean, over occurrences",
        "error_bound": BOUND,
    },
}


def write_report(
    folder: Path,
    about: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    shown: Sequence[Record],
    command: str,
    provenance: Mapping[str, Any],
) -> Path:
    """Write all files and return the path of the page.

    about        settings of the inspection, among them the layers and heads to show
    shown        Records of the texts that the page shows with full maps
    provenance   versions and hardware
    """
    for name, table in tables.items():
        write_table(folder / "tables" / name, table)
    whole = {"format": FORMAT, "about": dict(about), "schema": SCHEMA}
    rows = {name: table.to_json(orient="records", double_precision=15) for name, table in tables.items()}  # NaN: null
    whole["tables"] = {name: json.loads(table) for name, table in rows.items()}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "statistics.json", text + "\n")
    sections: list[tuple[str, Sequence[Part]]] = []
    if shown:
        # the page shows the pictures of the first text, and names the files of all
        places = about["layers"], about["heads"]
        first, *others = [_write_example(folder, number, one, *places) for number, one in enumerate(shown, start=1)]
        files = [part for parts in others for part in parts if not isinstance(part, Picture)]
        sections.append(("What the model attends to", [*_build_viewer(shown, *places), *first, *files]))
    sections += _build_sections(folder, tables)
    facts = {key: value for key, value in {**about, **provenance}.items() if value is not None}
    sections.append(("How to reproduce this page", [Command(command), Facts(facts)]))
    report = folder / "report.html"
    write_text(report, render_page(f"attnlab inspect: {name_model(str(about['model']))}", sections))
    return report


def write_table(stem: Path, table: pd.DataFrame) -> None:
    """Write stem.csv, and stem.parquet if pyarrow is installed."""
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False, lineterminator="\n"))
    if find_spec("pyarrow") is not None:
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        write_bytes(stem.with_suffix(".parquet"), buffer.getvalue())


def _build_sections(folder: Path, tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, Sequence[Part]]]:
    categories = tables["categories"]
    sections: list[tuple[str, Sequence[Part]]] = []
    for kind, part in categories.groupby("kind", sort=False):
        caption = f"{kind}: what each category receives in each layer; left by weight, right by norm"
        pictures = {f"{kind}-categories": (draw_category_lines(part), caption)}
        for category in part["category"].unique():
            caption = f"{kind}, by layer and head: left, the weight on {category}; right, the mean ‖f(x)‖ of its tokens"
            if part.loc[part["category"] == category, "tokens"].any():
                pictures[f"{kind}-heads-{_file_name(category)}"] = (draw_head_maps(part, category), caption)
        body: list[Part] = [Text(COMPARE)]
        body += [save_figure(folder / "figures" / name, *picture) for name, picture in pictures.items()]
        sections.append((f"{kind}: weights beside norms", body))
    numbers: list[Part] = [
        Text("How much ‖f(x)‖ varies over the tokens of the corpus. CV is the standard deviation divided by the mean."),
        _format_table(extremes(tables["heads"])),
        Text("Spearman's ρ of weight and norm. A value below 0 means that heads put much weight on short vectors."),
        _format_table(tables["spearman"]),
    ]
    if "frequency" in tables:
        text = "Spearman's ρ with a token's frequency rank. A value above 0 means that rarer tokens have larger values."
        numbers += [Text(text), _format_table(tables["frequency"])]
    return [*sections, ("Numbers", numbers)]


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
    """Write the maps and tables of one text. Return its pictures and links to its files."""
    where = f"examples/{number}"
    pictures: list[Part] = []
    files: dict[str, str] = {}
    for kind in dict.fromkeys(record.kinds):
        known = list(select_layers(record, [kind], layers))
        for start in range(0, len(known), LAYERS_PER_FIGURE):
            some = known[start : start + LAYERS_PER_FIGURE]
            caption = (
                f"Text {number}, {kind}: for each layer, the mean weight of the heads above the norm of what the "
                "layer takes. Each row is a query; the strongest colour marks the key it reads most"
            )
            name = f"{where}/maps-{kind}-{some[0].index}"
            pictures.append(save_figure(folder / name, _draw_maps(record, some), caption))
            files[f"{name}.pdf"] = f"text {number}, {kind}: the maps as PDF"
    write_table(folder / where / "layers", contribution(record, level="layer", layers=layers))
    files[f"{where}/layers.csv"] = f"text {number}: every weight and norm, heads together"
    shapes = [(x.context.shape[2], x.grouped_values.shape[2]) for x in select_layers(record, None, layers)]
    rows = sum(i * j for i, j in shapes) * (record.layers[0].context.shape[1] if heads is None else len(heads))
    if rows > MAX_ROWS:
        note = Text(f"The table of single heads is not written: it has {rows:,} rows. Choose --layers or --heads.")
        return [*pictures, Files(files), note]
    write_table(folder / where / "heads", contribution(record, layers=layers, heads=heads))
    files[f"{where}/heads.csv"] = f"text {number}: every weight and norm of each head"
    return [*pictures, Files(files)]


def _draw_maps(record: Record, layers: Sequence[Layer]) -> Figure:
    """Draw weights and norms of the first example in layers of one kind."""
    sizes = layers[0].context.shape[2], layers[0].grouped_values.shape[2]
    query, key = (read_side(record, name, 0, n, False) for name, n in zip(KINDS[layers[0].kind], sizes, strict=True))
    titles, computed = [f"layer {layer.index}" for layer in layers], [norms(layer) for layer in layers]
    weights, sums = (
        [getattr(x, name)[0][query.places][:, key.places] for x in computed] for name in ("weight", "layer")
    )
    return draw_text_maps(titles, weights, sums, list(query.labels), list(key.labels))


def _format_table(table: pd.DataFrame) -> Table:
    return Table(list(table.columns), [[_format_number(x) for x in row] for row in table.itertuples(index=False)])


def _format_number(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def _file_name(category: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in category)
