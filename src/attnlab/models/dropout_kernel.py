"""Dropout on a GPU as a pure function of a seed and of the place of a number, with the residual sum in the same pass.

    y = [x +] z ∘ keep / (1 − p)        keep = 1[u ≥ p],  u = Philox(seed, feature // 4, token, example)

Tensors are (s·b,n,e): b examples of each of s members, with a seed and a rate p of its own. Example and token are
counted within the member. So a member draws what it draws alone, whatever the other members and the padding are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, operator, remember_calls, round_up, select_device
from attnlab.mechanisms.kernels.pairs import draw_dropout
from attnlab.models.affine import KERNEL_TYPES

TILE = 4096  # numbers of a program


@remember_calls
@triton.jit(do_not_specialize=["examples", "tokens"])
def _drop(
    z, x, bias, seeds, rates, out, sums, examples, tokens, features, b_s, ADDED: tl.constexpr, BIASED: tl.constexpr,
    SUMMED: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """BT tokens and BE features of one member. sums (s,tiles of tokens,features); b_s: members' stride in the bias."""
    rows, columns = examples * tokens, tl.cdiv(features, BE)
    tiles = tl.cdiv(rows, BT) * columns
    member, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    left = tile % columns * BE
    row, e = tile // columns * BT + tl.arange(0, BT), left + tl.arange(0, BE)
    place = (member.to(tl.int64) * rows + row)[:, None] * features + e[None, :]
    inside = (row < rows)[:, None] & (e < features)[None, :]
    rate, seed = tl.load(rates + member), tl.load(seeds + member)
    quad = left // 4 + tl.arange(0, BE // 4)
    kept = draw_dropout(seed, rate, (row // tokens)[:, None], (row % tokens)[:, None], quad[None, :])
    y = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + member.to(tl.int64) * b_s + e, mask=e < features, other=0.0).to(tl.float32)[None, :]
    y = tl.where(kept > 0.0, y * kept, 0.0)
    if SUMMED:
        at = (member * tl.cdiv(rows, BT) + tile // columns) * features + e
        tl.store(sums + at, tl.sum(tl.where(inside, y, 0.0), 0), mask=e < features)
    if ADDED:
        y += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y, mask=inside)


@operator("attnlab::drop")
def drop(z: Tensor, x: Tensor | None, seeds: Tensor, rates: Tensor) -> Tensor:
    """Return x + dropout(z), or dropout(z) without x, (s·b,n,e). seeds: (s,) int64; rates: (s,) float32."""
    return drop_biased(z, None, x, seeds, rates)


def drop_biased(z: Tensor, bias: Tensor | None, x: Tensor | None, seeds: Tensor, rates: Tensor) -> Tensor:
    """Return x + dropout(z + b), b (s,e), whose rows may lie apart. It has no derivative."""
    given, out = z.contiguous(), torch.empty_like(z, memory_format=torch.contiguous_format)
    _launch(given, given if x is None else x.contiguous(), bias, seeds, rates, out, None, added=x is not None)
    return out


def drop_summed(z: Tensor, seeds: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return dropout(z), and its sums over parts of the tokens of a member, (s,parts,e) in float32."""
    given, out = z.contiguous(), torch.empty_like(z, memory_format=torch.contiguous_format)
    members, (rows, tokens, features) = len(rates), z.shape
    parts = divide_up(rows // members * tokens, TILE // min(256, round_up(features)))
    sums = z.new_empty(members, parts, features, dtype=torch.float32)
    _launch(given, given, None, seeds, rates, out, sums, added=False)
    return out, sums


def _launch(
    z: Tensor, x: Tensor, bias: Tensor | None, seeds: Tensor, rates: Tensor, out: Tensor, sums: Tensor | None, *,
    added: bool,
) -> None:  # fmt: skip
    members, (rows, tokens, features) = len(rates), z.shape
    wide = min(256, round_up(features))
    sizes = {"BT": TILE // wide, "BE": wide}
    tiles = divide_up(rows // members * tokens, sizes["BT"]) * divide_up(features, wide)
    kinds = {"ADDED": added, "BIASED": bias is not None, "SUMMED": sums is not None}
    pointers = (z, x, rates if bias is None else bias, seeds, rates, out, rates if sums is None else sums)
    with select_device(z):
        _drop[(members * tiles,)](
            *pointers, rows // members, tokens, features, 0 if bias is None else bias.stride(0), **kinds, **sizes
        )


def drop_tokens(z: Tensor, x: Tensor | None, seeds: Tensor, rates: Tensor) -> Tensor:
    """`drop` for any floating-point type, and for (n,e) of one member as well.

    The kernel computes in float32. In float64 it only draws the mask.
    """
    if z.dim() == 2:
        return drop_tokens(z[None], None if x is None else x[None], seeds, rates)[0]
    if z.dtype in KERNEL_TYPES:
        y: Tensor = drop(z, x, seeds, rates)
        return y
    y = z * drop(torch.ones_like(z, dtype=torch.float32), None, seeds, rates)
    return y if x is None else x + y


@drop.register_fake
def _(z: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, seeds, rates = inputs
    ctx.is_added = x is not None
    ctx.save_for_backward(seeds, rates)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    seeds, rates = ctx.saved_tensors
    return drop(grad, None, seeds, rates), grad if ctx.is_added else None, None, None


drop.register_autograd(_gradients, setup_context=_save_inputs)
