"""Readers of attention whose weights are no softmax. Such modules are recorded and changed, not adapted.

    DiffLlama    w = softmax(q₁k₁ᵀ) − λ softmax(q₂k₂ᵀ)             then a norm of each head, and a factor
    MiniMax      w_ij = q_i·k_j · exp(−s (i − j)) for j ≤ i        then a norm of all heads, and a gate

Both are linear in the values, so their contributions are exact. Nothing here imports transformers.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def read_diffllama(
    attend: Any, module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None,
    past_key_values: Any = None, **named: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The h/2 heads of the difference have values of size 2d: those of both halves, side by side."""
    query, key, value = (
        part(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for part in (module.q_proj, module.k_proj, module.v_proj)
    )
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    values = torch.cat(value.chunk(2, dim=1), dim=-1)  # (b,g/2,j,2d)
    how = {"scaling": module.scaling, "lambda_": compute_lambda(module, query.dtype)}
    context, weights = attend(module, query, key, values, attention_mask, **how)  # (b,i,h/2,2d)
    return module.o_proj(((1 - module.lambda_init) * module.groupnorm(context)).flatten(2)), weights


def compute_lambda(module: Any, dtype: torch.dtype) -> Tensor:
    pairs = ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    first, second = (torch.exp((q * k).sum(-1, dtype=torch.float32)).to(dtype) for q, k in pairs)
    return first - second + module.lambda_init


def attend_differentially(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    lambda_: Tensor, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2) * scaling
    logits = logits if mask is None else logits + mask
    kept = torch.float64 if logits.dtype == torch.float64 else torch.float32
    first, second = logits.softmax(-1, dtype=kept).to(query.dtype).chunk(2, dim=1)
    weights = first - lambda_ * second
    values = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def subtract(module: nn.Module, own: Tensor) -> Tensor:
    """Return the difference of the two halves of DiffLlama's own weights (b,h,i,j)."""
    first, second = own.chunk(2, dim=1)
    return first - compute_lambda(module, own.dtype) * second


def read_lightning(
    attend: Any, module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None,
    past_key_values: Any = None, **named: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Queries, keys and values of padding are 0. attention_mask is (b,j), or None."""
    if past_key_values is not None:
        raise ValueError("linear attention is recorded and changed without a cache: pass use_cache=False")
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    hidden = None if attention_mask is None else attention_mask.bool()
    if hidden is not None:
        mixed = mixed * hidden[:, :, None]
    query, key, value = mixed.unflatten(-1, (module.num_attention_heads, 3, -1)).transpose(1, 2).unbind(3)
    n = query.shape[2]
    seen = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()[None, None]
    seen = seen if hidden is None else seen & hidden[:, None, None]
    context, _ = attend(module, query, key, value, seen, slopes=module.slope_rate, first=0)
    gate = torch.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(context.flatten(2))), None


def attend_with_decay(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, slopes: Tensor, first: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute (q kᵀ ⊙ exp(−s (i − j))) v. first: position of the first query; slopes s (h,1,1)."""
    i, j = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
    distance = (i + first)[:, None] - j
    weights = query @ key.transpose(-1, -2) * torch.exp(-slopes * distance.clamp_min(0)).to(query.dtype)
    weights = weights.masked_fill(mask < 0, 0.0)
    return (weights @ value).transpose(1, 2).contiguous(), weights
