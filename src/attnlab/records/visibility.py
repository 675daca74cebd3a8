"""What makes a long sequence short to store: a causal mask as a rule, and softmax weights as what they are made of.

Neither has a value for each pair of a query and a key; rows of both are computed when they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weigh = Callable[[int, int], Tensor]  # weights of queries start … stop−1, (b,h,stop−start,j)


@dataclass(frozen=True)
class CausalMask:
    """A query sees the keys up to its own. The last query is at the last key: query r sees keys 0 … r + keys − queries.

    It reads like a bool tensor (1,1,queries,keys) that is computed on access; `rows` computes a few queries of it.
    """

    queries: int
    keys: int
    device: torch.device

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the mask of queries start … stop−1, (1,1,stop−start,keys)."""
        last = torch.arange(start, min(stop, self.queries), device=self.device) + (self.keys - self.queries)
        return (torch.arange(self.keys, device=self.device) <= last[:, None])[None, None]

    def build(self) -> Tensor:
        """Return the whole mask as a tensor. Use it for short sequences only."""
        return self.rows(0, self.queries)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, 1, self.queries, self.keys))

    def dim(self) -> int:
        return 4

    def __getitem__(self, places: Any) -> Tensor:
        return self.build()[places]

    def expand(self, *sizes: int) -> Tensor:
        return self.build().expand(*sizes)

    def to(self, device: torch.device | str) -> "CausalMask":
        return CausalMask(self.queries, self.keys, torch.device(device))

    def hides_any(self) -> bool:
        return self.keys > 1 and self.queries > 1


@dataclass(frozen=True, eq=False)
class SoftmaxScores:
    """The weights softmax(scale · q kᵀ) of a plain softmax attention, causal or over all keys.

    `weigh` computes rows of them with the model's own function. A reader of totals can use q and k instead.
    """

    weigh: Weigh
    query: Tensor  # (b,h,i,d)
    key: Tensor  # (b,g,j,d), each of the g for h/g consecutive heads
    scale: float
    causal: bool  # the last query is at the last key
    logsumexp: Tensor | None = None  # (b,h,i) ln Σ_j exp(scale · q k), where the forward pass has computed it

    def __call__(self, start: int, stop: int) -> Tensor:
        return self.weigh(start, stop)
