"""A trained alignment layer on frozen encoders.

    F(s,t) = softmax over s of γ (x_s P)·(y_t Q)        B(s,t) = softmax over t of the same

x_s and y_t are the vectors of words from the encoders of two translators, each of which reads its own source language,
or from one encoder that reads both. P, Q (e,d) and γ are trained (`aligner_training`). Alignment needs no decoder.

    FOLDER/aligner.safetensors      P, Q, γ; the names of the models and how it was trained are in its header
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.aligning.extraction import Sentences
from attnlab.aligning.model_inputs import ModelLoader
from attnlab.aligning.pair_readers import choose_batch_tokens, find_readable
from attnlab.aligning.request import AlignmentRequest, Pairs
from attnlab.aligning.side_encoders import SideEncoder, open_sides
from attnlab.aligning.soft_maps import fit_shape, normalise_similarity
from attnlab.aligning.views import Maps, PairView
from attnlab.files import replace_file
from attnlab.files.user_files import parse_json
from attnlab.training.runs import choose_device

FILE = "aligner.safetensors"
FORMAT = "attnlab-aligner-1"


class AlignmentLayer(nn.Module):
    """The trained part: two projections and a scale."""

    def __init__(self, source: int, target: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(source, width, bias=False), nn.Linear(target, width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(2.3))  # γ = 10 on cosines

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits (b,S,T) of vectors x (b,S,e) and y (b,T,e)."""
        x, y = F.normalize(self.source(x), dim=-1), F.normalize(self.target(y), dim=-1)
        logits: Tensor = self.log_scale.exp() * (x @ y.mT)
        return logits


@dataclass(eq=False)
class TrainedAligner:
    """An alignment layer with its encoders."""

    models: list[str]
    sides: list[SideEncoder]
    layer: AlignmentLayer
    about: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, request: AlignmentRequest) -> "TrainedAligner":
        """Load the layer and its models. Raises ValueError for a file that is not an aligner."""
        refuse = "is of cross attention; a trained aligner has no such choice: omit it"
        request.refuse_options(("by", "layer", "head", "setting"), refuse)
        try:
            with safe_open(folder / FILE, "pt") as file:
                about = parse_json((file.metadata() or {}).get(FORMAT, "null"), f"the header of {folder / FILE}")
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        except SafetensorError as error:
            raise ValueError(f"{folder / FILE} is damaged ({error}); train the aligner again") from None
        if not isinstance(about, dict) or set(weights) != {"source.weight", "target.weight", "log_scale"}:
            raise ValueError(f"{folder / FILE} is not an aligner of attnlab align-train")
        device = choose_device(request.device)
        languages = replace(request, languages=request.languages or about.get("languages")).get_languages(0)
        sides = open_sides(about["models"], ModelLoader(device, request.allow_code, request.precision), languages)
        width = weights["source.weight"].shape[0]
        layer = AlignmentLayer(weights["source.weight"].shape[1], weights["target.weight"].shape[1], width)
        layer.load_state_dict(weights)
        return cls(about["models"], sides, layer.to(device).eval(), about)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.layer.state_dict().items()}
        with replace_file(folder / FILE) as scratch:
            save_file(weights, scratch, metadata={FORMAT: json.dumps(self.about | {"models": self.models})})

    def describe(self) -> str:
        pairs = self.about.get("pairs")
        return f"read by a trained aligner on {' and '.join(self.models)}, trained on {pairs:,} pairs"

    def open_pairs(self, pairs: Pairs) -> "TrainedView":
        return TrainedView(self, *pairs)


class TrainedView(PairView):
    """Sentence pairs as a trained aligner reads them."""

    def __init__(self, aligner: TrainedAligner, source: Sentences, target: Sentences) -> None:
        self.aligner = aligner
        self.encoded = [side.encode(text) for side, text in zip(aligner.sides, (source, target), strict=True)]
        self.lengths = tuple(np.array([*map(len, side.ids)], dtype=np.int64) for side in self.encoded)
        limits = [side.limit for side in aligner.sides if side.limit is not None]
        self.readable, self.left_out = find_readable(source, target, self.lengths, min(limits, default=None))
        self.batch_tokens = choose_batch_tokens(aligner.sides[0].device)
        self.words = [np.array([*map(len, side)]) for side in (source, target)]

    def read_vectors(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the vectors of the words of both sides."""
        x, y = (s.read_words(e.pick(numbers)) for s, e in zip(self.aligner.sides, self.encoded, strict=True))
        return x, y

    @torch.no_grad()
    def read_maps(self, numbers: Any, sizes: tuple[int, int]) -> Maps:
        logits = fit_shape(self.aligner.layer(*self.read_vectors(list(numbers))), *sizes)
        return list(normalise_similarity(logits, find_live(self.words, numbers, sizes, logits.device), 1.0))


def find_live(words: list[np.ndarray], numbers: Any, sizes: tuple[int, int], device: torch.device) -> Tensor:
    """Return which cells (b,S,T) are of two words that exist."""
    live = [torch.as_tensor(words[side][list(numbers)])[:, None] > torch.arange(sizes[side]) for side in (0, 1)]
    return (live[0].unsqueeze(2) & live[1].unsqueeze(1)).to(device)
