"""What stands around each attention of a model: its residual, the norm after it and, where asked for, the feed-forward.

Found by what flows, not by names. With x what the attention was given and o what it returned,

    residual       r is x, or what a norm that gave x had read; the next norm reads exactly r + o
    norm           LayerNorm or RMSNorm: its own output is made again from its weight, or it is not understood
    feed-forward   W₂ g(W₁ m), or gated W₂ (g(W₁ m) · W₃ m), of m, what the norm gave; the next norm reads what it
                   returned + m (post-norm) or + (r + o) (pre-norm)

What is not of this form (parallel blocks, norms on the attention's output, mixtures of experts) is said in the layer's
`strange`, and no analysis guesses.

The feed-forward is recorded as the linear map that integrated gradients from 0 make of it at each query (Kobayashi et
al. 2024). Let each input be a sum m = Σ_j m_j, one term for each token and one for all biases. For an elementwise g
with g(0) = 0 and s = W₁ m, s_j = W₁ m_j,

    ∫₀¹ s_j g'(ts) dt = s_j · g(s)/s        slope = g(s)/s

and for a gated one with u = W₃ m the same integral along (ts, tu) is, by parts,

    ∫₀¹ (s_j g'(ts) tu + u_j g(ts)) dt = s_j · u (g(s) − ḡ)/s + u_j · ḡ,        ḡ = ∫₀¹ g(ts) dt

ḡ is one number for each query and neuron, made by Gauss–Legendre quadrature; the terms add up to g(s)·u whatever its
error is. With NODES nodes ḡ is right to 1e-12 of 1 + |s| for SiLU and GELU up to |s| = 50 (tested).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.recording.tolerance import CHECKED, close
from attnlab.records.record import Layer

NODES = 64
MISSED = {  # what a block waited for, and what it means that it did not come
    "norm": "no norm reads the attention's output plus its residual",
    "feed-forward": "no feed-forward W₂ g(W₁ x) or W₂ (g(W₁ x) · W₃ x) comes after its norm",
    "closing norm": "no norm reads its feed-forward's output plus a residual",
}


class Around:
    """Hears the norms, linear maps and activations of one forward pass, and is told of each attention in it."""

    def __init__(self, model: nn.Module, *, feed_forward: bool) -> None:
        self.model, self.feed_forward = model, feed_forward
        self.blocks: list[SurroundingBlock] = []
        self._block = SurroundingBlock(
            (), torch.empty(0), None, waits_for="nothing"
        )  # the last one; before the first, this
        self._norms: list[tuple[Tensor, Tensor]] = []  # what norms read and gave since the last attention
        self._matrices: dict[nn.Module, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if (what := _what(module)) == "norm" or (what and self.feed_forward):
                    stack.callback(module.register_forward_hook(self._listener(what, name, module)).remove)
            yield

    def attended(self, layer: Layer) -> None:
        """An attention has run, and returned what is in the layer."""
        self._block.end()
        residuals = [layer.inputs, *(read for read, gave in self._norms if _same(gave, layer.inputs))]
        self._block = SurroundingBlock(residuals, layer.outputs, self._matrix if self.feed_forward else None)
        self.blocks.append(self._block)
        self._norms.clear()

    def added(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers, in the order in which they were told of, with what was found around each."""
        self._block.end()
        pairs = zip(layers, self.blocks, strict=True)
        return [replace(layer, around=block.found, strange=block.strange) for layer, block in pairs]

    def _listener(self, what: str, name: str, module: nn.Module) -> Callable[..., None]:
        def hear(_module: nn.Module, read: tuple[Any, ...], gave: Any) -> None:
            if read and isinstance(read[0], Tensor) and isinstance(gave, Tensor):
                if what == "norm":
                    self._norms.append((read[0], gave))
                getattr(self._block, what)(name, module, read[0], gave)

        return hear

    def _matrix(self, module: nn.Module) -> Tensor:
        """(in,out), copied once: training on must not change a record."""
        if module not in self._matrices:
            self._matrices[module] = matrix(module).clone()
        return self._matrices[module]


