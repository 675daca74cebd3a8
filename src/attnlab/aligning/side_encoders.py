"""Encoders of one side of a text, which return a vector for each word: of attnlab runs and Hugging Face models."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnlab.aligning.extraction import Sentences, number_pieces, pad_rows
from attnlab.aligning.model_inputs import ModelLoader
from attnlab.aligning.pair_readers import encode_run_words, get_vocabularies
from attnlab.aligning.views import Encoder, average_pieces
from attnlab.aligning.word_tokens import EncodedLines, Languages
from attnlab.analysis.alignment import NOWHERE
from attnlab.models.transformer import Translator
from attnlab.tasks.task import BOS, EOS, PAD
from attnlab.training.run_list import find_folder
from attnlab.training.runs import Run, open_run


class SideEncoder(ABC):
    """An encoder that reads one language."""

    limit: int | None  # number of positions
    device: torch.device

    @abstractmethod
    def encode(self, sentences: Sentences) -> EncodedLines:
        """Return the tokens of each line and their words."""

    @abstractmethod
    def read_words(self, lines: EncodedLines) -> Tensor:
        """Return the vector of each word, (b,words,e), in float32."""


class PretrainedSide(SideEncoder):
    """The last layer of a Hugging Face encoder, which reads a line as its source or target language."""

    def __init__(self, encoder: Encoder, side: int) -> None:
        from attnlab.huggingface import inputs

        self.encoder, self.side, self.device = encoder, side, encoder.model.device
        self.limit = inputs.count_positions(encoder.model)

    def encode(self, sentences: Sentences) -> EncodedLines:
        return self.encoder.tokenizers[self.side].encode(sentences)

    def read_words(self, lines: EncodedLines) -> Tensor:
        return self.encoder.encode_words(self.side, lines.ids, lines.owners, [self.encoder.layers])[0]


class RunSide(SideEncoder):
    """The encoder of a Transformer that attnlab trained to translate from this language."""

    def __init__(self, run: Run) -> None:
        if not isinstance(run.model, Translator):
            what = f"{run.folder.path} is a {type(run.model).__name__}"
            raise ValueError(f"{what}; an aligner is trained on the encoder of a Transformer that translates")
        self.run, self.device = run, next(run.model.parameters()).device
        config = run.recipe.model
        self.limit = config.max_length if getattr(config, "positions", "") == "learned" else None  # type: ignore

    def encode(self, sentences: Sentences) -> EncodedLines:
        task: Any = self.run.task
        begin, lower = (getattr(task.config, name, False) for name in ("source_begin", "lower"))
        pieces = encode_run_words(get_vocabularies(task)[0], sentences, lower)
        ids = [[BOS] * begin + [token for word in line for token in word] + [EOS] if line else [] for line in pieces]
        owners = [[NOWHERE] * begin + number_pieces(line) + [NOWHERE] if line else [] for line in pieces]
        return EncodedLines(ids, owners)

    @torch.no_grad()
    def read_words(self, lines: EncodedLines) -> Tensor:
        ids = pad_rows(lines.ids, PAD).to(self.device)
        states = self.run.model.encoder(ids, mask=(ids != PAD)[:, None, None])  # type: ignore[operator]
        return average_pieces(states.float(), pad_rows(lines.owners).to(self.device))


def open_sides(models: list[str], loader: ModelLoader, languages: Languages) -> list[SideEncoder]:
    """Open the encoders of both languages.

    models   two translators, of which each reads its own source language; or one encoder that reads both
    """
    if len(models) == 1 and find_folder(models[0], "model.json"):
        raise ValueError(f"{models[0]} is a run and encodes one language: pass the run of the other with --reverse")
    if len(models) == 1:
        encoder = Encoder.open(models[0], loader, languages)
        return [PretrainedSide(encoder, side) for side in (0, 1)]
    sides: list[SideEncoder] = []
    for k, name in enumerate(models):
        if find_folder(name, "model.json"):
            sides.append(RunSide(open_run(name, device=str(loader.device), allow_code=loader.allow_code)))
        else:
            own = languages if k == 0 else languages.reverse("")
            sides.append(PretrainedSide(Encoder.open(name, loader, own), 0))
    return sides
