"""Gaussian noise as a pure function of its position: ε(seed, layer, b, h, i, j).

Philox4x32-10 (Salmon et al. 2011) with key = seed and counter = (j // 4, i, b, layer·2¹⁶ + h). Its four words become
four normals by Box–Muller, one for each j mod 4. Nothing is stored, and nothing depends on the length of a row. So a
kernel draws the same noise again in its backward pass, and decoding one token at a time has the noise of the full pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism
from attnlab.mechanisms.seeding import NOISE, draw_seed

_WORD = 0xFFFFFFFF


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Four 32-bit words for each counter (c0, c1, c2, c3), as int64. The key is the low and high word of seed."""
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(0xD2511F53, c0), _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def gaussian(seed: int | Tensor, layer: int, batch: int, heads: int, rows: Tensor, keys: int) -> Tensor:
    """ε ~ N(0,1), (b,h,i,j) in float32; rows (i,) are the positions of the queries."""
    device = rows.device
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None] + (layer << 16)
    j = torch.arange(-(-keys // 4), device=device)
    shape = (batch, heads, len(rows), len(j))
    words = philox(seed, *(c.expand(shape) for c in (j, rows[:, None] & _WORD, b, h)))
    pairs = (_normals(*words[:2]), _normals(*words[2:]))
    return torch.stack([n for pair in pairs for n in pair], dim=-1).flatten(-2)[..., :keys]


def logit_noise(
    mechanism: Mechanism, z: Tensor, causal: bool, at: Tensor | None, noise: int | Tensor | None = None
) -> Tensor | float:
    """The noise of logits z: `noise` as a draw (b,h,i,j) or a seed; by default a fresh seed in training, else 0.

    The fresh seed comes from torch's generator on the device, so checkpointing and CUDA graphs treat it like dropout.
    Inside `seed_noise` its seed is used, also at evaluation. The position of a query is its key index if causal or if
    `at` is given, else 0, 1, …
    """
    if isinstance(noise, Tensor) and noise.dim() == 4:
        return noise
    seed, layer = noise_seed(mechanism, z.device) if noise is None else (noise, mechanism.layer)
    if seed is None:
        return 0.0
    b, h, i, j = z.shape
    first = j - i if causal else 0
    rows = torch.arange(first, first + i, device=z.device) if at is None else at
    if not z.is_cuda:
        return gaussian(seed, layer, b, h, rows, j).to(z.dtype)
    from attnlab.mechanisms.kernels.noise import gaussian as fused

    draw: Tensor = fused(torch.as_tensor(seed, dtype=torch.int64, device=z.device), layer, b, h, rows, j, z.dtype)
    return draw


def noise_seed(mechanism: Mechanism, device: torch.device) -> tuple[Tensor | None, int]:
    """The seed, as of `seeding.draw_seed`, and the layer of the noise. The seed is None if there is no noise."""
    if mechanism.sample_seed is not None:
        seeds = [mechanism.sample_seed] * mechanism.members
        return torch.tensor(seeds if mechanism.members > 1 else seeds[0], device=device), mechanism.layer
    if mechanism.training:  # each call has a fresh seed, so layers need no number and share one compiled program
        return draw_seed(mechanism, NOISE, device), 0
    return None, 0


@contextmanager
def seed_noise(model: nn.Module, seed: int) -> Iterator[None]:
    """Let every stochastic mechanism of the model draw its own noise from this seed, within the context."""
    if not 0 <= seed <= _WORD:
        raise ValueError(f"the noise seed must be a whole number from 0 to {_WORD}, got {seed}")
    stochastic = [m for m in model.modules() if isinstance(m, Mechanism) and m.stochastic]
    try:
        for index, mechanism in enumerate(stochastic):
            mechanism.sample_seed = seed | (index << 32)
        yield
    finally:
        for mechanism in stochastic:
            mechanism.sample_seed = None


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of two words, without overflow of signed 64-bit numbers."""
    low, high = a * (x & 0xFFFF), a * (x >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def _normals(word0: Tensor, word1: Tensor) -> tuple[Tensor, Tensor]:
    """Two normals from two words, by Box–Muller."""
    radius = (-2.0 * _uniform(word0).clamp_min(1e-7).log()).sqrt()
    angle = 6.283185307179586 * _uniform(word1)
    return radius * angle.cos(), radius * angle.sin()


def _uniform(word: Tensor) -> Tensor:
    """Map words to [0,1) as Triton does: read as signed numbers, and folded."""
    signed = torch.where(word > 0x7FFFFFFF, word - 0x100000000, word)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10
