"""attnlab describe: print the number of parameters of each block of a model."""

from collections.abc import Sequence

from attnlab.config import split_pairs
from attnlab.mechanisms.per_layer import describe_layers, is_per_layer
from attnlab.models.presets import build_on_meta, configure_model, parameter_table
from attnlab.models.transformer_config import TransformerConfig
from attnlab.terminal import show_table


def describe_model(model: str, settings: Sequence[str]) -> None:
    """Print the parameters of each block of a preset with these settings, and the attention of each layer."""
    config = configure_model(model, split_pairs(settings))
    counts = parameter_table(build_on_meta(config))
    rows = [[block, f"{count:,}"] for block, count in [*counts, ("total", sum(count for _, count in counts))]]
    show_table(f"{model}, attention={config.attention}", ["block", "parameters"], rows)
    if isinstance(config, TransformerConfig) and any(is_per_layer(name or "") for name in config.attentions):
        for kind in config.attention_kinds:
            print(f"{kind}: {describe_layers(config.list_attentions(kind))}")
