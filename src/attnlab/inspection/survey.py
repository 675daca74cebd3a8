"""Statistics of a model over a corpus: read as a stream, stored as it goes, shared out over processes.

The batches of a corpus are a pure function of it and of the settings. With w processes, process r takes the batches r,
r+w, … and keeps its sums and the next batch in FOLDER/state/r-of-w.safetensors, written whole or not at all. Killed and
started again, it goes on from there; at the end the sums of all processes are joined.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.categories import Categories
from attnlab.analysis.categories import parse as parse_categories
from attnlab.analysis.frequency import Frequency
from attnlab.analysis.frequency import parse as parse_frequency
from attnlab.analysis.statistics import Statistics
from attnlab.inspection.corpus import Corpus, Example
from attnlab.inspection.reader import Reader
from attnlab.store import Checkpoint, DamagedError, read_checkpoint, write_checkpoint
from attnlab.tasks.text import read_text, write_atomically

WINDOW = 1024  # examples that are sorted by length together
SECONDS = 30.0  # of work that may be lost

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class SurveyConfig:
    """What fixes the statistics of a model and a corpus."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    batch_tokens: int = 4096  # padded tokens of a batch; a longer text is a batch of its own
    max_length: int | None = None
    dtype: str | None = None
    categories: str | None = None  # a file
    frequency: str | None = None  # a file; None: counted from the corpus

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, not {self.batch_tokens}")


@dataclass(frozen=True, eq=False)
class Contents:
    """What the first reading of a corpus found."""

    counts: dict[str, Tensor]  # of each side, by token
    examples: int
    tokens: int
    fingerprint: str


def survey(
    reader: Reader,
    corpus: Corpus,
    config: SurveyConfig,
    folder: Path,
    *,
    progress: Progress = lambda done, total, what: None,
    groups: dict[str, list[str]] | None = None,
) -> tuple[Statistics, Contents]:
    """The statistics of all processes; groups: categories by name, where no file says them."""
    world = processes(reader)
    contents = first_reading(reader, corpus, progress)
    about = {"model": reader.name, "corpus": contents.fingerprint, "groups": groups, "processes": world.num_processes}
    with world.main_process_first():
        claim(folder / "survey.json", asdict(config) | about, write=world.is_main_process)
    statistics = _empty(reader, config, contents, groups)
    path = folder / "state" / f"{world.process_index}-of-{world.num_processes}.safetensors"
    start = _resumed(statistics, path)
    done, saved = start["examples"], time.monotonic()
    for number, batch in enumerate(batches(reader, corpus, config.batch_tokens)):
        if number % world.num_processes != world.process_index or number < start["batch"]:
            continue
        statistics.add(reader.record(batch))
        done += len(batch)
        progress(min(done * world.num_processes, contents.examples), contents.examples, "examples")
        if time.monotonic() - saved > SECONDS:
            _save(statistics, path, number + 1, done)
            saved = time.monotonic()
    _save(statistics, path, _END, done)
    return _joined(statistics, world), contents


class Alone:
    """One process, as accelerate.PartialState would describe it."""

    num_processes, process_index, is_main_process = 1, 0, True

    def main_process_first(self) -> AbstractContextManager[None]:
        return nullcontext()


