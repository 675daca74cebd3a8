"""Keep what a model does to its logits around a mechanism: a soft cap (Gemma 2), or an attention sink (gpt-oss).

    cap    c·tanh(l/c) of the logits l = scaling·qkᵀ: the mechanism gets the bias c·tanh(l/c) − l
    sink   one more key, with the logit s of its head and the value 0: the mechanism gets it as key 0, with the bias s

So a mechanism with logits scaling·qkᵀ + bias sees exactly the capped logits and the sink, in training and decoding.
Nothing here imports transformers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.huggingface.native import AttentionCall
from attnlab.mechanisms.mechanism import repeat_heads


def has_cap(call: AttentionCall) -> bool:
    return call.options.get("softcap") is not None


def has_sink(call: AttentionCall) -> bool:
    return isinstance(call.options.get("s_aux"), Tensor)


def add_cap_and_sink(call: AttentionCall, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a call, with its sink if it has one; change mask, bias and at to match."""
    key, value = call.key, call.value
    if has_cap(call):
        cap = compute_cap(call)
        given["bias"] = cap if given["bias"] is None else given["bias"] + cap
    if has_sink(call):
        key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
        given["bias"] = compute_sink(call, given["bias"])
        given["mask"] = None if given["mask"] is None else F.pad(given["mask"], (1, 0), value=True)
    return key, value


def compute_cap(call: AttentionCall) -> Tensor:
    """Return c·tanh(l/c) − l for every query and key, (b,h,i,j)."""
    cap, scaling = float(call.options["softcap"]), call.options.get("scaling")
    scaling = call.query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    logits = call.query @ repeat_heads(call.key, call.query.shape[1]).transpose(-1, -2) * scaling
    return cap * torch.tanh(logits / cap) - logits


def compute_sink(call: AttentionCall, bias: Tensor | None) -> Tensor:
    """Return the bias (1 or b,h,i,1+j): the sink's logit before that of the keys, 0 without one."""
    sink = call.options["s_aux"].to(call.query.dtype).view(1, -1, 1, 1)
    if bias is None:
        return F.pad(sink, (0, call.key.shape[2]))  # (1,h,1,1+j)
    return torch.cat([sink.expand(len(bias), -1, bias.shape[2], 1), bias.expand(-1, sink.shape[1], -1, -1)], dim=-1)
