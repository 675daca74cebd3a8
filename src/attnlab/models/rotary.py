"""Rotary position embedding, RoPE (Su et al. 2021, §3.4): queries and keys are rotated by position.

    ω_c = θ^(−2c/d),  c = 0 … d/2 − 1        (x_c, x_{c+d/2}) at position t  ->  rotated by the angle t·ω_c

A product of a rotated query and a rotated key depends on the distance of their positions only. The pairs (c, c + d/2)
are those of Hugging Face's models. For texts longer than those of the training, by a factor s, scaling slows the
rotation:

    linear   ω_c / s
    llama3   ω_c / s below `low` rotations in the original length L, ω_c above `high`; between, with r = L ω_c / 2π,
             (1 − g) ω_c / s + g ω_c,  g = (r − low) / (high − low)
    yarn     the same with g linear in c, between the channels of `low` and `high` rotations, rounded outwards;
             cosine and sine are multiplied by 1 + 0.1 ln s (Peng et al. 2023)
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]  # cosine and sine of every angle, (n,d/2) each, in float32 at least
Scaling = Literal["none", "linear", "llama3", "yarn"]


class Rotary(nn.Module):
    """The angles of a model's positions. It has no parameters.

    size     of a head          length   number of tokens that llama3 and yarn extend, L
    """

    def __init__(
        self,
        size: int,
        *,
        theta: float = 10000.0,
        scaling: Scaling = "none",
        factor: float = 1.0,
        length: int = 8192,
        low: float = 1.0,
        high: float = 4.0,
    ) -> None:
        super().__init__()
        self.size, self.theta, self.scaling, self.factor = size, theta, scaling, factor
        self.length, self.low, self.high = length, low, high

    def forward(self, x: Tensor, start: int | Tensor) -> Rotation:
        """Return the rotation of the positions start, start+1, … of x (b,n,e); start may be a tensor."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        positions = start + torch.arange(x.shape[1], device=x.device, dtype=dtype)
        angle = positions[:, None] * self.frequencies(x.device, dtype)
        scale = 1.0 + 0.1 * math.log(self.factor) if self.scaling == "yarn" else 1.0
        return scale * angle.cos(), scale * angle.sin()

    def frequencies(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the angle of one position, (d/2,)."""
        channel = torch.arange(0, self.size, 2, device=device, dtype=dtype)
        rate = 1.0 / self.theta ** (channel / self.size)
        if self.scaling in ("none", "linear"):
            return rate / self.factor
        kept = self.compute_kept_share(rate)
        return (1.0 - kept) * rate / self.factor + kept * rate

    def compute_kept_share(self, rate: Tensor) -> Tensor:
        """Return g, the share of each frequency that is not slowed, (d/2,)."""
        if self.scaling == "llama3":
            rotations = self.length * rate / (2 * math.pi)
            return ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        first, last = math.floor(self._find_channel(self.high)), math.ceil(self._find_channel(self.low))
        first, last = max(first, 0), min(last, self.size - 1)
        channel = torch.arange(len(rate), device=rate.device, dtype=rate.dtype)
        return 1.0 - ((channel - first) / max(last - first, 0.001)).clamp(0, 1)

    def _find_channel(self, rotations: float) -> float:
        """Return the channel c, not rounded, that rotates this often within the original length."""
        return self.size * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

    def extra_repr(self) -> str:
        return f"size={self.size}, theta={self.theta:g}, scaling={self.scaling}"


def rotate(x: Tensor, rotation: Rotation, parts: int = 1) -> Tensor:
    """Rotate the queries or keys (b,h,n,d) of these positions; parts: pieces of a head that are rotated apart."""
    cos, sin = (angle[:, None, ::parts] for angle in rotation)  # (n,1,d/2p): a shorter piece has every p-th frequency
    first, second = x.unflatten(-1, (parts, 2, -1)).unbind(-2)  # (b,h,n,p,d/2p) each
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-2).flatten(-3)
    return rotated.to(x.dtype)  # the angles may be in float32 where x is not
