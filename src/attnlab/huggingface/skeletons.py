"""Classes of transformers that compute what a model of ours computes, with the name that each of our weights has there.

    language models   RMSNorm before each block, RoPE, gated feed-forward: LlamaForCausalLM; with QK-norm
                      Qwen3ForCausalLM

Nothing here imports transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.models.transformer_config import ROPE_HIGH, TransformerConfig
from attnlab.tasks.task import BOS, EOS

DECODER = {  # a layer of Llama and Qwen3, and one of our blocks
    "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output", "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm", "mlp.gate_proj": "feed_forward.inner",
    "mlp.up_proj": "feed_forward.factor", "mlp.down_proj": "feed_forward.output",
    "input_layernorm": "attention_residual.norm", "post_attention_layernorm": "feed_forward_residual.norm",
}  # fmt: skip
ROPE_NAMES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


@dataclass(frozen=True)
class Skeleton:
    """A class of transformers for a model of ours."""

    kind: str  # name of the class
    config: Mapping[str, Any]  # values of its configuration
    modules: Mapping[str, str]  # the name of each of its modules with weights, and the name of ours

    def rename(self, name: str) -> str:
        """Return our name of one of its weights."""
        module, _, weight = name.rpartition(".")
        return f"{self.modules[module]}.{weight}"


def find_language_skeleton(config: TransformerConfig, length: int) -> Skeleton:
    """Return the skeleton of a language model whose texts have up to `length` tokens."""
    kind = "Qwen3ForCausalLM" if config.query_key_norm else "LlamaForCausalLM"
    values = {
        "vocab_size": config.vocabulary, "hidden_size": config.width, "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "head_dim": config.head_size,
        "num_key_value_heads": config.key_value_heads or config.heads, "rms_norm_eps": config.norm_epsilon,
        "hidden_act": {"swiglu": "silu", "geglu": "gelu"}[config.activation], "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout, "max_position_embeddings": length,
        "rope_parameters": _describe_rope(config), "tie_word_embeddings": config.tie != "none",
        "pad_token_id": config.padding, "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    if not config.query_key_norm:
        values["mlp_bias"] = config.feed_forward_bias
    modules = {"model.embed_tokens": "decoder.embedding.words", "model.norm": "decoder.norm", "lm_head": "readout"}
    for layer in range(config.layers):
        modules |= {f"model.layers.{layer}.{name}": f"decoder.blocks.{layer}.{ours}" for name, ours in DECODER.items()}
    return Skeleton(kind, values, modules)


def _describe_rope(config: TransformerConfig) -> dict[str, Any]:
    kind = config.rope_scaling
    values: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": config.rope_theta}
    if kind != "none":
        values["factor"] = config.rope_factor
    if kind in ROPE_NAMES:
        low, high = ROPE_NAMES[kind]
        values |= {low: config.rope_low, high: config.rope_high or ROPE_HIGH[kind]}
        values["original_max_position_embeddings"] = config.rope_length
    return values
