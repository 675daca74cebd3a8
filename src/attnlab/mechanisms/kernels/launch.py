"""What all kernels share: the device they run on, the record of launches, the layout of their outputs."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.mechanism import is_mapped

WIDEST = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}  # a side of a matrix in shared memory
LAUNCHED: set[str] = set()  # names of the kernels that this process has run; a reader clears it beforehand


def select_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def note_launch(kernel: str) -> bool:
    """Add a name to LAUNCHED.

    Outside of a custom operator, torch.compile runs this only when it traces the call. A second model that reuses the
    compiled program of a first one is not recorded.
    """
    LAUNCHED.add(kernel)
    return True


# like torch.compiler.assume_constant_result, without importing the compiler, which takes a second or more
note_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find_device_gap(x: Tensor) -> str | None:
    """Name why no kernel can run on x, or return None. Custom operators have no batching rule for torch.func."""
    if not x.is_cuda and not os.environ.get("TRITON_INTERPRET"):
        return f"tensors on {x.device}"
    if is_mapped(x):
        return "tensors that torch.func maps over"
    return None


def find_head_gap(q: Tensor) -> str | None:
    """Name why the heads of q do not fit into a multiprocessor's memory, or why no kernel can run; or return None."""
    if gap := find_device_gap(q):
        return gap
    if q.dtype not in WIDEST:
        return str(q.dtype)
    if q.shape[3] > WIDEST[q.dtype]:
        return f"head_dim={q.shape[3]} in {q.dtype} (at most {WIDEST[q.dtype]})"
    return None


def empty_by_token(x: Tensor) -> Tensor:
    """Allocate a tensor like x (b,h,n,d) with the memory layout (b,n,h,d), which the output projection reads."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)
