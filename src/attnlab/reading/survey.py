"""Statistics of a model over a corpus: read as a stream, saved regularly, and split over processes.

The batches are a pure function of the corpus and the settings. With w processes, process r takes batches r, r+w, …
and saves its sums and the number of the next batch in FOLDER/state/r-of-w.safetensors, atomically. After an
interruption it resumes from there. At the end the sums of all processes are added. FOLDER/survey.json describes the
survey and is written before any sums. The folder refuses a survey with another description.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis import ANALYSES, EVERY, find_analysis
from attnlab.analysis.categories import Categories, parse_categories
from attnlab.analysis.frequency import Frequency, parse_counts
from attnlab.analysis.statistics import Statistics
from attnlab.analysis.sums import Analysis
from attnlab.config import Natural, check_fields
from attnlab.files import write_text
from attnlab.files.user_files import read_json, read_text
from attnlab.reading.reader import TextReader
from attnlab.reading.text_stream import TextCorpus, TextExample
from attnlab.records.record import Record
from attnlab.registry.own_files import hash_files
from attnlab.tasks.batching import split_chunks
from attnlab.training.processes import SingleProcess, count_processes
from attnlab.training.run_folder import Checkpoint, DamagedError, read_checkpoint, write_checkpoint

WINDOW = 1024  # number of examples that are sorted by length together
SECONDS = 30.0  # time between two saves of the sums
TABLES = ("heads", "categories", "spearman", "frequency")  # of the statistics
END = 2**62  # the next batch of a finished survey

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class SurveyConfig:
    """The settings that determine the statistics of a model and a corpus."""

    layers: tuple[Natural, ...] | None = None
    heads: tuple[Natural, ...] | None = None
    batch_tokens: int = 4096  # maximum number of tokens in a batch, with padding; a longer text is one batch
    max_length: int | None = None
    dtype: str | None = None
    categories: str | None = None  # path of a file
    frequency: str | None = None  # path of a file; by default counts of the corpus
    analyses: tuple[str, ...] = ()  # further tables, by the names in ANALYSES or ./file.py:Class

    def __post_init__(self) -> None:
        check_fields(self)
        given: dict[str, str] = {}
        for analysis in expand_analyses(self.analyses):
            name = name_analysis(analysis)
            if name in TABLES:
                raise ValueError(f"--analysis: every inspection has a table {name!r}; give the class another name")
            if name in given:
                advice = "" if given[name] == analysis else f", as {given[name]} and {analysis}: rename one class"
                raise ValueError(f"--analysis: {name} is named twice{advice}")
            given[name] = analysis


def name_analysis(name: str) -> str:
    """Return the name of an analysis's table: its own, or that of the class in lower case."""
    return name.rpartition(":")[2].lower()


def expand_analyses(names: Sequence[str]) -> list[str]:
    """Return the names of analyses; "all" stands for every registered one that is not named beside it."""
    every = [name for name in ANALYSES if name not in names]
    return [each for name in names for each in (every if name == EVERY else [name])]


@dataclass(frozen=True, eq=False)
class Contents:
    """Counts of a corpus, from the first of the two times it is read."""

    counts: dict[str, Tensor]  # by token id, for each side
    examples: int
    tokens: int
    fingerprint: str


