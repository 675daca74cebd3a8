"""Sixty architectures of transformers as tiny random models, and batches for them. Nothing is downloaded.

Each entry names a class of transformers and what its config differs in from the sizes of its group. Parameters are
drawn far from their initial values, so that attention is not uniform and gains and biases are not 1 and 0.
"""

from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3,
    "intermediate_size": 17, "max_position_embeddings": 53, "initializer_range": 0.3, "pad_token_id": 0,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 3, "intermediate_size": 17, "max_position_embeddings": 53, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
PLAIN = {key: value for key, value in DECODER.items() if key != "head_dim"} | {
    "num_attention_heads": 3, "num_key_value_heads": 3,
}  # fmt: skip
GROUPED = PLAIN | {"num_attention_heads": 6, "num_key_value_heads": 2}
OLD = {
    "vocab_size": VOCABULARY, "n_embd": 24, "n_head": 3, "n_layer": 3, "n_positions": 53, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
TRANSLATOR = {
    "vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 17, "decoder_ffn_dim": 19, "max_position_embeddings": 53,
    "init_std": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0,
    "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
PICTURE = {
    "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 17, "image_size": 8,
    "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
SPEECH = ENCODER | {
    "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 3, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
MORE_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8} | {
    "experts_implementation": "eager", "decoder_sparse_step": 1, "shared_expert_intermediate_size": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LATENT = {"kv_lora_rank": 7, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5} | {
    "first_k_dense_replace": 3, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 6, "head_dim": 4,
}  # fmt: skip
MODERNBERT = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0) | {
    "local_attention": 6, "global_attn_every_n_layers": 2, "initializer_cutoff_factor": 2.0,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "partial_rotary_factor": 0.5,
}  # fmt: skip
CLIP_TEXT = ENCODER | {"eos_token_id": 1, "bos_token_id": 0}

# the name, its class, and its config
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", ENCODER),
    "RoBERTa": ("RobertaModel", ENCODER),
    "XLM-RoBERTa": ("XLMRobertaModel", ENCODER),
    "ALBERT": ("AlbertModel", ENCODER | {"embedding_size": 7}),
    "DistilBERT": ("DistilBertModel", {"vocab_size": VOCABULARY, "dim": 24, "n_heads": 3, "n_layers": 3,
                                       "hidden_dim": 17, "max_position_embeddings": 53, "initializer_range": 0.3}),
    "ELECTRA": ("ElectraModel", ENCODER | {"embedding_size": 7}),
    "ERNIE": ("ErnieModel", ENCODER),
    "MobileBERT": ("MobileBertModel", ENCODER | {"embedding_size": 24, "intra_bottleneck_size": 12}),
    "ModernBERT": ("ModernBertModel", ENCODER | MODERNBERT),
    "ESM": ("EsmModel", ENCODER | {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 2}),
    "MPNet": ("MPNetModel", ENCODER),
    "DeBERTa": ("DebertaModel", ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa-v2": ("DebertaV2Model", ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                                                "share_att_key": True, "position_buckets": 8}),
    "GPT": ("OpenAIGPTLMHeadModel", OLD),
    "GPT-2": ("GPT2LMHeadModel", OLD),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", OLD | {"multi_query": True}),
    "GPT-Neo": ("GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_heads": 3, "num_layers": 4,
                                      "attention_types": [[["global", "local"], 2]], "window_size": 5,
                                      "max_position_embeddings": 53, "initializer_range": 0.3}),
    "GPT-J": ("GPTJForCausalLM", OLD | {"rotary_dim": 4}),
    "CodeGen": ("CodeGenForCausalLM", OLD | {"n_head": 4, "n_embd": 32, "rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", PLAIN),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_head": 3, "n_layer": 3,
                                   "initializer_range": 0.3}),
    "Falcon": ("FalconForCausalLM", PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 1}),
    "Falcon with ALiBi": ("FalconForCausalLM", PLAIN | {"alibi": True, "multi_query": False, "num_kv_heads": 3}),
    "MPT": ("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 24, "n_heads": 3, "n_layers": 3,
                               "max_seq_len": 53, "initializer_range": 0.3}),
    "OPT": ("OPTForCausalLM", PLAIN | {"word_embed_proj_dim": 24, "ffn_dim": 17, "init_std": 0.3, "dropout": 0.0}),
    "Llama": ("LlamaForCausalLM", DECODER),
    "Mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 5}),
    "Mixtral": ("MixtralForCausalLM", DECODER | EXPERTS | {"sliding_window": None}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", DECODER),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", DECODER | MORE_EXPERTS),
    "Qwen3-Next": ("Qwen3NextForCausalLM", DECODER | MORE_EXPERTS | DELTA),
    "Gemma": ("GemmaForCausalLM", DECODER),
    "Gemma 2": ("Gemma2ForCausalLM", DECODER | {"attn_logit_softcapping": 3.0, "sliding_window": 5,
                                                "layer_types": WINDOWS}),
    "Gemma 3": ("Gemma3ForCausalLM", DECODER | {"sliding_window": 5, "layer_types": WINDOWS}),
    "Phi": ("PhiForCausalLM", PLAIN),
    "Phi-3": ("Phi3ForCausalLM", DECODER | {"head_dim": 4, "original_max_position_embeddings": 53}),
    "StarCoder2": ("Starcoder2ForCausalLM", GROUPED | {"sliding_window": None}),
    "StableLM": ("StableLmForCausalLM", PLAIN),
    "OLMo 2": ("Olmo2ForCausalLM", PLAIN),
    "Cohere 2": ("Cohere2ForCausalLM", DECODER | {"sliding_window": 5, "layer_types": WINDOWS}),
    "Granite": ("GraniteForCausalLM", PLAIN | {"attention_multiplier": 0.5}),
    "GLM-4": ("Glm4ForCausalLM", DECODER),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED | {"no_rope_layers": [1, 0, 1]}),
    "BitNet": ("BitNetForCausalLM", PLAIN),
    "DiffLlama": ("DiffLlamaForCausalLM", DECODER | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", DECODER | LATENT),
    "gpt-oss": ("GptOssForCausalLM", DECODER | EXPERTS | {"rope_parameters": ROPE, "sliding_window": 5,
                                                          "layer_types": WINDOWS}),
    "MiniMax": ("MiniMaxForCausalLM", DECODER | EXPERTS | {"block_size": 4, "layer_types": DELTA["layer_types"]}),
    "T5": ("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 5, "num_heads": 3,
                                          "d_ff": 17, "num_layers": 3, "pad_token_id": 0, "eos_token_id": 1,
                                          "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}),
    "BART": ("BartForConditionalGeneration", TRANSLATOR),
    "Marian": ("MarianMTModel", TRANSLATOR),
    "Whisper": ("WhisperForConditionalGeneration", TRANSLATOR | {"num_mel_bins": 4, "max_source_positions": 10,
                                                                 "max_target_positions": 53}),
    "ViT": ("ViTModel", PICTURE),
    "DINOv2": ("Dinov2Model", PICTURE),
    "CLIP": ("CLIPModel", {"text_config": CLIP_TEXT, "vision_config": PICTURE, "projection_dim": 8}),
    "Wav2Vec2": ("Wav2Vec2Model", SPEECH),
    "Longformer": ("LongformerModel", ENCODER | {"attention_window": 4, "bos_token_id": 1, "eos_token_id": 1,
                                                 "sep_token_id": 1}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2,
                                   "state_size": 4}),
    "RWKV": ("RwkvForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2,
                                 "context_length": 53}),
}  # fmt: skip


