"""Where a kernel is launched, which ones were, and how what they write is laid out."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

LAUNCHED: set[str] = set()  # the kernels that this process has run; whoever asks empties it first


def select_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def note_launch(kernel: str) -> bool:
    """Add to LAUNCHED.

    Outside of a custom operator torch.compile runs this when it traces the call, so that a second model that is served
    by a program made for a first one leaves no note.
    """
    LAUNCHED.add(kernel)
    return True


# what torch.compiler.assume_constant_result does, but for importing the compiler, which takes a second or more
note_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_mapped(x: Tensor) -> bool:
    """Whether torch.func maps over x: custom operators have no batching rule."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)


def empty_by_token(x: Tensor) -> Tensor:
    """Like x (b,h,n,d), but laid out as (b,n,h,d), as a projection reads it."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)
