"""How mechanisms call the fused kernels, and the type of the logits that some of them pass to the next layer.

carry_dtype is the type of the logits that are passed on: "input", the type of q, or "float32", at least float32.
"""

from typing import Literal

from torch import Tensor, nn

from attnlab.mechanisms.mechanism import Mechanism, widen
from attnlab.mechanisms.noise import noise_seed
from attnlab.mechanisms.seeding import DROPOUT, draw_seed

CarryDtype = Literal["input", "float32"]


def check_carry_dtype(carry_dtype: CarryDtype) -> None:
    if carry_dtype not in ("input", "float32"):
        raise ValueError(f"carry_dtype must be 'input' or 'float32', got {carry_dtype!r}")


def cast_carry(z: Tensor, carry_dtype: CarryDtype) -> Tensor:
    return z if carry_dtype == "input" else widen(z)


def can_mix_one_pass(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, *, at: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether impl asks for kernels, and `mix_one_pass` and `mix_fused` cover these arguments.

    Raises TypeError if bias is not floating-point.
    """
    if not mechanism.wants_kernels(q):
        return False
    from attnlab.mechanisms.kernels import tiles

    gap = tiles.find_tile_gap(q, k, v) or find_bias_gap(bias)
    return mechanism.is_covered("queries placed by at=" if at is not None else gap)


def takes_members_in_one_pass(
    self: Mechanism, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, bias: Tensor | None
) -> bool:
    """The method `takes_members` of a mechanism without parameters whose `mix` is `mix_one_pass` or `mix_fused`.

    Only these kernels read the seed of each member, so dropout by other means needs a call for each.
    """
    return not (self.training and self.dropout) or can_mix_one_pass(self, q, k, v, at=at, bias=bias)


def find_bias_gap(bias: Tensor | None) -> str | None:
    """Name what keeps kernels from reading a bias, or return None. Raises TypeError if bias is not floating-point."""
    if bias is None:
        return None
    if not bias.is_floating_point():
        raise TypeError(f"bias must be floating-point, got {bias.dtype}; pass a boolean mask as mask=")
    if bias.dim() > 1 and bias.shape[-2] * bias.stride(-2) >= 2**31:
        return f"a bias {tuple(bias.shape)}, whose offsets exceed 31 bits"
    return None


def draw_dropping(mechanism: Mechanism, q: Tensor) -> tuple[float, Tensor | None]:
    """Return the rate of dropout, and the seed from which kernels draw it; 0 and None outside training."""
    rate = mechanism.dropout if mechanism.training else 0.0
    return rate, draw_seed(mechanism, DROPOUT, q.device) if rate else None


def mix_one_pass(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool,
    bias: Tensor | None = None, form: str = "softmax", extra: Tensor | None = None, level: Tensor | None = None,
    eps: float = 0.0, noisy: bool = False, dropping: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the context by the kernels that store no logits. form, extra, level and eps: see kernels/one_pass.py.

    dropping   the seed of dropout, where a checkpoint needs the same again; by default a fresh one in training
    """
    from attnlab.mechanisms.kernels import one_pass, online

    kind = getattr(online, form.upper()).value
    seed, layer = noise_seed(mechanism, q.device) if noisy else (None, 0)
    rate, drawn = draw_dropping(mechanism, q) if dropping is None else (mechanism.dropout, dropping)
    given = (mask, bias, extra, level, seed, drawn, kind, causal, mechanism.scale, rate, layer, eps)
    context: Tensor = one_pass.one_pass(q, k, v, *given)[0]
    return context


def is_case_covered(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, *, at: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether kernels that take no bias cover these arguments."""
    from attnlab.mechanisms.kernels import tiles

    gap = "a bias, or queries placed by at=" if at is not None or bias is not None else None
    return mechanism.is_covered(gap or tiles.find_tile_gap(q, k, v))


def mix_fused(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carry: Tensor | None, *, causal: bool,
    at: Tensor | None, bias: Tensor | None, carry_dtype: CarryDtype = "input", sharp: float = 1.0,
    sigma: nn.Sequential | None = None, own: bool = True, residual: bool = True,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return context and logits Z by the kernels, with P = softmax(sharp·Z), or None where the kernels do not apply.

    It has many parameters: those of `mix`, and the form of the cascade. own and residual describe σ as in
    kernels/coda.py. A stochastic mechanism adds its noise to Z.
    """
    if not can_mix_one_pass(mechanism, q, k, v, at=at, bias=bias):
        return None
    if carry is not None:
        mechanism.check_carry(carry, (*q.shape[:3], k.shape[2]))
    net: list[Tensor | None] = [None] * 6
    if sigma is not None and carry is not None:
        linears = [part for part in sigma if isinstance(part, nn.Linear)]
        given = [x for linear in linears for x in (linear.weight, linear.bias)]
        net = [*given[:2], *(given[2:4] if len(linears) == 3 else (None, None)), *given[-2:]]
    from attnlab.mechanisms.kernels.cascade import cascade

    seed, layer = noise_seed(mechanism, q.device) if mechanism.stochastic else (None, 0)
    rate, dropping = draw_dropping(mechanism, q)
    context, z, _ = cascade(
        q, k, v, mask, bias, carry, *net, seed, dropping, causal=causal, scale=mechanism.scale, sharp=sharp, rate=rate,
        layer=layer, own=own, residual=residual, wide=carry_dtype == "float32",
    )  # fmt: skip
    return context, z
