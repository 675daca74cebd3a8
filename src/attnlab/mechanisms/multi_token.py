"""Multi-token attention (Golovneva et al. 2025, §3): a weight depends on several queries, keys and heads.

    Ŝ = S where visible, else 0        Z_ij = Σ_{0 ≤ a < c_q} Σ_{|b| ≤ c_k/2} θ_ab Ŝ_{i−a, j+b}        P = softmax(Z)
    weights = M P, M mixing each c_h heads        finish: y σ(y w + β),  y = RMSNorm(context of each head)

θ (one for each head) and M start as the identity. queries = c_q, keys = c_k, group = c_h (default: all heads), norm:
whether to finish so. Hidden keys count as 0 in the sum, so a key after its query has no influence. A row reads the
c_q − 1 queries before its own. Rows of a head sum to the sum of its row of M.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import check_value
from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax, visible, widen
from attnlab.mechanisms.mixed_heads import can_mix_heads, can_mix_in_bands, mix_in_bands, weigh_heads


class MultiToken(Mechanism):
    positional = True
    lookback = 5
    kernels = frozenset({"mixed_heads"})

    def __init__(self, heads: int, head_dim: int, *, queries: int = 6, keys: int = 11, group: int | None = None,
                 norm: bool = True, **base: Any) -> None:  # fmt: skip
        super().__init__(heads, head_dim, **base)
        for name, value, hint in (("queries", queries, int), ("keys", keys, int), ("group", group, int | None)):
            check_value(name, value, hint)
        if keys % 2 == 0:
            raise ValueError(f"keys must be odd, because the kernel is centred on its key, got {keys}")
        group = group or heads
        if heads % group:
            raise ValueError(f"group must divide heads={heads}, got {group}")
        self.lookback = queries - 1
        kernel = torch.zeros(heads, 1, queries, keys)
        kernel[:, :, -1, keys // 2] = 1.0
        self.kernel = nn.Parameter(kernel)  # θ, with the query itself in its last row
        self.mixer = nn.Parameter(torch.eye(group).repeat(heads // group, 1, 1))  # M, (h/c_h,c_h,c_h)
        self.norm = nn.RMSNorm(head_dim, eps=1e-5) if norm else None
        self.gate = nn.Linear(head_dim, 1) if norm else None  # w, β

    @property
    def row_sum(self) -> Tensor:
        return self.mixer.sum(-1).flatten()

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        z = self.convolve(widen(logits(q, k, self.scale, bias)).masked_fill(~seen, 0.0))
        p = masked_softmax(z, seen).to(q.dtype)
        grouped = p.view(len(p), *self.mixer.shape[:2], *p.shape[2:])
        return torch.einsum("gnm,bgmij->bgnij", self.mixer, grouped).flatten(1, 2), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        if not can_mix_heads(self, q, k, bias):
            return super().mix(q, k, v, mask, carry, **options)
        self.check(q, k, mask, at, v)
        if can_mix_in_bands(q, k, at):
            theta = self.kernel.squeeze(1)
            given: dict[str, Any] = {"causal": causal, "scale": self.scale, "theta": theta}
            return mix_in_bands(self, q, k, v, mask, None, self.widen_mixer(), **given), None
        return mix_by_rows(self, self.weigh_fused, q, k, v, mask, **options), None

    def weigh_fused(
        self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the weights of a band by the kernels that mix heads."""
        seen = visible(q, k, mask, causal=causal, at=at)
        z = self.convolve(widen(logits(q, k, self.scale, bias)).masked_fill(~seen, 0.0))
        return weigh_heads(z, q, k, mask, None, self.widen_mixer(), causal=causal, at=at)

    def widen_mixer(self) -> Tensor:
        """Return Mᵀ of all groups as one matrix (h,h)."""
        if len(self.mixer) == 1:
            return self.mixer.squeeze(0).mT
        own = torch.eye(len(self.mixer), device=self.mixer.device, dtype=self.mixer.dtype)[:, None, :, None]
        return (self.mixer.mT[:, :, None] * own).reshape(self.heads, self.heads)

    def convolve(self, s: Tensor) -> Tensor:
        """Return Z of Ŝ, (b,h,i,j), with zeros beyond the borders."""
        if s.numel() == 0:
            return s
        *_, rows, columns = self.kernel.shape
        padded = F.pad(s, (columns // 2, columns // 2, rows - 1, 0))
        return F.conv2d(padded, self.kernel.to(s.dtype), groups=self.heads)

    def finish(self, context: Tensor) -> Tensor:
        if self.norm is None or self.gate is None:
            return context
        if self.wants_kernels(context):
            from attnlab.mechanisms.kernels.gated_norm import find_norm_gap, gated_norm

            if find_norm_gap(context, self.norm.weight) is None:
                fused: Tensor = gated_norm(context, self.norm.weight, self.gate.weight, self.gate.bias, self.norm.eps)
                return fused
        y = F.rms_norm(widen(context), (self.head_dim,), widen(self.norm.weight), self.norm.eps).to(context.dtype)
        gate: Tensor = self.gate(y).sigmoid()
        return gate * y
