"""Adam and AdamW of many members in one pass: a row of the flat parameters for each, with numbers of its own.

    g ← c g      Adam: g ← g + λ θ      AdamW: θ ← (1 − η λ) θ      c: of clipping, λ: weight decay, η: learning rate
    m ← β₁ m + (1 − β₁) g      v ← β₂ v + (1 − β₂) g²      θ ← θ − η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

The working copy of the parameters is written in the same pass. A row whose flag is set stays as it is. The caller
computes 1 − β and the corrections 1 − βᵗ in float64: in float32, 1 − 0.9999 has four digits.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, select_device

BLOCK = 4096
NUMBERS = ("lr", "1 − beta1", "1 − beta2", "eps", "weight_decay")  # of a row, in this order


@remember_calls
@triton.jit
def _adam(
    master, work, grad, first, second, numbers, factors, corrections, flags, size, DECOUPLED: tl.constexpr,
    COPIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK parameters of one row. COPIED: the working copy is a tensor of its own."""
    row = tl.program_id(1).to(tl.int64)
    if tl.load(flags + row) == 0.0:
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        place, inside = row * size + n, n < size
        own = numbers + 5 * row
        lr, share1, share2 = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        eps, decay = tl.load(own + 3), tl.load(own + 4)
        p = tl.load(master + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + row)
        if DECOUPLED:
            p -= lr * decay * p
        else:
            g += decay * p
        m = (1.0 - share1) * tl.load(first + place, mask=inside, other=0.0) + share1 * g
        v = (1.0 - share2) * tl.load(second + place, mask=inside, other=0.0) + share2 * g * g
        scale, root = lr / tl.load(corrections + 2 * row), tl.load(corrections + 2 * row + 1)
        p -= scale * m / (tl.sqrt(v) / root + eps)
        tl.store(master + place, p, mask=inside)
        tl.store(first + place, m, mask=inside)
        tl.store(second + place, v, mask=inside)
        if COPIED:
            tl.store(work + place, p, mask=inside)


def update_rows(
    master: Tensor, work: Tensor, grad: Tensor, first: Tensor, second: Tensor, numbers: Tensor, factors: Tensor,
    corrections: Tensor, flags: Tensor, *, decoupled: bool,
) -> None:  # fmt: skip
    """Update all rows in place.

    master, first, second         (s,size) in float32        work      master itself, or its copy in another type
    grad                          (s,size) in any type
    numbers                       (s,5), of NUMBERS          factors   (s,) of the gradient, for clipping
    corrections                   (s,2), 1 − β₁ᵗ, √(1 − β₂ᵗ)  flags    (s,) not 0: leave the row as it is
    """
    rows, size = master.shape
    with select_device(master):
        _adam[(divide_up(size, BLOCK), rows)](
            master, work, grad, first, second, numbers, factors, corrections, flags, size, DECOUPLED=decoupled,
            COPIED=work.data_ptr() != master.data_ptr(), BLOCK=BLOCK,
        )  # fmt: skip
