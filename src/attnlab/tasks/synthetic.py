"""Synthetic tasks, drawn from a seed, without a download.

    lexicon               an artificial language pair with gold word alignments (lexicon.py)
    permutation           copy x, a permutation of the same 40 types             Snell et al. 2021, §3.3
    subset                copy x, 40 of 60 types in random order                 its control
    mixture               copy x, a permutation of one of two sets of 40 types   App. A.3
    permutation-function  y_t = x_π(t) for one fixed π, x 40 of 60 types         §6.2, eq. 26
    keyword               is type 1 (once or never) among 40 draws of 40 types?  §6.1
    mqar                  k₁ v₁ … k_P v_P, then keys again: which value belongs to each?     Arora et al. 2023, §4

All but the lexicon draw new examples for each epoch and never repeat one. Types are the words "1", "2", …, ids 4, 5, ….
As in the authors' code, a sequence to copy ends with </s>, which is predicted too; the keyword task has no </s>.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from attnlab.config import Natural, Positive, refuse_unused
from attnlab.tasks.batching import Sequences
from attnlab.tasks.lexicon import Lexicon, Links
from attnlab.tasks.pairs import SentencePairs
from attnlab.tasks.task import BOS, EOS, PAD, SPECIALS, Architecture, Batch, Score, Task, TaskConfig
from attnlab.tasks.vocabulary import Vocabulary, Words

PARTS = ("train", "valid", "test")
PAGE = 1024  # examples drawn at once
FIRST = len(SPECIALS)  # the id of the first type

ProblemName = Literal["lexicon", "permutation", "subset", "mixture", "permutation-function", "keyword", "mqar"]


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(TaskConfig):
    data: ProblemName = "lexicon"  # what to learn: to translate, to copy in one of four ways, to find a word, to recall
    length: int = 40  # length of every sequence; not used by the lexicon
    types: int = 60  # number of types to draw from, in subset, permutation-function and mqar; fixed by the other tasks
    pairs: int = 8  # mqar: number of keys with their values at the start of a sequence
    queries: int | None = None  # mqar: number of keys that are asked for again; none: all of them
    power: Positive = 0.01  # mqar: place n of the queries has the weight n^(power − 1); 1: all places alike
    examples: int = 10_000  # number of examples in an epoch
    held_out: int = 500  # number of examples in the validation part and in the test part
    data_seed: Natural = 0  # seed of the examples

    def check(self) -> None:
        if self.data in ("subset", "permutation-function") and self.types < self.length:
            raise ValueError(f"types={self.types} must be at least length={self.length}: no type occurs twice")
        if self.data == "keyword" and self.length < 2:
            raise ValueError(f"length must be at least 2 for the keyword task, got {self.length}")
        if self.data == "mqar":
            self._check_recall()
        else:
            refuse_unused(self, ("pairs", "queries", "power"), f"data={self.data}", "data=mqar")

    def _check_recall(self) -> None:
        asked, space = self.query_count, (self.length - 2 * self.pairs) // 2
        if asked > self.pairs:
            raise ValueError(f"queries={asked} must be at most pairs={self.pairs}: each key is asked for once")
        if space < asked:
            needed = f"{self.pairs} pairs and {asked} queries"
            raise ValueError(f"length={self.length} is too short for {needed}: it must be {2 * (self.pairs + asked)}")
        if self.types < 2 * self.pairs:
            raise ValueError(f"types={self.types} must be at least {2 * self.pairs}: half are keys, half are values")

    @property
    def query_count(self) -> int:
        """Number of queries of mqar."""
        return self.pairs if self.queries is None else self.queries

    def count_examples(self, part: str) -> int:
        return self.examples if part == "train" else self.held_out


class Synthetic(Task):
    config_type: ClassVar[type] = SyntheticConfig
    parts = PARTS

    def __init__(self, config: SyntheticConfig, folder: Path | None = None) -> None:
        self.config, self.notes = config, []
        self.problem = PROBLEMS[config.data](config)
        self.architecture = self.problem.architecture
        self.has_text = config.data != "mqar"
        self.source_vocabulary, self.target_vocabulary = self.problem.source, self.problem.target
        self.vocabulary = self.problem.source  # of a classifier's input
        self.classes = ("absent", "present")  # of the keyword

    @classmethod
    def name_main_score(cls, data: Mapping[str, Any]) -> Score:
        return "accuracy" if data["data"] in ("keyword", "mqar") else "perplexity"

    def get_sizes(self) -> dict[str, int]:
        if self.architecture == "classification":
            return {"vocabulary": len(self.vocabulary), "classes": 2}
        if self.architecture == "language":
            return {"vocabulary": len(self.vocabulary)}
        return {"source_vocabulary": len(self.source_vocabulary), "vocabulary": len(self.target_vocabulary)}

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        self.check_part(part)
        return self.problem.get_lengths(part)

    def plan_batches(
        self, part: str, *, seed: int = 0, epoch: int = 0, shuffle: bool = True, **budget
    ) -> list[list[int]]:
        """Plan batches as any task does; a fresh problem trains on the new examples of (seed, epoch), unshuffled."""
        if not (self.problem.fresh and part == "train"):
            return super().plan_batches(part, seed=seed, epoch=epoch, shuffle=shuffle, **budget)
        first = (seed << 32) + epoch * self.count_examples(part)
        return [[first + index for index in batch] for batch in super().plan_batches(part, shuffle=False, **budget)]

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        self.check_part(part)
        return self.problem.make_batch(part, indices)

    def split(self, line: str) -> list[str]:
        return line.split()

    def encode(self, lines: Sequence[str]) -> Sequences:
        """Encode lines of source words as the model reads them."""
        end = EOS if self.architecture == "translation" else None
        return Sequences.from_ids(self.source_vocabulary.encode(lines), end=end)

    def encode_target(self, lines: Sequence[str]) -> Sequences:
        """Encode lines of target words as the decoder reads them, with <s> before each."""
        return Sequences.from_ids(self.target_vocabulary.encode(lines), begin=BOS)

    def decode(self, ids: Sequence[int]) -> str:
        return self.target_vocabulary.decode(ids)

    def read_sources(self, part: str) -> list[str]:
        """Return the input of every example as text."""
        return [self.source_vocabulary.decode(row) for row in self._make_whole(part).inputs[0].tolist()]

    def read_references(self, part: str) -> list[str]:
        """Return the correct output of every example as text."""
        return [self.target_vocabulary.decode(row) for row in self._make_whole(part).targets.tolist()]

    def read_alignments(self, part: str) -> list[Links]:
        """Return the gold links of every example: pairs (source word, target word), counted from 0."""
        self.check_part(part)
        if self.architecture != "translation":
            raise ValueError(f"data={self.config.data} is a {self.architecture} task: it has no alignments")
        return [self.problem.get_links(part, index) for index in range(self.count_examples(part))]

    def _make_whole(self, part: str) -> Batch:
        return self.make_batch(part, list(range(self.count_examples(part))))


class LexiconProblem:
    """The lexicon task: a fixed set of sentence pairs in each part."""

    architecture: Architecture = "translation"
    fresh = False  # whether each epoch draws new examples

    def __init__(self, config: SyntheticConfig) -> None:
        self.config, self.lexicon = config, Lexicon(config.data_seed)
        self.source: Vocabulary = Words(self.lexicon.source_words)
        self.target: Vocabulary = Words(self.lexicon.target_words)
        self._get_part = lru_cache(maxsize=None)(self._draw_part)

    def _draw_part(self, part: str) -> tuple[SentencePairs, list[Links]]:
        sentences = self.lexicon.draw_sentences(PARTS.index(part), self.config.count_examples(part))
        source = self.source.encode([" ".join(sentence.source) for sentence in sentences])
        target = self.target.encode([" ".join(sentence.target) for sentence in sentences])
        return SentencePairs.from_ids(source, target, begin=False), [sentence.links for sentence in sentences]

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return self._get_part(part)[0].lengths

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        return self._get_part(part)[0].make_batch(indices)

    def get_links(self, part: str, index: int) -> Links:
        return self._get_part(part)[1][index]


class SequenceProblem(ABC):
    """Sequences of one length, drawn page by page from (seed, part, page), so example k is always the same."""

    architecture: Architecture
    fresh = True

    def __init__(self, config: SyntheticConfig, types: int, widths: tuple[int, ...]) -> None:
        self.config, self.types, self.widths = config, types, widths  # of each tensor of a batch
        self.source: Vocabulary = Words([str(k + 1) for k in range(types)])
        self.target: Vocabulary = self.source
        self._get_page = lru_cache(maxsize=16)(self._draw_page)

    @abstractmethod
    def draw_rows(self, draw: np.random.Generator) -> np.ndarray:
        """Draw PAGE sequences of types counted from 0, (PAGE, length); further columns may hold labels."""

    @abstractmethod
    def make_batch(self, part: str, indices: list[int]) -> Batch: ...

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return tuple(np.full(self.config.count_examples(part), width) for width in self.widths)

    def get_links(self, part: str, index: int) -> Links:
        return frozenset()

    def _get_rows(self, part: str, indices: list[int]) -> np.ndarray:
        return np.stack([self._get_page(part, index // PAGE)[index % PAGE] for index in indices])

    def _draw_page(self, part: str, page: int) -> np.ndarray:
        return self.draw_rows(np.random.default_rng((self.config.data_seed, 2, PARTS.index(part), page)))


class CopyProblem(SequenceProblem):
    """Copy a sequence without repeated types, in its own order or in the order of a fixed permutation π."""

    architecture: Architecture = "translation"

    def __init__(self, config: SyntheticConfig) -> None:
        length = config.length
        types = {"permutation": length, "mixture": 2 * length}.get(config.data, config.types)
        super().__init__(config, types, (length + 1, length + 1))
        self.sets = 2 if config.data == "mixture" else 1
        draw = np.random.default_rng((config.data_seed, 1))
        self.order = draw.permutation(length) if config.data == "permutation-function" else np.arange(length)  # π

    def draw_rows(self, draw: np.random.Generator) -> np.ndarray:
        each = self.types // self.sets
        shuffled = np.argsort(draw.random((PAGE, each)), axis=1)[:, : self.config.length]
        return shuffled + each * draw.integers(self.sets, size=(PAGE, 1))

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        x = torch.from_numpy(self._get_rows(part, indices) + FIRST)  # (b,length)
        y = x[:, torch.from_numpy(self.order)]
        begin, end = torch.full((len(x), 1), BOS), torch.full((len(x), 1), EOS)
        targets = torch.cat([y, end], dim=1)
        return Batch((torch.cat([x, end], 1), torch.cat([begin, y], 1)), targets, targets.numel(), list(indices))

    def get_links(self, part: str, index: int) -> Links:
        return frozenset((int(source), target) for target, source in enumerate(self.order))


class KeywordProblem(SequenceProblem):
    """Decide whether type 1 is in the sequence. It occurs once in half of the examples, and never in the others."""

    architecture: Architecture = "classification"

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config, config.length, (config.length,))

    def draw_rows(self, draw: np.random.Generator) -> np.ndarray:
        x = draw.integers(1, self.types, size=(PAGE, self.config.length))
        positive = draw.permutation(PAGE) % 2
        x[positive == 1, draw.integers(self.config.length, size=PAGE)[positive == 1]] = 0
        return np.concatenate([x, positive[:, None]], axis=1)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        rows = torch.from_numpy(self._get_rows(part, indices))
        return Batch((rows[:, :-1] + FIRST,), rows[:, -1], len(rows), list(indices))


class RecallProblem(SequenceProblem):
    """Multi-query associative recall: P keys with their values, then keys again, each of which asks for its value.

    The first half of the types are keys, the second half are values; a sequence repeats neither. Query q stands at
    2P + 2n_q, where the places n_q are drawn without replacement with weights (n + 1)^(power − 1). All else is random
    types. Only the tokens after the queries are targets, and they are not in the input.
    """

    architecture: Architecture = "language"

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config, config.types, (config.length,))

    def draw_rows(self, draw: np.random.Generator) -> np.ndarray:
        pairs, asked, length, half = self.config.pairs, self.config.query_count, self.config.length, self.types // 2
        keys = np.argsort(draw.random((PAGE, half)), axis=1)[:, :pairs]
        values = half + np.argsort(draw.random((PAGE, self.types - half)), axis=1)[:, :pairs]
        tokens, answers = draw.integers(self.types, size=(PAGE, length)), np.full((PAGE, length), -1)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        weights = np.arange(1, (length - 2 * pairs) // 2 + 1) ** (self.config.power - 1)
        late = draw.exponential(size=(PAGE, len(weights))) / weights  # the smallest are a draw by the weights
        places = 2 * pairs + 2 * np.argsort(late, axis=1)[:, :asked]
        chosen = np.argsort(draw.random((PAGE, pairs)), axis=1)[:, :asked]
        np.put_along_axis(tokens, places, np.take_along_axis(keys, chosen, 1), 1)
        np.put_along_axis(answers, places, np.take_along_axis(values, chosen, 1), 1)
        return np.concatenate([tokens, answers], axis=1)

    def make_batch(self, part: str, indices: list[int]) -> Batch:
        tokens, answers = torch.from_numpy(self._get_rows(part, indices)).chunk(2, dim=1)
        targets = torch.where(answers < 0, PAD, answers + FIRST)
        return Batch((tokens + FIRST,), targets, len(indices) * self.config.query_count, list(indices))


PROBLEMS: dict[str, Callable[[SyntheticConfig], LexiconProblem | SequenceProblem]] = {
    "lexicon": LexiconProblem, "permutation": CopyProblem, "subset": CopyProblem, "mixture": CopyProblem,
    "permutation-function": CopyProblem, "keyword": KeywordProblem, "mqar": RecallProblem,
}  # fmt: skip
