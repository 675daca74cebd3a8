"""Ranking of next words: log-probabilities of the best ones, and of the end.

    log p(w) = x_w − log Σ_v exp x_v            x: the logits of one hypothesis

On a GPU one Triton kernel reads the logits once (`ranking_kernel.py`).
"""

import torch
from torch import Tensor

from attnlab.provenance import HAS_TRITON

Ranked = tuple[Tensor, Tensor, Tensor]  # log p (n,k) of the best words, best first; the words (n,k); log p of eos (n,)


def rank_words(logits: Tensor, k: int, *, padding: int, bos: int, eos: int, dtype: torch.dtype) -> Ranked:
    """Return the k best words of logits (n,vocabulary), or all if there are fewer, without padding, bos and eos.

    dtype   type of the log-probabilities
    """
    if logits.is_cuda and HAS_TRITON and dtype == torch.float32:
        from attnlab.decoding import ranking_kernel as kernel

        if kernel.is_covered(logits, k):
            return kernel.rank_words(logits, k, padding=padding, bos=bos, eos=eos)
    log_prob = logits.log_softmax(-1, dtype=dtype)
    end = log_prob[:, eos].clone()
    for token in (padding, bos, eos):
        log_prob[:, token] = -torch.inf
    return *log_prob.topk(min(k, log_prob.shape[1])), end
