"""The interface of every attention mechanism, and the tensor functions that mechanisms share.

Notation, everywhere in attnlab: b batch, h heads, i query, j key, d head size; mask True = may attend.

    q (b,h,i,d)    k, v (b,g,j,d) with g dividing h (grouped heads)    weights (b,h,i,j)    context (b,h,i,d)
"""

import inspect
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.config import Natural, Positive, Probability, check_value
from attnlab.mechanisms.seeding import DROPOUT, draw_seed

Impl = Literal["auto", "reference", "fused"]
WithCarry = tuple[Tensor, Tensor | None]  # weights or context, and the carry for the next layer
ALL = sys.maxsize  # lookback of a mechanism that reads every former query
Sides = tuple[Any, Any]  # what query_side and key_side returned: a tensor or None each


class NotCoveredError(ValueError):
    """impl="fused" was asked for a case that the kernels do not cover."""


class Mechanism(nn.Module, ABC):
    """One attention mechanism: it turns queries and keys into weights. Models hold one and do not know which.

        weights(q, k, …)  -> weights, carry      the definition, in plain PyTorch
        mix(q, k, v, …)   -> context, carry      dropout(weights) @ v, or a fused equivalent
        finish(context)   -> context             identity, unless the paper transforms the mixed context
        forward           = finish(turn(mix(…))) what models call

    mask    bool, broadcastable to (b,1,i,j), True = may attend; the same for all heads
    causal  key j is visible to query i only if j <= at[i]; never inferred from a mask
    at      (i,) the key index of each query; by default the last i keys, so causal is aligned bottom-right.
            In cross attention it is the query's position in its own sequence, which the noise depends on.
    bias    added to the logits, broadcastable to (b,h,i,j); −∞ hides its key, as the mask does
    carry   what the previous layer of the same kind returned, or None; undefined where hidden, and never read there

    A mechanism that reads more than q, k and v overrides one of these. x (b,n,e) is the input of the layer:

        query_side(x)    -> None | (b,·,i,·)     derived from x for each query, as a gate
        key_side(x)      -> None | (b,·,j,·)     derived from x for each key; cached beside the keys
        values(v, carry) -> v, carry             what is mixed, and what the next layer gets (carry_of = "keys")
        turn(context, v, at, sides) -> context   linear in each query's context of each head, as a gate

    turn gets sides = (query_side, key_side), and so do weights and mix if weights has a parameter sides: a mechanism
    that only turns the context keeps the kernels of the one it is built on.

    A row without visible keys has weights 0, context 0 and finite gradients. `impl` selects how mix is computed:

    reference  by the definition, weights(…) @ v
    fused      by Triton kernels; an error names what they do not cover
    auto       by the kernels where they cover the case, on a GPU; elsewhere by torch's attention or sums where the
               mechanism has such a form, else by the definition, in bands of queries where it is large
    """

    carries: ClassVar[bool] = False  # passes a carry to the next layer
    stochastic: ClassVar[bool] = False  # draws noise in training
    self_only: ClassVar[bool] = False  # undefined where queries and keys are different sequences
    head_parts: ClassVar[int] = 1  # parts of a head with products of their own, which RoPE rotates apart
    positional: ClassVar[bool] = False  # depends on the order of the keys
    carry_of: ClassVar[Literal["pairs", "keys"]] = "pairs"  # the carry is shaped like the logits, or like v
    lookback: int = 0  # former queries that a row depends on, or ALL; a cache keeps them
    kernels: ClassVar[frozenset[str]] = frozenset()  # names of the Triton kernels that impl="fused" launches
    members: int = 1  # models whose parameters it has, stacked to (s,…), as models/members.py does
    row_sum: Any = None  # the sum of every row with a visible key: a number, one per head (h,), or None where it varies

    def __init__(
        self, heads: int, head_dim: int, *, layer: Natural = 0, scale: Positive | None = None,
        dropout: Probability = 0.0, impl: Impl = "auto", model_size: Positive | None = None,
    ) -> None:  # fmt: skip
        """model_size: size e of the layer's input x, by default heads · head_dim."""
        super().__init__()
        types = {"heads": int, "head_dim": int, "layer": Natural, "scale": Positive | None, "dropout": Probability}
        for value, (name, hint) in zip((heads, head_dim, layer, scale, dropout), types.items(), strict=True):
            check_value(name, value, hint)
        check_value("impl", impl, Impl)
        if impl == "fused" and not self.kernels:
            raise ValueError("impl='fused' is not available: there are no kernels; use impl='auto' or 'reference'")
        self.heads, self.head_dim, self.layer, self.dropout = heads, head_dim, layer, float(dropout)
        if type(self).values is not Mechanism.values and not (self.carries and self.carry_of == "keys"):
            raise ValueError("a mechanism that overrides values must declare carries = True and carry_of = 'keys'")
        self.reads_sides = _takes_sides(type(self))
        self.first = layer == 0  # a bool, because torch.compile would recompile for each value of layer
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.impl: Impl = impl
        self.model_size = heads * head_dim if model_size is None else int(model_size)
        self.sample_seed: int | None = None  # set by noise.seed_noise; read by stochastic mechanisms
        self.seeds: Tensor | None = None  # (2,s) of noise and of dropout, set by seeding.Seeds in training on a GPU

    @abstractmethod
    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None) -> WithCarry:  # fmt: skip
        """Return weights (b,h,i,j) and the carry: the definition, in plain PyTorch."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
            causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None, **sides: Any
            ) -> WithCarry:  # fmt: skip
        from attnlab.mechanisms.by_rows import mix_by_rows, needs_bands

        if self.impl == "auto" and needs_bands(self, q, k):
            self.check(q, k, mask, at, v)
            return mix_by_rows(self, self.weigh, q, k, v, mask, causal=causal, at=at, bias=bias, **sides), None
        result = self.weights(q, k, mask, carry, causal=causal, at=at, bias=bias, **sides)
        self.check(q, k, mask, at, v)
        self.check_result("weights", result, (len(q), self.heads, q.shape[2], k.shape[2]))
        return self.drop(result[0]) @ repeat_heads(v, self.heads), result[1]

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Return the weights alone, (b,h,i,j)."""
        result = self.weights(q, k, mask, **options)
        self.check_result("weights", result, (len(q), self.heads, q.shape[2], k.shape[2]))
        return result[0]

    def query_side(self, x: Tensor) -> Tensor | None:
        """Return what weights, mix and turn read of each query's x: (b,i,e) -> (b,·,i,·), or None."""
        return None

    def key_side(self, x: Tensor) -> Tensor | None:
        """Return what weights, mix and turn read of each key's x: (b,j,e) -> (b,·,j,·), or None."""
        return None

    def values(self, v: Tensor, carry: Tensor | None) -> WithCarry:
        """Return what is mixed, (b,g,j,d), and what the next layer gets, if the mechanism carries values."""
        return v, None

    def turn(self, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor:
        """Return the context after a linear map for each query and head, (b,h,i,d). It must not read other rows."""
        return context

    def finish(self, context: Tensor) -> Tensor:
        return context

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, carry: Tensor | None = None, *,
                causal: bool = False, at: Tensor | None = None, bias: Tensor | None = None, sides: Sides = (None, None),
                ) -> WithCarry:  # fmt: skip
        if sides[0] is None and sides[1] is None and self.has_sides:
            self.check_sides(q.new_zeros(1, 1, self.model_size))
        if not q.dim() == k.dim() == v.dim() == 4:
            got = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"q, k and v of {type(self).__name__} must be (batch, heads, length, size), got {got}")
        v, carry, carried = self.take_values(v, carry)
        result = self.mix(q, k, v, mask, carry, causal=causal, at=at, bias=bias, **self.give_sides(sides))
        self.check_result("mix", result, (len(q), self.heads, q.shape[2], v.shape[3]))
        return self.complete(result[0], v, at, sides), result[1] if carried is None else carried

    def take_values(self, v: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what is mixed, the carry that weights and mix get, and the carried values for the next layer."""
        if self.carry_of == "pairs":
            return v, carry, None
        mixed, carried = self.values(v, carry)
        return mixed, None, carried

    def complete(self, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor:
        """Return the mixed context after `turn` and `finish`, whose results are checked."""
        turned = self.turn(context, v, at, sides)
        if turned is not context:
            self.check_result("turn", (turned, None), tuple(context.shape))
        finished = self.finish(turned)
        if finished is not turned:
            self.check_result("finish", (finished, None), tuple(context.shape))
        return finished

    @property
    def has_sides(self) -> bool:
        """Whether it reads the input of its layer."""
        kind = type(self)
        return kind.query_side is not Mechanism.query_side or kind.key_side is not Mechanism.key_side

    @property
    def needs_layer(self) -> bool:
        """Whether it needs the projections of a Transformer's layer, and not queries, keys and values alone."""
        return self.lookback != 0 or self.query_heads != self.heads or self.has_sides

    def give_sides(self, sides: Sides) -> dict[str, Any]:
        """Return the sides as a named argument of weights and mix, or nothing if they take none."""
        return {"sides": sides} if self.reads_sides else {}

    def visible(
        self, q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Which keys each query may attend to: 4-D, bool, broadcastable to (b,h,i,j). Raises like `check`.

        Only a bias, which hides keys where it is −∞, makes heads differ. Pass it if hidden logits are read, except by
        `masked_softmax`, which knows them.
        """
        self.check(q, k, mask, at)
        seen = visible(q, k, mask, causal=causal, at=at)
        return seen if bias is None else seen & (bias != -torch.inf)

    @property
    def carry_heads(self) -> int:
        """Number of heads of the carry, if there is one."""
        return self.heads

    @property
    def query_heads(self) -> int:
        """Number of heads of q."""
        return self.heads

    def check(
        self, q: Tensor, k: Tensor, mask: Tensor | None = None, at: Tensor | None = None, v: Tensor | None = None
    ) -> None:
        """Raise ValueError or TypeError if the arguments do not fit this mechanism or each other."""
        if (q.shape[1:2], q.shape[-1:]) != ((self.query_heads,), (self.head_dim,)):
            expected = f"(batch, {self.query_heads}, length, {self.head_dim})"
            raise ValueError(f"q of {type(self).__name__} must be {expected}, got {tuple(q.shape)}")
        check(q, k, mask, at, v)
        if self.self_only and at is None and q.shape[2] > k.shape[2]:
            got = f"{q.shape[2]} queries and {k.shape[2]} keys"
            raise ValueError(f"{type(self).__name__} is self-attention, so every query has a key, but got {got}")

    def check_sides(self, x: Tensor) -> None:
        """Raise ValueError if the mechanism derives a side from an input x (b,n,e): then sides must be passed."""
        if self.query_side(x) is not None or self.key_side(x) is not None:
            how = f"(b,n,{self.model_size}): pass sides=(m.query_side(x), m.key_side(x)), where m is the mechanism"
            raise ValueError(f"{type(self).__name__} reads the input x of its layer, {how}")

    def check_result(self, method: str, result: Any, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless a method returned a floating-point tensor of this shape, and a carry."""
        if torch.compiler.is_compiling():
            return
        got = ""
        if not isinstance(result, tuple) or len(result) != 2:
            kind = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            got = f"a pair ({method}, carry), where carry may be None, got {kind}"
        elif not isinstance(result[0], Tensor) or not result[0].is_floating_point():
            kind = str(result[0].dtype) if isinstance(result[0], Tensor) else type(result[0]).__name__
            got = f"a floating-point tensor, got {kind}"
        elif result[0].shape != shape:
            got = f"a tensor of shape {tuple(shape)}, got {tuple(result[0].shape)}"
        elif result[1] is not None and not isinstance(result[1], Tensor):
            got = f"a tensor or None as the carry, got {type(result[1]).__name__}"
        if got:
            file = getattr(sys.modules.get(type(self).__module__), "__file__", type(self).__module__)
            raise ValueError(f"{file}: {type(self).__name__}.{method} must return {got}")

    def check_carry(self, carry: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ValueError if this is layer 0, or if the carry does not have this shape, of the logits or of v."""
        if self.first:
            raise ValueError(f"layer 0 takes no carry; build {type(self).__name__} with layer= its index in the stack")
        if carry.shape != shape:
            raise ValueError(f"the carry is {tuple(carry.shape)} but this layer needs {tuple(shape)}")

    def read_carry(self, carry: Tensor, z: Tensor, seen: Tensor) -> Tensor:
        """Return the carry as logits z may add it: 0 where hidden, in z's type. Raises like `check_carry`."""
        self.check_carry(carry, z.shape)
        return carry.masked_fill(~seen, 0.0).to(z.dtype)

    def drop(self, weights: Tensor, number: int = 0) -> Tensor:
        """Return the weights after dropout, in training; number: of these weights, where a mechanism has several."""
        if self.seeds is None or not (self.training and self.dropout):
            return F.dropout(weights, self.dropout, self.training)
        from attnlab.mechanisms.by_rows import draw_kept

        kept: Tensor = draw_kept(weights.detach(), draw_seed(self, DROPOUT, weights.device, number), self.dropout, 0)
        return weights * kept

    def take_seeds(self, seeds: Tensor) -> None:
        """Draw noise and dropout from these seeds, (2,s), instead of torch's generator."""
        self.seeds = seeds

    def wants_kernels(self, q: Tensor) -> bool:
        """Whether impl asks for kernels: "fused" always, "auto" on a GPU."""
        return self.impl == "fused" or (self.impl == "auto" and q.is_cuda)

    def is_covered(self, gap: str | None) -> bool:
        """Whether kernels cover a case. `gap` names what they lack, or is None; with impl="fused" a gap is an error."""
        if gap and self.impl == "fused":
            raise NotCoveredError(f"impl='fused' does not cover {gap}; use impl='auto' or 'reference'")
        return gap is None

    def takes_members(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None) -> bool:
        """Whether mix takes stacked parameters here: q (s·b,h,i,d) has the examples of s members one after another.

        Only a class that has this method itself is asked: a subclass may read parameters of its own in other ways.
        """
        return False

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, layer={self.layer}, scale={self.scale:.4g}"


def _takes_sides(kind: type[Mechanism]) -> bool:
    """Whether weights has a parameter sides, also where it passes named arguments on to the class before."""
    for each in kind.__mro__:
        if "weights" in vars(each):
            parameters = inspect.signature(vars(each)["weights"]).parameters
            if "sides" in parameters:
                return True
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return False
    return False


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each of g key heads for heads/g consecutive query heads: (b,g,j,d) -> (b,heads,j,d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b,n,heads·d) -> (b,heads,n,d)."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """S = scale · q kᵀ + bias, (b,h,i,j)."""
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias must be floating-point, got {bias.dtype}; pass a boolean mask as mask=")
    s = (q if scale == 1 else q * scale) @ repeat_heads(k, q.shape[1]).mT
    return s if bias is None else s + bias


def position(q: Tensor, k: Tensor, at: Tensor | None = None) -> Tensor:
    """The key index of each query, (i,); by default the last i keys."""
    i, j = q.shape[2], k.shape[2]
    return torch.arange(j - i, j, device=q.device) if at is None else at


def select_own(x: Tensor, q: Tensor, at: Tensor | None = None) -> Tensor:
    """x (b,g,j,d) at the key index of each query: (b,g,i,d)."""
    i, j = q.shape[2], x.shape[2]
    if at is None and i <= j:
        return x if i == j else x[:, :, j - i :]
    return x.index_select(2, position(q, x, at))


def visible(
    q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool = False, at: Tensor | None = None
) -> Tensor:
    """Which keys each query may attend to, (b|1,1,i|1,j) bool."""
    if mask is None:
        seen = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=q.device)
    else:
        seen = mask[(None,) * (4 - mask.dim())]
    if causal:
        seen = seen & (torch.arange(k.shape[2], device=q.device) <= position(q, k, at)[:, None])
    return seen


def masked_softmax(z: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the visible keys, at least in float32. A row without visible keys is 0, and so is its gradient.

    A logit of −∞, which a bias can cause, hides its key too.
    """
    hidden = ~seen | (z == -torch.inf)
    p = widen(z).masked_fill(hidden, torch.finfo(widen(z).dtype).min).softmax(-1)
    return p.masked_fill(hidden, 0.0).to(z.dtype)


def widen(x: Tensor) -> Tensor:
    """x in at least float32, the precision of every sum over keys."""
    return x if x.dtype == torch.float64 else x.float()


def check(q: Tensor, k: Tensor, mask: Tensor | None = None, at: Tensor | None = None, v: Tensor | None = None) -> None:
    """Raise ValueError or TypeError if the arguments do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", k if v is None else v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim), got {tuple(x.shape)}")
    (b, h, i, d), (kb, g, j, kd) = q.shape, k.shape
    if (b, d) != (kb, kd):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head_dim")
    if h % g:
        raise ValueError(f"{h} query heads cannot share {g} key heads: {g} does not divide {h}")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or length")
    if not q.dtype == k.dtype == (q if v is None else v).dtype and not torch.is_autocast_enabled(q.device.type):
        got = ", ".join(str(x.dtype) for x in (q, k, v) if x is not None)
        raise TypeError(f"q, k and v must have one type, got {got}: cast them, as with q.to(v.dtype)")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool (True = may attend), got {mask.dtype}; pass an additive mask as bias=")
        if mask.dim() > 3 and mask.shape[-3] != 1:
            raise ValueError(f"mask {tuple(mask.shape)} differs between heads: it must be the same for all, (b,1,i,j)")
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(shape, (b, 1, i, j), strict=True)):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to (b,1,i,j) = {(b, 1, i, j)}")
    if at is not None and (at.shape != (i,) or at.is_floating_point() or at.dtype == torch.bool):
        raise ValueError(f"at must have one key index for each of the {i} queries, got {at.dtype} {tuple(at.shape)}")
