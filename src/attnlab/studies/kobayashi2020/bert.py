"""§4 of Kobayashi et al. 2020: what BERT attends to, by weight and by norm. One survey a seed, which all items read.

A seed draws the sequences; the model is the same for all. The published figures are of bert-base-uncased on other
sequences, so they are compared with an interval over draws. Those of Figures 3 and 4 are read off the figures.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from scipy.stats import spearmanr

from attnlab.analysis.statistics import extremes
from attnlab.config import compute_digest
from attnlab.experiments.plan import Calculation, Workplace
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell, Interval
from attnlab.reading.reader import PretrainedReader, open_reader
from attnlab.reading.survey import SurveyConfig, survey
from attnlab.reading.text_stream import TextCorpus
from attnlab.report.norm_figures import draw_category_lines, draw_head_maps
from attnlab.studies.kobayashi2020.sequences import LENGTH, SEQUENCES, draw_sequences

OPTIONS = ("model", "file", "frequency")
MODEL = "bert-base-uncased"
GROUPS = {"[CLS]": ["[CLS]"], "[SEP]": ["[SEP]"], "comma, period": [",", "."]}
READ_OFF = "read off the figure"

Tables = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class TableMeasure:
    """A cell to be: where it stands, what was published, and how it is read from the tables of a draw."""

    row: str
    column: str
    of: Callable[[Tables], float]
    published: float | None = None
    published_interval: Interval | None = None
    sign: Literal[-1, 0, 1] = 0
    note: str = ""


@dataclass(frozen=True)
class Survey:
    """What fixes a survey's numbers, but for its seed."""

    model: str
    file: str | None
    frequency: str | None
    sequences: int


@dataclass(frozen=True)
class DrawTables:
    """The tables of each seed, or why there are none."""

    tables: list[Tables]
    tags: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    reason: str = ""

    def cells(self, item: str, measures: Sequence[TableMeasure]) -> list[Cell]:
        return [
            Cell(
                item=item, row=m.row, column=m.column, values=tuple(float(m.of(tables)) for tables in self.tables),
                published=m.published, published_interval=m.published_interval, sign=m.sign, note=m.note,
                tags=self.tags, not_run=self.reason,
            )
            for m in measures
        ]  # fmt: skip

    def mean(self, table: str, by: list[str]) -> pd.DataFrame:
        """A table of numbers, in the mean over seeds."""
        return pd.concat([tables[table] for tables in self.tables]).groupby(by, sort=False).mean().reset_index()


def read_surveys(setting: Setting) -> DrawTables:
    """Read the tables of each seed from the ledger; all items share them."""
    sequences = setting.at(smoke=8, small=96, full=SEQUENCES)
    options = setting.options
    config = Survey(options.get("model", MODEL), options.get("file"), options.get("frequency"), sequences)
    tags: tuple[str, ...] = ("other data",)
    tags += () if Path(config.model).name == MODEL else ("other model",)
    tags += () if sequences == SEQUENCES else ("smaller scale",)
    for name in ("file", "frequency"):
        if setting.running and (given := options.get(name)) is not None and not Path(given).is_file():
            raise FileNotFoundError(f"{name}={given}: no such file")
    function = partial(measure_survey, config)
    plan = {seed: Calculation("survey", asdict(config), function, seed) for seed in setting.seeds}
    if setting.running and not all(setting.rows.has_any([run]) for run in plan.values()):
        try:  # once, before every seed tries
            _open_reader(config.model, setting.place.device)
        except OSError as error:
            return DrawTables([], tags, reason=f"{error}; model=FOLDER takes another")
    measured = setting.rows.read_plan(plan)
    if not measured.values:
        return DrawTables([], tags, reason=next(iter(measured.failures.values())))
    tables = [
        {name: pd.DataFrame(rows) for name, rows in values["tables"].items()} for values in measured.values.values()
    ]
    return DrawTables(tables, tags, (list(measured.values.values())[-1]["remark"],))