class SurroundingBlock:
    """What was found around one attention. It waits for a norm, then for a feed-forward, then for a norm again."""

    def __init__(
        self,
        residuals: Sequence[Tensor],
        outputs: Tensor,
        copied: Callable[[nn.Module], Tensor] | None,
        waits_for: str = "norm",
    ) -> None:
        """residuals: what the outputs may be added to; copied: a linear map's matrix, None without feed-forward."""
        self.found: dict[str, Tensor] = {}
        self.strange = ""
        self.waits_for = waits_for
        self.residuals, self.outputs, self.copied = residuals, outputs, copied
        self.total = self.normed = outputs  # r + o, and the norm of it, once they are known
        self.inner: list[tuple[nn.Module, Tensor]] = []  # linear maps that read the normed, and what they gave
        self.active: tuple[int, nn.Module, Tensor] | None = None  # which of them, its activation, what that gave

    def norm(self, name: str, module: nn.Module, read: Tensor, gave: Tensor) -> None:
        if self.waits_for == "nothing" or read.shape != self.outputs.shape:
            return
        if self.waits_for == "feed-forward":
            self.end()
        elif self.waits_for == "norm":
            self._first(name, module, read, gave)
        elif _same(read, self.total + self.outputs):
            self._understood({"feed_forward.pre": torch.tensor(True)}, then="nothing")
        elif _same(read, self.normed + self.outputs):
            parts = self._norm_parts("closing", name, module, read, gave)
            self._understood({"feed_forward.pre": torch.tensor(False)} | parts, then="nothing")
        else:
            self.end(f"{name} does not read its feed-forward's output plus a residual")

    def _first(self, name: str, module: nn.Module, read: Tensor, gave: Tensor) -> None:
        residual = next((r for r in self.residuals if _same(read, r + self.outputs)), None)
        if residual is None:
            return self.end(f"{name} does not read the attention's output plus its residual")
        self.total, self.normed = read, gave
        parts = self._norm_parts("norm", name, module, read, gave)
        then = "nothing" if self.copied is None or not parts else "feed-forward"
        self._understood({"residual": residual} | parts, then=then)

    def linear(self, _name: str, module: nn.Module, read: Tensor, gave: Tensor) -> None:
        if self.waits_for != "feed-forward":
            return
        if _same(read, self.normed):
            self.inner.append((module, gave))
        elif self.active and len(self.inner) <= 2:
            which, activation, activated = self.active
            other = self.inner[1 - which] if len(self.inner) == 2 else None
            if _same(read, activated if other is None else activated * other[1]):
                self._fed_forward(which, activation, other, module)
                self.outputs = gave

    def activation(self, name: str, module: nn.Module, read: Tensor, gave: Tensor) -> None:
        if self.waits_for != "feed-forward":
            return
        for which, (_, made) in enumerate(self.inner):
            if _same(read, made):
                if reason := _not_elementwise(module, made, gave):
                    return self.end(f"its activation {name} {reason}")
                self.active = which, module, gave

    def end(self, reason: str | None = None) -> None:
        """Nothing more will be found; if something was waited for, this is why."""
        if self.waits_for != "nothing":
            self.strange = reason or MISSED[self.waits_for]
        self._understood({}, then="nothing")

    def _fed_forward(self, which: int, activation: Any, other: tuple[nn.Module, Tensor] | None, output: Any) -> None:
        assert self.copied is not None
        module, s = self.inner[which]
        parts = {"inner": self.copied(module), "output": self.copied(output)}
        if other is None:
            parts["slope"] = slope(activation.forward, s)
        else:
            parts["factor"] = self.copied(other[0])
            parts["slope"], parts["factor_slope"] = slopes(activation.forward, s, other[1])
        self._understood({f"feed_forward.{name}": x for name, x in parts.items()}, then="closing norm")

    def _norm_parts(self, prefix: str, name: str, module: nn.Module, read: Tensor, gave: Tensor) -> dict[str, Tensor]:
        parts = norm_parts(module, read, gave)
        if not parts:
            self.strange = f"{name} ({type(module).__name__}) is neither a LayerNorm nor an RMSNorm"
        return {f"{prefix}.{part}": x for part, x in parts.items()}

    def _understood(self, parts: dict[str, Tensor], *, then: str) -> None:
        self.found |= parts
        self.waits_for = then
        if then == "nothing":  # let go of everything that was only held to be compared
            self.residuals, self.inner, self.active = (), [], None
            self.total = self.normed = self.outputs = torch.empty(0)


def _what(module: nn.Module) -> str:
    """What a module may be, by what it has: a vector for a weight, a matrix, or no parameters at all."""
    if next(module.children(), None) is not None or isinstance(module, nn.Dropout | nn.Identity):
        return ""
    if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 1:
        return "norm"
    if is_linear(module):
        return "linear"
    return "activation" if next(module.parameters(), None) is None else ""


def norm_parts(module: nn.Module, read: Tensor, gave: Tensor) -> dict[str, Tensor]:
    """gain (e,), centred () and scale (b,i,1) of a norm that read and gave these; nothing if it is no such norm."""
    x, weight = _wide(read), _wide(module.weight.detach())  # type: ignore[operator]
    bias = getattr(module, "bias", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    eps = torch.finfo(read.dtype).eps if eps is None else eps
    added = 0.0 if bias is None else _wide(bias.detach())
    few = slice(CHECKED)
    for centred in (True, False):
        away = x - x.mean(-1, keepdim=True) if centred else x
        scale = (away.square().mean(-1, keepdim=True) + eps).rsqrt()
        for gain in (weight, 1 + weight):  # Gemma's norms hold what is added to 1
            if close(away[..., few, :] * scale[..., few, :] * gain + added, gave[..., few, :]):
                return {"gain": gain.clone(), "centred": torch.tensor(centred), "scale": scale}
    return {}


def slope(g: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    """g(s)/s, at 0 its limit to six digits."""
    s = _away_from_zero(s)
    return g(s) / s


def slopes(g: Callable[[Tensor], Tensor], s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """u (g(s) − ḡ)/s and ḡ = ∫₀¹ g(ts) dt: what IG multiplies s_j and u_j by in g(s)·u."""
    s, mean = _away_from_zero(s), torch.zeros_like(_wide(s))
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    for node, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
        mean += float(weight) * g(float(node) * s)
    return _wide(u) * (g(s) - mean) / s, mean


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear map as (in,out): y = x·matrix + bias."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(module, nn.Linear) else weight


def is_linear(module: nn.Module) -> bool:
    """A Linear, or transformers' Conv1D: a linear map that keeps its weight transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _not_elementwise(activation: Any, read: Tensor, gave: Tensor) -> str:
    """Why an activation cannot be passed through: it is not 0 at 0, or more than one number makes one of its own."""
    at_zero = float(activation.forward(torch.zeros(1, dtype=read.dtype, device=read.device)))
    if at_zero != 0.0:
        return f"is {at_zero:.3g} at 0, and only an activation that is 0 there can be shared out among tokens"
    alone = activation.forward(read[..., :1])
    return "" if close(alone, gave[..., :1]) else "does not act on each number by itself"


def _away_from_zero(s: Tensor) -> Tensor:
    s = _wide(s)
    return s.masked_fill(s == 0, 1e-6)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
