"""One direction of a fitted statistical aligner: what `fit_hmm` returns, and a file holds.

    θ(o|i) = (n_io + a) / (n_i + a O_i)        n_io: expected links of i with o      O_i: types that occur with i

Only pairs of types with n_io ≥ SMALLEST_COUNT are stored. θ of every other pair is a / (n_i + a O_i). A source word
that was never seen has θ = 1/O for all O target types.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.fertility import MOST, tabulate_weights, weigh_links
from attnlab.counting.hmm import WIDEST, Posterior, build_moves, run_chain
from attnlab.counting.padded_blocks import PADDING, PaddedBlock, iterate_blocks
from attnlab.counting.type_pairs import TypePairs
from attnlab.files import write_bytes
from attnlab.files.user_files import parse_json

FORMAT = "attnlab-hmm-1"
SMALLEST_COUNT = 1e-3


@dataclass(frozen=True, eq=False)
class HmmModel:
    """p(target|source) by a hidden Markov model; with fertilities if `fertility` has rows."""

    keys: np.ndarray  # (pairs,) int64: source type · target types + target type
    counts: np.ndarray  # (pairs,) float32: n_io
    totals: np.ndarray  # (I,) float32: n_i + a O_i
    null_words: np.ndarray  # (O,) float32: θ(o|NULL)
    jumps: np.ndarray  # (2·WIDEST+1,) float32: j
    fertility: np.ndarray  # (I, MOST+1) float32: F, or (0, MOST+1)
    prior: float  # a
    null: float  # p0

    @property
    def kind(self) -> str:
        return "fertility" if len(self.fertility) else "hmm"

    @cached_property
    def weights(self) -> np.ndarray | None:
        """w of the fertilities by type and μ, or None."""
        return tabulate_weights(self.fertility) if len(self.fertility) else None

    def iterate_blocks(self, corpus: WordPairs) -> Iterator[PaddedBlock]:
        """Yield sentence pairs in blocks whose cells are numbered by this model's pairs of types."""
        index = TypePairs(len(self.null_words))
        order = np.zeros(len(self.keys) + 1, dtype=np.int32)  # number in the index -> number in `keys`, from 1
        order[index.add(self.keys)] = np.arange(1, len(self.keys) + 1)
        return iterate_blocks(corpus, lambda keys: order[index.find(keys)], index.columns)

    def iterate_posteriors(self, corpus: WordPairs) -> Iterator[tuple[PaddedBlock, Posterior]]:
        """Yield sentence pairs in blocks with the posterior of their links."""
        counts = np.concatenate([np.zeros(1, dtype=np.float32), self.counts])
        for block in self.iterate_blocks(corpus):
            emission = counts.take(block.cells)
            emission += np.float32(self.prior)
            emission[:, :, 0] = 0.0
            inside = (block.target != PADDING).T[:, :, None]
            emission[:, :, 1:] *= np.where(block.source == PADDING, 0.0, 1.0 / self.totals[block.source])
            emission *= inside
            null = weigh_null(self.null_words, block.target, self.null)
            yield block, find_posterior(emission, null, self.jumps, self.null, self.weights, block.source)

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("prior", "null")}
        named = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        write_bytes(path, save(named, metadata={FORMAT: json.dumps({"prior": self.prior, "null": self.null})}))

    @classmethod
    def load(cls, path: Path) -> "HmmModel":
        """Read a file of `save`. Raises FileNotFoundError or, for another or damaged file, ValueError."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys() if FORMAT in about}  # noqa: SIM118
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a safetensors file or is damaged: {error}") from None
        if not arrays:
            raise ValueError(f"{path} is a safetensors file, but not a fitted aligner ({FORMAT})")
        try:
            model = cls(**arrays, **parse_json(about[FORMAT], f"the metadata of {path}"))
        except TypeError as error:
            raise ValueError(f"{path} is a damaged aligner ({error}); delete it to fit it again") from None
        if len(model.jumps) != 2 * WIDEST + 1 or model.fertility.shape[1:] != (MOST + 1,):
            raise ValueError(f"{path} is a damaged aligner (unexpected shapes); delete it to fit it again")
        return model


def weigh_null(words: np.ndarray, target: np.ndarray, null: float) -> np.ndarray:
    """Return p0 θ(y_t|NULL) of targets (n,T), (T,n); 1 at padding."""
    return np.ascontiguousarray(np.where(target == PADDING, 1.0, null * words[target]).T, dtype=np.float32)


def find_posterior(
    emission: np.ndarray, null: np.ndarray, jumps: np.ndarray, p0: float, weights: np.ndarray | None, source: np.ndarray
) -> Posterior:
    """Run the chain, and with fertilities (their `weights`) run it a second time with w of the first."""
    moves = build_moves(jumps, emission.shape[2], p0)
    posterior = run_chain(emission, null, moves)
    if weights is None:
        return posterior
    return run_chain(emission * weigh_links(weights, posterior.links, source), null, moves)
