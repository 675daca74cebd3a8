"""Read a parallel corpus or a labelled file as ids, in a stream: memory holds its word types and one chunk of pairs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from pathlib import Path

import numpy as np

from attnlab.counting.packed_pairs import PackedPairs
from attnlab.files.user_files import apply_budget, exceed_budget
from attnlab.tasks.labelled import split_words
from attnlab.tasks.task import SPECIALS, UNK
from attnlab.tasks.text import LABELLED_FILES, get_suffix, iterate_labelled, iterate_parallel
from attnlab.tasks.vocabulary import Subwords

MOST_SAMPLED = 100_000  # lines of each side from which subwords are learnt
MOST_CELLS = 10**8  # words of a source times words of its target

IdPair = tuple[Sequence[int], Sequence[int]]
Rows = Callable[[], Iterator[tuple[str, str]]]  # reads the file again


@dataclass(frozen=True, eq=False)
class CorpusText:
    """A corpus as pairs of token ids, with the word of each id and notes on skipped pairs."""

    name: str
    pairs: PackedPairs
    source: list[str]  # by id
    target: list[str]
    labelled: bool
    notes: list[str]


def read_corpus(
    source: Path,
    target: Path | None = None,
    *,
    limit: int | None = None,
    vocabulary: int = 8000,
    units: str = "word",
    text: str = "text",
    label: str = "label",
) -> CorpusText:
    """Read two files, line k of one the translation of line k of the other; or one .csv, .tsv or .jsonl with labels."""
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2, got {limit}: the two halves of the corpus are compared")
    if vocabulary <= len(SPECIALS):
        raise ValueError(f"vocabulary must be larger than the {len(SPECIALS)} special tokens, got {vocabulary}")
    if units not in ("word", "subword"):
        raise ValueError(f"units must be word or subword, got {units!r}")
    if target is None and get_suffix(source) not in LABELLED_FILES:
        kinds = ", ".join(LABELLED_FILES)
        raise ValueError(f"{source}: a single file must be labelled text ({kinds}); give SRC and TGT for parallel text")
    name = str(source) if target is None else f"{source} and {target}"

    def read_rows() -> Iterator[tuple[str, str]]:
        rows = iterate_labelled(source, text, label) if target is None else iterate_parallel(source, target)
        return islice(rows, limit)

    pack = _pack_subwords if units == "subword" else _pack_words
    pairs, words, others = pack(read_rows, name, vocabulary, labelled=target is None)
    if target is None and len(others) < 2:
        raise ValueError(f"{source}: every example has the label {others[0]!r}; at least two labels are needed")
    return CorpusText(name, pairs, words, others, target is None, _describe_skipped(pairs))


def split_text(line: str) -> list[str]:
    """Split a line into lower-case words and single punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", line.lower())


def _pack_words(rows: Rows, name: str, size: int, *, labelled: bool) -> tuple[PackedPairs, list[str], list[str]]:
    """Pack words under the numbers of their first occurrence; then name them by frequency."""
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})  # of the source and the target words
    split = split_words if labelled else split_text
    pairs = PackedPairs(_check_sizes(((
        [numbers[0].setdefault(word, len(numbers[0])) for word in split(left)],
        [numbers[1].setdefault(word, len(numbers[1])) for word in ([right] if labelled else split_text(right))],
    ) for left, right in rows()), name))  # fmt: skip
    counts = [np.zeros(len(known), dtype=np.int64) for known in numbers]
    for chunk in pairs.chunks():
        for total, ids in zip(counts, (chunk.source, chunk.target), strict=True):
            total += np.bincount(ids, minlength=len(total))
    source, renamed = _rank_words(numbers[0], counts[0], size)
    target, renamed_target = _sort_labels(numbers[1]) if labelled else _rank_words(numbers[1], counts[1], size)
    pairs.rename(renamed, renamed_target)
    return pairs, source, target


def _rank_words(numbers: dict[str, int], counts: np.ndarray, size: int) -> tuple[list[str], np.ndarray]:
    """Return the special tokens and the most frequent words, `size` in all, and the id of each number."""
    kept = sorted(numbers, key=lambda word: (-counts[numbers[word]], word))[: size - len(SPECIALS)]
    ids = np.full(len(numbers), UNK)
    ids[[numbers[word] for word in kept]] = np.arange(len(kept)) + len(SPECIALS)
    return [*SPECIALS, *kept], ids


def _sort_labels(numbers: dict[str, int]) -> tuple[list[str], np.ndarray]:
    names, ids = sorted(numbers), np.zeros(len(numbers), dtype=np.int64)
    ids[[numbers[name] for name in names]] = np.arange(len(names))
    return names, ids


def _pack_subwords(rows: Rows, name: str, size: int, *, labelled: bool) -> tuple[PackedPairs, list[str], list[str]]:
    """Learn subwords from at most MOST_SAMPLED lines of each side, one set for both; then encode and pack."""
    step = 1 + max(sum(1 for _ in rows()) - 1, 0) // MOST_SAMPLED
    sampled = list(islice(rows(), 0, None, step))
    lines = [left for left, _ in sampled] + ([] if labelled else [right for _, right in sampled])
    vocabulary = Subwords.train(lines, size)
    pieces = vocabulary.get_tokens(range(len(vocabulary)))
    left, right = tee(rows())
    sources, targets = vocabulary.encode(line for line, _ in left), (other for _, other in right)
    if not labelled:
        return PackedPairs(_check_sizes(zip(sources, vocabulary.encode(targets), strict=True), name)), pieces, pieces
    numbers: dict[str, int] = {}
    labels = ([numbers.setdefault(label, len(numbers))] for label in targets)
    pairs = PackedPairs(zip(sources, labels, strict=True))
    names, ids = _sort_labels(numbers)
    pairs.rename(np.arange(len(pieces)), ids)
    return pairs, pieces, names


def _check_sizes(pairs: Iterable[IdPair], name: str) -> Iterator[IdPair]:
    """Yield the pairs. Raises ValueError for one whose words have too many cells to be judged."""
    limit = apply_budget(MOST_CELLS)
    for number, (x, y) in enumerate(pairs, start=1):
        if len(x) * len(y) > limit:
            problem = f"{name}: pair {number:,} has {len(x):,} times {len(y):,} words, more than {limit:,}"
            raise exceed_budget(f"{problem}; split it into sentences")
        yield x, y


def _describe_skipped(pairs: PackedPairs) -> list[str]:
    full = single = 0
    for chunk in pairs.full_chunks():
        full += len(chunk)
        starts = np.cumsum(chunk.source_lengths) - chunk.source_lengths
        extremes = [reduce(chunk.source, starts) for reduce in (np.minimum.reduceat, np.maximum.reduceat) if len(chunk)]
        single += int((extremes[0] == extremes[1]).sum()) if extremes else 0
    repeated = "have a source of one word, or of one word repeated: they offer no choice and are not judged"
    counts = {"have an empty side and are left out": len(pairs) - full, repeated: single}
    return [f"{count:,} of {len(pairs):,} pairs {what}" for what, count in counts.items() if count]
