"""Readers of sentence pairs for attnlab runs and Hugging Face models, which know the word of each token.

Each word is tokenized on its own, so that every token belongs to one word. SentencePiece never joins pieces across
white space, so tokenizing the whole line would give the same tokens.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.aligning.choice import SINGLE
from attnlab.aligning.extraction import (
    MapKey,
    PairBatch,
    PairReader,
    Sentences,
    number_pieces,
    pad_rows,
)
from attnlab.aligning.model_inputs import ModelLoader, build_inputs, convert_linears, is_decoder_only
from attnlab.aligning.word_tokens import EncodedLines, Languages, WordTokenizer, number_specials
from attnlab.analysis.alignment import NOWHERE
from attnlab.huggingface.cross_pass import CrossPlan, probe_positions, read_cross_layers, weigh_gradients
from attnlab.huggingface.recorder import record
from attnlab.recording import probe
from attnlab.records.record import Layer
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
    sides = zip(get_vocabularies(task), (source, target), strict=True)
    pieces = [encode_run_words(vocabulary, sentences, lower) for vocabulary, sentences in sides]
    model, device = run.model, next(run.model.parameters()).device

    def read_batch(numbers: Sequence[int], wanted: AbstractSet[MapKey]) -> PairBatch:
        x, y = ([side[number] for number in numbers] for side in pieces)
        words = max(len(sentence) for sentence in x)
        keys = [[words + 1] * begin + number_pieces(sentence) + [words] for sentence in x]
        ids = [[BOS] * begin + _flatten(sentence) + [EOS] for sentence in x]
        inputs = pad_rows(ids, PAD).to(device), pad_rows([[BOS, *_flatten(sentence)] for sentence in y], PAD).to(device)
        recorded = record(model, inputs)
        labels = pad_rows([[*number_pieces(sentence), NOWHERE] for sentence in y]).to(device)
        targets = pad_rows([[*_flatten(sentence), EOS] for sentence in y], PAD).to(device)
        extra: dict[str, Tensor] = {}
        if any(by == "probe" for by, *_ in wanted):
            extra["probe"] = probe.beta(model, inputs, targets).exp()
        if any(by == "gradient" for by, *_ in wanted):
            extra["gradient"] = probe.saliency(model, inputs, targets).abs()
        masks = recorded.masks
        real = (masks["target"].unsqueeze(2) & masks["source"].unsqueeze(1)).to(device)
        layers = {layer.index: layer for layer in recorded.kind("cross")}
        return PairBatch(layers, labels, pad_rows(keys).to(device), words, real, extra)

    lengths = [np.array([sum(map(len, sentence)) + extra for sentence in side], dtype=np.int64)
               for side, extra in zip(pieces, (1 + begin, 1), strict=True)]  # fmt: skip
    config: Any = run.recipe.model
    limit = config.max_length if getattr(config, "positions", "") == "learned" else None
    readable, left_out = find_readable(source, target, lengths, limit)
    size = _find_size(read_batch, readable, lengths)
    tokens = choose_batch_tokens(device)
    return PairReader(lengths[0], lengths[1], [*map(len, target)], readable, size, read_batch, left_out, tokens)


def open_pretrained_reader(
    name: str, source: Sentences, target: Sentences, *, device: torch.device, allow_code: bool = False
) -> PairReader:
    """Open sentence pairs for a Hugging Face encoder-decoder model."""
    return PretrainedTranslator.open(name, ModelLoader(device, allow_code)).open_pairs(source, target)


@dataclass(frozen=True, eq=False)
class PretrainedTranslator:
    """A Hugging Face encoder-decoder that reads the pairs of one direction."""

    name: str
    model: Any
    tokenizers: tuple[WordTokenizer, WordTokenizer]  # of the source and the target
    plan: CrossPlan | None  # None for an adapted model, of which a full Record is made
    heads: int

    @classmethod
    def open(cls, name: str, loader: ModelLoader, languages: Languages | None = None) -> "PretrainedTranslator":
        """Load a model and prove that it can be recorded. Raises ValueError if it has no cross attention."""
        from attnlab.huggingface import dispatch, pretrained

        model = loader.load(name)
        if not model.config.is_encoder_decoder:
            what = f"{name} is a {type(model).__name__}, not an encoder-decoder: it has no cross attention to align by"
            advice = "pass a translator" if is_decoder_only(model) else "for a multilingual encoder pass --by encoder"
            raise ValueError(f"{what}; {advice}")
        tokenizer = pretrained.open_tokenizer(name)
        languages = languages or Languages()
        sides = tuple(WordTokenizer.open(tokenizer, argument, name, languages) for argument in SIDES)
        proved = pretrained.record(model, PROOF, target=PROOF, tokenizer=tokenizer)
        plan = CrossPlan.from_record(model, proved)
        heads = proved.kind("cross")[0].context.shape[1]
        convert_linears(model, loader.precision)
        return cls(name, model, sides, None if dispatch.find_adaptation(model) else plan, heads)  # type: ignore[arg-type]

    def open_pairs(self, source: Sentences, target: Sentences) -> PairReader:
        from attnlab.huggingface import inputs

        encoded = [side.encode(text) for side, text in zip(self.tokenizers, (source, target), strict=True)]
        lengths = [np.array([*map(len, side.ids)], dtype=np.int64) for side in encoded]
        readable, left_out = find_readable(source, target, lengths, inputs.count_positions(self.model))
        layers = len(self.plan) if self.plan else _count_layers(self.model)

        def read_batch(numbers: Sequence[int], wanted: AbstractSet[MapKey]) -> PairBatch:
            return self._read_attention([encoded[0].pick(numbers), encoded[1].pick(numbers)], wanted, layers)

        size, tokens = (layers, self.heads), choose_batch_tokens(self.model.device)
        return PairReader(lengths[0], lengths[1], [*map(len, target)], readable, size, read_batch, left_out, tokens)

    def _read_attention(self, encoded: Sequence[EncodedLines], wanted: AbstractSet[MapKey], layers: int) -> PairBatch:
        from attnlab.huggingface import inputs, pretrained

        model, device = self.model, self.model.device
        batch, labels = build_inputs(model, encoded[0].ids, encoded[1].ids, self.tokenizers[0].padding)
        words = 1 + max(max(row) for row in encoded[0].owners)
        keys = pad_rows([number_specials(row, words) for row in encoded[0].owners]).to(device)
        real = batch["decoder_attention_mask"].bool().unsqueeze(2) & batch["attention_mask"].bool().unsqueeze(1)
        extra: dict[str, Tensor] = {}
        if any(by == "gradient" for by, *_ in wanted):
            extra["gradient"] = weigh_gradients(model, batch, labels).abs()
        if any(by == "probe" for by, *_ in wanted):
            plan = self.plan or CrossPlan.from_record(model, pretrained.record(model, batch))
            extra["probe"] = probe_positions(model, plan, batch, labels).exp()
        inputs.check_batch(model, batch)
        found: dict[int, Layer] = {}
        if places := _list_layers(wanted, layers):
            if self.plan is None:
                recorded = pretrained.record(model, batch)
                found = {layer.index: layer for layer in recorded.kind("cross")}
            else:
                found = read_cross_layers(model, self.plan, batch, places)
        owners = pad_rows(encoded[1].owners).to(device)
        return PairBatch(found, owners, keys, words, real, extra)


SIDES = ("text", "text_target")  # arguments of tokenizers for source and target
PROOF = ["The cat sat on the mat.", "Nobody saw it."]
MOST_CELLS = 4_000_000  # source tokens times target tokens of a pair


def choose_batch_tokens(device: torch.device) -> int:
    """Return the number of tokens in a batch, padding included: what a GPU needs to be busy, or a CPU cache holds."""
    return 32_768 if device.type == "cuda" else 512


def _list_layers(wanted: AbstractSet[MapKey], layers: int) -> list[int]:
    """Return the layers whose maps are wanted; all if a mean is."""
    places = {where for by, where, _ in wanted if by not in SINGLE}
    return list(range(layers)) if "mean" in places else sorted(place for place in places if isinstance(place, int))


def _count_layers(model: Any) -> int:
    return int(getattr(model.config, "decoder_layers", None) or model.config.num_decoder_layers)


def _find_size(
    read_batch: Callable[[Sequence[int], AbstractSet[MapKey]], PairBatch],
    readable: np.ndarray,
    lengths: Sequence[np.ndarray],
) -> tuple[int, int]:
    """Return the numbers of cross-attention layers and heads, from the shortest pair; (0, 0) if none is readable."""
    if not readable.any():
        return 0, 0
    total = np.where(readable, lengths[0] + lengths[1], np.iinfo(np.int64).max)
    layers = read_batch([int(total.argmin())], set()).layers
    if not layers:
        raise ValueError("this model has no cross attention, so it cannot align words")
    return len(layers), next(iter(layers.values())).context.shape[1]


def find_readable(
    source: Sentences, target: Sentences, lengths: Sequence[np.ndarray], limit: int | None
) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Return which pairs a model can read, (pairs,) bool, and the indices of those that it cannot read, by reason."""
    full = np.array([bool(len(x) and len(y)) for x, y in zip(source, target, strict=True)], dtype=bool)
    short = np.maximum(*lengths) <= (limit or np.iinfo(np.int64).max)
    small = lengths[0] * lengths[1] <= MOST_CELLS
    left_out = {
        f"longer than the model's {limit} positions": full & ~short,
        f"with more than {MOST_CELLS:,} cells of tokens; split the lines": full & short & ~small,
    }
    return full & short & small, {why: np.flatnonzero(pairs).tolist() for why, pairs in left_out.items() if pairs.any()}


def get_vocabularies(task: Task) -> tuple[Vocabulary, Vocabulary]:
    if isinstance(task, Synthetic):
        return task.problem.source, task.problem.target
    assert isinstance(task, Translation)
    return task.source_vocabulary, task.target_vocabulary


def encode_run_words(vocabulary: Vocabulary, sentences: Sentences, lower: bool) -> list[list[Sequence[int]]]:
    """Return the ids of every word of every sentence. Each distinct word is encoded once."""
    types = list(dict.fromkeys(word.lower() if lower else word for words in sentences for word in words))
    ids = dict(zip(types, vocabulary.encode(types), strict=True))
    return [[ids[word.lower() if lower else word] for word in words] for words in sentences]


def _flatten(sentence: Sequence[Sequence[int]]) -> list[int]:
    return [token for pieces in sentence for token in pieces]
