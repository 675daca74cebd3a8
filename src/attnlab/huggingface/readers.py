"""Attention modules that do not call transformers' AttentionInterface: a small reader for each family of them.

A reader stands in for one method of the module, most often forward. It computes queries, keys and values with the
module's own parts, gives them to an attention function of attnlab, and returns what the method returns:

    context = softmax(scaling · q kᵀ + position_bias) v        mask: bool, True = may attend

So such models are recorded and adapted like the others, and proved like them: the proof runs the module's own method.
Those with an eager function of their own compute weights that are no softmax; they are for records only. Nothing here
imports transformers.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.huggingface import linear_readers

Attend = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Reader:
    """The method of a module that a function stands in for."""

    function: Callable[..., Any]  # of the attention function, the module, and the arguments of the method
    method: str = "forward"
    eager: Callable[..., tuple[Tensor, Tensor]] | None = None  # computes weights that are no softmax
    combine: Callable[[nn.Module, Tensor], Tensor] | None = None  # the module's own weights, as the reader has them
    returns_weights: bool = True  # the module returns its weights, which can be compared


def find_reader(module: nn.Module) -> Reader | None:
    """Return the reader of an attention module, or None if it needs none or has none."""
    for kind in type(module).__mro__:
        package, _, file = kind.__module__.rpartition(".")
        if package.startswith("transformers.models.") and (found := READERS.get((file, kind.__name__))) is not None:
            return found
    return None


def has_readers(kind: type) -> bool:
    """Return whether the file of a model's class has attention modules with a reader."""
    return any(file == kind.__module__.rpartition(".")[2] for file, _ in READERS)


def install_readers(model: nn.Module, attend: Attend, *, linear: bool) -> list[tuple[nn.Module, str, Any]]:
    """Let readers stand in for the methods of attention modules. Return what `remove_readers` needs.

    linear: also modules whose weights are no softmax, but not those that hold a mechanism.
    """
    before = []
    for module in model.modules():
        reader = find_reader(module)
        if reader is None or (reader.eager is not None and (not linear or hasattr(module, "attnlab_place"))):
            continue
        before.append((module, reader.method, vars(module).get(reader.method)))
        setattr(module, reader.method, partial(reader.function, partial(attend, by_reader=True), module))
    return before


