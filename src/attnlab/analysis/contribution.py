"""How much each token adds to an attention's output: norms of vectors, not weights alone (Kobayashi et al. 2020).

An attention returns a sum of vectors, one for each head h and key j (eqs. 3 and 4); the output bias belongs to no key:

    y_i = Σ_h Σ_j α_hij f_h(x_j) + b        f_h(x_j) = v_hj W_h

So the contribution of key j to query i has a size: ‖α_hij f_h(x_j)‖ in one head, ‖Σ_h α_hij f_h(x_j)‖ in the layer. The
vectors themselves would need (h,i,j,e) values; they are never computed, because

    ‖f_h(x_j)‖²          = v_hj (W_h W_hᵀ) v_hjᵀ        one d×d matrix a head
    ‖α f‖                = |α| ‖f‖
    ‖Σ_h α_hij f_h(x_j)‖² = α_ijᵀ G_j α_ij               G_j = (f_h(x_j)·f_g(x_j))_hg, one h×h matrix a key

A mechanism may also turn the context of each query by a linear map A_hi, as a gate does. Then

    y_i = Σ_h Σ_j α_hij (v_hj A_hi) W_h + b

and the contribution is ‖α_hij (v_hj A_hi) W_h‖. If A_hi is one number, it joins α. Else the vectors v_hj A_hi are
computed for a few queries at a time. ‖f_h(x_j)‖ alone is a property of the key, without A.

Weights may be negative (daGPAM), and heads may share values. The computation is in float64 if the record is, else in
float32. A square is accurate to the rounding of its largest terms. So where large vectors cancel, the remaining norm is
accurate to the square root of that rounding.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import ModuleType
from typing import get_args

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import Impl, widen
from attnlab.records.record import Layer, turn_values
from attnlab.records.tolerance import is_close

ROWS = 256  # smallest number of queries whose weights are computed at a time
AT_ONCE = 2**24  # values that a GPU processes at a time
IN_CACHE = 2**18  # values that stay in a CPU cache between passes
KEYS = 128  # keys whose vectors f are in memory at a time
TURNED = 2**22  # values of v A in memory at a time

NOT_A_SUM = "the mechanism transforms the mixed context (finish), so its output is not a sum over keys"
Read = Callable[[], Iterator[tuple[slice, Tensor]]]  # ranges of queries and their weights (b,h,·,j)


def norms(layer: Layer, *, impl: Impl = "auto") -> "Norms":
    """Return the norms of one attention layer. Each map is computed on first use and kept.

    impl   "reference": plain PyTorch; "fused": a Triton pass for each map; "auto": fused on a GPU if supported
    """
    check_linear(layer)
    keys = Keys(layer, impl)
    b, h, j, _ = keys.values.shape
    rows = max(ROWS, AT_ONCE // max(1, b * h * j)) if keys.values.is_cuda else ROWS
    return Norms(keys, lambda: layer.chunks(rows), layer.context.shape[2], layer.turning)


class Keys:
    """The quantities that depend only on the keys of a layer."""

    def __init__(self, layer: Layer, impl: Impl = "auto") -> None:
        self.kernel = _kernel(layer, impl)
        self.values, self.projection = widen(layer.values), widen(layer.output_weight)  # (b,h,j,d), (h,d,e)

    @cached_property
    def value(self) -> Tensor:
        """‖v_h(x_j)‖, (b,h,j)."""
        size: Tensor = self.values.norm(dim=-1)
        return size

    @cached_property
    def vector(self) -> Tensor:
        """‖f_h(x_j)‖, (b,h,j)."""
        if self.kernel:
            vector: Tensor = self.kernel.vector(self.values, self.projection)
            return vector
        return compute_projected_norms(self.values, self.projection)

    @cached_property
    def gram(self) -> Tensor:
        """G_j, (b,j,h,h)."""
        b, h, j, _ = self.values.shape
        gram = self.values.new_empty(b, j, h, h)
        size = max(KEYS, AT_ONCE // max(1, b * h * self.projection.shape[2])) if gram.is_cuda else KEYS
        for start in range(0, j, size):
            f = (self.values[:, :, start : start + size] @ self.projection).transpose(1, 2)  # (b,·,h,e)
            gram[:, start : start + size] = f @ f.mT
        return gram


class Norms:
    """The maps of a layer, or of a range of its queries.

    vector  ‖f_h(x_j)‖ (b,h,j)              weight  the mean of α over heads (b,i,j)
    head    ‖α_hij f_h(x_j)‖ (b,h,i,j)      value   |α|·‖v_h(x_j)‖ (b,h,i,j), without the output projection
    layer   ‖Σ_h α_hij f_h(x_j)‖ (b,i,j)

    With a turning, head, layer and value are those of v_h(x_j) A_hi; vector and weight are without it.
    """

    def __init__(self, keys: Keys, read: Read, queries: int, turning: Tensor | None = None) -> None:
        self.keys, self._read, self._queries, self._turning = keys, read, queries, turning

    def chunks(self, size: int = ROWS) -> Iterator[tuple[slice, "Norms"]]:
        """Yield ranges of at most `size` queries with their Norms, so that a long text fits into memory."""
        if size < 1:
            raise ValueError(f"size must be at least 1 query, got {size}")
        for rows, weights in self._read():
            for start in range(0, weights.shape[2], size):
                part = weights[:, :, start : start + size]
                first, queries = rows.start + start, part.shape[2]
                turning = None if self._turning is None else self._turning[:, :, first : first + queries]
                yield slice(first, first + queries), Norms(self.keys, _once(part), queries, turning)

    @property
    def weights(self) -> Tensor:
        """α itself, (b,h,i,j)."""
        parts = [weights for _, weights in self._read()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    @property
    def vector(self) -> Tensor:
        return self.keys.vector

    @cached_property
    def head(self) -> Tensor:
        if needs_vectors(self._turning):
            return self._per_turned_head(partial(compute_projected_norms, projection=self.keys.projection))
        return self._per_head(self.keys.vector)

    @cached_property
    def value(self) -> Tensor:
        if needs_vectors(self._turning):
            return self._per_turned_head(partial(torch.linalg.vector_norm, dim=-1))
        return self._per_head(self.keys.value)

    @cached_property
    def weight(self) -> Tensor:
        mean = self._empty()
        for rows, weights in self._read():
            mean[:, rows] = weights.mean(1, dtype=mean.dtype)
        return mean

    @cached_property
    def layer(self) -> Tensor:
        sizes = self._empty()
        if needs_vectors(self._turning):
            for rows, weights, turned in self._turn():
                parts = weights.to(turned.dtype).unsqueeze(-1) * turned
                sizes[:, rows] = torch.einsum("bhijd,hde->bije", parts, self.keys.projection).norm(dim=-1)
            return sizes
        gram, kernel = self.keys.gram, self.keys.kernel
        if kernel:
            by_key = gram.permute(0, 2, 3, 1).contiguous()  # (b,h,h,j)
            for rows, weights in self._scale():
                kernel.layer(weights, by_key, sizes[:, rows])
            return sizes
        b, j, h, _ = gram.shape
        size = max(32, IN_CACHE // (b * h * j)) if gram.device.type == "cpu" else ROWS
        for rows, weights in self._scale():
            for start in range(0, weights.shape[2], size):
                part = weights[:, :, start : start + size].permute(0, 3, 1, 2).to(gram.dtype).contiguous()  # (b,j,h,·)
                square = ((gram @ part) * part).sum(2).mT  # (b,·,j)
                sizes[:, rows.start + start : rows.start + start + square.shape[1]] = square.clamp_min_(0.0).sqrt_()
        return sizes

    def _per_head(self, size: Tensor) -> Tensor:
        """Compute |α_hij|·size_hj, (b,h,i,j)."""
        b, h, j = size.shape
        sizes = size.new_empty(b, h, self._queries, j)
        for rows, weights in self._scale():
            if self.keys.kernel:
                self.keys.kernel.head(weights, size, sizes[:, :, rows])
            else:
                torch.mul(weights, size[:, :, None], out=sizes[:, :, rows]).abs_()
        return sizes

    def _per_turned_head(self, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute |α_hij|·measure(v_hj A_hi), (b,h,i,j)."""
        b, h, j, _ = self.keys.values.shape
        sizes = self.keys.values.new_empty(b, h, self._queries, j)
        for rows, weights, turned in self._turn():
            sizes[:, :, rows] = measure(turned.flatten(2, 3)).view(weights.shape) * weights.abs()
        return sizes

    def _scale(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the ranges of queries and their α, times the turning if it is one number for each query."""
        for rows, weights in self._read():
            yield rows, weights if self._turning is None else widen(weights) * self._turning[:, :, rows]

    def _turn(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield small ranges of queries with their α (b,h,·,j) and every v_hj A_hi (b,h,·,j,d)."""
        assert self._turning is not None
        values = self.keys.values
        size = max(1, TURNED // max(1, values.numel()))
        for rows, weights in self._read():
            for start in range(rows.start, rows.stop, size):
                some = slice(start, min(start + size, rows.stop))
                turning = self._turning[:, :, some].to(values.dtype)
                yield some, weights[:, :, start - rows.start :][:, :, :size], turn_values(turning, values)

    def _empty(self) -> Tensor:
        b, _, j, _ = self.keys.values.shape
        return self.keys.values.new_empty(b, self._queries, j)


def average_heads(layer: Layer) -> Tensor:
    """Return the mean of α over heads (b,i,j), for every mechanism."""
    return torch.cat([widen(weights).mean(1) for _, weights in layer.chunks()], dim=1)


def compute_projected_norms(x: Tensor, projection: Tensor) -> Tensor:
    """Compute ‖x_hn W_h‖ (b,h,n) of vectors x (b,h,n,d) and matrices W (h,d,e)."""
    square = ((x @ (projection @ projection.mT)) * x).sum(-1)
    return square.clamp_min(0.0).sqrt()


def is_linear(layer: Layer) -> bool:
    """Return whether the output of a layer is a sum over its keys: `finish` does nothing."""
    if layer.turning is not None:
        return is_close(layer.turned_context, layer.mixed)
    return layer.mixed is layer.context or torch.equal(layer.mixed, layer.context)


def needs_vectors(turning: Tensor | None) -> bool:
    """Return whether a turning changes the direction of values, so that it cannot join the weights."""
    return turning is not None and (turning.dim() == 5 or turning.shape[-1] > 1)


def check_linear(layer: Layer) -> None:
    """Raise ValueError if the output of a layer is not a sum over its keys."""
    if not is_linear(layer):
        raise ValueError(
            f"{layer.name}: {NOT_A_SUM} and has no contributions; compare weights, or choose a mechanism without finish"
        )


def _kernel(layer: Layer, impl: Impl) -> ModuleType | None:
    """Return the fused kernels or None for PyTorch. Raises ValueError if impl="fused" does not support the layer."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if impl == "reference" or (impl == "auto" and not layer.values.is_cuda):
        return None
    from attnlab.analysis import contribution_kernel

    held = [layer.attended] if isinstance(layer.attended, Tensor) else []
    reason = contribution_kernel.find_gap(layer.values, layer.output_weight, layer.context, *held)
    reason = "a turning of vectors, such as a gate for each element" if needs_vectors(layer.turning) else reason
    if reason and impl == "fused":
        raise ValueError(f"impl='fused' does not cover {reason}; use impl='auto' or 'reference'")
    return None if reason else contribution_kernel


def _once(weights: Tensor) -> Read:
    return lambda: iter([(slice(0, weights.shape[2]), weights)])
