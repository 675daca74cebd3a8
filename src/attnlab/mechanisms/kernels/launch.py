"""Where a kernel is launched, and how what it writes is laid out."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def launching_on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def empty_by_token(x: Tensor) -> Tensor:
    """Like x (b,h,n,d), but laid out as (b,n,h,d), as a projection reads it."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)
