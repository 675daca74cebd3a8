"""Attention with linear biases, ALiBi (Press et al. 2022, §3): logits fall with the distance of the key.

    P = softmax(S − m_h |i − j|)        m_h = 2^(−8h/H) for h = 1 … H, if H is a power of 2

Nothing is learnt, and the model needs no position embeddings. For other H the slopes are those of the next lower power
of 2, then every second one of the next higher, as in the authors' code. The distance counts in both directions.
A causal row may add m_h j instead, which is the same for all queries, so nothing is stored for each pair.
"""

from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.by_rows import needs_bands
from attnlab.mechanisms.cascade import can_mix_one_pass, mix_one_pass, takes_members_in_one_pass
from attnlab.mechanisms.kernels.launch import is_intercepted
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, position
from attnlab.mechanisms.softmax import Arguments, Softmax


class ALiBi(Softmax):
    kernels = frozenset({"one_pass"})
    takes_members = takes_members_in_one_pass
    positional = True
    self_only = True
    slopes: Tensor

    def __init__(self, heads: int, head_dim: int, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.register_buffer("slopes", torch.tensor(list_slopes(heads)).view(heads, 1, 1), persistent=False)
        self._kept: tuple[Tensor, tuple[int, int], Tensor] | None = None  # slopes, their version and keys, m_h j

    def prepare(
        self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Arguments:
        distance = (position(q, k, at)[:, None] - torch.arange(k.shape[2], device=q.device)).abs()
        slope = (-self.slopes * distance).to(q.dtype)  # (h,i,j)
        return q, k, mask, causal, slope if bias is None else slope + bias

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        self.check(q, k, mask, at, v)
        if not can_mix_one_pass(self, q, k, v, at=at, bias=bias):
            mix = Mechanism.mix if self.impl == "auto" and needs_bands(self, q, k) else Softmax.mix
            return mix(self, q, k, v, mask, carry, causal=causal, at=at, bias=bias)
        if causal and bias is None:
            bias = self._rise(k.shape[2])
        else:
            *_, bias = self.prepare(q, k, mask, causal, at, bias)
        return mix_one_pass(self, q, k, v, mask, causal=causal, bias=bias), None

    def _rise(self, keys: int) -> Tensor:
        """m_h j in float64, (h,1,j), computed once for the same slopes and number of keys."""
        if torch.compiler.is_compiling() or is_intercepted():
            return self.slopes.double() * torch.arange(keys, device=self.slopes.device)
        kind = (self.slopes._version, keys)
        if self._kept is None or self._kept[0] is not self.slopes or self._kept[1] != kind:
            with torch.inference_mode(False):
                bias = self.slopes.double() * torch.arange(keys, device=self.slopes.device)
            if bias.is_cuda and torch.cuda.is_current_stream_capturing():
                return bias
            self._kept = self.slopes, kind, bias
        return self._kept[2]


def list_slopes(heads: int) -> list[float]:
    """Return m_h of every head."""
    power = 2 ** (heads.bit_length() - 1)
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
