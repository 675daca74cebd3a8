"""torch.func.vmap of a function that is made for many at once: one call, not one for each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def as_one_call(
    function: type[torch.autograd.Function], count: int, in_dims: Sequence[int | None], given: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """What a function gives whose tensors have an axis of so many alike in front: vmap's axis, of this count, joins it
    and leaves it again. What it gives has that axis in front."""

    def joined(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    made = function.apply(*(joined(x, dim) for x, dim in zip(given, in_dims, strict=True)))
    several = made if isinstance(made, tuple) else (made,)
    return tuple(x.unflatten(0, (count, -1)) for x in several)
