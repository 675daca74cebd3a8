"""A tiny Llama as a GGUF file, written by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import torch

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_llama(model: Any, path: Path, kind: Any = None) -> None:
    """Write the weights of a LlamaForCausalLM; the matrices as this type, else in float32. No tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.state_dict().items():
        _add(writer, name, weight, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, weight: torch.Tensor, config: Any, kind: Any) -> None:
    tops = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in tops:
        ours = tops[name]
    else:
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        ours = f"blk.{layer}.{NAMES[part]}"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[part])
        if heads:  # GGUF keeps the two halves of rotary pairs side by side
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    array = weight.detach().float().contiguous().numpy()
    if kind is not None and array.ndim == 2 and name not in tops:
        writer.add_tensor(f"{ours}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(f"{ours}.weight", array)
