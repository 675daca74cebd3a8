"""Attention in O(n) memory for every form of weights in `online.py`: forward, and backward by recomputing the weights.

    forward    O = (P ∘ D) V, online           the levels L of the rows are kept        D: dropout
    backward   dV = (P ∘ D)ᵀ G      dP = (G Vᵀ) ∘ D      δ = Σ_d G ∘ O      dS by the form
               dQ = scale·dS K      dK = scale·dSᵀ Q     an extra logit x of a head: dx = −Σ_i e^{x−L_i} δ_i
               a bias: dS, summed over the axes that it broadcasts

No logit is ever written. Noise is a function of its position, so each pass draws it again. In the backward pass one
kernel loops over the keys for dQ, and stores δ. Then one loops over the queries for dK and dV, of all query heads that
share a key head. It also sums the gradient of a bias that is the same for all queries. That of any other bias has a
kernel of its own, which loops over the heads and examples that share the bias, so it needs no more memory than the bias
itself. A running sum b as bias means b_j − b_i, where b_i changes no weight. Its gradient is Σ_i dS_im − Σ_j dS_mj. The
second sum is 0 but for the rounding of δ, which the running sum would otherwise add up. Every sum has a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import (
    divide_up,
    empty_by_token,
    note_launch,
    operator,
    refuse_second_derivative,
    remember_calls,
    select_device,
)
from attnlab.mechanisms.kernels.nap import measure_rows, measure_slopes
from attnlab.mechanisms.kernels.online import (
    LOG2_E,
    NAP,
    PARTS,
    PLAIN,
    SIGMOID,
    SOFTMAX,
    at_pairs,
    attend,
    differentiate,
    hide,
    read_part,
    standardize,
)
from attnlab.mechanisms.kernels.pairs import (
    OF_PAIRS,
    RELATIVE,
    add_bias,
    count_examples,
    draw_dropout,
    first_query,
    is_visible,
    last_key,
    read_bias,
    read_mask,
    whole_keys,
    whole_queries,
)
from attnlab.mechanisms.kernels.tiles import (
    ANY_VALUE,
    choose_pass_tile,
    load_tile,
    locate_tile,
    score_tile,
    write_tile,
)


@triton.jit
def _slope(
    x, y, z, g, mask, bias, extra, noise, dropping, lse, delta, sums, head, b, h, first, left, heads, rows, keys, m_b,
    m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer, each, FORM: tl.constexpr, BIAS: tl.constexpr,
    NOISY: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPPED: tl.constexpr, WHOLE: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """P ∘ D and dS of the BI queries from `first` on (x, gradients g) and the BJ keys from `left` on (y, values z).

    sums: δ of the queries, from `_read_delta`; NAP reads its numbers from delta. each: as in `online._attend`.
    """
    UNIT: tl.constexpr = 1.0 if FORM == NAP else LOG2_E
    i, j = first + tl.arange(0, BI), left + tl.arange(0, BJ)
    own = noise + b // each
    s = score_tile(x, y, own, b % each, h, i, left, rows, keys, scale, layer, NOISY, CAUSAL, BJ, UNIT)
    seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, WHOLE)
    s = add_bias(s, bias, b, h, first, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, UNIT)
    s, seen = hide(s, seen, FORM, BIAS)
    kept = tl.full((BI, BJ), 1.0, tl.float32)
    if DROPPED:
        quad = left // 4 + tl.arange(0, BJ // 4)
        number = (b % each * heads + h).to(tl.int32)
        kept = draw_dropout(tl.load(dropping + b // each), rate, number, i[:, None], quad[None, :])
    dp = tl.dot(g, tl.trans(z), input_precision="ieee") * kept
    if FORM == NAP:
        inverse, gain = read_part(lse, 1, head, i, rows), tl.load(extra + h).to(tl.float32)
        s = standardize(s, read_part(lse, 0, head, i, rows), inverse)
        p = tl.where(seen, s * gain + tl.load(extra + heads + h).to(tl.float32), 0.0)
        mean, pull = read_part(delta, 0, head, i, rows), read_part(delta, 1, head, i, rows)
        ds = tl.where(seen, (dp - mean[:, None] - s * pull[:, None]) * (inverse * gain)[:, None], 0.0)
    else:
        level = tl.load(lse + head * rows + i, mask=i < rows, other=0.0)
        p, ds = differentiate(s, level, seen, dp, sums, FORM)
    return p * kept, ds


@triton.jit
def _read_delta(delta, head, i, rows, FORM: tl.constexpr, BI: tl.constexpr):
    """δ of queries i, if the form needs it, else 0."""
    sums = tl.zeros((BI,), dtype=tl.float32)
    if FORM != SIGMOID and FORM != PLAIN and FORM != NAP:
        sums = tl.load(delta + head * rows + i, mask=i < rows, other=0.0)
    return sums


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _backward_keys(
    q, k, v, mask, bias, extra, noise, dropping, grad, lse, delta, dk, dv, dbias, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer,
    each, FORM: tl.constexpr, BIAS: tl.constexpr, SUMMED: tl.constexpr, NOISY: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of BJ keys of one key head, from all query heads that share it; SUMMED: Σ_i dS of each, as dbias."""
    groups = heads // SHARED
    _, tile, b, g = locate_tile(tl.cdiv(keys, BJ), groups)
    left = tile * BJ
    j = left + tl.arange(0, BJ)
    y = load_tile(k, b, g, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
    z = load_tile(v, b, g, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
    sum_k, sum_v = tl.zeros((BJ, WIDE), dtype=tl.float32), tl.zeros((BJ, WIDE), dtype=tl.float32)
    least = first_query(left, rows, keys, CAUSAL) // BI * BI
    whole = whole_queries(left, rows, keys, CAUSAL, BI, BJ)
    for h in range(g * SHARED, (g + 1) * SHARED):
        columns = tl.zeros((BJ, 16), dtype=tl.float32)  # all the same: the narrowest product
        for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
            start, end = (least, tl.minimum(whole, rows)) if part else (whole, rows)
            for above in range(start, end, BI):
                i = above + tl.arange(0, BI)
                x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
                c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
                sums = _read_delta(delta, b * heads + h, i, rows, FORM, BI)
                taken, ds = _slope(
                    x, y, z, c, mask, bias, extra, noise, dropping, lse, delta, sums, b * heads + h, b, h, above, left,
                    heads, rows, keys, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer, each, FORM, BIAS, NOISY,
                    MASKED, CAUSAL, DROPPED, part == 0, BI, BJ,
                )  # fmt: skip
                sum_v = tl.dot(tl.trans(taken.to(c.dtype)), c, sum_v, input_precision="ieee")
                sum_k = tl.dot(tl.trans(ds.to(x.dtype)), x, sum_k, input_precision="ieee")
                if SUMMED:
                    ones = tl.full((BI, 16), 1.0, x.dtype)
                    columns = tl.dot(tl.trans(ds.to(x.dtype)), ones, columns, input_precision="ieee")
        if SUMMED:
            tl.store(dbias + (b * heads + h) * keys + j, tl.max(columns, 1), mask=j < keys)
    write_tile(dk, sum_k * scale, b, g, j, groups, keys, D, WIDE)
    write_tile(dv, sum_v, b, g, j, groups, keys, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _backward_queries(
    q, k, v, mask, bias, extra, noise, dropping, grad, lse, delta, out, dq, sums, heads, rows, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer,
    each, FORM: tl.constexpr, BIAS: tl.constexpr, SUMMED: tl.constexpr, NOISY: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """δ, which it stores, and dQ of BI queries of one head.

    SUMMED: Σ_j dS of each, as sums, of the same rounded dS as in `_backward_keys`.
    """
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI
    i = first + tl.arange(0, BI)
    x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
    products = tl.zeros((BI,), dtype=tl.float32)
    if FORM != SIGMOID and FORM != PLAIN and FORM != NAP:
        o = load_tile(out, b, h, i, rows, rows * heads * D, D, heads * D, 1, D, WIDE)
        products = tl.sum(c.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + head * rows + i, products, mask=i < rows)
    sum_q, total = tl.zeros((BI, WIDE), dtype=tl.float32), tl.zeros((BI,), dtype=tl.float32)
    whole = whole_keys(first, rows, keys, CAUSAL, BJ)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            _, ds = _slope(
                x, y, z, c, mask, bias, extra, noise, dropping, lse, delta, products, head, b, h, first, left, heads,
                rows, keys, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer, each, FORM, BIAS, NOISY, MASKED,
                CAUSAL, DROPPED, part == 0, BI, BJ,
            )  # fmt: skip
            sum_q = tl.dot(ds.to(y.dtype), y, sum_q, input_precision="ieee")
            if SUMMED:
                total += tl.sum(ds.to(y.dtype).to(tl.float32), 1)
    if SUMMED:
        tl.store(sums + head * rows + i, total, mask=i < rows)
    write_tile(dq, sum_q * scale, b, h, i, heads, rows, D, WIDE)


@remember_calls
@triton.jit(do_not_specialize=ANY_VALUE)
def _backward_bias(
    q, k, v, mask, bias, extra, noise, dropping, grad, lse, delta, dbias, some, alike, heads, rows, keys, q_b, q_h, q_i,
    q_d, k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_d, g_b, g_h, g_i, g_d, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate,
    layer, each, FORM: tl.constexpr, BIAS: tl.constexpr, NOISY: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dS of one tile, summed over the `some` heads of each of `alike` examples that share one head of the bias."""
    columns = tl.cdiv(keys, BJ)
    one, tile, first_b, first_h = locate_tile(tl.cdiv(rows, BI) * columns, heads // some)
    top, left = tile // columns * BI, tile % columns * BJ
    i, j = top + tl.arange(0, BI), left + tl.arange(0, BJ)
    total = tl.zeros((BI, BJ), dtype=tl.float32)
    if left < last_key(top + BI, rows, keys, CAUSAL):
        for n in range(alike * some):
            b, h = first_b * alike + n // some, first_h * some + n % some
            x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
            c = load_tile(grad, b, h, i, rows, g_b, g_h, g_i, g_d, D, WIDE)
            y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
            z = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            sums = _read_delta(delta, b * heads + h, i, rows, FORM, BI)
            _, ds = _slope(
                x, y, z, c, mask, bias, extra, noise, dropping, lse, delta, sums, b * heads + h, b, h, top, left, heads,
                rows, keys, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, rate, layer, each, FORM, BIAS, NOISY, MASKED,
                CAUSAL, DROPPED, False, BI, BJ,
            )  # fmt: skip
            total += ds
    place, inside = at_pairs(one, i, j, rows, keys)
    tl.store(dbias + place, total, mask=inside)


SHARES = 1024  # queries of a step of `_sum_shares`


@remember_calls
@triton.jit(do_not_specialize=["examples", "rows"])
def _sum_shares(extra, lse, delta, out, examples, heads, rows, BLOCK: tl.constexpr):
    """The gradient of the extra logit e of one head, −Σ exp(e − L) δ over all queries; L in base 2."""
    h = tl.program_id(0).to(tl.int64)
    level = tl.load(extra + h).to(tl.float32) * LOG2_E
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, examples * rows, BLOCK):
        n = first + tl.arange(0, BLOCK)
        at, inside = (n // rows * heads + h) * rows + n % rows, n < examples * rows
        share = tl.exp2(level - tl.load(lse + at, mask=inside, other=float("inf")))
        total += share * tl.load(delta + at, mask=inside, other=0.0)
    tl.store(out + h, -tl.sum(total, 0))


@operator("attnlab::one_pass")
def one_pass(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, extra: Tensor | None,
    level: Tensor | None, noise: Tensor | None, dropping: Tensor | None, form: int, causal: bool, scale: float,
    rate: float, layer: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Context (b,h,i,d) and levels L (b,h,i), in base 2, or the numbers of rows of NAP; q (b,h,i,d), k and v (b,g,j,d).

    bias    floating-point, broadcastable to (b,h,i,j), or None; −∞ hides a key
            the same for all queries, in float64, for softmax: a running sum, which keeps its digits
    extra   h logits that have no value, or None          level     (b,h,i) the levels of SIGMOID or PLAIN, or None:
            2h: the gains of NAP, then its shifts                   counted, if there is neither mask nor bias
    noise   the seed of ε, or None                        dropping  the seed of dropout, or None; rate: of dropout
    """
    note_launch("one_pass")
    counted = level is None and form in (SIGMOID.value, PLAIN.value)
    if counted and not (mask is None and bias is None):
        raise ValueError("level must be given with a mask or a bias, which may hide keys, got None")
    out, lse = _empty(q, form)
    if level is not None:
        torch.mul(level, LOG2_E.value, out=lse)
    extra = None if extra is None else extra.contiguous()
    seen, added = read_mask(mask, causal, q, k), read_bias(bias, q, k, _is_shifted(form, extra))
    options: dict[str, Any] = {"scale": scale, "rate": rate, "layer": layer, "form": form, "eps": eps}
    if form == NAP.value:
        measure_rows(q, k, seen, added, lse, scale, eps)
    attend(q, k, v, None, seen, added, extra, noise, dropping, out, lse, counted=counted, **options)
    return out, lse


@operator("attnlab::one_pass_backward")
def one_pass_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, extra: Tensor | None,
    noise: Tensor | None, dropping: Tensor | None, out: Tensor, lse: Tensor, form: int, causal: bool, scale: float,
    rate: float, layer: int, eps: float, learnt: bool, extra_learnt: bool,
) -> list[Tensor]:  # fmt: skip
    """dQ, dK, dV, then the gradient of the bias, if it is learnt, then that of extra, if it is learnt."""
    (b, h, i, _), (g, j) = q.shape, k.shape[1:3]
    seen, added = read_mask(mask, causal, q, k), read_bias(bias, q, k, _is_shifted(form, extra))
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    extra = None if extra is None else extra.contiguous()
    if form == NAP.value:
        delta = measure_slopes(q, k, v, seen, added, dropping, grad, lse, scale, rate)
    else:
        delta = lse if form in (SIGMOID.value, PLAIN.value) else torch.empty_like(lse)  # lse: not read as δ
    unread = (q if x is None else x for x in (extra, noise, dropping))
    pointers = (q, k, v, seen.mask, added.values, *unread, grad, lse, delta)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *seen.strides, *added.strides)
    flags = {"FORM": form, "BIAS": added.kind, "NOISY": noise is not None, "DROPPED": dropping is not None}
    each = count_examples(b, noise if dropping is None else dropping)
    numbers, flags = (h, i, j, *strides, scale, rate, layer, each), flags | {"SHARED": h // g} | seen.flags
    by_keys, by_queries = choose_pass_tile(q, "keys"), choose_pass_tile(q, "queries")
    dbias = q if bias is None or not learnt else _empty_sums(q, k, bias)  # q: not written
    summed, relative = learnt and added.kind != OF_PAIRS.value, learnt and added.kind == RELATIVE.value
    sums = torch.empty_like(lse) if relative else dbias
    with select_device(q):
        _backward_queries[(b * h * divide_up(i, by_queries["BI"]),)](  # first: the others read its δ
            *pointers, out, dq, sums, *numbers, SUMMED=relative, **flags, **by_queries
        )
        _backward_keys[(b * g * divide_up(j, by_keys["BJ"]),)](
            *pointers, dk, dv, dbias, *numbers, SUMMED=summed, **flags, **by_keys
        )
        if learnt and added.kind == OF_PAIRS.value:
            some, alike = h // dbias.shape[1], b // dbias.shape[0]
            tiles = divide_up(i, by_queries["BI"]) * divide_up(j, by_queries["BJ"])
            _backward_bias[(dbias.shape[0] * dbias.shape[1] * tiles,)](
                *pointers, dbias, some, alike, *numbers, **flags, **by_queries
            )
    if relative:
        dbias[:, :, 0, max(0, j - i) :] -= sums[:, :, max(0, i - j) :]
    more = [dbias.sum_to_size(bias.shape).to(bias.dtype)] if bias is not None and learnt else []
    more += [_sum_extra(extra, lse, delta, form)] if extra is not None and extra_learnt else []
    return [dq, dk, dv, *more]


@one_pass.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(q, rest[8])


@one_pass_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, extra: Tensor | None,
      *rest: Any) -> list[Tensor]:  # fmt: skip
    more = [bias.new_empty(bias.shape)] if bias is not None and rest[-2] else []
    more += [extra.new_empty(extra.shape)] if extra is not None and rest[-1] else []
    return [*(empty_by_token(x) for x in (q, k, v)), *more]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, bias, extra, _, noise, dropping, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the levels
    ctx.save_for_backward(q, k, v, mask, bias, extra, noise, dropping, *output)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    learnt = ctx.needs_input_grad[4:6]
    dq, dk, dv, *more = one_pass_backward(grad, *ctx.saved_tensors, *ctx.options, *learnt)
    given = (more.pop(0) if each else None for each in learnt)
    return dq, dk, dv, None, *given, *(None,) * (3 + len(ctx.options))


one_pass.register_autograd(_gradients, setup_context=_save_inputs)


def _empty(q: Tensor, form: int) -> tuple[Tensor, Tensor]:
    b, h, i, _ = q.shape
    return empty_by_token(q), q.new_empty(
        (b, h, PARTS.value, i) if form == NAP.value else (b, h, i), dtype=torch.float32
    )


def _sum_extra(extra: Tensor, lse: Tensor, delta: Tensor, form: int) -> Tensor:
    """The gradient of the extra logits, or of gain and shift of NAP."""
    if form == NAP.value:
        return delta[:, :, 2:].sum((0, 3)).T.reshape(extra.shape).to(extra.dtype)
    (b, h, i), out = lse.shape, torch.empty_like(extra)
    with select_device(lse):
        _sum_shares[(h,)](extra, lse, delta, out, b, h, i, BLOCK=SHARES)
    return out


def _empty_sums(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Allocate the sums of dS in float32 that give the bias its gradient: (b,h,1,j), or (b|1,h|1,i,j)."""
    b, h, i, _ = bias[(None,) * (4 - bias.dim())].shape
    shape = (*q.shape[:2], 1, k.shape[2]) if i == 1 else (b, h, i, k.shape[2])
    return q.new_empty(shape, dtype=torch.float32)


def _is_shifted(form: int, extra: Tensor | None) -> bool:
    """Whether a number may be added to all logits of a row: the weights stay the same."""
    return form == SOFTMAX.value and extra is None
