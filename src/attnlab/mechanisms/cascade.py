"""How a mechanism that hands on its logits is computed: by its definition, or by the fused kernels that equal it.

    impl="reference"  the definition        "fused"  the kernels, or an error that says what they do not cover
    impl="auto"       the kernels where they cover the case, on a GPU

carry_dtype says in what the logits are handed on: "input", as q is, or "float32" at least.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Mechanism, wide

Impl = Literal["auto", "reference", "fused"]
CarryDtype = Literal["input", "float32"]


def check_impl(impl: Impl) -> None:
    if impl not in ("auto", "reference", "fused"):
        raise ValueError(f"impl must be 'auto', 'reference' or 'fused', not {impl!r}")


def check_choices(impl: Impl, carry_dtype: CarryDtype) -> None:
    check_impl(impl)
    if carry_dtype not in ("input", "float32"):
        raise ValueError(f"carry_dtype must be 'input' or 'float32', not {carry_dtype!r}")


def handed_on(z: Tensor, carry_dtype: CarryDtype) -> Tensor:
    return z if carry_dtype == "input" else wide(z)


def takes_kernels(
    mechanism: Mechanism, impl: Impl, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carry: Tensor | None, *,
    at: Tensor | None, bias: Tensor | None, width: int = 0,
) -> bool:  # fmt: skip
    """Whether the kernels are to be run. Refuses arguments that do not fit. width: of σ's hidden layers, if any."""
    if impl == "reference" or (impl == "auto" and not q.is_cuda):
        return False
    mechanism.check(q, k, mask, at, v)
    shape = (*q.shape[:3], k.shape[2])
    if carry is not None and (mechanism.first or carry.shape != shape):
        mechanism.previous(carry, q.new_empty(shape, device="meta"), carry)  # raises, and says why
    from attnlab.mechanisms.kernels import cascade

    reason = "a bias, or queries placed by at=" if at is not None or bias is not None else None
    reason = reason or cascade.unsupported(q, k, v, width)
    if reason and impl == "fused":
        raise ValueError(f"impl='fused' does not cover {reason}; say impl='auto' or 'reference'")
    return reason is None


def run_kernels(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, carry: Tensor | None, *, causal: bool,
    carry_dtype: CarryDtype, sharp: float = 1.0, net: Tensor | None = None, seed: Tensor | None = None, layer: int = 0,
    **form: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context and logits, P = softmax(sharp·Z). net, form: σ, as the kernels read it; seed, layer: of the noise."""
    from attnlab.mechanisms.kernels.cascade import cascade

    rate = mechanism.dropout if mechanism.training else 0.0
    dropping = torch.randint(2**62, (), device=q.device) if rate else None
    sigma = {"width": 0, "own": True, "residual": True} | form
    context, z, _ = cascade(
        q, k, v, mask, carry, net, seed, dropping, causal=causal, scale=mechanism.scale, sharp=sharp, rate=rate,
        layer=layer, wide=carry_dtype == "float32", **sigma,
    )  # fmt: skip
    return context, z
