"""The slow way, in float64: every vector of every head, query and key is made, then measured.

Blocks are read from the models' own modules, so nothing here knows what a record found around an attention.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.records.record import Layer


def vectors(layer: Layer) -> Tensor:
    """α f(x), (b,h,i,j,e); f(x) = v W, or v A W with a turning A of each query."""
    v = layer.values.double()[:, :, None].expand(-1, -1, layer.context.shape[2], -1, -1)  # (b,h,i,j,d)
    return layer.weights.double()[..., None] * torch.einsum(
        "bhijd,hde->bhije", turned(layer, v), layer.output_weight.double()
    )


def turned(layer: Layer, v: Tensor) -> Tensor:
    if layer.turning is None:
        return v
    a = layer.turning.double()
    a = a if a.dim() == 5 else torch.diag_embed(a.expand(*a.shape[:3], v.shape[-1]))
    return torch.einsum("bhijd,bhidc->bhijc", v, a)


@dataclass
class Parts:
    """The modules around one attention; residual: what its output is added to."""

    residual: Tensor
    norm: nn.Module
    inner: nn.Module
    activation: Any
    output: nn.Module
    factor: nn.Module | None = None
    closing: nn.Module | None = None  # of a post-norm block

    def follow(self, layer: Layer) -> dict[str, Tensor]:
        """Every contribution as a vector (b,i,j,e), at each place of the block, with the residual where it belongs."""
        c = vectors(layer).sum(1)
        found = {"attention": c}
        own = torch.eye(c.shape[1], c.shape[2], dtype=c.dtype)[..., None] * self.residual[:, :, None]
        c = c + own if layer.kind != "cross" else torch.cat([c, self.residual[:, :, None]], dim=2)  # its own comes last
        total = self.residual + layer.outputs
        m = normed(self.norm, c, total)
        state = self.norm(total)
        fed = self._fed_forward(m, state)
        found |= {"residual": c, "norm": m, "feed-forward": fed}
        found["feed-forward-residual"] = fed + (c if self.closing is None else m)
        found["block"] = found["feed-forward-residual"]
        if self.closing is not None:
            closed = state + self.output(self._hidden(state))
            found["block"] = normed(self.closing, found["block"], closed)
        return found

    def _hidden(self, state: Tensor) -> Tensor:
        hidden = self.activation(self.inner(state))
        return hidden if self.factor is None else hidden * self.factor(state)

    def _fed_forward(self, m: Tensor, state: Tensor) -> Tensor:
        """Integrated gradients from 0, by quadrature with torch's own gradients at 200 points of the path."""
        s = self.inner(state).detach()
        u = torch.ones_like(s) if self.factor is None else self.factor(state).detach()
        by_s, by_u = torch.zeros_like(s), torch.zeros_like(u)
        for node, weight in zip(*np.polynomial.legendre.leggauss(200), strict=True):
            t = (1 + node) / 2
            path = [(t * s).requires_grad_(), (u if self.factor is None else t * u).detach().requires_grad_()]
            with torch.enable_grad():
                made = self.activation(path[0]) * path[1]
                gradients = torch.autograd.grad(made.sum(), path)
            by_s += weight / 2 * gradients[0]
            by_u += weight / 2 * gradients[1]
        hidden = (m @ matrix(self.inner)) * by_s[:, :, None]
        if self.factor is not None:
            hidden = hidden + (m @ matrix(self.factor)) * by_u[:, :, None]
        return hidden @ matrix(self.output)


def normed(norm: nn.Module, c: Tensor, total: Tensor) -> Tensor:
    """A norm's share of each c (b,i,k,e), its deviation that of the total (b,i,e)."""
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    if isinstance(norm, nn.LayerNorm):
        deviation = (total.var(-1, unbiased=False) + eps).sqrt()
        c = c - c.mean(-1, keepdim=True)
    else:
        deviation = (total.square().mean(-1) + eps).sqrt()
    gain = 1 + norm.weight if "Gemma" in type(norm).__name__ else norm.weight
    return c * gain.detach() / deviation[..., None, None]


def matrix(linear: nn.Module) -> Tensor:
    scale = getattr(linear, "scale", 1.0)
    return scale * (linear.weight.T if isinstance(linear, nn.Linear) else linear.weight).detach()


def ratio(c: Tensor, *, cross: bool) -> Tensor:
    """‖others‖ / (‖others‖ + ‖own‖) of vectors (b,i,j,e); in a cross attention the own one is the last."""
    own = c[:, :, -1] if cross else c.diagonal(dim1=1, dim2=2).mT
    others = (c.sum(2) - own).norm(dim=-1)
    return others / (others + own.norm(dim=-1))
