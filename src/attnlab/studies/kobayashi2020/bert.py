"""§4 of Kobayashi et al. 2020: what BERT attends to, by weight and by norm. All items read one survey per seed.

A seed draws the sequences; the model is the same for all. So the intervals are over draws of text, and every cell has
the tag "one model" and no verdict. The published numbers are of bert-base-uncased on other sequences. Those of Figures
3 and 4 are read off the figures.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from attnlab.analysis.statistics import extremes
from attnlab.config import compute_digest
from attnlab.experiments.plan import Calculation, Workplace
from attnlab.experiments.significance import Interval
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import ONE_MODEL, Cell
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
    """A planned cell: its row and column, what was published, and how it is read from the tables of a seed."""

    row: str
    column: str
    read: Callable[[Tables], float]
    published: float | None = None
    published_interval: Interval | None = None
    sign: Literal[-1, 0, 1] = 0
    note: str = ""
    number: str | None = None


@dataclass(frozen=True)
class Survey:
    """Everything but the seed that fixes the numbers of a survey."""

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

    def make_findings(
        self, item: str, measures: Sequence[TableMeasure], figures: Mapping[str, tuple[Figure, str]] | None = None
    ) -> Findings:
        cells = [
            Cell(
                item=item, row=m.row, column=m.column, values=tuple(float(m.read(tables)) for tables in self.tables),
                published=m.published, published_interval=m.published_interval, sign=m.sign, note=m.note,
                number=m.number, tags=self.tags, not_run=self.reason,
            )
            for m in measures
        ]  # fmt: skip
        return Findings(cells, figures or {}, self.remarks)

    def average_categories(self) -> pd.DataFrame:
        """Return the table of categories by head, the mean over seeds."""
        tables = pd.concat([tables["categories"] for tables in self.tables])
        return tables.groupby(["kind", "layer", "head", "category"], sort=False).mean().reset_index()


def read_surveys(setting: Setting) -> DrawTables:
    """Read the tables of each seed from the ledger."""
    sequences = setting.at(smoke=8, small=96, full=SEQUENCES)
    options = setting.options
    config = Survey(options.get("model", MODEL), options.get("file"), options.get("frequency"), sequences)
    tags: tuple[str, ...] = ("other data",)
    tags += () if Path(config.model).name == MODEL else ("other model",)
    tags += () if sequences == SEQUENCES else ("smaller scale",)
    tags += (ONE_MODEL,)
    for name in ("file", "frequency"):
        if setting.running and (given := options.get(name)) is not None and not Path(given).is_file():
            raise FileNotFoundError(f"{name}={given}: file not found")
    function = partial(measure_survey, config)
    plan = {seed: Calculation("survey", asdict(config), function, seed) for seed in setting.seeds}
    if setting.running and not all(setting.rows.has_any([run]) for run in plan.values()):
        try:  # fail once, not once per seed
            _open_reader(config.model, setting.place.device)
        except OSError as error:
            return DrawTables([], tags, reason=f"{error}; model=FOLDER reads another model")
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
    unknown = reader.tokenizer.unk_token or ""
    examples = draw_sequences(config.file, config.sequences, seed or 0, unknown, place.data_dir)
    ranks = config.frequency or _find_published_ranks(reader, place.data_dir)
    statistics, contents = survey(
        reader, TextCorpus(examples), SurveyConfig(max_length=LENGTH, frequency=ranks),
        place.folder / f"bert-{compute_digest(config)}" / f"seed-{seed}", groups=GROUPS,
    )  # fmt: skip
    source = config.file or "wikitext-2"
    counted = "the authors' counts" if ranks and config.frequency is None else ranks or "counts of these sequences"
    remark = (
        f"{reader.name}, {config.sequences} sequences of {source} per seed ({contents.tokens:,} tokens for the last "
        f"seed). Frequency ranks come from {counted}. Layers and heads are counted from 0."
    )
    tables = {name: table.to_dict("records") for name, table in statistics.tables().items()}
    return {"tables": json.loads(json.dumps(tables, default=float)), "remark": remark}


def table1(setting: Setting) -> Findings:
    """The item: how ‖f(x)‖ varies in the heads with the greatest and the least CV, and in the mean over heads."""

    def read_dispersion(row: int, column: str) -> Callable[[Tables], float]:
        return lambda tables: extremes(tables["heads"])[column][row]

    columns = {"norm_mean": "mean", "norm_sd": "sd", "norm_cv": "CV", "norm_max": "max", "norm_min": "min"}
    published = {
        "head of greatest CV": (4.26, 1.59, 0.37, 12.66, 0.96),
        "head of least CV": (4.00, 0.50, 0.12, 6.15, 1.35),
        "mean over heads": (5.15, 1.17, 0.22),
    }
    measures = [
        TableMeasure(row, columns[column], read_dispersion(n, column), value)
        for n, (row, values) in enumerate(published.items())
        for column, value in zip(columns, values, strict=False)
    ]
    return read_surveys(setting).make_findings("table1", measures)


def figure3(setting: Setting) -> Findings:
    """The item: what each category of tokens gets, the mean over heads, in the layer where that is greatest."""

    def average_heads(tables: Tables, category: str, column: str) -> pd.Series:
        part = tables["categories"]
        return part[part["category"] == category].groupby("layer")[column].mean()

    def read_greatest(category: str, column: str) -> Callable[[Tables], float]:
        return lambda tables: average_heads(tables, category, column).max()

    def read_drop(category: str) -> Callable[[Tables], float]:
        """Return the function that reads its share by weight − by norm, in the layer where it has most weight."""

        def compute_drop(tables: Tables) -> float:
            weight = average_heads(tables, category, "weight_share")
            norm = sum(average_heads(tables, name, "norm_sum") for name in (*GROUPS, "other"))
            return weight.max() - (average_heads(tables, category, "norm_sum") / norm)[weight.idxmax()]

        return compute_drop

    published = {"[CLS]": (0.26, 0.45), "[SEP]": (0.60, 0.2), "comma, period": (0.55, 0.4)}  # Σ α; bound of Σ ‖αf‖
    measures = [
        TableMeasure(name, "greatest Σ α of a layer", read_greatest(name, "weight_share"), share, note=READ_OFF)
        for name, (share, _) in published.items()
    ]
    norm, drop = "greatest Σ ‖αf‖ of a layer", "its share by weight − by norm, where it has most weight"
    for name, (_, bound) in published.items():
        read = read_greatest(name, "norm_sum")
        measures.append(TableMeasure(name, norm, read, published_interval=(0.0, bound), note=READ_OFF))
    measures.append(TableMeasure("other", norm, read_greatest("other", "norm_sum"), 3.4, note=READ_OFF))
    measures += [TableMeasure(name, drop, read_drop(name), sign=1) for name in GROUPS]
    draws = read_surveys(setting)
    caption = "Weights and norms of [CLS], [SEP], commas and periods, and all other tokens, layer by layer."
    figures = {"categories": (draw_category_lines(draws.average_categories()), caption)} if draws.tables else {}
    return draws.make_findings("figure3", measures, figures)


def table2(setting: Setting) -> Findings:
    """The item: Spearman's ρ of α and ‖f(x)‖ over all pairs, by the category of the key."""

    def read_rho(category: str) -> Callable[[Tables], float]:
        return lambda tables: tables["spearman"].set_index("category")["spearman"][category]

    published = {"[CLS]": -0.34, "[SEP]": -0.69, "comma, period": -0.25, "other": -0.06}
    measures = [TableMeasure(name, "Spearman's ρ", read_rho(name), value, sign=-1) for name, value in published.items()]
    draws = read_surveys(setting)
    bound = max((tables["spearman"]["error_bound"].max() for tables in draws.tables), default=0.0)
    remarks = (*draws.remarks, f"Numbers are binned; the error of each ρ is at most {bound:.4f}.")
    return replace(draws, remarks=remarks if draws.tables else ()).make_findings("table2", measures)