def processes(reader: Reader) -> Any:
    """The processes that torchrun or accelerate launch started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from accelerate import PartialState

    return PartialState(cpu=reader.device.type == "cpu")


def first_reading(reader: Reader, corpus: Corpus, progress: Progress) -> Contents:
    """How often each token occurs; refuses what the model cannot read, before the model is run."""
    counts = {side: torch.zeros(len(found.pieces), dtype=torch.int64) for side, found in reader.sides.items()}
    examples, known = 0, hashlib.sha256()
    for window in corpus.windows(WINDOW):
        known.update(b"".join(example.content for example in window))
        for side, rows in reader.tokens(window).items():
            counts[side] += torch.bincount(torch.tensor([t for row in rows for t in row]), minlength=len(counts[side]))
        examples += len(window)
        progress(0, examples, "examples read")
    if not examples:
        raise ValueError("there is no text to inspect")
    tokens = sum(int(count.sum()) for count in counts.values())
    only = next(count for count in counts.values() if count.any())  # a model with one side may call it either
    counts = {side: count if count.any() else only for side, count in counts.items()}
    return Contents(counts, examples, tokens, known.hexdigest())


def batches(reader: Reader, corpus: Corpus, tokens: int) -> Iterator[list[Example]]:
    """Examples of similar length together, at most so many padded tokens a batch."""
    for window in corpus.windows(WINDOW):
        sides = list(reader.tokens(window).values())
        lengths = [max(len(rows[k]) for rows in sides) for k in range(len(window))]
        batch: list[int] = []
        for k in sorted(range(len(window)), key=lambda k: -lengths[k]):
            if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
                yield [window[place] for place in batch]
                batch = []
            batch.append(k)
        yield [window[place] for place in batch]


def claim(path: Path, config: dict[str, Any], *, write: bool) -> None:
    """Say what a folder holds, or make sure that it holds just that."""
    now = json.loads(json.dumps(config))
    if not path.exists():
        if write:
            write_atomically(path, (json.dumps(now, indent=1, ensure_ascii=False) + "\n").encode())
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    if differing := [key for key in now if there.get(key) != now[key]]:
        shown = "; ".join(f"{key}: {there.get(key)!r} there, {now[key]!r} now" for key in differing[:3])
        raise ValueError(f"{path.parent} holds another inspection ({shown}); choose another --out, or delete it")


def _empty(reader: Reader, config: SurveyConfig, contents: Contents, groups: dict[str, list[str]] | None) -> Statistics:
    if config.categories is not None:
        groups = parse_categories(read_text(Path(config.categories)), config.categories)
    text = None if config.frequency is None else read_text(Path(config.frequency))
    categories: dict[str, Categories] = {}
    frequency: dict[str, Frequency] = {}
    for side, found in reader.sides.items():
        here = contents.counts[side]
        if twin := next((s for s in categories if reader.sides[s] is found and contents.counts[s] is here), None):
            categories[side], frequency[side] = categories[twin], frequency[twin]
            continue
        if groups is None:
            categories[side] = Categories.usual(found.texts, found.special)
        else:
            categories[side] = Categories.own(groups, found.pieces)
        counts = here if text is None else parse_frequency(text, found.pieces, str(config.frequency))
        frequency[side] = Frequency.of(counts, here)
    return Statistics(categories, frequency, layers=config.layers, heads=config.heads)


_END = 2**62  # a batch that there never is: all are done


def _resumed(statistics: Statistics, path: Path) -> dict[str, int]:
    """Where to go on; the statistics take in what was stored."""
    if not path.exists():
        return {"batch": 0, "examples": 0}
    try:
        stored = read_checkpoint(path)
    except DamagedError as error:
        raise ValueError(f"{error}; delete it, and its part is counted again") from None
    statistics.join(stored.tensors)
    return stored.state


def _save(statistics: Statistics, path: Path, batch: int, examples: int) -> None:
    tensors = {name: x.clone() for name, x in statistics.tensors().items()}  # safetensors takes no shared memory
    write_checkpoint(Checkpoint(tensors, {"batch": batch, "examples": examples}), path)


def _joined(statistics: Statistics, world: Any) -> Statistics:
    """The sums of all processes, at each of them."""
    if world.num_processes == 1:
        return statistics
    from accelerate.utils import gather_object

    whole = Statistics(statistics.categories, statistics.frequency, layers=statistics.layers, heads=statistics.heads)
    parts: Sequence[dict[str, Tensor]] = gather_object([statistics.tensors()])
    for part in parts:
        whole.join(part)
    return whole
