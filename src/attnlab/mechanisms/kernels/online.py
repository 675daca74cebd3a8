"""Attention over tiles of keys, online: weights are never stored. Logits Z are read, or computed from q and k.

Weights have one of six forms, each a function of its own logit s and of one number L for each row, or of two:

    SOFTMAX    e^{s−L}                     L = log Σ e^s         with an extra key of logit x, log (e^x + Σ e^s)
    COG        sign(s) e^{|s|−L}           L = log Σ e^{|s|}
    SOFTPICK   ReLU(e^{s−L} − e^{−L})      L = log (Σ |e^s − 1| + ε e^m)       m = max(0, max s)
    SIGMOID    1 / (1 + e^{−s−L})          L is given, or −log n of n visible keys
    PLAIN      s L                         L is given, or 1/√n
    NAP        g z + c                     z = (s − L) r with L and r given (nap.py); g and c of the head

With dP the gradient of a weight and δ = Σ_j P dP, the gradient of its logit is

    SOFTMAX    P (dP − δ)        COG       |P| dP − P δ
    SIGMOID    P (1 − P) dP      SOFTPICK  e^{s−L} (1[s>0] dP − sign(s) δ)
    PLAIN      L dP              NAP       g r (dP − m − z e)      with m and e given

All exponentials have base 2: s and L hold log₂ e, except in NAP.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, remember_calls, select_device
from attnlab.mechanisms.kernels.pairs import (
    ABSENT,
    Bias,
    Visibility,
    add_bias,
    count_examples,
    draw_dropout,
    is_multiple_of_8,
    is_visible,
    last_key,
    mark_multiple_of_8,
    whole_keys,
)
from attnlab.mechanisms.kernels.tiles import (
    ANY_VALUE,
    choose_logits_tile,
    choose_pass_tile,
    load_tile,
    locate_tile,
    score_tile,
    write_tile,
)

LOG2_E = tl.constexpr(1.4426950408889634)
SOFTMAX, COG, SOFTPICK, SIGMOID, NAP, PLAIN = (tl.constexpr(form) for form in range(6))
LN_2 = tl.constexpr(0.6931471805599453)
PARTS = tl.constexpr(4)  # numbers of a row in NAP


@triton.jit
def at_pairs(head, i, j, rows, keys):
    """Offsets of a head's pairs, and which exist. A tile is loaded whole, so that loads are wide, and masked later."""
    return head * rows * keys + i[:, None] * keys + j[None, :], (i < rows)[:, None] & (j < keys)[None, :]


@triton.jit
def hide(s, seen, FORM: tl.constexpr, BIAS: tl.constexpr):
    """Logits s, those of hidden keys replaced by 0 or by −∞, whichever has weight 0, and which keys are visible.

    A bias of −∞ hides its key.
    """
    hidden = float("-inf")
    if FORM != SOFTMAX and FORM != SIGMOID:
        hidden = 0.0
        if BIAS != ABSENT:
            seen = seen & (s != float("-inf"))
    return tl.where(seen, s, hidden), seen


@triton.jit
def read_part(x, part, head, i, rows):
    """One of the numbers of rows i of x (b,h,PARTS,i)."""
    return tl.load(x + (head * PARTS + part) * rows + i, mask=i < rows, other=0.0)


@triton.jit
def standardize(s, mean, inverse):
    """Logits z of NAP."""
    return (s - mean[:, None]) * inverse[:, None]


@triton.jit
def weigh(s, level, seen, FORM: tl.constexpr):
    """Weights of logits s, from `hide`, at the rows' levels, and what they add to the rows' totals; 0 where hidden."""
    if FORM == COG:
        mass = tl.where(seen, tl.exp2(tl.abs(s) - level[:, None]), 0.0)
        weight = tl.where(s > 0.0, mass, tl.where(s < 0.0, -mass, 0.0))
    elif FORM == SOFTPICK:
        above = tl.exp2(s - level[:, None]) - tl.exp2(-level)[:, None]
        weight, mass = tl.maximum(above, 0.0), tl.abs(above)
    elif FORM == SIGMOID:
        weight = 1.0 / (1.0 + tl.exp2(-s - level[:, None]))
        mass = weight
    elif FORM == PLAIN:
        weight = s * (level * (LN_2 * LN_2))[:, None]
        mass = weight
    else:
        weight = tl.exp2(s - level[:, None])
        mass = weight
    return weight, mass


