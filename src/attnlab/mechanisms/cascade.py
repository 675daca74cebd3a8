"""What mechanisms share that pass their logits to the next layer: the type of the carry, and the fused kernels.

carry_dtype is the type of the logits that are passed on: "input", the type of q, or "float32", at least float32.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, wide

CarryDtype = Literal["input", "float32"]


def check_carry_dtype(carry_dtype: CarryDtype) -> None:
    if carry_dtype not in ("input", "float32"):
        raise ValueError(f"carry_dtype must be 'input' or 'float32', got {carry_dtype!r}")


def cast_carry(z: Tensor, carry_dtype: CarryDtype) -> Tensor:
    return z if carry_dtype == "input" else wide(z)


def is_case_covered(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, *, at: Tensor | None,
    bias: Tensor | None, width: int = 0,
) -> bool:  # fmt: skip
    """Whether the kernels cover these arguments. width: hidden units of σ, 0 without σ. Raises like `check_carry`."""
    if carry is not None:
        mechanism.check_carry(carry, (*q.shape[:3], k.shape[2]))
    from attnlab.mechanisms.kernels import cascade

    gap = "a bias, or queries placed by at=" if at is not None or bias is not None else None
    return mechanism.is_covered(gap or cascade.find_gap(q, k, v, width))


def run_kernels(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carry: Tensor | None, *, causal: bool,
    carry_dtype: CarryDtype = "input", sharp: float = 1.0, net: Tensor | None = None, seed: Tensor | None = None,
    layer: int = 0, **form: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return context and logits Z, with P = softmax(sharp·Z).

    net and form (width, own, residual) describe σ as in kernels/coda.py; seed and layer determine the noise.
    """
    from attnlab.mechanisms.kernels.cascade import cascade

    rate = mechanism.dropout if mechanism.training else 0.0
    dropping = torch.randint(2**62, (), device=q.device) if rate else None
    sigma = {"width": 0, "own": True, "residual": True} | form
    context, z, _ = cascade(
        q, k, v, mask, carry, net, seed, dropping, causal=causal, scale=mechanism.scale, sharp=sharp, rate=rate,
        layer=layer, wide=carry_dtype == "float32", **sigma,
    )  # fmt: skip
    return context, z
