"""A rule of torch.func.vmap for functions with a leading batch axis: one call for all, not one for each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_as_one_call(
    function: type[torch.autograd.Function], count: int, in_dims: Sequence[int | None], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Apply a function on a leading batch axis to inputs of vmap, whose axis of size `count` joins the batch axis.

    In the results vmap's axis comes first.
    """

    def fold_axis(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    result = function.apply(*(fold_axis(x, dim) for x, dim in zip(inputs, in_dims, strict=True)))
    outputs = result if isinstance(result, tuple) else (result,)
    return tuple(x.unflatten(0, (count, -1)) for x in outputs)
