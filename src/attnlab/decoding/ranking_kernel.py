"""Ranking of next words by one Triton kernel; `ranking.py` defines it.

A program holds all logits of one hypothesis in registers: it sums their exponentials, then takes the maximum k times.
So the logits are read once, and no log-probability is written except those of the k best words. Of equal logits, the
first word comes first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import note_launch, select_device

LARGEST = 65536  # words, 64 for each thread
MOST = 64  # words to rank
TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _rank(
    logits, values, words, ends, stride, size, padding, bos, eos, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One hypothesis. NaN logits make the log-probability of its end NaN."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + word, mask=word < size, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = top + tl.log(tl.sum(tl.exp(x - top), 0))
    tl.store(ends + row, tl.load(logits + row * stride + eos).to(tl.float32) - total)
    x = tl.where((word == padding) | (word == bos) | (word == eos), float("-inf"), x)
    for n in range(K):
        best, place = tl.max(x, 0, return_indices=True)
        tl.store(values + row * K + n, best - total)
        tl.store(words + row * K + n, tl.minimum(tl.maximum(place, 0), size - 1).to(tl.int64))
        x = tl.where(word == place, float("-inf"), x)


def is_covered(logits: Tensor, k: int) -> bool:
    """Return whether the kernel can rank k words of logits (n,vocabulary)."""
    size = logits.shape[1]
    return logits.dtype in TYPES and logits.stride(1) == 1 and size <= LARGEST and k <= min(MOST, size)


def rank_words(logits: Tensor, k: int, *, padding: int, bos: int, eos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p (n,k) of the k best words, the words (n,k), and log p (n,) of eos, in float32."""
    note_launch("ranking")
    n, size = logits.shape
    values, ends = (logits.new_empty(shape, dtype=torch.float32) for shape in ((n, k), (n,)))
    words, block = logits.new_empty(n, k, dtype=torch.long), triton.next_power_of_2(size)
    with select_device(logits):
        _rank[(n,)](
            logits, values, words, ends, logits.stride(0), size, padding, bos, eos, K=k, BLOCK=block,
            num_warps=min(32, max(4, block // 1024)),
        )  # fmt: skip
    return values, words, ends
