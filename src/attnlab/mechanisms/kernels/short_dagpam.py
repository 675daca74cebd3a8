"""daGPAM over short rows: both signs of a head share its keys and values, and their weights are combined before V.

    Q⁻ = ReLU(Q) W⁻      P± = softmax(scale·Q± Kᵀ)      P = (1 + λ⁺) P⁺∘D⁺ − λ⁻ P⁻∘D⁻      C = P V      D: dropout
    dV = Pᵀ G            T± = P± ∘ D± ∘ (G Vᵀ)          δ± = Σ_j T±                        dλ± = ±Σ_i δ±
    dS± = a± (T± − P± δ±)     a⁺ = 1 + λ⁺, a⁻ = −λ⁻     dQ± = scale·dS± K      dK = scale Σ± dS±ᵀ Q±
    dQ = dQ⁺ + 1[Q>0] (dQ⁻ W⁻ᵀ)                         dW⁻ = Σ ReLU(Q)ᵀ dQ⁻

A program holds all keys of a head and takes the queries by tiles. The backward pass needs only the inputs and one
number L for each row and sign. One program handles all query heads that share a key head. Every sum is computed in
float32 and in a fixed order. Parameters and seeds (s,…) are those of s members, whose examples come one after another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.dagpam import count_members, find_strides, split_signs
from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    round_up,
    select_device,
)  # fmt: skip
from attnlab.mechanisms.kernels.online import LOG2_E
from attnlab.mechanisms.kernels.pairs import count_examples, draw_dropout, is_visible, read_mask
from attnlab.mechanisms.kernels.tiles import load_tile, write_tile

LONGEST = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}  # queries or keys
WIDEST = 64  # head size
PLAIN = ("heads", "rows", "keys", "m_b", "lambda_s", "lambda_h", "each", "drawn")  # numbers that have no variants


@triton.jit
def _matrix(w, D: tl.constexpr, WIDE: tl.constexpr):
    """W⁻ of one head, padded with zeros."""
    d = tl.arange(0, WIDE)
    return tl.load(w + d[:, None] * D + d[None, :], mask=(d < D)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _score(x, y, seen, scale):
    """scale·x yᵀ in base 2, −∞ where hidden."""
    return tl.where(seen, tl.dot(x, tl.trans(y), input_precision="ieee") * (scale * LOG2_E), float("-inf"))


@triton.jit
def _weigh(x, y, seen, dropping, head, i, scale, rate, DROPPED: tl.constexpr, KEYS: tl.constexpr):
    """P ∘ D of queries x, whose rows are i, and all keys y, and L = log₂ Σ 2^S; a row without visible keys is 0.

    head counts the heads and signs that have the same seed.
    """
    s = _score(x, y, seen, scale)
    top = tl.max(s, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - top[:, None])
    total = tl.sum(p, 1)
    total = tl.where(total == 0.0, 1.0, total)
    p *= (1.0 / total)[:, None]
    if DROPPED:
        p *= draw_dropout(tl.load(dropping), rate, head, i[:, None], tl.arange(0, KEYS // 4)[None, :])
    return p, top + tl.log2(total)


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _forward(
    q, k, v, w, plus, minus, mask, dropping, out, lse, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d, m_b, m_i, m_j, w_s, w_h, lambda_s, lambda_h, each, drawn, scale, rate, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head. each, drawn: number of examples that have the same parameters, and the same seed."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // heads, program % heads
    i, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    matrix = _matrix(w + b // each * w_s + h * w_h, D, WIDE).to(x.dtype)
    at, dropping, head = b // each * lambda_s + h * lambda_h, dropping + b // drawn, b % drawn * heads + h
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
    p, level = _weigh(x, y, seen, dropping, 2 * head, i, scale, rate, DROPPED, KEYS)
    tl.store(lse + 2 * program * rows + i, level, mask=i < rows)
    weights = p * (1.0 + tl.load(plus + at).to(tl.float32))
    x = tl.dot(tl.maximum(x, 0.0).to(x.dtype), matrix, input_precision="ieee").to(x.dtype)
    p, level = _weigh(x, y, seen, dropping, 2 * head + 1, i, scale, rate, DROPPED, KEYS)
    tl.store(lse + (2 * program + 1) * rows + i, level, mask=i < rows)
    weights -= p * tl.load(minus + at).to(tl.float32)
    write_tile(out, tl.dot(weights.to(z.dtype), z, input_precision="ieee"), b, h, i, heads, rows, D, WIDE)


@triton.jit
def _slope(x, y, seen, dp, dropping, lse, head, i, rows, scale, rate, share, DROPPED: tl.constexpr, KEYS: tl.constexpr):
    """Of one sign with the factor `share`: its part of Pᵀ, scale·dSᵀ, and δ. Keys are the rows of its tiles.

    lse is that of the head's sign; head as in `_weigh`.
    """
    level = tl.load(lse + i, mask=i < rows, other=0.0)
    p = tl.exp2(_score(y, x, seen, scale) - level[None, :])
    taken, t = p, p * dp
    if DROPPED:
        kept = tl.trans(draw_dropout(tl.load(dropping), rate, head, i[:, None], tl.arange(0, KEYS // 4)[None, :]))
        taken, t = p * kept, t * kept
    delta = tl.sum(t, 0)
    return (taken * share).to(x.dtype), ((t - p * delta[None, :]) * (share * scale)).to(x.dtype), delta


@remember_calls
@triton.jit(do_not_specialize=PLAIN)
def _backward(
    q, k, v, w, plus, minus, mask, dropping, grad, lse, dq, dk, dv, dw, dlambda, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, w_s, w_h, lambda_s, lambda_h, each,
    drawn, scale, rate, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One key head, and the query heads that share it; dw (b,h,d,d) and dlambda (b,2,h) have parts.

    Over 50 lines, because both signs use the same keys, values and gradients while these are in registers.
    """
    program = tl.program_id(0).to(tl.int64)
    groups = heads // SHARED
    b, g = program // groups, program % groups
    j, d = tl.arange(0, KEYS), tl.arange(0, WIDE)
    y = load_tile(k, b, g, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, g, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_k, sum_v = tl.zeros((KEYS, WIDE), dtype=tl.float32), tl.zeros((KEYS, WIDE), dtype=tl.float32)
    member, dropping = b // each, dropping + b // drawn
    for h in range(g * SHARED, (g + 1) * SHARED):
        matrix, at = _matrix(w + member * w_s + h * w_h, D, WIDE).to(y.dtype), member * lambda_s + h * lambda_h
        more, less = 1.0 + tl.load(plus + at).to(tl.float32), -tl.load(minus + at).to(tl.float32)
        sum_w = tl.zeros((WIDE, WIDE), dtype=tl.float32)
        sum_plus, sum_minus = tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
        head, place = b * heads + h, 2 * (b % drawn * heads + h)
        level = lse + 2 * head * rows
        for first in range(0, rows, ROWS):
            i = first + tl.arange(0, ROWS)
            x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
            c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            seen = is_visible(mask, b, i[None, :], j[:, None], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL)
            dp = tl.dot(z, tl.trans(c), input_precision="ieee")  # (KEYS, ROWS)
            p, ds, delta = _slope(x, y, seen, dp, dropping, level, place, i, rows, scale, rate, more, DROPPED, KEYS)
            sum_plus += delta
            sum_v = tl.dot(p, c, sum_v, input_precision="ieee")
            sum_k = tl.dot(ds, x, sum_k, input_precision="ieee")
            back = tl.dot(tl.trans(ds), y, input_precision="ieee")
            bent = tl.maximum(x, 0.0).to(x.dtype)
            m = tl.dot(bent, matrix, input_precision="ieee").to(x.dtype)
            p, ds, delta = _slope(
                m, y, seen, dp, dropping, level + rows, place + 1, i, rows, scale, rate, less, DROPPED, KEYS
            )
            sum_minus -= delta
            sum_v = tl.dot(p, c, sum_v, input_precision="ieee")
            sum_k = tl.dot(ds, m, sum_k, input_precision="ieee")
            dm = tl.dot(tl.trans(ds), y, input_precision="ieee").to(x.dtype)
            sum_w = tl.dot(tl.trans(bent), dm, sum_w, input_precision="ieee")
            back += tl.where(x > 0.0, tl.dot(dm, tl.trans(matrix), input_precision="ieee"), 0.0)
            write_tile(dq, back, b, h, i, heads, rows, D, WIDE)
        tl.store(dw + (head * D + d[:, None]) * D + d[None, :], sum_w, mask=(d < D)[:, None] & (d < D)[None, :])
        tl.store(dlambda + 2 * b * heads + h, tl.sum(sum_plus))
        tl.store(dlambda + (2 * b + 1) * heads + h, tl.sum(sum_minus))
    write_tile(dk, sum_k, b, g, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, g, j, groups, keys, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=["each"])
def _add_examples(
    dw, dlambda, out, out_lambda, each, heads, size, kinds, signs, own, TIED: tl.constexpr, PER_HEAD: tl.constexpr,
    BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Sum BE numbers of a matrix over `each` examples, or one λ. kinds: matrices; signs, own: rows and columns of λ."""
    columns = tl.cdiv(size, BE)
    programs = kinds * columns + signs * own
    member, work = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    if work < kinds * columns:
        e = work % columns * BE + tl.arange(0, BE)
        shared = heads // kinds  # heads that share a matrix
        start = dw + (member * each * heads + work // columns) * size
        total = tl.zeros((BP, BE), dtype=tl.float32)
        for first in range(0, each * shared, BP):
            n = first + tl.arange(0, BP)
            inside = (n < each * shared)[:, None] & (e < size)[None, :]
            total += tl.load(start + n[:, None].to(tl.int64) * kinds * size + e[None, :], mask=inside, other=0.0)
        tl.store(out + (member * kinds + work // columns) * size + e, tl.sum(total, 0), mask=e < size)
    else:
        at = work - kinds * columns
        sums = tl.zeros((BE,), dtype=tl.float32)
        for first in range(0, each * 2 * heads, BE):
            n = first + tl.arange(0, BE)
            mine = n < each * 2 * heads
            if not TIED:
                mine = mine & (n // heads % 2 == at // own)
            if PER_HEAD:
                mine = mine & (n % heads == at % own)
            sums += tl.load(dlambda + member * each * 2 * heads + n, mask=mine, other=0.0)
        tl.store(out_lambda + member * signs * own + at, tl.sum(sums, 0))


@operator("attnlab::short_dagpam")
def short_dagpam(
    q: Tensor, k: Tensor, v: Tensor, negative: Tensor, lambdas: Tensor, mask: Tensor | None,
    dropping: Tensor | None, causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d) and L± (b,h,2,i); q (b,h,i,d), k and v (b,g,j,d), W⁻ as in `stack`, λ as in `combine`.

    dropping   the seed of dropout, one number () or one for each member (s,), or None; rate: of dropout
    """
    note_launch("dagpam")
    (out, lse), seen, w = _allocate_outputs(q), read_mask(mask, causal, q, k), negative.contiguous()
    plus, minus = split_signs(lambdas)
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides, *_locate(w, plus, dropping, q.shape[0]))
    tile = _tile(q, k)
    with select_device(q):
        _forward[(q.shape[0] * q.shape[1], divide_up(q.shape[2], tile["ROWS"]))](
            q, k, v, w, plus, minus, seen.mask, q if dropping is None else dropping, out, lse,
            q.shape[1], q.shape[2], k.shape[2], *strides, scale, rate, DROPPED=dropping is not None, **seen.flags,
            **tile,
        )  # fmt: skip
    return out, lse


@operator("attnlab::short_dagpam_backward")
def short_dagpam_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, negative: Tensor, lambdas: Tensor, mask: Tensor | None,
    dropping: Tensor | None, lse: Tensor, causal: bool, scale: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, dW⁻ and dλ."""
    b, h, i, d = q.shape
    dq, dk, dv = empty_by_token(q), empty_by_token(k), empty_by_token(v)
    seen, w = read_mask(mask, causal, q, k), negative.contiguous()
    dw = q.new_empty(b, h, d, d, dtype=torch.float32)
    dlambda, (plus, minus) = q.new_empty(b, 2, h, dtype=torch.float32), split_signs(lambdas)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides)
    strides += _locate(w, plus, dropping, b)
    with select_device(q):
        _backward[(k.shape[0] * k.shape[1],)](
            q, k, v, w, plus, minus, seen.mask, q if dropping is None else dropping, grad, lse, dq, dk,
            dv, dw, dlambda, h, i, k.shape[2], *strides, scale, rate, **seen.flags, DROPPED=dropping is not None,
            **_tile(q, k, backward=True),
        )  # fmt: skip
    return dq, dk, dv, *_sum_examples(dw, dlambda, w, lambdas)


def _sum_examples(dw: Tensor, dlambda: Tensor, w: Tensor, lambdas: Tensor) -> tuple[Tensor, Tensor]:
    """Sum dW⁻ (b,h,d,d) and dλ± (b,2,h) over the examples of a member, and over what shares a parameter."""
    (b, h, d, _), members = dw.shape, count_members(w, 3)
    out, out_lambda = torch.empty_like(w), torch.empty_like(lambdas, memory_format=torch.contiguous_format)
    kinds, signs, own = w.shape[-3], lambdas.shape[-2], lambdas.shape[-1]
    columns = divide_up(d * d, 128)
    with select_device(dw):
        _add_examples[(members * (kinds * columns + signs * own),)](
            dw, dlambda, out, out_lambda, b // members, h, d * d, kinds, signs, own, TIED=signs == 1, PER_HEAD=own > 1,
            BP=32, BE=128,
        )  # fmt: skip
    return out, out_lambda


@short_dagpam.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _allocate_outputs(q)


@short_dagpam_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, negative: Tensor, lambdas: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    weights = negative.new_empty(negative.shape), lambdas.new_empty(lambdas.shape)
    return empty_by_token(q), empty_by_token(k), empty_by_token(v), *weights


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, causal, scale, rate = inputs
    ctx.options = causal, scale, rate
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    return *short_dagpam_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


short_dagpam.register_autograd(_gradients, setup_context=_save_inputs)


def _locate(w: Tensor, plus: Tensor, dropping: Tensor | None, b: int) -> tuple[int, ...]:
    """Where the kernels find the parameters and the seed of an example: w_s, w_h, lambda_s, lambda_h, each, drawn."""
    return *find_strides(w, 3), *find_strides(plus, 1), b // count_members(w, 3), count_examples(b, dropping)


def _allocate_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    b, h, i, _ = q.shape
    return empty_by_token(q), q.new_empty(b, h, 2, i, dtype=torch.float32)


def is_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all keys of a head fit into one program, and v has the head size of q."""
    fits = q.dtype in LONGEST and max(q.shape[2], k.shape[2]) <= LONGEST[q.dtype] and q.shape[3] <= WIDEST
    return fits and q.dtype == k.dtype == v.dtype and v.shape[3] == q.shape[3]


def _tile(q: Tensor, k: Tensor, *, backward: bool = False) -> dict[str, int]:
    """Queries in a tile, and launch options: more warps where a program keeps more in registers."""
    rows, keys = min(32 if backward else 64, round_up(q.shape[2])), round_up(k.shape[2])
    sizes = {"ROWS": rows, "KEYS": keys, "D": q.shape[3], "WIDE": round_up(q.shape[3])}
    warps = 8 if rows * keys > 2048 and (backward or q.dtype == torch.float32) else 4
    return sizes | {"SHARED": q.shape[1] // k.shape[1], "num_warps": warps, "num_stages": 1}
