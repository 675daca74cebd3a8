"""The parameters of the paper's models, with fairseq's dictionaries."""

from dataclasses import replace

from attnlab.models.presets import PRESETS, build_on_meta
from attnlab.models.transformer import TransformerConfig


def count_millions(preset: str, attention: str) -> float:
    """Of a named model with this attention, as the paper prints them: two places."""
    config = PRESETS[preset]
    assert isinstance(config, TransformerConfig)
    model = build_on_meta(replace(config, attention=attention))
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)