def survey(
    reader: TextReader,
    corpus: TextCorpus,
    config: SurveyConfig,
    folder: Path,
    *,
    progress: Progress = lambda done, total, what: None,
    groups: dict[str, list[str]] | None = None,
) -> tuple["SurveySums", Contents]:
    """Compute the statistics and analyses of a corpus, added over all processes, and its contents.

    groups   tokens of each category by name, if config.categories names no file
    """
    world = find_processes(reader)
    if config.categories is not None:
        groups = parse_categories(read_text(Path(config.categories)), config.categories)
    counts = None if config.frequency is None else read_text(Path(config.frequency))
    categories, known = _categorize_tokens(reader, groups), {}
    if counts is not None:
        known = {side: parse_counts(counts, x.pieces, str(config.frequency)) for side, x in reader.sides.items()}
    contents = count_tokens(reader, corpus, progress)
    frequency = {side: Frequency.from_counts(known.get(side, here), here) for side, here in contents.counts.items()}
    statistics = _build_sums(config, Statistics(categories, frequency, layers=config.layers, heads=config.heads))
    about = {"corpus": contents.fingerprint, "groups": groups, "processes": world.num_processes}
    about["counts"] = None if counts is None else hashlib.sha256(counts.encode()).hexdigest()
    file, description = folder / "survey.json", _describe_survey(reader, config, about)
    _check_description(file, description)
    path = folder / "state" / f"{world.process_index}-of-{world.num_processes}.safetensors"
    start = _resume(statistics, path)
    done, saved = start["examples"], time.monotonic()

    def save(next_batch: int) -> None:
        if not file.exists():
            write_text(file, description)
        tensors = {name: x.clone() for name, x in statistics.tensors().items()}  # safetensors refuses shared memory
        write_checkpoint(Checkpoint(tensors, {"batch": next_batch, "examples": done}), path)

    for number, batch in enumerate(iterate_batches(reader, corpus, config.batch_tokens)):
        if number % world.num_processes != world.process_index or number < start["batch"]:
            continue
        statistics.add(reader.record(batch))
        done += len(batch)
        progress(min(done * world.num_processes, contents.examples), contents.examples, "examples")
        if time.monotonic() - saved > SECONDS:
            save(number + 1)
            saved = time.monotonic()
    save(END)
    return _join_processes(statistics, world), contents


def _build_sums(config: SurveyConfig, statistics: Statistics) -> "SurveySums":
    """Add the analyses of a survey to its statistics. Those that only `all` names are optional."""
    analyses = {name_analysis(name): find_analysis(name)() for name in expand_analyses(config.analyses)}
    optional = set(ANALYSES) if EVERY in config.analyses else set()
    return SurveySums(statistics, analyses, optional - set(config.analyses))


def _describe_survey(reader: TextReader, config: SurveyConfig, about: dict[str, Any]) -> str:
    """Return everything that the result depends on, as JSON."""
    settings = asdict(config) | {"code": hash_files(config.analyses)}
    settings = {key: value for key, value in settings.items() if config.analyses or key not in ("analyses", "code")}
    settings |= {"model": reader.name, "weights": digest_weights(reader.model)}
    return json.dumps(settings | about, indent=1, ensure_ascii=False) + "\n"