def build_model(name: str) -> Any:
    """Return a tiny random model of an architecture, in evaluation mode."""
    torch.manual_seed(7)
    model = getattr(transformers, ARCHITECTURES[name][0])(build_config(name)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model


def build_config(name: str) -> Any:
    kind, values = ARCHITECTURES[name]
    return getattr(transformers, kind).config_class(**values)


def build_batch(model: Any) -> dict[str, torch.Tensor]:
    """Return three examples of 11, 7 and 2 tokens, and pictures or sounds where the model reads them."""
    generator = torch.Generator().manual_seed(5)
    reads, config = model.main_input_name, model.config
    batch: dict[str, torch.Tensor] = {}
    if reads == "input_ids":
        batch |= draw_tokens((11, 7, 2), generator)
    if reads == "input_values":
        batch |= {reads: torch.randn(3, 200, generator=generator)}
    if reads == "input_features":
        width = 2 * config.max_source_positions
        batch |= {reads: torch.randn(3, config.num_mel_bins, width, generator=generator)}
    if reads == "pixel_values" or hasattr(config, "vision_config"):
        batch |= {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
    if config.is_encoder_decoder:
        batch |= {f"decoder_{name}": x for name, x in draw_tokens((5, 3, 4), generator).items()}
    return batch


def draw_tokens(lengths: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    length = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), length), generator=generator)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}