def measure_survey(config: Survey, place: Workplace, seed: int | None) -> dict[str, Any]:
    """Draw the sequences of a seed, read them with the model, and return the tables of statistics."""
    reader = _open_reader(config.model, place.device)
    examples = draw_sequences(
        config.file, config.sequences, seed or 0, reader.tokenizer.unk_token or "", place.data_dir
    )
    ranks = config.frequency or _find_published_ranks(reader, place.data_dir)
    statistics, contents = survey(
        reader, TextCorpus(examples), SurveyConfig(max_length=LENGTH, frequency=ranks),
        place.folder / f"bert-{compute_digest(config)}" / f"seed-{seed}", groups=GROUPS,
    )  # fmt: skip
    source = config.file or "wikitext-2"
    counted = "the authors' counts" if ranks and config.frequency is None else ranks or "counts of these sequences"
    remark = (
        f"{reader.name}, {config.sequences} sequences of {source} per seed ({contents.tokens:,} tokens in the last). "
        f"Frequency ranks from {counted}. Layers and heads are counted from 0."
    )
    tables = {name: table.to_dict("records") for name, table in statistics.tables().items()}
    return {"tables": json.loads(json.dumps(tables, default=float)), "remark": remark}


def table1(setting: Setting) -> Findings:
    """Mean, deviation, CV, greatest and least ‖f(x)‖ of the heads with the greatest and the least CV, and the mean."""

    def dispersion(row: int, column: str) -> Callable[[Tables], float]:
        return lambda tables: extremes(tables["heads"])[column][row]

    columns = {"norm_mean": "mean", "norm_sd": "sd", "norm_cv": "CV", "norm_max": "max", "norm_min": "min"}
    published = {
        "head of greatest CV": (4.26, 1.59, 0.37, 12.66, 0.96),
        "head of least CV": (4.00, 0.50, 0.12, 6.15, 1.35),
        "mean over heads": (5.15, 1.17, 0.22),
    }
    measures = [
        TableMeasure(row, columns[column], dispersion(n, column), value)
        for n, (row, values) in enumerate(published.items())
        for column, value in zip(columns, values, strict=False)
    ]
    found = read_surveys(setting)
    return Findings(found.cells("table1", measures), remarks=found.remarks)


def figure3(setting: Setting) -> Findings:
    """What each category gets, in the mean over heads; the greatest, or of others the least, over layers."""

    def by_layer(tables: Tables, category: str, column: str) -> pd.Series:
        part = tables["categories"]
        return part[part["category"] == category].groupby("layer")[column].mean()

    def most(category: str, column: str) -> Callable[[Tables], float]:
        return lambda tables: by_layer(tables, category, column).max()

    def drop(category: str) -> Callable[[Tables], float]:
        """From its share of the weight to its share of the norms, in the layer where it has most weight."""

        def measured(tables: Tables) -> float:
            weight = by_layer(tables, category, "weight_share")
            norm = sum(by_layer(tables, name, "norm_sum") for name in (*GROUPS, "other"))
            return weight.max() - (by_layer(tables, category, "norm_sum") / norm)[weight.idxmax()]

        return measured

    weight, norm = "greatest Σ α of a layer", "greatest Σ ‖αf‖ of a layer"
    measures = [
        TableMeasure("[CLS]", weight, most("[CLS]", "weight_share"), 0.26, note=READ_OFF),
        TableMeasure("[SEP]", weight, most("[SEP]", "weight_share"), 0.60, note=READ_OFF),
        TableMeasure("comma, period", weight, most("comma, period", "weight_share"), 0.55, note=READ_OFF),
        TableMeasure("[CLS]", norm, most("[CLS]", "norm_sum"), published_interval=(0.0, 0.45), note=READ_OFF),
        TableMeasure("[SEP]", norm, most("[SEP]", "norm_sum"), published_interval=(0.0, 0.2), note=READ_OFF),
        TableMeasure(
            "comma, period", norm, most("comma, period", "norm_sum"), published_interval=(0.0, 0.4), note=READ_OFF
        ),
        TableMeasure("other", norm, most("other", "norm_sum"), 3.4, note=READ_OFF),
    ]
    less = "its share by weight − by norm, where it has most weight"
    measures += [TableMeasure(name, less, drop(name), sign=1) for name in GROUPS]
    found = read_surveys(setting)
    figures = {}
    if found.tables:
        says = "by weight, [CLS], [SEP], commas and periods against all other tokens; by norm, the same"
        figures["categories"] = (
            draw_category_lines(found.mean("categories", ["kind", "layer", "head", "category"])),
            says,
        )
    return Findings(found.cells("figure3", measures), figures, found.remarks)