def remove_readers(before: list[tuple[nn.Module, str, Any]]) -> None:
    for module, method, own in before:
        delattr(module, method)
        if own is not None:
            setattr(module, method, own)


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    position_bias: Tensor | None = None, dropout: float = 0.0, wide: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute context (b,i,h,d) and weights (b,h,i,j) with an additive mask. wide: logits in float32."""
    groups = query.shape[1] // key.shape[1]
    key, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if wide and query.dtype != torch.float64:
        query, key = query.float(), key.float()
    logits = query @ key.transpose(-1, -2) * scaling
    logits = logits if position_bias is None else logits + position_bias
    logits = logits if mask is None else logits + mask
    kept = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights = logits.softmax(-1, dtype=kept).to(value.dtype)
    context = F.dropout(weights, dropout, training=module.training) @ values
    return context.transpose(1, 2).contiguous(), weights


def attend_fused(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    position_bias: Tensor | None = None, dropout: float = 0.0, is_causal: bool = True, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute the context (b,i,h,d) with torch's fused attention and a bool mask."""
    causal = is_causal and mask is None and query.shape[2] > 1
    if position_bias is not None and causal:
        i, j = query.shape[2], key.shape[2]
        mask, causal = torch.ones(i, j, dtype=torch.bool, device=query.device).tril(j - i)[None, None], False
    if position_bias is not None:
        bias = position_bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(query.dtype).min)
    dropped = dropout if module.training else 0.0
    grouped = query.shape[1] != key.shape[1]
    context = F.scaled_dot_product_attention(
        query, key, value, mask, dropped, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return context.transpose(1, 2).contiguous()


def to_bool(mask: Tensor | None) -> Tensor | None:
    """Return an additive mask as bool, True = may attend."""
    return mask if mask is None or mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def count_past(cache: Any, module: Any) -> int:
    """Return the number of keys that a cache holds before this call."""
    return 0 if cache is None else cache.get_seq_length(module.layer_idx)


def center_alibi(module: nn.Module, bias: Tensor, past: int, queries: int) -> Tensor:
    """Return ALiBi (b,h,1,j) as 0 at each query's own key, (b,h,i,j), for a module that holds a mechanism.

    Softmax ignores what is added to a whole row, and models add different amounts with and without a cache. Other
    mechanisms do not ignore it.
    """
    if not hasattr(module, "attnlab_place"):
        return bias
    own = past + torch.arange(queries, device=bias.device)
    return bias - bias[..., 0, own].unsqueeze(-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (b,h,n,d)


def read_gptj(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    how = {"scaling": 1 / float(module.scale_attn), "dropout": module.attn_dropout.p, "wide": True}
    context, weights = attend(module, query, key, value, to_bool(attention_mask), is_causal=True, **how)
    return context.transpose(1, 2), weights


def read_gpt_neo(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Every other layer sees a window. The logits are not scaled."""
    i, j = query.shape[2], key.shape[2]
    seen, hidden = module.bias[:, :, j - i : j, :j], to_bool(attention_mask)
    window = module.config.window_size if module.attention_type == "local" else None
    how = {"scaling": 1.0, "dropout": module.attn_dropout.p, "wide": True, "sliding_window": window}
    mask = seen if hidden is None else seen & hidden[..., :j]
    context, weights = attend(module, query, key, value, mask, is_causal=True, **how)
    return context.transpose(1, 2), weights


def read_openai(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """The keys come as (b,h,d,j)."""
    n = query.shape[2]
    seen, hidden = module.bias[:, :, :n, :n].bool(), to_bool(attention_mask)
    how = {"scaling": value.shape[-1] ** -0.5 if module.scale else 1.0, "dropout": module.attn_dropout.p}
    mask = seen if hidden is None else seen & hidden
    context, weights = attend(module, query, key.transpose(-1, -2), value, mask, is_causal=True, **how)
    return [context.transpose(1, 2), *([weights] if output_attentions else [])]


def read_bloom(
    attend: Attend, module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None,
    layer_past: Any = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    query, key, value = split_fused(module.query_key_value(hidden_states), module.num_heads)
    past = count_past(layer_past, module)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    alibi = module.beta * alibi.unflatten(0, (-1, module.num_heads))  # (b,h,1,j)
    bias = center_alibi(module, alibi, past, query.shape[2])
    how = {"scaling": module.inv_norm_factor, "position_bias": bias, "dropout": module.attention_dropout.p}
    context, weights = attend(module, query, key, value, to_bool(attention_mask), is_causal=True, **how)
    output = module.dense(context.flatten(2))
    return residual + F.dropout(output, module.hidden_dropout, module.training), weights


def split_fused(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split (b,n,h·3·d) into queries, keys and values (b,h,n,d)."""
    return x.unflatten(-1, (heads, 3, -1)).transpose(1, 2).unbind(3)


def read_falcon(
    attend: Attend, module: Any, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor | None,
    position_ids: Tensor | None = None, layer_past: Any = None, use_cache: bool = False,
    output_attentions: bool = False, position_embeddings: Any = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """With ALiBi, the mask is alibi/√d where visible, as Falcon's fused attention gets it."""
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    if alibi is None:
        query, key = call_in_file(module, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    past = count_past(layer_past, module)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    mask, bias, dropout = to_bool(attention_mask), None, 0.0
    if alibi is not None:
        bias = (alibi.reshape(len(query), module.num_heads, 1, -1) * module.inv_norm_factor).to(query.dtype)
        bias = center_alibi(module, bias, past, query.shape[2])
        mask, dropout = None if mask is None else mask[:, :1], module.attention_dropout.p
    how = {"scaling": module.head_dim**-0.5, "position_bias": bias, "dropout": dropout}
    context, weights = attend(module, query, key, value, mask, is_causal=True, **how)
    return module.dense(context.flatten(2)), weights


def call_in_file(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a function of the file that defines the module."""
    return getattr(sys.modules[type(module).__module__], name)


def read_mpt(
    attend: Attend, module: Any, hidden_states: Tensor, position_bias: Tensor | None, past_key_values: Any = None,
    attention_mask: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Its mask is True where a key is hidden, and its ALiBi has the length of the longest text."""
    fused = module.Wqkv(hidden_states)
    fused = fused.clamp(-module.clip_qkv, module.clip_qkv) if module.clip_qkv else fused
    query, key, value = (split_heads(x, module.n_heads) for x in fused.chunk(3, dim=-1))
    past, bias = count_past(past_key_values, module), None
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    if position_bias is not None:
        alibi = position_bias[None, ..., -key.shape[2] :]  # (1,h,1,j)
        bias = center_alibi(module, alibi, past, query.shape[2])
    how = {"scaling": module.softmax_scale, "position_bias": bias, "dropout": module.attn_dropout_p}
    mask = None if attention_mask is None else ~attention_mask
    context, weights = attend(module, query, key, value, mask, is_causal=True, **how)
    return module.out_proj(context.flatten(2)), weights


def read_mpnet(
    attend: Attend, module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None, output_attentions: bool = False, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One table of relative positions is the bias of all layers."""
    heads = module.num_attention_heads
    query, key, value = (split_heads(part(hidden_states), heads) for part in (module.q, module.k, module.v))
    how = {"scaling": module.attention_head_size**-0.5, "position_bias": position_bias, "dropout": module.dropout.p}
    context, weights = attend(module, query, key, value, to_bool(attention_mask), is_causal=False, **how)
    output = module.o(context.flatten(2))
    return (output, weights) if output_attentions else (output,)


def read_deberta(
    attend: Attend, module: Any, hidden_states: Tensor, attention_mask: Tensor, output_attentions: bool = False,
    query_states: Tensor | None = None, relative_pos: Tensor | None = None, rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The bias is content to position and position to content, by the module's own method."""
    if module.talking_head or query_states is not None:
        raise ValueError("DeBERTa with talking heads, or with queries of another sequence, is not supported")
    heads = module.num_attention_heads
    query, key, value = split_heads(module.in_proj(hidden_states), heads).chunk(3, dim=-1)
    query, value = (x + split_heads(b[None, None], heads) for x, b in ((query, module.q_bias), (value, module.v_bias)))
    factor, bias = 1 + len(module.pos_att_type), None
    query = query / (query.shape[-1] * factor) ** 0.5
    if module.relative_attention and rel_embeddings is not None and relative_pos is not None:
        positions = module.pos_dropout(rel_embeddings)
        bias = module.disentangled_att_bias(query, key, relative_pos, positions, factor)
        bias = bias if isinstance(bias, Tensor) else None
    how = {"scaling": 1.0, "position_bias": bias, "dropout": module.dropout.p}
    context, weights = attend(module, query, key, value, attention_mask.bool(), is_causal=False, **how)
    return context.flatten(2), weights


def read_deberta_v2(
    attend: Attend, module: Any, hidden_states: Tensor, attention_mask: Tensor, output_attentions: bool = False,
    query_states: Tensor | None = None, relative_pos: Tensor | None = None, rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As in DeBERTa. The decoder of its pretraining has queries of another sequence."""
    heads, own = module.num_attention_heads, hidden_states if query_states is None else query_states
    query = split_heads(module.query_proj(own), heads)
    key, value = (split_heads(part(hidden_states), heads) for part in (module.key_proj, module.value_proj))
    factor, bias = 1 + sum(part in module.pos_att_type for part in ("c2p", "p2c")), None
    if module.relative_attention:
        flat, positions = (query.flatten(0, 1), key.flatten(0, 1)), module.pos_dropout(rel_embeddings)
        bias = module.disentangled_attention_bias(*flat, relative_pos, positions, factor)
        bias = bias.unflatten(0, (len(query), heads)) if isinstance(bias, Tensor) else None
    scaling = (query.shape[-1] * factor) ** -0.5
    how = {"scaling": scaling, "position_bias": bias, "dropout": module.dropout.p}
    context, weights = attend(module, query, key, value, attention_mask.bool(), is_causal=False, **how)
    return context.flatten(2), weights


# by the file and the class of the attention module
READERS: dict[tuple[str, str], Reader] = {
    ("modeling_gptj", "GPTJAttention"): Reader(read_gptj, "_attn"),
    ("modeling_codegen", "CodeGenAttention"): Reader(read_gptj, "_attn"),
    ("modeling_gpt_neo", "GPTNeoSelfAttention"): Reader(read_gpt_neo, "_attn"),
    ("modeling_openai", "Attention"): Reader(read_openai, "_attn"),
    ("modeling_bloom", "BloomAttention"): Reader(read_bloom),
    ("modeling_falcon", "FalconAttention"): Reader(read_falcon),
    ("modeling_mpt", "MptAttention"): Reader(read_mpt),
    ("modeling_mpnet", "MPNetSelfAttention"): Reader(read_mpnet),
    ("modeling_deberta", "DisentangledSelfAttention"): Reader(read_deberta),
    ("modeling_deberta_v2", "DisentangledSelfAttention"): Reader(read_deberta_v2),
    ("modeling_diffllama", "DiffLlamaAttention"): Reader(
        linear_readers.read_diffllama, eager=linear_readers.attend_differentially, combine=linear_readers.subtract
    ),
    ("modeling_minimax", "MiniMaxLightningAttention"): Reader(
        linear_readers.read_lightning, eager=linear_readers.attend_with_decay, returns_weights=False
    ),
}
