"""Dropout:  x ∘ mask / (1 − p),  each entry of the mask 0 with probability p, else 1 (Srivastava et al. 2014).

torch draws a mask on a CPU number by number, which was a tenth of a training step there. Here a random word of 64 bits
serves four entries, so p is a multiple of 1/65536, the nearest, and the kept entries are divided by 1 − that.
"""

import torch
from torch import Tensor, nn

LEVELS = 2**16


class Dropout(nn.Dropout):
    """torch's, but for the way a mask is drawn on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        kept = round((1.0 - self.p) * LEVELS)  # of the levels
        if not self.training or x.device.type != "cpu" or kept in (0, LEVELS):
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        levels = words.view(torch.int16)[: x.numel()].view(x.shape)  # from −2^15
        mask = (levels < kept - LEVELS // 2).to(x.dtype).mul_(LEVELS / kept)
        return x * mask
