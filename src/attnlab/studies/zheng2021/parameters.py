"""The number of parameters of the paper's models, with fairseq's dictionaries."""

from dataclasses import replace

from attnlab.experiments.verdicts import Cell
from attnlab.models.presets import PRESETS, build_on_meta
from attnlab.models.transformer_config import TransformerConfig
from attnlab.studies.zheng2021.coda_models import LABELS


def count_millions(preset: str, attention: str) -> float:
    """Return the parameters of a preset with this attention, in millions with two decimals, as the paper does."""
    config = PRESETS[preset]
    assert isinstance(config, TransformerConfig)
    model = build_on_meta(replace(config, attention=attention))
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)


def make_size_cell(item: str, row: str, preset: str, attention: str, published: float) -> Cell:
    """Return the cell of a model's size; row: the name of its corpus."""
    size = count_millions(preset, attention)
    row = f"{row}: {LABELS[attention]}"
    return Cell(item=item, row=row, column="million parameters", published=published, values=(size,), exact=True)
