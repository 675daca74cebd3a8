"""Kinds of mechanisms: what is declared and what is measured."""

import pytest
import torch
from in_process import run_attnlab

from attnlab.mechanisms import MECHANISMS, attention
from attnlab.mechanisms.kinds import list_kinds
from attnlab.mechanisms.mechanism import Mechanism, logits, masked_softmax

KINDS = {
    "softmax": [],
    "coda+dagpam": ["carries logits", "signed", "cross-head", "stochastic"],
    "resformer": ["carries values"],
    "talking-heads": ["signed", "cross-head"],
    "gated": ["gated", "sink-free"],
    "fox": ["gated", "positional", "self-only"],
    "sink": ["sink-free"],
    "softpick": ["sink-free"],
    "sliding-window": ["positional", "self-only"],
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_known_mechanisms(name):
    assert list_kinds(lambda layer: attention(name, heads=3, head_dim=6, layer=layer)) == KINDS[name]


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_whose_rows_sum_to_one_is_not_sink_free(name):
    mechanism = attention(name, heads=3, head_dim=6)
    gates_context = type(mechanism).turn is not Mechanism.turn
    if isinstance(mechanism.row_sum, float) and mechanism.row_sum == 1.0 and not gates_context:
        assert "sink-free" not in list_kinds(lambda layer: attention(name, heads=3, head_dim=6, layer=layer))


class NextHead(Mechanism):
    """Softmax of the logits of the next head, half of it."""

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_softmax(logits(q, k, self.scale, bias).roll(1, dims=1), seen) / 2, None


def test_a_head_that_reads_another_is_cross_head():
    assert list_kinds(lambda layer: NextHead(3, 6, layer=layer)) == ["cross-head"]


def test_measuring_leaves_no_trace():
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    list_kinds(lambda layer: attention("talking-heads", heads=3, head_dim=6, layer=layer))
    assert torch.equal(torch.rand(1), first)


def test_check_prints_the_kind():
    assert "kind: gated, positional, self-only" in run_attnlab("check", "fox").stdout
