"""daGPAM: its λ and W⁻ options, and one fused call that never makes weights."""

from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from attnlab.mechanisms import attention

HEADS, SIZE = 3, 5


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1 + 75),
        ({"tied": False}, 2 + 75),
        ({"per_head": True}, 3 + 75),
        ({"shared": True}, 1 + 25),
        ({"fixed": True}, 75),
    ],
    ids=str,
)
def test_trained_parameters(options, count):
    mechanism = attention("dagpam", heads=HEADS, head_dim=SIZE, **options)
    assert sum(p.numel() for p in mechanism.parameters() if p.requires_grad) == count


def test_untied_lambdas_set_the_row_sum():
    mechanism = attention("dagpam", heads=HEADS, head_dim=SIZE, initial=(3.0, 1.0), tied=False)
    q, k = torch.randn(2, 1, HEADS, 7, SIZE)
    torch.testing.assert_close(mechanism.weights(q, k)[0].sum(-1), torch.full((1, HEADS, 7), 3.0))
    assert mechanism.row_sum.tolist() == [3.0]


def test_minus_identity_turns_a_positive_query_round():
    """With Q ≥ 0 the negative branch attends by −Q: the assumption A⁻ = −A⁺ of the paper's gradient lemma."""
    mechanism = attention("dagpam", heads=HEADS, head_dim=SIZE, negative_init="minus-identity")
    q, k = torch.rand(1, HEADS, 7, SIZE), torch.randn(1, HEADS, 7, SIZE)
    a = q @ k.mT / SIZE**0.5
    torch.testing.assert_close(mechanism.weights(q, k)[0], 2 * a.softmax(-1) - (-a).softmax(-1))


def test_mix_is_one_call_with_two_query_heads_for_each_key_head():
    mechanism = attention("dagpam", heads=4, head_dim=SIZE)
    q, k = torch.randn(1, 4, 7, SIZE), torch.randn(1, 2, 7, SIZE)
    with (
        patch("torch.nn.functional.scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as call,
        patch.object(type(mechanism), "weights", side_effect=AssertionError("weights were made")),
    ):
        mechanism(q, k, k, causal=True)
    ((queries, keys, _), options) = call.call_args
    assert call.call_count == 1
    assert (queries.shape[1], keys.shape[1], options["is_causal"]) == (8, 2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": (3.0, 1.0)}, "tied=False"),
        ({"negative_init": "zeros"}, "negative_init.*xavier"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention("dagpam", heads=HEADS, head_dim=SIZE, **options)
