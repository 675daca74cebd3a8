"""The totals of a softmax (`totals.py`) as Triton kernels: one pass over the pairs, none of them stored.

    _normalise   ln Σ_j exp(scale · q_i k_j), by an online softmax; not needed if the forward pass has computed it
    _stream      a program has a tile of queries of one head and loops over tiles of keys. It computes z = s − lse and
                 p = exp z once. Sums over keys stay in registers. Sums over its queries go to a row of `parts`, so that
                 the sum over all queries has a fixed order and the result is the same in every run

Powers are those of 2: z is scaled by log₂ e, and entropies by ln 2. Sums are in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import divide_up, find_head_gap, round_up, select_device
from attnlab.records.visibility import SoftmaxScores

TILES = {"ROWS": 128, "KEYS": 64, "num_warps": 4, "num_stages": 3}  # the fastest of benchmarks/reading.py --part tiles
WIDE_TILES = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}  # of float32, which needs twice the memory
PARTS = 2**29  # values of `parts` in memory at a time
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_query(query, b, h, i, queries, q_b, q_h, q_i, q_d, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    there = query + b * q_b + h * q_h + i[:, None].to(tl.int64) * q_i + d[None, :] * q_d
    return tl.load(there, mask=(i < queries)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _score(
    q, key, b, g, i, j, queries, keys, k_b, k_h, k_j, k_d, factor,
    D: tl.constexpr, WIDE: tl.constexpr, HIDES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return log₂ e · scale · q kᵀ of a tile, and which of its pairs are seen; all of them unless HIDES."""
    d = tl.arange(0, WIDE)
    there = key + b * k_b + g * k_h + j[None, :].to(tl.int64) * k_j + d[:, None] * k_d
    if HIDES:
        k = tl.load(there, mask=(j < keys)[None, :] & (d < D)[:, None], other=0.0)
    elif D == WIDE:
        k = tl.load(there)
    else:
        k = tl.load(there, mask=(d < D)[:, None], other=0.0)
    s = tl.dot(q, k, input_precision="ieee") * factor
    seen = (j < keys)[None, :] & (i < queries)[:, None]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + (keys - queries))
    return s, seen


@triton.jit
def _normalise(
    query, key, lse, heads, queries, keys, q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, scale,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the logsumexp of a tile of queries. Triton takes sizes and strides separately."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    place = tl.program_id(1).to(tl.int64)
    b, h = place // heads, place % heads
    i = tile * ROWS + tl.arange(0, ROWS)
    q = _load_query(query, b, h, i, queries, q_b, q_h, q_i, q_d, D, WIDE)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tile + 1) * ROWS + keys - queries)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        s, seen = _score(
            q, key, b, h // SHARED, i, j, queries, keys, k_b, k_h, k_j, k_d, scale * LOG2_E, D, WIDE, True, CAUSAL
        )
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        top = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + place * queries + i, (top + tl.log2(total)) * LN_2, mask=i < queries)


