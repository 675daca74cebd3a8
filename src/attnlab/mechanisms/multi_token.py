"""Multi-token attention (Golovneva et al. 2025, §3): a weight depends on several queries, keys and heads.

    Ŝ = S where visible, else 0        Z_ij = Σ_{0 ≤ a < c_q} Σ_{|b| ≤ c_k/2} θ_ab Ŝ_{i−a, j+b}        P = softmax(Z)
    weights = M P, M mixing each c_h heads        finish: y σ(y w + β),  y = RMSNorm(context of each head)

θ (one for each head) and M start as the identity. queries = c_q, keys = c_k, group = c_h (default: all heads), norm:
whether to finish so. Hidden keys count as 0 in the sum, so a key after its query has no influence. A row reads the
c_q − 1 queries before its own. Rows of a head sum to the sum of its row of M.

The kernels need no convolution, unless a mask differs between queries. Where no pair in the window is hidden, Z is a
product of longer vectors:

    Z_ij = Σ_a q_{i−a} · K̃^a_j        K̃^a_j = Σ_b θ_ab k_{j+b}        hidden keys are 0 vectors

In causal attention this is not so near the diagonal, at the keys j = i − t with t < c_q − 1 + c_k/2. There Z comes
from the visible logits in diagonal coordinates, S̄_it = S_{i,i−t} with t ≥ 0:        Z̄_it = Σ_ab θ_ab S̄_{i−a, t−a−b}
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import check_value
from attnlab.mechanisms.by_rows import mix_by_rows
from attnlab.mechanisms.constants import remember
from attnlab.mechanisms.mechanism import Mechanism, WithCarry, logits, masked_softmax, repeat_heads, visible, widen
from attnlab.mechanisms.mixed_heads import can_mix_heads, has_bands, mix_in_bands, weigh_heads
from attnlab.mechanisms.visible_sums import has_row_mask

LEAST, ALIGNED = 16, 16  # keys of which one product computes K̃; what the keys of its window are a multiple of


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
        if has_bands(q, k, at) and not has_row_mask(mask):
            q, k, near = self.prepare_products(q, k, mask, causal=causal)
            given: dict[str, Any] = {"causal": causal, "near": near, "count": self.kernel.shape[2]}
            return mix_in_bands(self, q, k, v, mask, None, self.widen_mixer(), **given), None
        return mix_by_rows(self, self.weigh_fused, q, k, v, mask, **options), None

    def weigh_fused(
        self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, at: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the weights of a band by the kernels; Z from products with longer vectors, if hidden pairs permit."""
        near = None
        if bias is None and not (causal and at is not None) and not has_row_mask(mask):
            q, smooth, near = self.prepare_products(q, k, mask, causal=causal)
            z = unroll(q, self.kernel.shape[2]) @ smooth.mT
        else:
            seen = visible(q, k, mask, causal=causal, at=at)
            z = self.convolve(widen(logits(q, k, self.scale, bias)).masked_fill(~seen, 0.0))
        return weigh_heads(z, q, k, mask, None, self.widen_mixer(), causal=causal, at=at, near=near)

    def prepare_products(
        self, q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q, scaled, K̃, and Z̄ near the diagonal where causal attention needs it."""
        q, k, theta = q * self.scale, repeat_heads(k, self.heads), self.kernel[:, 0].to(q.dtype)
        if mask is not None:
            k = k.masked_fill(~mask[(None,) * (4 - mask.dim())].mT, 0.0)
        near = convolve_diagonals(q, k, theta) if causal and theta[0].numel() > 1 else None
        return q, smooth_keys(k, theta), near

    def widen_mixer(self) -> Tensor:
        """Return Mᵀ of all groups as one matrix (h,h)."""
        if len(self.mixer) == 1:
            return self.mixer[0].mT
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
        y = F.rms_norm(widen(context), (self.head_dim,), widen(self.norm.weight), self.norm.eps).to(context.dtype)
        gate: Tensor = self.gate(y).sigmoid()
        return gate * y


def unroll(x: Tensor, count: int) -> Tensor:
    """(b,h,i,d) -> (b,h,i,count·d): x_{i−count+1}, …, x_i; zeros before the first."""
    padded = F.pad(x, (0, 0, count - 1, 0))
    return torch.cat([padded[:, :, m : m + x.shape[2]] for m in range(count)], dim=-1)


def smooth_keys(k: Tensor, theta: Tensor) -> Tensor:
    """Return K̃ of k (b,h,j,d) and θ (h,c_q,c_k), in the order of θ's rows: (b,h,j,c_q·d).

    At least LEAST keys are one product of a matrix of shifted θ and the keys of their window. Products on tensor cores
    need windows of ALIGNED keys.
    """
    (_, _, length, _), (heads, rows, columns) = k.shape, theta.shape
    width = -(-(LEAST + columns - 1) // ALIGNED) * ALIGNED
    size = width - columns + 1
    blocks = max(1, -(-length // size))
    shifted = F.pad(theta, (0, size)).repeat(1, 1, size)[..., : size * width]  # each row is shifted by one more
    matrix = shifted.reshape(heads, rows, size, width).transpose(1, 2).reshape(heads, 1, size * rows, width)
    windows = F.pad(k, (0, 0, columns // 2, blocks * size - length + columns // 2)).unfold(2, width, size)
    return (matrix @ windows.mT).reshape(*k.shape[:2], blocks * size, -1)[:, :, :length]


def score_diagonals(q: Tensor, k: Tensor, count: int) -> Tensor:
    """S̄_it = q_i · k_{i−t} of t < count, (b,h,i,count); queries are the last keys, and keys before the first are 0."""
    size = 1 << max(count - 1, 1).bit_length()  # queries of a block; with their keys and those of the block before
    (b, heads, rows, d), more = q.shape, -q.shape[2] % size
    blocks = (rows + more) // size
    q = F.pad(q, (0, 0, more, 0)).reshape(b, heads, blocks, size, d)
    k = F.pad(k, (0, 0, (blocks + 1) * size - k.shape[2], 0)).reshape(b, heads, blocks + 1, size, d).flip(3)
    s = (q @ torch.cat([k[:, :, 1:], k[:, :, :-1]], dim=3).mT).flatten(3)  # keys from the last to the first
    skewed = s[..., size - 1 : size - 1 + size * (2 * size - 1)].reshape(b, heads, blocks * size, 2 * size - 1)
    return skewed[:, :, more:, :count]


def convolve_diagonals(q: Tensor, k: Tensor, theta: Tensor) -> Tensor:
    """Return Z̄ of q, k (b,h,·,d) and θ (h,c_q,c_k), for t < c_q − 1 + c_k/2: (b,h,i,·)."""
    rows, half = theta.shape[1], theta.shape[2] // 2
    near = rows - 1 + half
    taps = list_taps(*theta.shape[1:], theta.dtype, q.device)
    spread = (theta.flatten(1) @ taps).view(len(theta), rows * (near + half), near)
    return unroll(score_diagonals(q, k, near + half), rows) @ spread


@remember
def list_taps(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where each number of θ leads: 1 for its row m and column n, a source s and a target t; (m·n, m·s·t)."""
    half = columns // 2
    near = rows - 1 + half
    m, source, t, n = (torch.arange(size, device=device) for size in (rows, near + half, near, columns))
    tap = t - (rows - 1 - m)[:, None, None] - source[:, None] + half  # the column of θ that leads from source to t
    leads = (tap[..., None] == n).to(dtype)  # (m,s,t,n)
    own = torch.eye(rows, dtype=dtype, device=device)
    return torch.einsum("mstn,mo->onmst", leads, own).reshape(rows * columns, -1)
