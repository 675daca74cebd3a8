"""What the kernels of mixed_heads.py cover, and their tiles and launch options, as measured; s: logits (b,h,i,j)."""

import torch
import triton.language as tl
from torch import Tensor

from attnlab.mechanisms.kernels.launch import find_device_gap

MOST_HEADS = 32
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def choose_rows(s: Tensor, *, keyed: bool, backward: bool = False) -> dict[str, int]:
    """Choose the tile of the programs of rows, and their launch options. A warp has one row or more."""
    narrow = s.shape[1] <= 16 and s.dtype != torch.float32
    if keyed and narrow:
        return {"BI": 16, "BJ": 16 if backward else 32, "num_warps": 8, "num_stages": 3 if backward else 2}
    if keyed or (s.dtype == torch.float32 and s.shape[1] <= 16):
        return {"BI": 16, "BJ": 16, "num_warps": 8, "num_stages": 2 if s.shape[1] * s.element_size() <= 32 else 1}
    if narrow:
        return {"BI": 2, "BJ": 128, "num_warps": 2, "num_stages": 3}
    return {"BI": 4, "BJ": 16, "num_warps": 4, "num_stages": 3}


def choose_keys(s: Tensor, *, keyed: bool) -> dict[str, int]:
    """Choose the tile of the programs of keys, the rows of a program, and their launch options."""
    if keyed or (s.dtype == torch.float32 and s.shape[1] <= 16):
        stages = 2 if s.shape[1] * s.element_size() <= 32 else 1
        return {"BI": 16, "BJ": 16, "SPAN": 256 if keyed else 64, "num_warps": 8, "num_stages": stages}
    keys = 16 if s.dtype == torch.float32 else 64 if s.shape[1] <= 16 else 32
    return {"BI": 4, "BJ": keys, "SPAN": 64, "num_warps": 4, "num_stages": 3}


def find_gap(q: Tensor, k: Tensor, *, keyed: bool) -> str | None:
    """Name what keeps these kernels from mixing the heads of the logits of q and k, or return None."""
    if gap := find_device_gap(q):
        return gap
    if q.dtype not in TYPES or q.dtype != k.dtype:
        return f"q and k in {q.dtype} and {k.dtype}"
    most = MOST_HEADS // 2 if keyed and q.dtype == torch.float32 else MOST_HEADS
    return f"{q.shape[1]} heads in {q.dtype} (at most {most})" if q.shape[1] > most else None
