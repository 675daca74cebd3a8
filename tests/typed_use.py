"""The public names as an editor sees them: mypy checks this file strictly, and test_public.py runs it."""

from typing import assert_type

import torch
from torch import Tensor, nn

import attnlab


def use_mechanisms() -> None:
    assert_type(attnlab.__version__, str)
    for name, kind in attnlab.MECHANISMS.items():
        assert_type(name, str)
        assert_type(kind, type[attnlab.Mechanism])
    mechanism = attnlab.attention("dagpam", heads=2, head_dim=4, initial=0.5)
    assert_type(mechanism, attnlab.Mechanism)
    weights, carry = mechanism.weights(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), causal=True)
    assert_type(weights, Tensor)
    assert_type(carry, Tensor | None)


def use_records(model: nn.Module, tokens: Tensor) -> None:
    record = attnlab.record(model, tokens, noise=None, feed_forward=False, lazy=False)
    assert_type(record, attnlab.Record)
    assert_type(record.layers[0].weights, Tensor)
    viewer = attnlab.show(record, title="one", layers=[0])
    assert_type(viewer.html(), str)
    table = attnlab.contribution(record, level="layer")
    assert len(table.columns) > 3
