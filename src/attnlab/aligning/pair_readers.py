"""How a model of ours, or of Hugging Face, reads the words of a sentence pair: which of its tokens are of which word.

A word is cut into pieces by itself, so that every piece is of one word; SentencePiece never joins pieces over white
space, so the line as a whole would be cut alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.aligning.extraction import PairReader, Seen, Sentences, numbered, padded
from attnlab.analysis.alignment import NOWHERE
from attnlab.analysis.words import number_words as numbered_by_marks
from attnlab.huggingface.recorder import record
from attnlab.recording import probe
from attnlab.tasks.synthetic import Synthetic
from attnlab.tasks.task import BOS, EOS, PAD, Task
from attnlab.tasks.translation import Translation
from attnlab.tasks.vocabulary import Vocabulary
from attnlab.training.runs import Run


def run_reader(run: Run, source: Sentences, target: Sentences) -> PairReader:
    """Sentence pairs as a translation run of ours reads them: as they stand, or in lower case if it was trained so."""
    task: Any = run.task
    if task.architecture != "translation":
        raise ValueError(f"{run.folder.path} is a {task.architecture} model: only a translator aligns words")
    begin, lower = (getattr(task.config, name, False) for name in ("source_begin", "lower"))
    sides = zip(_vocabularies(task), (source, target), strict=True)
    pieces = [_pieces(vocabulary, sentences, lower) for vocabulary, sentences in sides]
    model, device = run.model, next(run.model.parameters()).device

    def see(numbers: Sequence[int], probing: bool) -> Seen:
        x, y = ([side[number] for number in numbers] for side in pieces)
        words = max(len(sentence) for sentence in x)
        keys = [[words + 1] * begin + numbered(sentence) + [words] for sentence in x]
        ids = [[BOS] * begin + _flat(sentence) + [EOS] for sentence in x]
        inputs = padded(ids, PAD).to(device), padded([[BOS, *_flat(sentence)] for sentence in y], PAD).to(device)
        found = record(model, inputs)
        labels = padded([[*numbered(sentence), NOWHERE] for sentence in y]).to(device)
        beta: Tensor | None = None
        if probing:
            targets = padded([[*_flat(sentence), EOS] for sentence in y], PAD).to(device)
            beta = probe.beta(model, inputs, targets).exp()
        return Seen(found, labels, padded(keys).to(device), words, beta)

    lengths = [np.array([sum(map(len, sentence)) + extra for sentence in side], dtype=np.int64)
               for side, extra in zip(pieces, (1 + begin, 1), strict=True)]  # fmt: skip
    config: Any = run.recipe.model
    most = config.max_length if getattr(config, "positions", "") == "learned" else None
    return _reader(source, target, lengths, most, see)


def pretrained_reader(name: str, source: Sentences, target: Sentences, *, device: torch.device) -> PairReader:
    """Sentence pairs as a Hugging Face encoder-decoder reads them."""
    from attnlab.huggingface import inputs, pretrained

    how: dict[str, Any] = {"trust_remote_code": False, "device": device, "dtype": None}
    model = pretrained.open_model(name, allow_pickle=False, allow_code=False, **how)
    if not model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise ValueError(f"{name} is a {kind}, no encoder-decoder: it has no attention from a target to a source")
    tokenizer = pretrained.open_tokenizer(name, False)
    lines = [[" ".join(words) for words in side] for side in (source, target)]
    owned = [owners(tokenizer, side, argument, name) for side, argument in zip((source, target), SIDES, strict=True)]

    def see(numbers: Sequence[int], probing: bool) -> Seen:
        if probing:
            raise ValueError(f"{name} is a Hugging Face model: probes are of runs of attnlab; say --by weight or norm")
        texts, targets = ([side[number] for number in numbers] for side in lines)
        found = pretrained.record(model, texts, target=targets, tokenizer=tokenizer)
        words = max(len(source[number]) for number in numbers)
        keys = [_specials_from(owned[0][number], words) for number in numbers]
        labels = padded([owned[1][number] for number in numbers])
        return Seen(found, labels.to(device), padded(keys).to(device), words)

    lengths = [np.array([len(of) for of in side], dtype=np.int64) for side in owned]
    return _reader(source, target, lengths, inputs.count_positions(model), see)


SIDES = ("text", "text_target")  # what tokenizers call source and target


def _reader(
    source: Sentences,
    target: Sentences,
    lengths: Sequence[np.ndarray],
    most: int | None,
    see: Callable[[Sequence[int], bool], Seen],
) -> PairReader:
    full = np.array([bool(len(x) and len(y)) for x, y in zip(source, target, strict=True)], dtype=bool)
    short = np.maximum(*lengths) <= (most or np.iinfo(np.int64).max)
    notes = []
    if number := int((full & ~short).sum()):
        notes.append(f"{number:,} pairs are longer than the model's {most} positions: nothing is linked in them")
    return PairReader(lengths[0], lengths[1], [*map(len, target)], full & short, see, notes)


def _vocabularies(task: Task) -> tuple[Vocabulary, Vocabulary]:
    if isinstance(task, Synthetic):
        return task.problem.source, task.problem.target
    assert isinstance(task, Translation)
    return task.source_vocabulary, task.target_vocabulary


def _pieces(vocabulary: Vocabulary, sentences: Sentences, lower: bool) -> list[list[Sequence[int]]]:
    """The ids of every word of every sentence; each type is looked up once."""
    types = list(dict.fromkeys(word.lower() if lower else word for words in sentences for word in words))
    ids = dict(zip(types, vocabulary.encode(types), strict=True))
    return [[ids[word.lower() if lower else word] for word in words] for words in sentences]


def _flat(sentence: Sequence[Sequence[int]]) -> list[int]:
    return [token for pieces in sentence for token in pieces]


def owners(tokenizer: Any, sentences: Sentences, argument: str, name: str) -> list[list[int]]:
    """The word that each token of each line is of, NOWHERE for special tokens."""
    return [_owners_of(tokenizer, list(words), argument, name, line) for line, words in enumerate(sentences, start=1)]


def _owners_of(tokenizer: Any, words: list[str], argument: str, name: str, line: int) -> list[int]:
    if not words:
        return []
    text = " ".join(words)
    if tokenizer.is_fast:
        made = tokenizer(**{argument: text}, return_offsets_mapping=True, return_special_tokens_mask=True)
        of_character = _word_of_character(words)
        return [
            NOWHERE if special else of_character[start]
            for (start, _), special in zip(made["offset_mapping"], made["special_tokens_mask"], strict=True)
        ]
    ids = tokenizer(**{argument: text})["input_ids"]
    specials = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    own = [token for token in ids if token not in specials]
    of_word = numbered(tokenizer(**{argument: words}, add_special_tokens=False)["input_ids"])
    if len(of_word) != len(own):
        of_word = numbered_by_marks(tokenizer.convert_ids_to_tokens(own))
        if of_word[-1:] != [len(words) - 1]:
            raise ValueError(f"line {line}: it cannot be told which tokens of {name} are of which word of {text!r}")
    remaining = iter(of_word)
    return [NOWHERE if token in specials else next(remaining) for token in ids]


def _word_of_character(words: Sequence[str]) -> list[int]:
    """The word of each character of the words joined by spaces; a space is of the word after it."""
    return [number for number, word in enumerate(words) for _ in range(len(word) + (number > 0))]


def _specials_from(owners: Sequence[int], first: int) -> list[int]:
    """The same with special tokens numbered one after the other from first on."""
    specials = iter(range(first, first + len(owners)))
    return [next(specials) if owner == NOWHERE else owner for owner in owners]
