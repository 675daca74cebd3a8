"""Named configurations, and the number of parameters of a model by block.

Three presets reproduce the parameter counts published by Zheng et al. 2021, with fairseq's dictionaries:

    iwslt14      39,469,056    attention=coda  39,476,616        German–English
    wmt14        60,915,712    attention=coda  60,944,656        English–German
    wikitext103 246,933,504    attention=coda 246,959,232        language model of Baevski & Auli 2019

Two presets are language models as of 2026, not of a paper: RMSNorm before each block, RoPE, SwiGLU, QK-norm, grouped
keys, no biases, tied embeddings. With 32,768 words:

    modern-25m   25,173,376        modern-125m   125,856,512

The LSTM presets reproduce the counts of Snell et al. 2021, without embeddings and with them:

    lstm              6,132,544    8,180,544        translation, 8,000 subwords
    lstm-copy         1,326,378    1,337,130        copying of 40 types
    lstm-classifier   1,274,882    4,581,482        classification, with SST's words
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from attnlab.config import parse_values, replace_values, suggest_nearest
from attnlab.mechanisms import DECIDED_BY_MODEL, describe_owner, parse_options, read_option_types
from attnlab.models.lstm_config import SETTINGS, LSTMConfig
from attnlab.models.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import nn

    from attnlab.models.model import Model

Config = TransformerConfig | LSTMConfig

UNIT = 32  # a feed_forward that follows the width is a multiple of it
MODERN: dict[str, Any] = {
    "model": "language-model", "vocabulary": 32768, "head_dim": 64, "positions": "rope", "norm_type": "rms",
    "norm_epsilon": 1e-6, "activation": "swiglu", "query_key_norm": True, "attention_bias": False,
    "feed_forward_bias": False, "embedding_scale": False, "dropout": 0.0, "init": "normal",
}  # fmt: skip
PRESETS: dict[str, Config] = {
    "tiny": TransformerConfig(
        model="language-model", vocabulary=256, layers=2, width=64, heads=4, feed_forward=256, dropout=0.0,
    ),
    "iwslt14": TransformerConfig(
        model="translator", vocabulary=8848, target_vocabulary=6632, heads=4, feed_forward=1024,
        norm="post", final_norm=False, dropout=0.3, activation_dropout=0.1,
    ),
    "wmt14": TransformerConfig(
        model="translator", vocabulary=32768, norm="post", final_norm=False, tie="all", dropout=0.1,
    ),
    "wikitext103": TransformerConfig(
        model="language-model", vocabulary=267744, layers=16, width=1024, feed_forward=4096, final_norm=False,
        adaptive_cutoffs=(20000, 60000), adaptive_dropout=0.2,
        dropout=0.3, attention_dropout=0.1, activation_dropout=0.1,
    ),
    "modern-25m": TransformerConfig(layers=8, width=384, heads=6, key_value_heads=2, feed_forward=1024, **MODERN),
    "modern-125m": TransformerConfig(layers=16, width=768, heads=12, key_value_heads=4, feed_forward=2048, **MODERN),
    "lstm": SETTINGS["translation"],
    "lstm-copy": SETTINGS["copy"],
    "lstm-multi-head": SETTINGS["multi-head"],
    "lstm-classifier": SETTINGS["classification"],
}  # fmt: skip


def build(config: Config) -> Model:
    """Build the model of a configuration, with random initialization."""
    from attnlab.models import lstm, transformer

    return lstm.build(config) if isinstance(config, LSTMConfig) else transformer.build(config)


def configure_model(name: str, values: Mapping[str, str]) -> Config:
    """Return a preset with values replaced by parsed texts. A key that is no field is an option of its attention."""
    if name not in PRESETS:
        raise ValueError(f"no model is called {name!r}{suggest_nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    keys = [f.name for f in fields(PRESETS[name]) if not f.name.endswith("options")]
    config = resize_model(PRESETS[name], {key: text for key, text in values.items() if key in keys})
    option_keys = [option for option in read_option_types(config.attention) if option not in DECIDED_BY_MODEL]
    options = {key: text for key, text in values.items() if key not in keys}
    for key in options:
        if key not in option_keys:
            if problem := describe_owner(config.attention, key):
                raise ValueError(problem)
            known = f"{config.model} has {', '.join(keys)}; attention={config.attention} has {', '.join(option_keys)}"
            raise ValueError(f"unknown key {key!r}{suggest_nearest(key, [*keys, *option_keys])}; a {known}")
    parsed = parse_options(config.attention, options)
    config = replace(config, attention_options={**config.attention_options, **parsed})
    if isinstance(config, TransformerConfig):
        config.check_attention()
    return config


def resize_model(config: Config, values: Mapping[str, str]) -> Config:
    """Return a configuration with values replaced by parsed texts.

    If its heads have a size of their own (head_dim), the sizes that are not given follow those that are: heads =
    width / head_dim, and key_value_heads and feed_forward keep their proportions. Otherwise each key changes one value.
    """
    if not isinstance(config, TransformerConfig) or config.head_dim is None:
        return replace_values(config, values)
    kinds = {"width": int, "heads": int, "head_dim": int | None}
    given = parse_values({key: text for key, text in values.items() if key in kinds}, kinds)
    width, heads, size = (given.get(key, getattr(config, key)) for key in kinds)
    if given and "heads" not in given and size is not None:
        if width % size:
            raise ValueError(f"width must be a multiple of head_dim={size}, got {width}; set heads= or head_dim= too")
        heads = width // size
    follow = {"heads": heads, "feed_forward": config.feed_forward}
    if config.key_value_heads is not None:
        most = max(1, heads * config.key_value_heads // config.heads)
        follow["key_value_heads"] = next(n for n in range(most, 0, -1) if heads % n == 0)
    if width != config.width:
        follow["feed_forward"] = UNIT * max(1, round(config.feed_forward * width / config.width / UNIT))
    return replace_values(config, {key: str(size) for key, size in follow.items()} | dict(values))


def build_on_meta(config: Config) -> Model:
    """Build the model of a configuration on the meta device: it has shapes but no values and takes no memory."""
    import torch

    with torch.device("meta"):
        return build(config)


def parameter_table(model: nn.Module) -> list[tuple[str, int]]:
    """Return (block, number of parameters) in the model's order. A shared parameter counts in its first block."""
    from attnlab.models.model import Model

    if not isinstance(model, Model):
        raise TypeError(f"parameter_table needs a model from attnlab's build, got a {type(model).__name__}")
    table: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = _name_block(name.split("."))
        table[block] = table.get(block, 0) + parameter.numel()
    return list(table.items())


def _name_block(path: list[str]) -> str:
    """Name a block: ['encoder', 'blocks', '3', 'cross', 'query', 'weight'] -> 'encoder layer 3: cross-attention'."""
    match path:
        case [stack, "blocks", layer, ("attention" | "cross") as part, inside, *_]:
            kind = "self" if part == "attention" else "cross"
            return f"{stack} layer {layer}: {kind}-attention{' mechanism' if inside == 'mechanism' else ''}"
        case [stack, "blocks", layer, "feed_forward", *_]:
            return f"{stack} layer {layer}: feed-forward"
        case [stack, "blocks", layer, *_]:
            return f"{stack} layer {layer}: norms"
        case [stack, "layers", layer, *_]:
            return f"{stack} layer {layer}: LSTM"
        case [stack, "embedding", ("words" | "positions") as part, *_]:
            return f"{stack} embedding: {part}"
        case [stack, "norm", *_]:
            return f"{stack} final norm"
    return path[0]
