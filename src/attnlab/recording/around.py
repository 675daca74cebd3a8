"""The block around each attention of a model: its residual, the norm after it and, optionally, the feed-forward.

Modules are recognized by the tensors that flow through them, not by their names. With x the attention's input and o its
output:

    residual       r is x, or the input of a norm whose output is x; the next norm reads exactly r + o
    norm           a LayerNorm or RMSNorm whose output can be recomputed from its weight
    feed-forward   W₂ g(W₁ m), or gated W₂ (g(W₁ m) · W₃ m), of the norm's output m; the next norm reads the
                   feed-forward's output + m (post-norm) or + (r + o) (pre-norm)

If a block has another form (parallel blocks, norms on the attention's output, mixtures of experts), the layer's
`strange` says what differs, and no analysis guesses.

The feed-forward is recorded as a linear map at each query, by integrated gradients from 0 (Kobayashi et al. 2024). Let
each input be a sum m = Σ_j m_j, with one term for each token and one for all biases. For an elementwise g with g(0) = 0
and s = W₁ m, s_j = W₁ m_j,

    ∫₀¹ s_j g'(ts) dt = s_j · g(s)/s        slope = g(s)/s

and for a gated one with u = W₃ m the same integral along (ts, tu) is, by parts,

    ∫₀¹ (s_j g'(ts) tu + u_j g(ts)) dt = s_j · u (g(s) − ḡ)/s + u_j · ḡ,        ḡ = ∫₀¹ g(ts) dt

ḡ is one number for each query and neuron, computed by Gauss–Legendre quadrature. The terms add up to g(s)·u whatever
its error. With NODES nodes the error of ḡ is below 1e-12 · (1 + |s|) for SiLU and GELU up to |s| = 50 (tested).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.mechanisms.mechanism import widen
from attnlab.models.scaled_linear import ScaledLinear
from attnlab.records.record import Layer
from attnlab.records.tolerance import CHECKED_POSITIONS, is_close

NODES = 64
NORM_SETTINGS = ("normalized_shape", "eps", "variance_epsilon")
MISSED = {  # the next expected module, and what `strange` says if it does not come
    "norm": "no norm reads the attention's output plus its residual",
    "feed-forward": "no feed-forward W₂ g(W₁ x) or W₂ (g(W₁ x) · W₃ x) comes after its norm",
    "closing norm": "no norm reads its feed-forward's output plus a residual",
}


class BlockWatcher:
    """Hooks on the norms, linear maps and activations of a model; call `add_attention` after each attention."""

    def __init__(self, model: nn.Module, *, feed_forward: bool) -> None:
        self.model, self.feed_forward = model, feed_forward
        self.blocks: list[SurroundingBlock] = []
        self._block = SurroundingBlock((), torch.empty(0), None, expected="nothing")  # before the first attention
        self._norms: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of norms since the last attention
        self._matrices: dict[nn.Module, Tensor] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Install the hooks within this context."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if (role := classify_module(module)) == "norm" or (role and self.feed_forward):
                    stack.callback(module.register_forward_hook(self._make_hook(role, name, module)).remove)
            yield

    def add_attention(self, layer: Layer) -> None:
        """Start the block of an attention that has just run and is recorded in this layer."""
        self._block.end()
        residuals = [layer.inputs, *(x for x, output in self._norms if _is_same(output, layer.inputs))]
        self._block = SurroundingBlock(residuals, layer.outputs, self._matrix if self.feed_forward else None)
        self.blocks.append(self._block)
        self._norms.clear()

    def describe_layers(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the layers, in the order of `add_attention`, with the parts of the block around each."""
        self._block.end()
        pairs = zip(layers, self.blocks, strict=True)
        return [replace(layer, around=block.parts, strange=block.strange) for layer, block in pairs]

    def _make_hook(self, role: str, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                if role == "norm":
                    self._norms.append((args[0], output))
                getattr(self._block, f"handle_{role}")(name, module, args[0], output)

        return hook

    def _matrix(self, module: nn.Module) -> Tensor:
        """Return a copy (in,out) of a linear map's weight: later training must not change a record."""
        if module not in self._matrices:
            self._matrices[module] = weight_matrix(module).clone()
        return self._matrices[module]


class SurroundingBlock:
    """The block around one attention. It expects a norm, then a feed-forward, then the closing norm.

    Each `handle_…` receives a module of that role, in the order of the forward pass, with its input x and its output.
    """

    def __init__(
        self,
        residuals: Sequence[Tensor],
        outputs: Tensor,
        copy_matrix: Callable[[nn.Module], Tensor] | None,
        expected: str = "norm",
    ) -> None:
        """residuals: candidates for the residual; copy_matrix: copies a linear map's matrix, None: no feed-forward."""
        self.parts: dict[str, Tensor] = {}
        self.strange = ""
        self.expected = expected
        self.residuals, self.outputs, self.copy_matrix = residuals, outputs, copy_matrix
        self.total = self.normed = outputs  # r + o and its norm, once they are known
        self.inner: list[tuple[nn.Module, Tensor]] = []  # linear maps that read the norm's output, and their outputs
        self.active: tuple[int, nn.Module, Tensor] | None = None  # index of one of them, its activation, the output

    def handle_norm(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if self.expected == "nothing" or x.shape != self.outputs.shape:
            return
        if self.expected == "feed-forward":
            self.end()
        elif self.expected == "norm":
            self._match_first_norm(name, module, x, output)
        elif _is_same(x, self.total + self.outputs):
            parts = {f"closing.{part}": value for part, value in match_norm(module, x, output).items()}
            parts |= {"closing.input": x, "closing.bias": read_bias(module, x)} if parts else {}
            self._store_parts({"feed_forward.pre": torch.tensor(True)} | parts, then="nothing")
        elif _is_same(x, self.normed + self.outputs):
            parts = self._read_norm("closing", name, module, x, output)
            self._store_parts({"feed_forward.pre": torch.tensor(False)} | parts, then="nothing")
        else:
            self.end(f"{name} does not read its feed-forward's output plus a residual")

    def _match_first_norm(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        residual = next((r for r in self.residuals if _is_same(x, r + self.outputs)), None)
        if residual is None:
            return self.end(f"{name} does not read the attention's output plus its residual")
        self.total, self.normed = x, output
        parts = self._read_norm("norm", name, module, x, output)
        then = "nothing" if self.copy_matrix is None or not parts else "feed-forward"
        self._store_parts({"residual": residual} | parts, then=then)

    def handle_linear(self, _name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if self.expected != "feed-forward":
            return
        if _is_same(x, self.normed):
            self.inner.append((module, output))
        elif self.active and len(self.inner) <= 2:
            which, activation, activated = self.active
            other = self.inner[1 - which] if len(self.inner) == 2 else None
            if _is_same(x, activated if other is None else activated * other[1]):
                self._store_mlp(which, activation, other, module)
                self.outputs = output

    def handle_activation(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if self.expected != "feed-forward":
            return
        for which, (_, inner) in enumerate(self.inner):
            if _is_same(x, inner):
                if reason := find_misfit(module, inner, output):
                    return self.end(f"its activation {name} {reason}")
                self.active = which, module, output

    def end(self, reason: str | None = None) -> None:
        """End the search; if a module is still expected, store the reason in `strange`."""
        if self.expected != "nothing":
            self.strange = reason or MISSED[self.expected]
        self._store_parts({}, then="nothing")

    def _store_mlp(self, which: int, activation: Any, other: tuple[nn.Module, Tensor] | None, output: Any) -> None:
        assert self.copy_matrix is not None
        module, s = self.inner[which]
        parts = {"inner": self.copy_matrix(module), "output": self.copy_matrix(output)}
        if other is None:
            parts["slope"] = compute_slope(activation.forward, s)
        else:
            parts["factor"] = self.copy_matrix(other[0])
            parts["slope"], parts["factor_slope"] = compute_gated_slopes(activation.forward, s, other[1])
        self._store_parts({f"feed_forward.{name}": x for name, x in parts.items()}, then="closing norm")

    def _read_norm(self, prefix: str, name: str, module: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
        parts = match_norm(module, x, output)
        if not parts:
            self.strange = f"{name} ({type(module).__name__}) is neither a LayerNorm nor an RMSNorm"
        return {f"{prefix}.{part}": x for part, x in parts.items()}

    def _store_parts(self, parts: dict[str, Tensor], *, then: str) -> None:
        self.parts |= parts
        self.expected = then
        if then == "nothing":  # free the tensors that were kept for comparison
            self.residuals, self.inner, self.active = (), [], None
            self.total = self.normed = self.outputs = torch.empty(0)


def classify_module(module: nn.Module) -> str:
    """Return the role that a module may have, by its weight: a vector, a matrix or none; "" for no role.

    A norm without a weight is told from an activation by its settings.
    """
    if next(module.children(), None) is not None or isinstance(module, nn.Dropout | nn.Identity):
        return ""
    if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 1:
        return "norm"
    if is_linear(module):
        return "linear"
    if next(module.parameters(), None) is not None:
        return ""
    return "norm" if any(hasattr(module, name) for name in NORM_SETTINGS) else "activation"


def match_norm(module: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Return gain (e,), centred () and scale (b,i,1) of a norm that mapped x to output; {} if it is no such norm."""
    dtype, x, weight = x.dtype, widen(x), getattr(module, "weight", None)
    weight = x.new_ones(x.shape[-1]) if weight is None else widen(weight.detach())
    bias = getattr(module, "bias", None)
    own = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    offset = 0.0 if bias is None else widen(bias.detach())
    few = slice(CHECKED_POSITIONS)
    for centred in (True, False):
        eps = (1e-5 if centred else torch.finfo(dtype).eps) if own is None else own  # the defaults of torch
        shifted = x - x.mean(-1, keepdim=True) if centred else x
        scale = (shifted.square().mean(-1, keepdim=True) + eps).rsqrt()
        for gain in (weight, 1 + weight):  # Gemma's norms store gain − 1
            if is_close(shifted[..., few, :] * scale[..., few, :] * gain + offset, output[..., few, :]):
                return {"gain": gain.clone(), "centred": torch.tensor(centred), "scale": scale}
    return {}


def read_bias(norm: nn.Module, like: Tensor) -> Tensor:
    """Return a copy of the bias (e,) of a norm of vectors like `like`; 0 if it has none."""
    bias = getattr(norm, "bias", None)
    return like.new_zeros(like.shape[-1]) if bias is None else bias.detach().clone()


def compute_slope(g: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    """Return g(s)/s; at s = 0, its limit to six digits."""
    s = _replace_zeros(s)
    return g(s) / s


def compute_gated_slopes(g: Callable[[Tensor], Tensor], s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return u (g(s) − ḡ)/s and ḡ = ∫₀¹ g(ts) dt, the factors of s_j and u_j in the integrated gradients of g(s)·u."""
    s, mean = _replace_zeros(s), torch.zeros_like(widen(s))
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    for node, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
        mean += float(weight) * g(float(node) * s)
    return widen(u) * (g(s) - mean) / s, mean


def weight_matrix(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as (in,out): y = x·matrix + bias."""
    weight: Tensor = (module.fold_scale()[0] if isinstance(module, ScaledLinear) else module.weight).detach()  # type: ignore[operator]
    return weight.T if isinstance(module, nn.Linear) else weight


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear, or a Conv1D of transformers: a linear map with a transposed weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def find_misfit(activation: Any, x: Tensor, output: Tensor) -> str:
    """Return why an activation cannot be linearized: it is not 0 at 0, or not elementwise; "" if it can."""
    try:
        at_zero = float(activation.forward(torch.zeros(1, dtype=x.dtype, device=x.device)))
    except RuntimeError:
        return "does not take single numbers"
    if at_zero != 0.0:
        return f"is {at_zero:.3g} at 0, and only an activation that is 0 at 0 can be split among tokens"
    alone = activation.forward(x[..., :1])
    return "" if is_close(alone, output[..., :1]) else "is not elementwise"


def _replace_zeros(s: Tensor) -> Tensor:
    s = widen(s)
    return s.masked_fill(s == 0, 1e-6)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))
