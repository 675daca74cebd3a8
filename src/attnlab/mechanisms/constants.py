"""Tensors that depend on sizes alone, made once: an eager call then spends no host time on them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from attnlab.mechanisms.kernels.launch import is_intercepted

MOST = 256  # constants of one kind that are kept


def remember(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function of numbers, dtypes and a device keep its tensors. Callers must not change them.

    Nothing is kept that belongs to somebody else: while torch.compile or a mode looks on, or a CUDA graph is captured.
    """
    known: dict[tuple[Any, ...], Tensor] = {}

    @wraps(make)
    def find(*given: Any) -> Tensor:
        if torch.compiler.is_compiling() or is_intercepted():
            return make(*given)
        kept = known.get(given)
        if kept is None:
            with torch.inference_mode(False):  # autograd saves no tensor of inference mode
                kept = make(*given)
            if not (kept.is_cuda and torch.cuda.is_current_stream_capturing()):
                if len(known) == MOST:
                    known.clear()
                known[given] = kept
        return kept

    return find
