"""What an inspection found, in three sentences made of its numbers, and what the model predicted."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from attnlab.analysis.contribution import is_linear
from attnlab.commands.inspect.inspection_tables import explain_missing_norms, name_kind
from attnlab.reading.predictions import Prediction
from attnlab.records.pieces import SPACE
from attnlab.records.record import KINDS, Record
from attnlab.report.numbers import format_percent, format_real
from attnlab.report.page import Part, Table, Text

FINDINGS = 3
NEAR = 0.05  # shares that differ less are alike
SHOWN = 60  # predictions in the table of one text
EXPECTS = ("after reading", "it expects", "probability", "then", "the text has", "probability of that")


def list_findings(
    tables: Mapping[str, pd.DataFrame], predictions: Sequence[Sequence[Prediction]], translation: str | None = None
) -> list[str]:
    """Return the first three sentences that the numbers allow."""
    first = predictions[0] if predictions else ()
    heads, kinds = tables["heads"], list(tables["heads"]["kind"].unique())
    kind = "cross" if "cross" in kinds else kinds[0]
    categories = tables["categories"]
    sentences = [
        describe_text(first, translation),
        _describe_categories(categories[categories["kind"] == kind], name_kind(kind, kinds)),
        _describe_heads(heads[heads["kind"] == kind], name_kind(kind, kinds)),
        _describe_lengths(tables["spearman"], kind),
    ]
    found = [sentence for sentence in sentences if sentence][:FINDINGS]
    missing = explain_missing_norms(heads)
    return [*found, missing] if missing else found


def describe_view(record: Record) -> str:
    """Return how to read the viewer of a text."""
    decodes = "target" in record.tokens and any(KINDS[kind][0] == "target" for kind in record.kinds)
    rows = "Each row is a token that attends, each column a token that it attends to."
    if decodes:
        rows = (
            "Each row is the token that the decoder reads; it writes the next one. Each column is a token that it "
            "attends to."
        )
    grey = any(layer.hides_any() for layer in record.layers)
    masked = " Grey cells are masked: the row cannot see them." if grey else ""
    sides = ""
    if any(is_linear(layer) for layer in record.layers):
        sides = " Left: the attention weight. Right: the norm, how much is really taken from there."
    return f"{rows} The darkest cell of a row is what it reads most.{sides}{masked}"


def tabulate_predictions(predictions: Sequence[Sequence[Prediction]]) -> list[tuple[str, list[Part]]]:
    """Return a section with what the model predicts at every position, if there is more than a finding can say."""
    parts: list[Part] = []
    for number, some in enumerate(predictions, start=1):
        if some and some[0].what == "next":
            text = f"Text {number}: after each token, what the model expects next, and how probable the text's own is."
            more = f" The first {SHOWN} of {len(some):,} positions." if len(some) > SHOWN else ""
            parts += [Text(text + more), Table(EXPECTS, [_list_cells(one) for one in some[:SHOWN]])]
        elif some:
            rows = [[text, format_percent(p)] for one in some for text, p in one.choices]
            what = "label" if some[0].what == "label" else "word for the mask"
            parts += [Text(f"Text {number}:"), Table((what, "probability"), rows)]
    return [("What the model predicts", parts)] if parts else []


def _list_cells(one: Prediction) -> list[str]:
    (best, p), *others = one.choices
    then = ", ".join(f"{text} {format_percent(q)}" for text, q in others)
    actual = ["–", "–"] if one.actual is None or one.share is None else [one.actual, format_percent(one.share)]
    return [one.read, best, format_percent(p), then, *actual]


def describe_text(predictions: Sequence[Prediction], translation: str | None) -> str:
    """Return what the model makes of a text: its translation, its label, or the token after its last one."""
    return (
        _describe_prediction(predictions)
        if translation is None
        else f"The model translates the text as “{translation}”."
    )


def _describe_prediction(predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return ""
    last = predictions[-1]
    read, names = _hide_spaces([last.read])[0], _hide_spaces([text for text, _ in last.choices])
    (best, p), *others = zip(names, (q for _, q in last.choices), strict=True)
    then = " and ".join(f"“{text}” ({format_percent(q)})" for text, q in others)
    if last.what == "label":
        return f"The model gives the text the label “{best}”, with a probability of {format_percent(p)}."
    if last.what == "masked":
        return f"For {last.read} the model expects “{best}” ({format_percent(p)}), then {then}."
    text = f"After the last token, “{read}”, the model expects “{best}” ({format_percent(p)}), then {then}."
    given = [one for one in predictions if one.actual is not None]
    if not given:
        return text
    right = sum(one.is_right for one in given)
    return f"{text} Its first guess is right for {right} of the {len(given)} tokens before."


def _hide_spaces(names: Sequence[str]) -> Sequence[str]:
    """Return tokens without the sign for the space before a word, unless they differ only in it."""
    words = [name.removeprefix(SPACE) or name for name in names]
    return words if len(set(words)) == len(words) else names


def _describe_categories(categories: pd.DataFrame, name: str) -> str:
    """Name the category whose shares by weight and by norm differ most; both are means over layers and heads."""
    there = categories[categories.groupby("category")["tokens"].transform("sum") > 0]
    if there["norm_sum"].isna().all():
        return _describe_weights(there, name)
    there = there.dropna(subset="norm_sum")  # layers that have norms
    sums = there.groupby("category", sort=False)[["weight_share", "norm_sum"]].mean()
    if len(sums) < 2 or (sums < 0).any(axis=None) or not (sums.sum() > 0).all():
        return ""
    shares = (sums / sums.sum()).drop(index="other", errors="ignore")
    gap = shares["norm_sum"] - shares["weight_share"]
    category = gap.abs().idxmax()
    weight, norm = (format_percent(x) for x in shares.loc[category])
    joint = "and" if abs(gap[category]) < NEAR else "but only" if gap[category] < 0 else "and even"
    return (
        f"{category.capitalize()} tokens get {weight} of the weight of the {name}, {joint} {norm} of what it takes, "
        "measured by the norm ‖αf(x)‖."
    )


def _describe_weights(categories: pd.DataFrame, name: str) -> str:
    """Name the category with the most weight, if there are no norms."""
    sums = categories.groupby("category", sort=False)["weight_share"].mean()
    if len(sums) < 2 or (sums < 0).any() or not sums.sum() > 0:
        return ""
    shares = (sums / sums.sum()).drop(index="other", errors="ignore")
    category = shares.idxmax()
    return f"{category.capitalize()} tokens get {format_percent(shares[category])} of the weight of the {name}."


def _describe_heads(heads: pd.DataFrame, name: str) -> str:
    """Name the head with the lowest and the one with the highest entropy; e^entropy is a number of keys."""
    entropy = heads["entropy_nats"]
    if len(heads) < 2:
        return ""
    focused, diffuse = heads.loc[entropy.idxmin()], heads.loc[entropy.idxmax()]
    keys = [f"{math.exp(row['entropy_nats']):,.1f}" for row in (focused, diffuse)]
    return (
        f"The most focused head of the {name} is layer {focused['layer']}, head {focused['head']}: its weights spread "
        f"over {keys[0]} tokens on average. The least focused is layer {diffuse['layer']}, head {diffuse['head']}, "
        f"over {keys[1]}."
    )


def _describe_lengths(spearman: pd.DataFrame, kind: str) -> str:
    rows = spearman[(spearman["kind"] == kind) & (spearman["category"] == "all") & spearman["spearman"].notna()]
    if rows.empty:
        return ""
    rho, pairs = float(rows["spearman"].iloc[0]), int(rows["pairs"].iloc[0])
    side = "short" if rho < 0 else "long"
    numbers = f"Spearman's ρ of weight and length ‖f(x)‖ is {format_real(round(rho, 2))} over {pairs:,} pairs"
    return f"Heads tend to put more weight on {side} vectors: {numbers}."