@triton.jit
def _add_tile(
    q, key, size, parts, own, b, g, place, i, start, queries, keys, k_b, k_h, k_j, k_d, factor, level, taken, spread,
    peak, D: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, HIDES: tl.constexpr, CAUSAL: tl.constexpr,
    PEAKS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums of its queries, and store what its keys receive."""
    j = start + tl.arange(0, KEYS)
    s, seen = _score(q, key, b, g, i, j, queries, keys, k_b, k_h, k_j, k_d, factor, D, WIDE, HIDES, CAUSAL)
    z = s - level[:, None]
    p = tl.exp2(z)
    if HIDES:
        z, p = tl.where(seen, z, 0.0), tl.where(seen, p, 0.0)
        f = tl.load(size + place * keys + j, mask=j < keys, other=0.0)
        tl.store(parts + own * keys + j, tl.sum(p, 0), mask=j < keys)
    else:
        f = tl.load(size + place * keys + j)
        tl.store(parts + own * keys + j, tl.sum(p, 0))
    norm = p * f[None, :]
    if PEAKS:
        others = norm
        if OWN:
            others = tl.where(j[None, :] == i[:, None] + (keys - queries), 0.0, norm)
        peak = tl.maximum(peak, tl.max(others, 1))
    return taken + tl.sum(norm, 1), spread + tl.sum(p * z, 1), peak


@triton.jit
def _stream(
    query, key, size, lse, taken_out, entropy_out, peak_out, parts, first, heads, queries, keys, q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d, scale, CAUSAL: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    PEAKS: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the totals of a tile of queries. first: the first head of this launch, b·heads + h."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    place = first + tl.program_id(1).to(tl.int64)
    b, h = place // heads, place % heads
    g = h // SHARED
    i = tile * ROWS + tl.arange(0, ROWS)
    q = _load_query(query, b, h, i, queries, q_b, q_h, q_i, q_d, D, WIDE)
    level = tl.load(lse + place * queries + i, mask=i < queries, other=0.0) * LOG2_E
    own = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    taken, spread = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    peak, factor = tl.zeros((ROWS,), tl.float32), scale * LOG2_E
    end, whole = keys, keys // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(keys, (tile + 1) * ROWS + keys - queries)
        whole = tl.minimum(whole, tl.maximum(0, (tile * ROWS + keys - queries + 1) // KEYS * KEYS))
    whole = tl.where((tile + 1) * ROWS > queries, 0, whole)  # rows beyond the last query are hidden pairs
    for start in range(0, whole, KEYS):
        taken, spread, peak = _add_tile(
            q, key, size, parts, own, b, g, place, i, start, queries, keys, k_b, k_h, k_j, k_d, factor, level, taken,
            spread, peak, D, WIDE, KEYS, False, CAUSAL, PEAKS, OWN,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        taken, spread, peak = _add_tile(
            q, key, size, parts, own, b, g, place, i, start, queries, keys, k_b, k_h, k_j, k_d, factor, level, taken,
            spread, peak, D, WIDE, KEYS, True, CAUSAL, PEAKS, OWN,
        )  # fmt: skip
    there = place * queries + i
    tl.store(taken_out + there, taken, mask=i < queries)
    tl.store(entropy_out + there, -spread * LN_2, mask=i < queries)
    if PEAKS:
        tl.store(peak_out + there, peak, mask=i < queries)


def compute_logsumexp(scores: SoftmaxScores, tiles: dict[str, int] | None = None) -> Tensor:
    """Compute ln Σ_j exp(scale · q_i k_j) over visible keys, (b,h,i) in float32."""
    (b, h, i, _), sizes, fixed, tiles = _prepare(scores, tiles)
    lse = scores.query.new_empty(b, h, i, dtype=torch.float32)
    with select_device(lse):
        _normalise[(divide_up(i, tiles["ROWS"]), b * h)](scores.query, scores.key, lse, *sizes, **fixed, **tiles)
    return lse


def stream_scores(
    scores: SoftmaxScores,
    vector: Tensor,
    level: Any = None,
    *,
    peaks: bool = True,
    own: bool = True,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return received_weight (b,h,j), taken_norm, entropy and peak (b,h,i), given ‖f‖ (b,h,j).

    peaks   without them, peak is NaN
    own     queries and keys are the same tokens, so peaks leave out each query's own key
    level   a Level of attnlab.analysis.totals to add the sums of blocks to
    tiles   ROWS, KEYS, num_warps and num_stages instead of TILES
    """
    lse = compute_logsumexp(scores) if scores.logsumexp is None else scores.logsumexp.float().contiguous()
    (b, h, i, _), sizes, fixed, tiles = _prepare(scores, tiles)
    if level is not None:  # a tile is in one block
        tiles = tiles | {"ROWS": min(tiles["ROWS"], level.block)}
    size, j = vector.float().contiguous(), scores.key.shape[2]
    received = size.new_empty(b * h, j)
    taken, entropy = size.new_empty(b, h, i), size.new_empty(b, h, i)
    peak = size.new_full((b, h, i), torch.nan)
    down = divide_up(i, tiles["ROWS"])
    step = max(1, min(b * h, PARTS // (down * j)))
    with select_device(size):
        for first in range(0, b * h, step):
            some = min(step, b * h - first)
            parts = size.new_zeros(some, down, j)  # what a causal mask hides is never written
            _stream[(down, some)](
                scores.query,
                scores.key,
                size,
                lse,
                taken,
                entropy,
                peak,
                parts,
                first,
                *sizes,
                **fixed,
                PEAKS=peaks,
                OWN=own,
                **tiles,
            )
            torch.sum(parts, dim=1, out=received[first : first + some])
            if level is not None:
                _add_level(level, parts, size.view(b * h, j)[first : first + some], first, tiles["ROWS"])
    return received.view(b, h, j), taken, entropy, peak


def _add_level(level: Any, parts: Tensor, size: Tensor, first: int, rows: int) -> None:
    """Add what each tile of queries gives to the blocks of a level, for some heads from `first` on."""
    each, heads = level.block // rows, level.weight.shape[1]
    places = torch.arange(first, first + len(parts), device=parts.device)
    for start in range(0, parts.shape[1], each):
        column = parts[:, start : start + each].sum(1, keepdim=True)  # (some,1,j)
        level.add((places // heads, places % heads), start * rows, column, size)


def find_gap(query: Tensor, key: Tensor, vector: Tensor) -> str | None:
    """Return why these kernels do not support an attention, or None."""
    if torch.version.hip:
        return "AMD GPUs"
    if vector.dtype == torch.float64:
        return "torch.float64"
    return find_head_gap(query) or ("an empty tensor" if not (query.numel() and key.numel()) else None)


def _prepare(scores: SoftmaxScores, tiles: dict[str, int] | None) -> tuple[Any, ...]:
    """Return the shape of the queries, sizes and strides, constants, and tiles."""
    q, k = scores.query, scores.key
    sizes = (q.shape[1], q.shape[2], k.shape[2], *q.stride(), *k.stride(), scores.scale)
    wide, shared = round_up(q.shape[3]), q.shape[1] // k.shape[1]
    fixed = {"CAUSAL": scores.causal, "SHARED": shared, "D": q.shape[3], "WIDE": wide}
    return tuple(q.shape), sizes, fixed, tiles or (TILES if q.element_size() == 2 else WIDE_TILES)
