"""Where a kernel is launched."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def launching_on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