@triton.jit
def differentiate(s, level, seen, dp, delta, FORM: tl.constexpr):
    """Weights again, and the gradients of their logits from those of the weights; both 0 where hidden."""
    weight, mass = weigh(s, level, seen, FORM)
    if FORM == COG:
        ds = tl.where(s == 0.0, 0.0, mass * dp) - weight * delta[:, None]
    elif FORM == SOFTPICK:
        slope = tl.where(s > 0.0, dp - delta[:, None], tl.where(s < 0.0, delta[:, None], 0.0))
        ds = tl.exp2(s - level[:, None]) * slope
    elif FORM == SIGMOID:
        ds = weight * (1.0 - weight) * dp
    elif FORM == PLAIN:
        ds = tl.where(seen, dp * (level * LN_2)[:, None], 0.0)
    else:
        ds = weight * (dp - delta[:, None])
    return weight, ds


@triton.jit
def count_level(i, rows, keys, CAUSAL: tl.constexpr, FORM: tl.constexpr):
    """Levels of queries i of SIGMOID or PLAIN without mask and bias, from the number of visible keys, at least 1."""
    n = tl.maximum(tl.minimum(keys, i + 1 + (keys - rows)), 1) if CAUSAL else tl.maximum(i * 0 + keys, 1)
    n = n.to(tl.float32)
    return -tl.log2(n) if FORM == SIGMOID else tl.rsqrt(n) * LOG2_E


