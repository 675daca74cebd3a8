"""Dropout:  x ∘ mask / (1 − p),  each entry of the mask 0 with probability p, else 1 (Srivastava et al. 2014).

On a CPU torch draws one random number per entry, which took a tenth of a training step. Here one random word of 64 bits
serves four entries. So p is rounded to a multiple of 1/65536, and kept entries are divided by 1 − the rounded p.

In training on a GPU, the seeds of each batch (mechanisms/seeding.py) replace torch's generator. One kernel draws the
mask, applies it and adds the residual stream. To torch.compile it is one opaque operator.
"""

import torch
from torch import Tensor, nn

from attnlab.mechanisms.seeding import DROPOUT

LEVELS = 2**16


class Dropout(nn.Dropout):
    """torch's Dropout with a faster mask on a CPU, and with given seeds on a GPU."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.sources: tuple[Tensor, Tensor] | None = None  # seeds and rates, (s,) each, on a GPU

    def take_seeds(self, seeds: Tensor) -> None:
        """Draw from these seeds, (2,s)."""
        self.sources = seeds[DROPOUT], seeds.new_full(seeds.shape[1:], self.p, dtype=torch.float32)

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """Return x + dropout(part)."""
        return self._draw(part, x) if self._has_seeds(part) else x + self(part)

    def forward(self, x: Tensor) -> Tensor:
        if self._has_seeds(x):
            return self._draw(x, None)
        keep = round((1.0 - self.p) * LEVELS)  # number of levels that keep an entry
        if not self.training or x.device.type != "cpu" or keep in (0, LEVELS) or torch.compiler.is_compiling():
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        levels = words.view(torch.int16)[: x.numel()].view(x.shape)  # −2^15 … 2^15 − 1
        mask = (levels < keep - LEVELS // 2).to(x.dtype).mul_(LEVELS / keep)
        return x * mask

    def _has_seeds(self, x: Tensor) -> bool:
        """Return whether this call draws from seeds; x (b,n,e) or (n,e), on their device."""
        if not self.training or not self.p or self.sources is None:
            return False
        return x.dim() in (2, 3) and x.device == self.sources[0].device

    def _draw(self, x: Tensor, added: Tensor | None) -> Tensor:
        from attnlab.models.dropout_kernel import drop_tokens

        assert self.sources is not None
        return drop_tokens(x, added, *self.sources)