class SurveySums:
    """The statistics of a survey and its analyses by name, saved and merged together."""

    def __init__(self, statistics: Statistics, analyses: Mapping[str, Analysis], optional: Collection[str]) -> None:
        """optional: names of analyses to leave out where they do not apply."""
        self.statistics, self.analyses, self.optional = statistics, dict(analyses), optional

    def add(self, record: Record) -> None:
        self.statistics.add(record)
        for name, analysis in list(self.analyses.items()):
            try:
                analysis.add(record)
            except ValueError as error:
                if name not in self.optional:
                    raise
                print(f"analysis {name} is left out: {error}")
                del self.analyses[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums by name; those of an analysis begin with its name and a colon."""
        own = {f"{name}:{key}": x for name, sums in self.analyses.items() for key, x in sums.tensors().items()}
        return self.statistics.tensors() | own

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors() of another instance."""
        for name, sums in self.analyses.items():
            sums.merge({key.removeprefix(f"{name}:"): x for key, x in tensors.items() if key.startswith(f"{name}:")})
        self.statistics.merge({key: x for key, x in tensors.items() if ":" not in key})

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables of the statistics, and one of each analysis. Raises ValueError for another return value."""
        held = {name: sums for name, sums in self.analyses.items() if name not in self.optional or sums.sums}
        tables = {name: sums.table() for name, sums in held.items()}
        for name, table in tables.items():
            if not isinstance(table, pd.DataFrame):
                kind = type(self.analyses[name]).__name__
                raise ValueError(f"{kind}.table must return a pandas DataFrame, got a {type(table).__name__}")
        return self.statistics.tables() | tables

    def copy_empty(self) -> "SurveySums":
        """Return an instance of the same kinds without any sums."""
        old = self.statistics
        statistics = Statistics(old.categories, old.frequency, layers=old.layers, heads=old.heads)
        return SurveySums(statistics, {name: type(sums)() for name, sums in self.analyses.items()}, self.optional)


def find_processes(reader: TextReader) -> Any:
    """Return the processes that torchrun or accelerate launch started, or a SingleProcess."""
    if count_processes() == 1:
        return SingleProcess(reader.device)
    from accelerate import PartialState

    return PartialState(cpu=reader.device.type == "cpu")


def count_tokens(reader: TextReader, corpus: TextCorpus, progress: Progress) -> Contents:
    """Count the tokens of a corpus. Raises ValueError for texts that the model cannot read, before it runs."""
    counts = {side: torch.zeros(len(tokens.pieces), dtype=torch.int64) for side, tokens in reader.sides.items()}
    examples, digest = 0, hashlib.sha256()
    for window in split_chunks(corpus, WINDOW):
        digest.update(b"".join(example.content for example in window))
        for side, rows in reader.encode_examples(window).items():
            counts[side] += torch.bincount(torch.tensor([t for row in rows for t in row]), minlength=len(counts[side]))
        examples += len(window)
        progress(0, examples, "examples read")
    if not examples:
        raise ValueError("the corpus has no examples")
    total = sum(int(count.sum()) for count in counts.values())
    only = next(count for count in counts.values() if count.any())  # models with one side have it as source or target
    counts = {side: count if count.any() else only for side, count in counts.items()}
    return Contents(counts, examples, total, digest.hexdigest())


def iterate_batches(reader: TextReader, corpus: TextCorpus, tokens: int) -> Iterator[list[TextExample]]:
    """Yield batches of examples of similar length, with at most this number of tokens, padding included."""
    for window in split_chunks(corpus, WINDOW):
        sides = list(reader.encode_examples(window).values())
        lengths = [max(len(rows[k]) for rows in sides) for k in range(len(window))]
        batch: list[int] = []
        for k in sorted(range(len(window)), key=lambda k: -lengths[k]):
            if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
                yield [window[place] for place in batch]
                batch = []
            batch.append(k)
        yield [window[place] for place in batch]


def digest_weights(model: torch.nn.Module) -> str:
    """Return a digest of some numbers of every parameter, to tell models of the same name apart."""
    digest = hashlib.sha256()
    for name, x in model.named_parameters():
        flat = x.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()


def _check_description(file: Path, description: str) -> None:
    """Raise ValueError if the file describes another survey."""
    if not file.exists():
        return
    old, new = read_json(file), json.loads(description)
    if differing := [key for key in new if old.get(key) != new[key]]:
        shown = "; ".join(f"{key}: {old.get(key)!r} there, {new[key]!r} now" for key in differing[:3])
        another = f"{file.parent} contains another inspection ({shown})"
        raise ValueError(f"{another}; choose another --out, or delete the folder")


def _categorize_tokens(reader: TextReader, groups: dict[str, list[str]] | None) -> dict[str, Categories]:
    """Return the categories of each side's tokens. Sides with the same vocabulary share them."""
    unique = {id(tokens): tokens for tokens in reader.sides.values()}
    categories = {
        key: Categories.default(x.texts, x.special)
        if groups is None
        else Categories.from_groups(groups, x.pieces, x.texts)
        for key, x in unique.items()
    }
    return {side: categories[id(tokens)] for side, tokens in reader.sides.items()}


def _resume(statistics: SurveySums, path: Path) -> dict[str, int]:
    """Add the saved sums to the statistics and return the position to resume from."""
    if not path.exists():
        return {"batch": 0, "examples": 0}
    try:
        stored = read_checkpoint(path)
    except DamagedError as error:
        raise ValueError(f"{error}; delete the file to count its part again") from None
    statistics.merge(stored.tensors)
    return stored.state


def _join_processes(statistics: SurveySums, world: Any) -> SurveySums:
    """Return the sum of all processes' statistics, in each process."""
    if world.num_processes == 1:
        return statistics
    from accelerate.utils import gather_object

    whole = statistics.copy_empty()
    parts: Sequence[dict[str, Tensor]] = gather_object([statistics.tensors()])
    for part in parts:
        whole.merge(part)
    return whole
