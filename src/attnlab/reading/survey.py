"""Statistics of a model over a corpus: read as a stream, stored as it goes, shared out over processes.

The batches of a corpus are a pure function of it and of the settings. With w processes, process r takes the batches r,
r+w, … and keeps its sums and the next batch in FOLDER/state/r-of-w.safetensors, written whole or not at all. Killed and
started again, it goes on from there; at the end the sums of all processes are joined. FOLDER/survey.json says what the
sums are of, and is there before any of them: what differs in it is another survey, which the folder does not take.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.analysis.categories import Categories
from attnlab.analysis.categories import parse_categories as parse_categories
from attnlab.analysis.frequency import Frequency
from attnlab.analysis.frequency import parse_counts as parse_frequency
from attnlab.analysis.statistics import Statistics
from attnlab.files import write_bytes
from attnlab.reading.reader import TextReader
from attnlab.reading.text_stream import TextCorpus, TextExample
from attnlab.tasks.text import read_text
from attnlab.training.run_folder import Checkpoint, DamagedError, read_checkpoint, write_checkpoint

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
    reader: TextReader,
    corpus: TextCorpus,
    config: SurveyConfig,
    folder: Path,
    *,
    progress: Progress = lambda done, total, what: None,
    groups: dict[str, list[str]] | None = None,
) -> tuple[Statistics, Contents]:
    """The statistics of all processes; groups: categories by name, where no file says them."""
    world = processes(reader)
    if config.categories is not None:
        groups = parse_categories(read_text(Path(config.categories)), config.categories)
    counts = None if config.frequency is None else read_text(Path(config.frequency))
    made = _Tokens.of(reader, groups, counts, str(config.frequency))
    contents = first_reading(reader, corpus, progress)
    frequency = {side: Frequency.from_counts(made.counts.get(side, here), here) for side, here in contents.counts.items()}
    statistics = Statistics(made.categories, frequency, layers=config.layers, heads=config.heads)
    about: dict[str, Any] = {"model": reader.name, "weights": weights_digest(reader.model)}
    about |= {"corpus": contents.fingerprint, "groups": groups, "processes": world.num_processes}
    about["counts"] = None if counts is None else hashlib.sha256(counts.encode()).hexdigest()
    claim = _Claim(folder / "survey.json", asdict(config) | about)
    claim.refuse_another()
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
            _save(statistics, claim, path, number + 1, done)
            saved = time.monotonic()
    _save(statistics, claim, path, _END, done)
    return _joined(statistics, world), contents


class Alone:
    """One process, as accelerate.PartialState would describe it."""

    num_processes, process_index, is_main_process = 1, 0, True


def processes(reader: TextReader) -> Any:
    """The processes that torchrun or accelerate launch started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from accelerate import PartialState

    return PartialState(cpu=reader.device.type == "cpu")


def first_reading(reader: TextReader, corpus: TextCorpus, progress: Progress) -> Contents:
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


def batches(reader: TextReader, corpus: TextCorpus, tokens: int) -> Iterator[list[TextExample]]:
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


def weights_digest(model: torch.nn.Module) -> str:
    """Of some numbers of every parameter: another training, or another model of this name, has another."""
    known = hashlib.sha256()
    for name, x in model.named_parameters():
        flat = x.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].float().cpu()
        known.update(name.encode() + some.numpy().tobytes())
    return known.hexdigest()


@dataclass(frozen=True)
class _Claim:
    """What the sums of a folder are of."""

    path: Path
    values: dict[str, Any]

    @property
    def _text(self) -> str:
        return json.dumps(self.values, indent=1, ensure_ascii=False) + "\n"

    def refuse_another(self) -> None:
        if not self.path.exists():
            return
        there, now = json.loads(self.path.read_text(encoding="utf-8")), json.loads(self._text)
        if differing := [key for key in now if there.get(key) != now[key]]:
            shown = "; ".join(f"{key}: {there.get(key)!r} there, {now[key]!r} now" for key in differing[:3])
            raise ValueError(
                f"{self.path.parent} holds another inspection ({shown}); choose another --out, or delete it"
            )

    def write(self) -> None:
        if not self.path.exists():
            write_bytes(self.path, self._text.encode())


@dataclass(frozen=True, eq=False)
class _Tokens:
    """What is known of each side's tokens before the corpus is read: their categories, and counts where given."""

    categories: dict[str, Categories]
    counts: dict[str, Tensor]

    @classmethod
    def of(cls, reader: TextReader, groups: dict[str, list[str]] | None, text: str | None, where: str) -> "_Tokens":
        made = cls({}, {})
        for side, found in reader.sides.items():
            if twin := next((other for other in made.categories if reader.sides[other] is found), None):
                made.categories[side] = made.categories[twin]
            elif groups is None:
                made.categories[side] = Categories.default(found.texts, found.special)
            else:
                made.categories[side] = Categories.from_groups(groups, found.pieces)
            if text is not None:
                made.counts[side] = parse_frequency(text, found.pieces, where)
        return made


_END = 2**62  # a batch that there never is: all are done


def _resumed(statistics: Statistics, path: Path) -> dict[str, int]:
    """Where to go on; the statistics take in what was stored."""
    if not path.exists():
        return {"batch": 0, "examples": 0}
    try:
        stored = read_checkpoint(path)
    except DamagedError as error:
        raise ValueError(f"{error}; delete it, and its part is counted again") from None
    statistics.merge(stored.tensors)
    return stored.state


def _save(statistics: Statistics, claim: _Claim, path: Path, batch: int, examples: int) -> None:
    claim.write()
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
        whole.merge(part)
    return whole