@triton.jit
def _begin(
    extra, lse, head, h, i, heads, rows, keys, FORM: tl.constexpr, COUNTED: tl.constexpr, EXTRA: tl.constexpr,
    CAUSAL: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """The largest logit and the total of queries i before any key; or their levels, if these are known."""
    top, total = tl.full((BI,), float("-inf"), tl.float32), tl.zeros((BI,), dtype=tl.float32)
    if EXTRA:
        top, total = tl.zeros((BI,), dtype=tl.float32) + tl.load(extra + h).to(tl.float32) * LOG2_E, total + 1.0
    if FORM == SOFTPICK:
        top = tl.zeros((BI,), dtype=tl.float32)
    if FORM == SIGMOID or FORM == PLAIN:  # noqa: SIM109 (Triton has no "in")
        if COUNTED:
            top = count_level(i, rows, keys, CAUSAL, FORM)
            tl.store(lse + head * rows + i, top, mask=i < rows)
        else:
            top = tl.load(lse + head * rows + i, mask=i < rows, other=0.0)
    return top, total


@triton.jit
def _rise(s, seen, top, FORM: tl.constexpr, BI: tl.constexpr):
    """The largest logit with those of one more tile, the level of its weights, and what fades the former sums."""
    level, fade = top, tl.full((BI,), 1.0, tl.float32)
    if FORM != SIGMOID and FORM != PLAIN and FORM != NAP:
        height = tl.where(seen, tl.abs(s), float("-inf")) if FORM == COG else s
        higher = tl.maximum(top, tl.max(height, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - level)
        top = higher
    return top, level, fade


@remember_calls
@triton.jit(do_not_specialize=[*ANY_VALUE, "keys", "m_b"])
def _attend(
    z, q, k, v, mask, bias, extra, noise, dropping, carry, out, lse, heads, rows, keys, q_b, q_h, q_i, q_d, k_b, k_h,
    k_j, k_d, v_b, v_h, v_j, v_d, m_b, m_i, m_j, a_b, a_h, a_i, a_j, scale, sharp, rate, layer, eps, each,
    STORED: tl.constexpr, HANDED: tl.constexpr, CARRIED: tl.constexpr, FORM: tl.constexpr, COUNTED: tl.constexpr,
    BIAS: tl.constexpr, EXTRA: tl.constexpr, NOISY: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPPED: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BI queries of one head. STORED: z holds the logits. HANDED: they are computed, with a carry if CARRIED, and
    stored in z. Both: P = softmax(sharp·z). EXTRA: a logit of each head that has no value.

    COUNTED: the levels are those of `count_level`; they are stored for the backward pass. each: number of examples
    whose noise and dropout have the same seed.
    It is long because it is the one loop over keys that all forms share, and only one form is compiled at a time.
    """
    UNIT: tl.constexpr = 1.0 if FORM == NAP or HANDED else LOG2_E
    keys, m_b = mark_multiple_of_8(keys, EVEN), mark_multiple_of_8(m_b, EVEN)
    tiles = tl.cdiv(rows, BI)
    head, tile, b, h = locate_tile(tiles, heads)
    first = (tiles - 1 - tile) * BI  # causal: the longest rows are the last, and start first
    i = first + tl.arange(0, BI)
    dropping, number = dropping + b // each, (b % each * heads + h).to(tl.int32)
    if not STORED:
        x = load_tile(q, b, h, i, rows, q_b, q_h, q_i, q_d, D, WIDE)
    top, total = _begin(extra, lse, head, h, i, heads, rows, keys, FORM, COUNTED, EXTRA, CAUSAL, BI)
    if FORM == NAP:
        gain, shift = tl.load(extra + h).to(tl.float32), tl.load(extra + heads + h).to(tl.float32)
        mean, inverse = read_part(lse, 0, head, i, rows), read_part(lse, 1, head, i, rows)
    context = tl.zeros((BI, WIDE), dtype=tl.float32)
    whole = whole_keys(first, rows, keys, CAUSAL, BJ)
    for part in tl.static_range(2):  # tiles that are visible as a whole, then the others
        start, end = (whole, last_key(first + BI, rows, keys, CAUSAL)) if part else (0, whole)
        for left in range(start, end, BJ):
            j = left + tl.arange(0, BJ)
            seen = is_visible(mask, b, i[:, None], j[None, :], rows, keys, m_b, m_i, m_j, MASKED, CAUSAL, part == 0)
            if STORED:
                place, inside = at_pairs(head, i, j, rows, keys)
                s = tl.load(z + place, mask=inside, other=0.0).to(tl.float32) * (sharp * LOG2_E)
            else:
                y = load_tile(k, b, h // SHARED, j, keys, k_b, k_h, k_j, k_d, D, WIDE)
                own = noise + b // each
                s = score_tile(x, y, own, b % each, h, i, left, rows, keys, scale, layer, NOISY, CAUSAL, BJ, UNIT)
                s = add_bias(s, bias, b, h, first, i, j, rows, keys, a_b, a_h, a_i, a_j, BIAS, UNIT)
                if HANDED:
                    place, inside = at_pairs(head, i, j, rows, keys)
                    if CARRIED:
                        s += tl.load(carry + place, mask=inside, other=0.0).to(tl.float32)
                    s = s.to(z.dtype.element_ty)  # the backward pass reads it so
                    tl.store(z + place, s, mask=inside)
                    s = s.to(tl.float32) * (sharp * LOG2_E)
            s, seen = hide(s, seen, FORM, BIAS)
            top, level, fade = _rise(s, seen, top, FORM, BI)
            if FORM == NAP:
                p = tl.where(seen, standardize(s, mean, inverse) * gain + shift, 0.0)
            else:
                p, mass = weigh(s, level, seen, FORM)
                total = total * fade + tl.sum(mass, 1)
            if DROPPED:
                p *= draw_dropout(
                    tl.load(dropping), rate, number, i[:, None], (left // 4 + tl.arange(0, BJ // 4))[None, :]
                )
            values = load_tile(v, b, h // SHARED, j, keys, v_b, v_h, v_j, v_d, D, WIDE)
            context = tl.dot(p.to(values.dtype), values, context * fade[:, None], input_precision="ieee")
    if FORM != SIGMOID and FORM != PLAIN and FORM != NAP:
        total += eps
        blind = total == 0.0
        total = tl.where(blind, 1.0, total)
        context = context / total[:, None]
        tl.store(lse + head * rows + i, tl.where(blind, 0.0, top + tl.log2(total)), mask=i < rows)
    write_tile(out, context, b, h, i, heads, rows, D, WIDE)


def attend(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, seen: Visibility, bias: Bias, extra: Tensor | None,
    noise: Tensor | None, dropping: Tensor | None, out: Tensor, lse: Tensor, *, scale: float, rate: float,
    layer: int = 0, form: int = SOFTMAX.value, eps: float = 0.0, counted: bool = False, sharp: float = 1.0,
    made: Tensor | None = None, carry: Tensor | None = None,
) -> None:  # fmt: skip
    """Write out = (P ∘ D) v and the levels lse of logits sharp·z, or scale·qkᵀ + bias + ε without z.

    NAP reads lse, and so do SIGMOID and PLAIN, unless `counted`: then there is no mask or bias, and they write it.
    noise, dropping: seeds (), or (s,) for s members.
    made: where to write Z = scale·qkᵀ + bias + carry + ε, of which P = softmax(sharp·Z); hidden tiles stay unwritten.
    """
    (b, h, i, _), even = q.shape, is_multiple_of_8(k.shape[2], seen.strides[0])
    pointers = (q if x is None else x for x in (extra, noise, dropping, carry))  # not read if None
    strides = (*q.stride(), *k.stride(), *v.stride(), *seen.strides, *bias.strides)
    stored = made if z is None else z
    tile = choose_pass_tile(q, "forward") if stored is None else choose_logits_tile(q, aligned=even)
    with select_device(q):
        _attend[(b * h * divide_up(i, tile["BI"]),)](
            q if stored is None else stored, q, k, v, seen.mask, bias.values, *pointers, out, lse, h, i, k.shape[2],
            *strides, scale, sharp, rate, layer, eps, count_examples(b, noise if dropping is None else dropping),
            STORED=z is not None, HANDED=made is not None, CARRIED=carry is not None, FORM=form, COUNTED=counted,
            BIAS=bias.kind, EXTRA=extra is not None and form != NAP.value, NOISY=noise is not None,
            DROPPED=dropping is not None, SHARED=h // k.shape[1],
            EVEN=even, **seen.flags, **tile,
        )  # fmt: skip
