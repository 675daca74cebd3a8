"""Small Transformers of ours, with prime sizes, for tests over every mechanism."""

from dataclasses import replace

import pytest
import torch

from attnlab.mechanisms import MECHANISMS
from attnlab.models.transformer import Transformer, TransformerConfig, build

SMALL = {"vocabulary": 23, "layers": 2, "width": 12, "heads": 3, "feed_forward": 13, "dropout": 0.0}
LM = TransformerConfig(model="language-model", **SMALL)
TRANSLATOR = TransformerConfig(model="translator", target_vocabulary=19, **SMALL)
CLASSIFIER = TransformerConfig(model="classifier", classes=5, **SMALL)
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def made(config: TransformerConfig, name: str = "softmax", **changes) -> Transformer:
    """A model in float64 and evaluation mode, every parameter shaken away from its special starting value."""
    if config.model == "translator" and MECHANISMS[name].self_only:
        changes |= {"cross_attention": "softmax"}
    model = build(replace(config, attention=name, **changes)).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model
