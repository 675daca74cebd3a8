"""Views of sentence pairs: what one model says about the links of a batch, as soft maps F and B.

AttentionView   the cross attention of a translator, in one direction: F, or B if it translates back
EncoderView     the similarity of contextual vectors of words, both sides read by the same encoder: F and B

similarity(s,t) = cos(x_s − x̄, y_t − ȳ)      x_s the mean of the vectors of the pieces of word s, x̄ the mean over
                                             the first words of the text, which removes what all words have in common
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.aligning.choice import Candidate
from attnlab.aligning.extraction import PairReader, Sentences, pad_rows
from attnlab.aligning.model_inputs import ModelLoader, convert_linears, encode_side, is_decoder_only
from attnlab.aligning.pair_readers import choose_batch_tokens, find_readable
from attnlab.aligning.soft_maps import Pieces, fit_shape, normalise_similarity, read_soft_map
from attnlab.aligning.word_tokens import Languages, WordTokenizer
from attnlab.analysis.alignment import NOWHERE

TEMPERATURE = 0.1  # of the softmax over cosines
CENTRED = 256  # pairs from which the mean vectors are computed
Maps = list[Tensor]  # (b,S,T) each


class PairView(ABC):
    """Sentence pairs as one model reads them."""

    readable: np.ndarray
    lengths: tuple[np.ndarray, ...]
    left_out: dict[str, list[int]]  # indices of pairs that are too long, by reason
    batch_tokens: int

    @abstractmethod
    def read_maps(self, numbers: Sequence[int], sizes: tuple[int, int]) -> Maps:
        """Return the soft maps (b,S,T) of some pairs; sizes are the most source and target words among them."""


@dataclass(eq=False)
class AttentionView(PairView):
    """One direction of a translator."""

    reader: PairReader
    candidate: Candidate
    pieces: Pieces = "mean"
    backward: bool = False
    null: bool = False  # leave a word without a link if a special token has its largest value

    def __post_init__(self) -> None:
        self.readable, self.left_out = self.reader.readable, self.reader.left_out
        self.lengths = (self.reader.source_lengths, self.reader.target_lengths)
        self.batch_tokens = self.reader.batch_tokens

    def read_maps(self, numbers: Sequence[int], sizes: tuple[int, int]) -> Maps:
        key = self.candidate.by, self.candidate.layer, self.candidate.head
        found = read_soft_map(self.reader.read_batch(numbers, {key}), self.candidate, self.pieces, null=self.null)
        return [fit_shape(found if self.backward else found.mT, *sizes)]


@dataclass(eq=False)
class Encoder:
    """A Hugging Face encoder, or the encoder of a translator, that reads both sides."""

    name: str
    model: Any
    tokenizers: tuple[WordTokenizer, WordTokenizer]
    layers: int
    centres: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer: the mean vector of each side

    @classmethod
    def open(cls, name: str, loader: ModelLoader, languages: Languages | None = None) -> "Encoder":
        """Load the encoder. Raises ValueError for a decoder-only model, whose vectors see only one side."""
        from attnlab.huggingface import pretrained

        model = loader.load(name)
        config = model.config
        if is_decoder_only(model):
            what = f"{name} is a {type(model).__name__}, a decoder-only model"
            raise ValueError(f"{what}, and cannot align words: pass a translator or an encoder")
        tokenizer = pretrained.open_tokenizer(name)
        convert_linears(model, loader.precision)
        second = "text_target" if config.is_encoder_decoder else "text"
        languages = languages or Languages()
        sides = [WordTokenizer.open(tokenizer, argument, name, languages) for argument in ("text", second)]
        count = getattr(config, "encoder_layers", None) or config.num_hidden_layers
        inside = model.get_encoder() if config.is_encoder_decoder else model.base_model
        return cls(name, inside, (sides[0], sides[1]), int(count))

    def open_pairs(self, source: Sentences, target: Sentences, layer: int, temperature: float) -> "EncoderView":
        return EncoderView(self, source, target, layer, temperature)

    @torch.no_grad()
    def encode_words(self, side: int, ids: list[list[int]], owners: list[list[int]], layers: Sequence[int]) -> Maps:
        """Return the vectors (b,words,e) of the words of one side, for each of some layers; layer 0 is the input."""
        batch = encode_side(self.model, ids, self.tokenizers[side].padding)
        last = list(layers) == [self.layers]
        output = self.model(**batch, output_hidden_states=not last, return_dict=True)
        states = [output.last_hidden_state] if last else [output.hidden_states[layer] for layer in layers]
        of_word = pad_rows(owners).to(self.model.device)
        return [average_pieces(each.float(), of_word) for each in states]


def average_pieces(states: Tensor, owners: Tensor) -> Tensor:
    """Return the mean vector of the pieces of each word, (b,words,e), from (b,n,e) and the word of each piece (b,n)."""
    words = int(owners.max()) + 1
    member = F.one_hot(owners.clamp_min(0), words).to(states) * (owners != NOWHERE).unsqueeze(-1)  # (b,n,words)
    return member.mT @ states / member.sum(1).clamp_min(1).unsqueeze(-1)


class EncoderView(PairView):
    """The similarity of the words of both sides in one layer of an encoder."""

    def __init__(
        self, encoder: Encoder, source: Sentences, target: Sentences, layer: int, temperature: float = TEMPERATURE
    ) -> None:
        from attnlab.huggingface import inputs

        self.encoder, self.layer, self.temperature = encoder, layer, temperature
        self.encoded = [side.encode(text) for side, text in zip(encoder.tokenizers, (source, target), strict=True)]
        self.lengths = tuple(np.array([*map(len, side.ids)], dtype=np.int64) for side in self.encoded)
        limit = inputs.count_positions(encoder.model)
        self.readable, self.left_out = find_readable(source, target, self.lengths, limit)
        self.batch_tokens = choose_batch_tokens(encoder.model.device)
        self.words = [np.array([*map(len, side)]) for side in (source, target)]

    def read_maps(self, numbers: Sequence[int], sizes: tuple[int, int]) -> Maps:
        return list(self.read_layers(numbers, sizes, [self.layer])[0])

    def read_layers(
        self, numbers: Sequence[int], sizes: tuple[int, int], layers: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return F and B of several layers."""
        self.find_centres(layers)
        x, y = (self._encode(side, numbers, layers) for side in (0, 1))
        live = [
            torch.as_tensor(self.words[side][list(numbers)])[:, None] > torch.arange(sizes[side]) for side in (0, 1)
        ]
        both = (live[0].unsqueeze(2) & live[1].unsqueeze(1)).to(x[0].device)
        maps = []
        for layer, left, right in zip(layers, x, y, strict=True):
            centre = self.encoder.centres[layer]
            left, right = (F.normalize(v - c, dim=-1) for v, c in ((left, centre[0]), (right, centre[1])))
            similarity = fit_shape(left @ right.mT, *sizes)
            maps.append(normalise_similarity(similarity, both, self.temperature))
        return maps

    def _encode(self, side: int, numbers: Sequence[int], layers: Sequence[int]) -> Maps:
        some = self.encoded[side].pick(numbers)
        return self.encoder.encode_words(side, some.ids, some.owners, layers)

    def find_centres(self, layers: Sequence[int]) -> None:
        """Compute the mean vector of each side from the first readable pairs of the text, once."""
        missing = [layer for layer in layers if layer not in self.encoder.centres]
        if not missing:
            return
        numbers = np.flatnonzero(self.readable)[:CENTRED].tolist()
        for layer in missing:
            self.encoder.centres[layer] = []
        for side in (0, 1):
            totals: list[Any] = [0.0] * len(missing)
            count = 0
            for start in range(0, len(numbers), 32):
                part = numbers[start : start + 32]
                for k, vectors in enumerate(self._encode(side, part, missing)):
                    totals[k] = totals[k] + vectors.sum((0, 1))
                count += int(self.words[side][part].sum())
            for layer, total in zip(missing, totals, strict=True):
                self.encoder.centres[layer].append(total / max(count, 1))
