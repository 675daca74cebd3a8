"""Dynamically composable multi-head attention, DCMHA (Xiao et al. 2024, Compose): heads are mixed anew for each pair.

    P = softmax(compose_S(S))        weights = compose_P(P)        a = A_:ij, the entries of all heads, (h,)

    compose(A)_:ij = a W_b + Σ_{t = i, j} (Σ_{r ≤ rank} (a · u_tr) w_tr + a ⊙ g_t)
    u_t, w_t = RMSNorm(U), W  with  (U, W) = GELU(x_t W₁) W₂        g_t = tanh(x_t W_g)

t is the query i, then the key j. S and P have parameters of their own, and so have queries and keys. Initial values are
those of the authors' code, with which every head is nearly itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.mechanism import Mechanism, Sides, WithCarry, logits, masked_softmax, split_heads
from attnlab.mechanisms.mixed_heads import can_mix_heads, can_mix_in_bands, mix_in_bands, weigh_heads


class DCMHA(Mechanism):
    kernels = frozenset({"mixed_heads"})

    def __init__(self, heads: int, head_dim: int, *, rank: int = 2, **base: Any) -> None:
        super().__init__(heads, head_dim, **base)
        self.base = nn.Parameter(torch.eye(heads) + 0.1 * heads**-0.5 * torch.randn(2, heads, heads))  # W_b of S and P
        self.of_query, self.of_key = (DynamicHeads(self.model_size, heads, rank) for _ in range(2))

    def query_side(self, x: Tensor) -> Tensor:
        return self.derive(self.of_query, x)

    def key_side(self, x: Tensor) -> Tensor:
        return self.derive(self.of_key, x)

    def derive(self, heads: "DynamicHeads", x: Tensor) -> Tensor:
        """Return u, w and g of each token of x, by a kernel where it covers x."""
        if self.wants_kernels(x):
            from attnlab.mechanisms.kernels.dynamic_heads import derive_heads, find_side_gap

            if find_side_gap(x, heads.outward) is None:
                fused: Tensor = derive_heads(x, heads.inward.weight, heads.outward, heads.gate.weight)[0]
                return fused
        side: Tensor = heads(x)
        return side

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
                sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        (query_s, query_p), (key_s, key_p) = (side.unbind(1) for side in sides)
        s = compose(logits(q, k, self.scale, bias).masked_fill(~seen, 0.0), self.base[0], query_s, key_s)
        return compose(masked_softmax(s, seen), self.base[1], query_p, key_p), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None,
            sides: Sides = (None, None)) -> WithCarry:  # fmt: skip
        options: dict[str, Any] = {"causal": causal, "at": at, "bias": bias}
        if not can_mix_heads(self, q, k, bias):
            return super().mix(q, k, v, mask, carry, **options, sides=sides)
        self.check(q, k, mask, at, v)
        matrices = self.make_matrices(q, sides)
        if can_mix_in_bands(q, k, at):
            (before, after), keyed = matrices
            given: dict[str, Any] = {"causal": causal, "scale": self.scale, "keyed": keyed}
            return mix_in_bands(self, q, k, v, mask, before, after, **given), None
        return mix_by_rows(self, self.weigh_fused, q, k, v, mask, **options, sides=matrices), None

    def make_matrices(self, q: Tensor, sides: Sides) -> tuple[Tensor, Tensor]:
        """Return the matrices of queries and of keys, each (2,b,·,h,h), of S and P, in the type of q."""
        from attnlab.mechanisms.kernels.dynamic_heads import make_matrices

        query, key = (side.contiguous() for side in sides)
        made: tuple[Tensor, Tensor] = make_matrices(query.to(q.dtype), key.to(q.dtype), self.base)
        return made

    def weigh_fused(
        self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None,
        sides: Sides,
    ) -> Tensor:  # fmt: skip
        """Return the weights of a band by the kernels; sides: the matrices of its rows and of its keys."""
        s, (before, after) = logits(q, k, self.scale, bias), sides[0]
        return weigh_heads(s, q, k, mask, before, after, causal=causal, at=at, keyed=sides[1])


class DynamicHeads(nn.Module):
    """What composes heads at one token, computed from the layer's input: u, w and g, once for S and once for P."""

    def __init__(self, size: int, heads: int, rank: int) -> None:
        super().__init__()
        hidden = 2 * rank * heads
        self.heads, self.rank = heads, rank
        self.inward = nn.Linear(size, 2 * hidden, bias=False)  # W₁
        self.outward = nn.Parameter(torch.randn(2, hidden, hidden) * hidden**-0.5 * 0.02 / (heads + rank))  # W₂
        self.gate = nn.Linear(size, 2 * heads, bias=False)  # W_g
        nn.init.normal_(self.inward.weight, std=(2 / (size + hidden)) ** 0.5)
        nn.init.normal_(self.gate.weight, std=0.005 * (2 / (size + heads)) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(b,n,e) -> (b,2,n,(2·rank+1)·h)."""
        u, w = (F.gelu(split_heads(self.inward(x), 2)) @ self.outward).chunk(2, dim=-1)
        u = F.rms_norm(u.reshape(*u.shape[:3], self.rank, self.heads), (self.heads,), eps=1e-6).flatten(-2)
        return torch.cat([u, w, split_heads(self.gate(x), 2).tanh()], dim=-1)


def compose(a: Tensor, base: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Mix the heads of a (b,h,i,j) by W_b (h,h) and by what belongs to the query (b,i,·) and to the key (b,j,·)."""
    mixed = torch.einsum("bhij,hg->bgij", a, base)
    for t, side in (("i", query), ("j", key)):
        rows = side.reshape(*side.shape[:2], side.shape[2] // a.shape[1], a.shape[1])  # u, w and g, (b,t,2·rank+1,h)
        (u, w), gate = rows[:, :, :-1].chunk(2, dim=2), rows[:, :, -1]
        low = torch.einsum(f"bhij,b{t}rh->brij", a, u)
        mixed = mixed + torch.einsum(f"brij,b{t}rh->bhij", low, w) + torch.einsum(f"bhij,b{t}h->bhij", a, gate)
    return mixed
