"""Classes of transformers that compute what a Transformer of ours computes, with the name of each of our modules there.

    LlamaForCausalLM   language models with RoPE, RMSNorm before each block and a gated feed-forward
    Qwen3ForCausalLM   the same with QK-norm
    MarianMTModel      translators with LayerNorm after each block
    PegasusForConditionalGeneration    translators with LayerNorm before each block, and a vocabulary of one size

The last two save their tables of positions with the model, because ours have other frequencies.
Nothing here imports transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.models.transformer_config import ROPE_HIGH, TransformerConfig
from attnlab.tasks.task import BOS, EOS, PAD, UNK

LANGUAGE: dict[str, tuple[Any, ...]] = {  # the values that Llama and Qwen3 have
    "norm": ("pre",), "norm_type": ("rms",), "final_norm": (True,), "positions": ("rope",),
    "activation": ("swiglu", "geglu"), "logit_cap": (None,), "adaptive_cutoffs": ((),),
}  # fmt: skip
TRANSLATOR: dict[str, tuple[Any, ...]] = {  # the values that Marian and Pegasus have
    "norm_type": ("layer",), "norm_epsilon": (1e-5,),
    "positions": ("sinusoidal", "learned", "none"), "activation": ("relu", "gelu"), "query_key_norm": (False,),
    "logit_cap": (None,),
}  # fmt: skip
DECODER = {  # a layer of Llama and Qwen3, and one of our blocks
    "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output", "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm", "mlp.gate_proj": "feed_forward.inner",
    "mlp.up_proj": "feed_forward.factor", "mlp.down_proj": "feed_forward.output",
    "input_layernorm": "attention_residual.norm", "post_attention_layernorm": "feed_forward_residual.norm",
}  # fmt: skip
MARIAN = {  # a layer of Marian and Pegasus, of which the encoder has no encoder_attn, and one of our blocks
    **{f"{theirs}.{name}_proj": f"{ours}.{part}"
       for theirs, ours in (("self_attn", "attention"), ("encoder_attn", "cross"))
       for name, part in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))},
    "self_attn_layer_norm": "attention_residual.norm", "encoder_attn_layer_norm": "cross_residual.norm",
    "fc1": "feed_forward.inner", "fc2": "feed_forward.output", "final_layer_norm": "feed_forward_residual.norm",
}  # fmt: skip
ROPE_NAMES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
POSITIONS = "embed_positions"  # the tables of Marian and Pegasus, one of each stack


@dataclass(frozen=True)
class Skeleton:
    """A class of transformers for a model of ours."""

    kind: str  # name of the class
    config: Mapping[str, Any]  # values of its configuration
    modules: Mapping[str, str]  # the name of each of its modules with weights, and the name of ours
    generation: Mapping[str, Any]  # values of its generation_config: tokens that our decoding never writes


def find_skeleton(config: TransformerConfig, length: int) -> Skeleton:
    """Return the skeleton of a model that reads up to `length` tokens.

    Raises ValueError, naming the keys, if no class of transformers has such a model.
    """
    if config.model == "language-model":
        return _find_language_skeleton(config, length)
    if config.model == "translator":
        return _find_translation_skeleton(config, length)
    what = f"a classifier with pool={config.pool} has no class of transformers that computes the same"
    raise ValueError(f"{what}; language models and translators can be exported")


def _find_language_skeleton(config: TransformerConfig, length: int) -> Skeleton:
    kind = "Qwen3" if config.query_key_norm else "Llama"
    misfits = _list_misfits(config, LANGUAGE)
    if config.embedding_factor != 1:
        misfits.append(f"embedding_scale={config.embedding_scale}".lower())
    if config.query_key_norm and config.feed_forward_bias:
        misfits.append("feed_forward_bias=true with query_key_norm=true")
    if not config.query_key_norm and config.width % config.heads:
        misfits.append(f"width={config.width} with heads={config.heads}, which does not divide it")
    if misfits:
        raise ValueError(f"{kind} of transformers has no {', '.join(misfits)}; train with model=modern-25m, which fits")
    values = {
        "vocab_size": config.vocabulary, "hidden_size": config.width, "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "head_dim": config.head_size,
        "num_key_value_heads": config.key_value_heads or config.heads, "rms_norm_eps": config.norm_epsilon,
        "hidden_act": {"swiglu": "silu", "geglu": "gelu"}[config.activation], "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout, "max_position_embeddings": length,
        "rope_parameters": _describe_rope(config), "tie_word_embeddings": config.tie != "none",
        "pad_token_id": config.padding, "bos_token_id": EOS, "eos_token_id": EOS,
    }  # fmt: skip
    if not config.query_key_norm:
        values["mlp_bias"] = config.feed_forward_bias
    modules = {"model.embed_tokens": "decoder.embedding.words", "model.norm": "decoder.norm", "lm_head": "readout"}
    for layer in range(config.layers):
        modules |= {f"model.layers.{layer}.{name}": f"decoder.blocks.{layer}.{ours}" for name, ours in DECODER.items()}
    return Skeleton(f"{kind}ForCausalLM", values, modules, {"suppress_tokens": [PAD, BOS, UNK]})


def _find_translation_skeleton(config: TransformerConfig, length: int) -> Skeleton:
    pre = config.norm == "pre"
    name, sizes = "Pegasus" if pre else "Marian", (config.vocabulary, config.target_vocabulary or config.vocabulary)
    misfits = _list_misfits(config, TRANSLATOR | {"final_norm": (pre,)})
    if config.embedding_factor not in (1, config.width**0.5):
        misfits.append(f"embedding_scale={config.embedding_scale}")
    if config.key_value_heads not in (None, config.heads):
        misfits.append(f"key_value_heads={config.key_value_heads}")
    if config.head_size * config.heads != config.width:
        misfits.append(f"head_dim={config.head_dim}")
    if pre and sizes[0] != sizes[1]:
        misfits.append(f"second vocabulary (source {sizes[0]} words, target {sizes[1]})")
    if misfits:
        raise ValueError(f"{name} of transformers has no {', '.join(misfits)}; train with model=iwslt14, which fits")
    values: dict[str, Any] = {
        "vocab_size": sizes[0], "d_model": config.width, "activation_function": config.activation,
        "dropout": config.dropout, "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout, "scale_embedding": config.embedding_factor != 1,
        "tie_word_embeddings": config.tie == "all" if pre else config.tie != "none", "pad_token_id": config.padding,
        "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS, "forced_eos_token_id": None,
        "max_position_embeddings": config.max_length if config.positions == "learned" else length,
    }  # fmt: skip
    if not pre:
        values |= {"decoder_vocab_size": sizes[1], "share_encoder_decoder_embeddings": config.tie == "all"}
    modules = {"model.shared": "decoder.embedding.words", "lm_head": "readout"}
    for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
        values |= {f"{stack}_layers": count, f"{stack}_attention_heads": config.heads}
        values[f"{stack}_ffn_dim"] = config.feed_forward
        modules |= {
            f"model.{stack}.embed_tokens": f"{stack}.embedding.words",
            f"model.{stack}.layer_norm": f"{stack}.norm",
        }
        modules |= {f"model.{stack}.{POSITIONS}": f"{stack}.embedding.positions"}
        for layer in range(count):
            theirs, own = f"model.{stack}.layers.{layer}", f"{stack}.blocks.{layer}"
            modules |= {f"{theirs}.{part}": f"{own}.{ours}" for part, ours in MARIAN.items()}
    kind = "PegasusForConditionalGeneration" if pre else "MarianMTModel"
    return Skeleton(kind, values, modules, {"suppress_tokens": [PAD, BOS]})


def _list_misfits(config: TransformerConfig, values: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return key=value of the configuration where it has none of these values."""
    pairs = [(key, getattr(config, key)) for key in values]
    return [f"{key}={str(value).lower()}" for key, value in pairs if value not in values[key]]


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
