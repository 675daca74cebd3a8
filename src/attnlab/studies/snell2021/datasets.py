"""Table 9: the number of examples of each data set, their lengths, and the vocabulary, counted by the loaders."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attnlab.config import FREE_KEYS, compute_digest
from attnlab.experiments.plan import Calculation, Workplace
from attnlab.experiments.study import SCALES, Findings, Scale, Setting
from attnlab.experiments.verdicts import IMPOSSIBLE, Cell
from attnlab.studies.snell2021.plan import NO_GLOVE, OTHER, make_pairs, make_texts
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.task import Task
from attnlab.tasks.translation import Translation, TranslationConfig

ITEM = "table9"
GLOVE = "the authors also keep rare words that have a GloVe vector; the loader does so with embeddings=FILE"
PIECES = "the authors' SentencePiece model differs from the one that the official files give, so pieces differ"
LACKING = f"{IMPOSSIBLE}the official files are not at hand"
SLIP = "the printed number is that of AG News"
REMARK = (
    "Lengths are medians of tokens without <s> and </s>. The vocabulary printed for 20 Newsgroups is that of AG News; "
    "the parameter counts of A.8 give (5,021,282 − 1,274,882) / 300 = 12,488."
)


@dataclass(frozen=True)
class Published:
    """A row of Table 9; two medians if there are two sides, source and target."""

    train: int
    valid: int
    train_medians: tuple[int, ...]
    valid_medians: tuple[int, ...]
    vocabulary: int

    @property
    def columns(self) -> dict[str, int]:
        sides = [""] if len(self.train_medians) == 1 else [", source", ", target"]
        return (
            {"training examples": self.train, "validation examples": self.valid}
            | {f"median training length{side}": m for side, m in zip(sides, self.train_medians, strict=True)}
            | {f"median validation length{side}": m for side, m in zip(sides, self.valid_medians, strict=True)}
            | {"vocabulary": self.vocabulary}
        )


IMDB = Published(25_000, 4_000, (181,), (178,), 60_338)
AG_NEWS = Published(60_000, 3_800, (40,), (40,), 31_065)
NEWSGROUPS = Published(1_197, 796, (183,), (207,), 31_065)
SST = Published(5_130, 1_421, (16,), (17,), 11_022)
AMAZON = Published(32_514, 4_000, (71,), (72,), 37_110)
YELP = Published(88_821, 4_000, (74,), (74,), 41_368)
IWSLT14 = Published(160_240, 7_284, (23, 24), (22, 23), 8_000)
MULTI30K = Published(29_000, 1_014, (14, 14), (15, 14), 8_000)
EN_NL = Published(52_070, 5_786, (30, 34), (30, 34), 8_000)
EN_PT = Published(48_538, 5_394, (31, 35), (31, 35), 8_000)
IT_PT = Published(21_572, 2_397, (36, 35), (36, 36), 8_000)


@dataclass(frozen=True)
class DatasetRow:
    """A row of ours: the published one that it is compared with, and how it is loaded."""

    name: str
    published: Published
    config: ClassificationConfig | TranslationConfig
    tags: tuple[str, ...] = ()
    from_scale: Scale = "full"  # the smallest scale at which it is run
    drawn: bool = False  # whether a part of it is drawn at random, by data_seed
    note: str = ""  # on its lengths
    lacking: bool = False  # whether its files are not at hand here, so that results/ has no row of it


ROWS = (
    DatasetRow("IMDB", IMDB, make_texts("imdb"), from_scale="small", drawn=True),
    DatasetRow("AG News", AG_NEWS, make_texts("ag-news"), lacking=True),
    DatasetRow("AG News, a sample", AG_NEWS, make_texts("ag-news-sample"), OTHER, "small"),
    DatasetRow("20 Newsgroups", NEWSGROUPS, make_texts("20newsgroups"), from_scale="smoke"),
    DatasetRow("SST, official parts", SST, make_texts("sst"), OTHER, "smoke"),
    DatasetRow("Amazon, labelled part", AMAZON, make_texts("amazon"), OTHER, "small", drawn=True),
    DatasetRow("Yelp, a sample", YELP, make_texts("yelp"), OTHER, "small", drawn=True),
    DatasetRow("IWSLT14", IWSLT14, make_pairs("iwslt14", "de-en"), lacking=True),
    DatasetRow("IWSLT14, Europarl de-en", IWSLT14, make_pairs("europarl", "de-en"), OTHER),
    DatasetRow("Multi30k", MULTI30K, make_pairs("multi30k", "de-en"), from_scale="small", note=PIECES),
    DatasetRow("News en-nl", EN_NL, make_pairs("news-commentary-v14", "en-nl"), drawn=True, lacking=True),
    DatasetRow("News en-nl, Europarl", EN_NL, make_pairs("europarl", "en-nl", EN_NL.train), OTHER),
    DatasetRow("News en-pt", EN_PT, make_pairs("news-commentary-v14", "en-pt"), drawn=True, lacking=True),
    DatasetRow("News en-pt, Europarl", EN_PT, make_pairs("europarl", "en-pt", EN_PT.train), OTHER),
    DatasetRow("News it-pt", IT_PT, make_pairs("news-commentary-v14", "it-pt"), drawn=True, lacking=True),
    DatasetRow("News it-pt, Europarl", IT_PT, make_pairs("europarl", "it-pt", IT_PT.train), OTHER),
)


def table9(setting: Setting) -> Findings:
    """The item: the rows of this scale, and what the paper prints."""
    asked = [row for row in ROWS if SCALES.index(setting.scale) >= SCALES.index(row.from_scale)]
    plan = {
        (row, seed): plan_statistics(row.config, seed if row.drawn else None)
        for row in asked
        for seed in (setting.seeds if row.drawn else (0,))
    }
    measured = setting.rows.read_plan(plan)
    cells: list[Cell] = []
    for row in ROWS:
        values = [counts for (of, _), counts in measured.values.items() if of is row]
        reasons = [reason for (of, _), reason in measured.failures.items() if of is row]
        reason = "" if row in asked else f"this row runs from scale {row.from_scale} on"
        failed = LACKING if row.lacking and reasons and not setting.running else next(iter(reasons), "")
        cells += _make_cells(row, [] if reasons else values, reason or failed)
    return Findings(cells, remarks=(REMARK,))


def plan_statistics(config: ClassificationConfig | TranslationConfig, seed: int | None = None) -> Calculation:
    """Plan the statistics of a data set; seed: that of the random part."""
    values = {key: value for key, value in asdict(config).items() if key not in FREE_KEYS}
    return Calculation("dataset statistics", values, partial(measure_dataset, config), seed)


def measure_dataset(
    config: ClassificationConfig | TranslationConfig, place: Workplace, seed: int | None
) -> dict[str, float]:
    """Load a data set and count it."""
    config = replace(config, data_dir=place.data_dir, data_seed=config.data_seed if seed is None else seed)
    kind: type[Task] = Classification if isinstance(config, ClassificationConfig) else Translation
    return count_statistics(kind.prepare(config, place.folder / "datasets" / compute_digest(config)))


def count_statistics(task: Task) -> dict[str, float]:
    """Return the columns of Table 9 for a loaded set."""
    columns: dict[str, float] = {}
    for part, name in (("train", "training"), ("valid", "validation")):
        columns[f"{name} examples"] = task.count_examples(part)
        lengths = task.get_lengths(part)
        if len(lengths) == 1:
            columns[f"median {name} length"] = float(np.median(lengths[0])) - 2  # <s>, </s>
        else:
            target, source = lengths
            columns[f"median {name} length, source"] = float(np.median(source)) - 2
            columns[f"median {name} length, target"] = float(np.median(target)) - 1  # </s>
    return columns | {"vocabulary": task.get_sizes()["vocabulary"]}


def _make_cells(row: DatasetRow, seeds: list[dict[str, float]], reason: str) -> Iterator[Cell]:
    for column, published in row.published.columns.items():
        values = tuple(float(counts[column]) for counts in seeds)
        common: dict[str, Any] = {"item": ITEM, "row": row.name, "values": values, "not_run": reason}
        common |= {"exact": not row.drawn and bool(values), "number": f"{ITEM}, {row.published}, {column}"}
        common |= {"margin": 0.5} if "examples" in column else {}  # their number is equal or different
        if column != "vocabulary" or isinstance(row.config, TranslationConfig):
            note = row.note if "length" in column and not reason else ""
            yield Cell(column=column, published=published, tags=row.tags, note=note, **common)
            continue
        tags = (*row.tags, *NO_GLOVE)
        if row.published is NEWSGROUPS:
            tags = (*tags, "erratum")
            yield Cell(column=f"{column}, as printed", published=published, tags=tags, note=SLIP, **common)
            column, published, common["number"] = f"{column}, from A.8", 12_488, ""  # computed from A.8
        yield Cell(column=column, published=published, tags=tags, note=GLOVE, **common)
