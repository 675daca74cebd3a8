"""Readers of sentence pairs for attnlab runs and Hugging Face models, which know the word of each token.

Each word is tokenized on its own, so that every token belongs to one word. SentencePiece never joins pieces across
white space, so tokenizing the whole line would give the same tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.aligning.extraction import PairBatch, PairReader, Sentences, number_pieces, pad_rows
from attnlab.analysis.alignment import NOWHERE
from attnlab.analysis.words import number_words as numbered_by_marks
from attnlab.huggingface.recorder import record
from attnlab.recording import probe
from attnlab.tasks.synthetic import Synthetic
from attnlab.tasks.task import BOS, EOS, PAD, Task
from attnlab.tasks.translation import Translation
from attnlab.tasks.vocabulary import Vocabulary
from attnlab.training.runs import Run


def open_run_reader(run: Run, source: Sentences, target: Sentences) -> PairReader:
    """Open sentence pairs for an attnlab translation run. Words are lowercased if the run was trained so."""
    task: Any = run.task
    if task.architecture != "translation":
        raise ValueError(f"{run.folder.path} is a {task.architecture} model; only translation models align words")
    begin, lower = (getattr(task.config, name, False) for name in ("source_begin", "lower"))
    sides = zip(_get_vocabularies(task), (source, target), strict=True)
    pieces = [_encode_words(vocabulary, sentences, lower) for vocabulary, sentences in sides]
    model, device = run.model, next(run.model.parameters()).device

    def read_batch(numbers: Sequence[int], with_probe: bool) -> PairBatch:
        x, y = ([side[number] for number in numbers] for side in pieces)
        words = max(len(sentence) for sentence in x)
        keys = [[words + 1] * begin + number_pieces(sentence) + [words] for sentence in x]
        ids = [[BOS] * begin + _flatten(sentence) + [EOS] for sentence in x]
        inputs = pad_rows(ids, PAD).to(device), pad_rows([[BOS, *_flatten(sentence)] for sentence in y], PAD).to(device)
        recorded = record(model, inputs)
        labels = pad_rows([[*number_pieces(sentence), NOWHERE] for sentence in y]).to(device)
        beta: Tensor | None = None
        if with_probe:
            targets = pad_rows([[*_flatten(sentence), EOS] for sentence in y], PAD).to(device)
            beta = probe.beta(model, inputs, targets).exp()
        return PairBatch(recorded, labels, pad_rows(keys).to(device), words, beta)

    lengths = [np.array([sum(map(len, sentence)) + extra for sentence in side], dtype=np.int64)
               for side, extra in zip(pieces, (1 + begin, 1), strict=True)]  # fmt: skip
    config: Any = run.recipe.model
    limit = config.max_length if getattr(config, "positions", "") == "learned" else None
    return _build_reader(source, target, lengths, limit, read_batch)


def open_pretrained_reader(
    name: str, source: Sentences, target: Sentences, *, device: torch.device, allow_code: bool = False
) -> PairReader:
    """Open sentence pairs for a Hugging Face encoder-decoder model."""
    from attnlab.huggingface import inputs, pretrained

    model = pretrained.open_model(name, device=device, allow_code=allow_code)
    if not model.config.is_encoder_decoder:
        raise ValueError(f"{name} is a {type(model).__name__}; only encoder-decoder models align words")
    tokenizer = pretrained.open_tokenizer(name)
    lines = [[" ".join(words) for words in side] for side in (source, target)]
    sides = zip((source, target), SIDES, strict=True)
    owned = [find_owners(tokenizer, sentences, argument, name) for sentences, argument in sides]

    def read_batch(numbers: Sequence[int], with_probe: bool) -> PairBatch:
        if with_probe:
            raise ValueError(f"{name} is a Hugging Face model and has no probes; use --by weight or --by norm")
        texts, targets = ([side[number] for number in numbers] for side in lines)
        recorded = pretrained.record(model, texts, target=targets, tokenizer=tokenizer)
        words = max(len(source[number]) for number in numbers)
        keys = [_number_specials(owned[0][number], words) for number in numbers]
        labels = pad_rows([owned[1][number] for number in numbers])
        return PairBatch(recorded, labels.to(device), pad_rows(keys).to(device), words)

    lengths = [np.array([*map(len, side)], dtype=np.int64) for side in owned]
    return _build_reader(source, target, lengths, inputs.count_positions(model), read_batch)


SIDES = ("text", "text_target")  # arguments of tokenizers for source and target


def _build_reader(
    source: Sentences,
    target: Sentences,
    lengths: Sequence[np.ndarray],
    limit: int | None,
    read_batch: Callable[[Sequence[int], bool], PairBatch],
) -> PairReader:
    full = np.array([bool(len(x) and len(y)) for x, y in zip(source, target, strict=True)], dtype=bool)
    short = np.maximum(*lengths) <= (limit or np.iinfo(np.int64).max)
    notes = []
    if number := int((full & ~short).sum()):
        notes.append(f"{number:,} pairs are longer than the model's {limit} positions and get no links")
    return PairReader(lengths[0], lengths[1], [*map(len, target)], full & short, read_batch, notes)


def _get_vocabularies(task: Task) -> tuple[Vocabulary, Vocabulary]:
    if isinstance(task, Synthetic):
        return task.problem.source, task.problem.target
    assert isinstance(task, Translation)
    return task.source_vocabulary, task.target_vocabulary


def _encode_words(vocabulary: Vocabulary, sentences: Sentences, lower: bool) -> list[list[Sequence[int]]]:
    """Return the ids of every word of every sentence. Each distinct word is encoded once."""
    types = list(dict.fromkeys(word.lower() if lower else word for words in sentences for word in words))
    ids = dict(zip(types, vocabulary.encode(types), strict=True))
    return [[ids[word.lower() if lower else word] for word in words] for words in sentences]


def _flatten(sentence: Sequence[Sequence[int]]) -> list[int]:
    return [token for pieces in sentence for token in pieces]


def find_owners(tokenizer: Any, sentences: Sentences, argument: str, name: str) -> list[list[int]]:
    """Return the word that each token of each line belongs to, NOWHERE for special tokens."""
    lines = enumerate(sentences, start=1)
    return [_find_line_owners(tokenizer, list(words), argument, name, line) for line, words in lines]


def _find_line_owners(tokenizer: Any, words: list[str], argument: str, name: str, line: int) -> list[int]:
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
    of_word = number_pieces(tokenizer(**{argument: words}, add_special_tokens=False)["input_ids"])
    if len(of_word) != len(own):
        of_word = numbered_by_marks(tokenizer.convert_ids_to_tokens(own))
        if of_word[-1:] != [len(words) - 1]:
            raise ValueError(f"line {line}: cannot match the tokens of {name} to the words of {text!r}")
    remaining = iter(of_word)
    return [NOWHERE if token in specials else next(remaining) for token in ids]


def _word_of_character(words: Sequence[str]) -> list[int]:
    """Return the word of each character in the words joined by spaces. A space belongs to the word after it."""
    return [number for number, word in enumerate(words) for _ in range(len(word) + (number > 0))]


def _number_specials(owners: Sequence[int], first: int) -> list[int]:
    """Replace NOWHERE, the owner of special tokens, by the numbers first, first + 1, …"""
    specials = iter(range(first, first + len(owners)))
    return [next(specials) if owner == NOWHERE else owner for owner in owners]