def table2(setting: Setting) -> Findings:
    """Spearman's ρ of α and ‖f(x)‖ over all pairs, by the category of the key."""

    def rho(category: str) -> Callable[[Tables], float]:
        return lambda tables: tables["spearman"].set_index("category")["spearman"][category]

    published = {"[CLS]": -0.34, "[SEP]": -0.69, "comma, period": -0.25, "other": -0.06}
    measures = [TableMeasure(name, "Spearman's ρ", rho(name), value, sign=-1) for name, value in published.items()]
    found = read_surveys(setting)
    bound = max((tables["spearman"]["error_bound"].max() for tables in found.tables), default=0.0)
    remarks = found.remarks + (
        (f"Numbers are binned; each ρ is right to {bound:.4f} or better.",) if found.tables else ()
    )
    return Findings(found.cells("table2", measures), remarks=remarks)


def figure4(setting: Setting) -> Findings:
    """Heads that give [SEP] much weight have short vectors for it: Spearman's ρ over heads."""

    def over_heads(tables: Tables) -> float:
        part = tables["categories"]
        part = part[part["category"] == "[SEP]"]
        return spearmanr(part["weight_share"], part["norm_mean"]).statistic

    column = "Spearman's ρ of weight and mean ‖f‖ over heads"
    found = read_surveys(setting)
    figures = {}
    if found.tables:
        mean = found.mean("categories", ["kind", "layer", "head", "category"])
        figures["heads"] = (
            draw_head_maps(mean, "[SEP]"),
            "weight on [SEP] and the mean norm of its vectors, head by head",
        )
    cells = found.cells("figure4", [TableMeasure("[SEP]", column, over_heads, sign=-1, note="the paper shows a map")])
    return Findings(cells, figures, found.remarks)


def frequency(setting: Setting) -> Findings:
    """Spearman's ρ of a token's frequency rank with its ‖f(x)‖ and with its α, averaged over heads and layers."""

    def rho(of: str) -> Callable[[Tables], float]:
        return lambda tables: tables["frequency"].set_index("of")["spearman"][of]

    measures = [
        TableMeasure("rank, ‖f(x)‖", "Spearman's ρ", rho("norm"), 0.75, sign=1),
        TableMeasure("rank, α", "Spearman's ρ", rho("weight"), 0.06),
        TableMeasure("‖f(x)‖ − α", "Spearman's ρ", lambda t: rho("norm")(t) - rho("weight")(t), 0.69, sign=1),
    ]
    found = read_surveys(setting)
    return Findings(found.cells("frequency", measures), remarks=found.remarks)


def _open_reader(model: str, device: str) -> PretrainedReader:
    """An encoder that reads [SEP], 128 tokens of a text at most."""
    reader = open_reader(model, device=device)
    if not isinstance(reader, PretrainedReader) or reader.two_sided or "[SEP]" not in reader.sides["source"].pieces:
        raise ValueError(f"{reader.name} does not read [CLS] p1 [SEP] p2 [SEP]: model= must be an encoder such as BERT")
    return PretrainedReader(reader.name, reader.model, reader.tokenizer, LENGTH)


def _find_published_ranks(reader: Any, data_dir: str | None) -> str | None:
    """The authors' file of counts, where it is at hand and the vocabulary is BERT's."""
    pieces = reader.sides["source"].pieces
    if len(pieces) < 1997 or (pieces[1996], pieces[1012]) != ("the", "."):
        return None
    root = data_dir or os.environ.get("ATTNLAB_DATA")
    places = [Path(root) / "bert-frequency" / f"rank_count_ids.txt{end}" for end in ("", ".gz")] if root else []
    return next((str(path) for path in places if path.exists()), None)
