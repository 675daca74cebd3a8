"""The tables of an inspection: their columns in files, and what a reader of the page sees of them.

A value that is not defined is left out of the page, and a sentence says why.
"""

from typing import Any

import pandas as pd

from attnlab.analysis.contribution import NOT_A_SUM
from attnlab.analysis.statistics import extremes
from attnlab.report.numbers import format_real
from attnlab.report.page import Part, Table, Text
from attnlab.report.view import KIND_NAMES

PLACE_COLUMNS = {"kind": "encoder-self, decoder-self or cross", "layer": "from 0, within its kind", "head": "from 0"}
BOUND = "upper bound on the error of Spearman's ρ that comes from binning the numbers"
SCHEMA: dict[str, dict[str, str]] = {
    "heads": PLACE_COLUMNS
    | {
        "norm_mean": "mean of ‖f(x)‖ over all tokens x of the corpus; all norms are empty if the mechanism has finish",
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
BOUND_NAME = "error of ρ at most"
MOST_ROWS = 200  # of an analysis on the page; its file has all
LENGTHS = ("attention", "mean ‖f(x)‖", "standard deviation", "deviation ÷ mean", "largest ‖f(x)‖", "smallest ‖f(x)‖")
PAIRS = ("attention", "key", "pairs of query and key", "Spearman's ρ of weight and length", BOUND_NAME)
OCCURRENCES = ("attention", "of", "tokens", "Spearman's ρ with the frequency rank", BOUND_NAME)
OF = {"norm": "length ‖f(x)‖", "weight": "weight |α|"}
EFFECTS = {
    "loss_change_nats": "how much more a predicted token costs",
    "kl_nats": "how far the predictions move",
    "distance": "the relative change of the model's output",
}
CAPTIONS = {
    "heads": "How much the length ‖f(x)‖ of the transformed vectors varies over the tokens of the text.",
    "spearman": "A value below 0 means that heads put much weight on short vectors.",
    "frequency": "A value above 0 means that rarer tokens have larger values.",
}


def name_kind(kind: str, kinds: list[str]) -> str:
    """Return the name of a kind of attention; a model with one stack just has self-attention."""
    alone = kind != "cross" and sum(other != "cross" for other in set(kinds)) == 1
    return "self-attention" if alone else KIND_NAMES[kind]


def render_analysis(name: str, table: pd.DataFrame) -> list[Part]:
    """Return the first rows of the table of an analysis, and a sentence if the table has more."""
    shown = table.head(MOST_ROWS)
    rows = [[format_real(x) if isinstance(x, float) else str(x) for x in row] for row in shown.itertuples(index=False)]
    parts: list[Part] = [Table([str(column) for column in shown.columns], rows)]
    if len(table) > MOST_ROWS:
        parts.insert(0, Text(f"The first {MOST_ROWS} of {len(table):,} rows; tables/{name}.csv has all."))
    return parts


def describe_importance(table: pd.DataFrame, texts: int) -> str:
    """Return how to read the table of what knocking out each head does to a number of texts."""
    columns = "; ".join(f"{name}: {what}" for name, what in EFFECTS.items() if name in table)
    return (
        "Each row is a head, the most important first: what changes if it is knocked out, on "
        f"{texts} {'text' if texts == 1 else 'texts'}. {columns}. "
        "Near 0 or below: the model does as well without the head."
    )


def explain_missing_layers(unrecorded: str) -> str:
    """Say which layers a Record leaves out, given the entry of its meta; "" if it has all."""
    return f"This page leaves out {unrecorded}. attnlab cannot record attention there." if unrecorded else ""


def explain_missing_norms(heads: pd.DataFrame) -> str:
    """Name the attentions that have weights and no norms, and say why; "" if all have norms."""
    kinds, places = list(heads["kind"].unique()), []
    for kind, part in heads.groupby("kind", sort=False):
        layers = part.loc[part["norm_mean"].isna(), "layer"].unique()
        if len(layers):
            every = len(layers) == part["layer"].nunique()
            where = "" if every else f" in layer {', '.join(map(str, layers))}"
            places.append(f"{name_kind(str(kind), kinds)}{where}")
    if not places:
        return ""
    of = "" if heads["norm_mean"].isna().all() else f" for {', '.join(places)}"
    return f"Weights are shown without norms{of}: {NOT_A_SUM}."


def render_numbers(tables: dict[str, pd.DataFrame]) -> list[Part]:
    """Return the tables of lengths and correlations with their captions."""
    heads = tables["heads"]
    kinds = list(heads["kind"].unique())
    normed = set(heads.loc[heads["norm_mean"].notna(), "kind"])
    parts: list[Part] = [Text(CAPTIONS["heads"]), _tabulate_lengths(heads, kinds)] if normed else []
    if missing := explain_missing_norms(heads):
        parts.append(Text(missing))
    for name in ("spearman", "frequency"):
        table = tables.get(name, heads[:0])
        table = table[table["kind"].isin(normed) | (table.get("of") == "weight")]
        if table.empty:
            continue
        counted = "pairs" if name == "spearman" else "tokens"
        left_out = table[table["spearman"].isna()]
        defined = table.drop(left_out.index)
        named = defined.assign(kind=[name_kind(kind, kinds) for kind in defined["kind"]])
        if name == "frequency":
            named = named.assign(of=[OF[what] for what in named["of"]])
        columns = PAIRS if name == "spearman" else OCCURRENCES
        rows = [[_format_cell(x) for x in row] for row in named.itertuples(index=False)]
        parts += [Text(CAPTIONS[name]), Table(columns, rows)] if rows else []
        if len(left_out):
            parts.append(Text(_explain_left_out(left_out, counted, kinds)))
    return parts


def _format_cell(x: Any) -> str:
    return format_real(x) if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def _tabulate_lengths(heads: pd.DataFrame, kinds: list[str]) -> Table:
    cv = heads["norm_cv"]
    places = {"varies most": heads.loc[cv.idxmax()], "varies least": heads.loc[cv.idxmin()]}
    names = [
        f"{what}: {name_kind(row['kind'], kinds)}, layer {row['layer']}, head {row['head']}"
        for what, row in places.items()
    ]
    numbers = extremes(heads).drop(columns="head").itertuples(index=False)
    rows = [[name, *map(_format_cell, row)] for name, row in zip([*names, "mean of all heads"], numbers, strict=True)]
    return Table(LENGTHS, rows)


def _explain_left_out(rows: pd.DataFrame, counted: str, kinds: list[str]) -> str:
    """Say which rows have no correlation, and why."""
    of = "category" if "category" in rows else "of"
    reasons: dict[str, list[str]] = {}
    for row in rows.to_dict("records"):
        what = OF.get(row[of], row[of])
        where = f"{what} ({name_kind(row['kind'], kinds)})"
        reason = "the text has no such token" if not row[counted] else "all its values are equal"
        reasons.setdefault(reason, []).append(where)
    told = "; or for ".join(f"{', '.join(some)}, because {reason}" for reason, some in reasons.items())
    return f"There is no correlation for {told}."