def figure4(setting: Setting) -> Findings:
    """The item: heads that give [SEP] much weight have short vectors for it; Spearman's ρ over heads."""

    def correlate_heads(tables: Tables) -> float:
        part = tables["categories"]
        part = part[part["category"] == "[SEP]"]
        return spearmanr(part["weight_share"], part["norm_mean"]).statistic

    column = "Spearman's ρ of weight and mean ‖f‖ over heads"
    measure = TableMeasure("[SEP]", column, correlate_heads, sign=-1, note="the paper shows a map")
    draws = read_surveys(setting)
    caption = "Weight on [SEP] and the mean norm of its vectors, head by head."
    figures = {"heads": (draw_head_maps(draws.average_categories(), "[SEP]"), caption)} if draws.tables else {}
    return draws.make_findings("figure4", [measure], figures)


def frequency(setting: Setting) -> Findings:
    """The item: Spearman's ρ of a token's frequency rank with its ‖f(x)‖ and its α, averaged over heads and layers."""

    def read_rho(of: str) -> Callable[[Tables], float]:
        return lambda tables: tables["frequency"].set_index("of")["spearman"][of]

    norm, weight = read_rho("norm"), read_rho("weight")
    measures = [
        TableMeasure("rank, ‖f(x)‖", "Spearman's ρ", norm, 0.75, sign=1),
        TableMeasure("rank, α", "Spearman's ρ", weight, 0.06),
        TableMeasure(
            "‖f(x)‖ − α", "Spearman's ρ", lambda tables: norm(tables) - weight(tables), 0.69, sign=1, number=""
        ),
    ]
    return read_surveys(setting).make_findings("frequency", measures)


def _open_reader(model: str, device: str) -> PretrainedReader:
    """Open an encoder that reads [SEP], with texts of at most 128 tokens."""
    reader = open_reader(model, device=device)
    if not isinstance(reader, PretrainedReader) or reader.two_sided or "[SEP]" not in reader.sides["source"].pieces:
        raise ValueError(f"{reader.name} does not read [CLS] p1 [SEP] p2 [SEP]: model= must be an encoder such as BERT")
    return PretrainedReader(reader.name, reader.model, reader.tokenizer, LENGTH)


def _find_published_ranks(reader: Any, data_dir: str | None) -> str | None:
    """Return the authors' file of counts if it is available and the vocabulary is BERT's."""
    pieces = reader.sides["source"].pieces
    if len(pieces) < 1997 or (pieces[1996], pieces[1012]) != ("the", "."):
        return None
    root = data_dir or os.environ.get("ATTNLAB_DATA")
    places = [Path(root) / "bert-frequency" / f"rank_count_ids.txt{end}" for end in ("", ".gz")] if root else []
    return next((str(path) for path in places if path.exists()), None)
