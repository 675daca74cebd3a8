"""The section of a page on sinks: tokens that receive much weight and give little, and massive activations."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from attnlab.analysis.contribution import is_linear
from attnlab.analysis.contribution_table import select_layers
from attnlab.analysis.sinks import EPSILON, MASSIVE, TIMES_MEDIAN, measure_activations, tabulate_sinks
from attnlab.analysis.totals import totals
from attnlab.commands.inspect.inspection_tables import name_kind
from attnlab.records.record import KINDS, Record
from attnlab.report.figures import draw_panels, save_figure
from attnlab.report.numbers import format_percent, format_real
from attnlab.report.page import Part, Table, Text

COLUMNS = (
    "attention", "layer", "heads with a sink", "weight on the first token", "its share by norm", "largest activation",
    "at token", "median activation", "massive activations",
)  # fmt: skip
READING = (
    f"A head has a sink if it puts more than {EPSILON} of its weight on the first token, on average over queries. The "
    "share by norm is how much of what the head takes comes from there, ‖αf(x)‖. High by weight and low by norm: the "
    "head rests there and takes nothing."
)
MASSIVE_READING = (
    f"An activation of the states that enter a layer is massive if it is above {MASSIVE:.0f} and above "
    f"{TIMES_MEDIAN:,.0f} times the median."
)


def measure_record(
    record: Record, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[pd.DataFrame, ...]:
    """Return the tables of sinks and of activations of one text. Layers without norms are left out."""
    found, states = [], []
    for layer in select_layers(record, None, layers):
        if not is_linear(layer):
            continue
        table = tabulate_sinks([totals(layer)])
        found.append(table if heads is None else table[table["head"].isin(heads)])
        if "residual" in layer.around:
            row = vars(measure_activations(layer.around["residual"]))
            words = record.words.get(KINDS[layer.kind][0])
            token = {"token": str(words[0][row["token"]])} if words else {}
            states.append({"kind": layer.kind, "layer": layer.index, **row, "position": row["token"], **token})
    sinks = pd.concat(found, ignore_index=True) if found else pd.DataFrame()
    return sinks, pd.DataFrame(states)


def describe_sinks(sinks: pd.DataFrame) -> str:
    """Return a sentence with the sink rate, and what the heads with a sink take from there."""
    with_sink = sinks[sinks["is_sink"]]
    total = len(sinks)
    if with_sink.empty:
        return f"No head of {total:,} puts more than {EPSILON} of its weight on the first token."
    weight, norm = (format_percent(with_sink[name].mean()) for name in ("first_weight", "first_norm"))
    return (
        f"{len(with_sink):,} of {total:,} heads have a sink, a rate of {format_percent(len(with_sink) / total)}. They "
        f"put {weight} of their weight on the first token. By norm, {norm} of what they take comes from it."
        + _warn_of_short_text(with_sink)
    )


def _warn_of_short_text(with_sink: pd.DataFrame) -> str:
    """Return a sentence if even heads that spread their weight evenly would count as heads with a sink."""
    uniform = with_sink["first_uniform"].max()
    if uniform <= EPSILON:
        return ""
    return f" The text is too short to find sinks: weights spread evenly put {format_percent(uniform)} there."


def build_sink_section(folder: Path, sinks: pd.DataFrame, activations: pd.DataFrame) -> tuple[str, list[Part]] | None:
    """Return the section with its figure, which is written to the folder; None without norms."""
    if sinks.empty:
        return None
    kinds = list(sinks["kind"].unique())
    means = sinks.groupby(["kind", "layer"], sort=False)[["first_weight", "first_norm"]].mean()
    panels = {}
    for kind in kinds:
        part = means.loc[kind]
        lines = {"by weight": part["first_weight"], "by norm": part["first_norm"]}
        panels[name_kind(kind, kinds)] = {name: (list(x.index), x.tolist()) for name, x in lines.items()}
    figure = draw_panels(panels, x="layer (from 0)", y="share of the first token")
    caption = "What the first token gets in each layer, mean over heads: of the weight, and of what heads take."
    picture = save_figure(folder / "figures" / "sinks", figure, caption)
    table = Table(COLUMNS, _list_rows(sinks, activations, kinds))
    parts: list[Part] = [Text(describe_sinks(sinks)), picture, Text(READING), table, Text(MASSIVE_READING)]
    return "Sinks: what the first token takes and gives", parts


def _list_rows(sinks: pd.DataFrame, activations: pd.DataFrame, kinds: list[str]) -> list[list[str]]:
    rows = []
    known = (
        {} if activations.empty else {(x.get("kind", kinds[0]), x["layer"]): x for x in activations.to_dict("records")}
    )
    for (kind, layer), part in sinks.groupby(["kind", "layer"], sort=False):
        state = known.get((kind, layer), {})
        shares = [format_percent(part[name].mean()) for name in ("first_weight", "first_norm")]
        row = [name_kind(str(kind), kinds), str(layer), f"{int(part['is_sink'].sum())} of {len(part)}", *shares]
        if "largest" in state:
            where = f"{state['position']} {state.get('token', '')}".strip()
            row += [format_real(state["largest"]), where, format_real(state["median"]), f"{state['massive']:,}"]
        rows.append(row + ["–"] * (len(COLUMNS) - len(row)))
    return rows
