"""Every bad argument gets a sentence that says what was wrong and what to do."""

import pytest
import torch

from attnlab.mechanisms import attention

Q, K = torch.zeros(2, 4, 3, 6), torch.zeros(2, 2, 5, 6)


@pytest.mark.parametrize("method", ["weights", "mix"])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q[0], K), {}, ValueError, r"q must be \(batch, heads, length, head_dim\); its shape is \(4, 3, 6\)"),
        ((Q, K[0]), {}, ValueError, r"k must be \(batch, heads, length, head_dim\)"),
        ((Q[:1], K), {}, ValueError, "differ in batch or head_dim"),
        ((Q[..., :4], K), {}, ValueError, "differ in batch or head_dim"),
        ((Q[:, :3], K), {}, ValueError, "3 query heads cannot share 2 key heads: 2 does not divide 3"),
        (
            (Q, K, torch.zeros(3, 5)),
            {},
            TypeError,
            "mask must be bool .* not torch.float32; for an additive mask use bias=",
        ),
        ((Q, K, torch.ones(2, 4, 3, 5) > 0), {}, ValueError, "has a head axis: a mask is the same for all heads"),
        ((Q, K, torch.ones(3, 4) > 0), {}, ValueError, r"does not broadcast to \(b,1,i,j\) = \(2, 1, 3, 5\)"),
        ((Q, K, torch.ones(1, 2, 1, 3, 5) > 0), {}, ValueError, "does not broadcast"),
        ((Q, K), {"at": torch.arange(2)}, ValueError, "one key index for each of the 3 queries"),
        ((Q, K), {"at": torch.zeros(3)}, ValueError, "one key index for each of the 3 queries; got torch.float32"),
    ],
)
def test_bad_arguments(method, arguments, options, error, message):
    mechanism = attention("softmax", heads=4, head_dim=6)
    q, k, *mask = arguments
    values = (k,) if method == "mix" else ()
    with pytest.raises(error, match=message):
        getattr(mechanism, method)(q, k, *values, *mask, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sofmax", {}, "no attention is called 'sofmax' .did you mean 'softmax'.*there are softmax, realformer"),
        ("softmax", {"heads": 0}, "heads and head_dim must be at least 1"),
        ("softmax", {"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ("dagpam", {"inital": 1.0}, "dagpam has no option 'inital' .did you mean 'initial'"),
        ("dagpam", {"impl": "fast"}, "impl must be 'auto', 'reference' or 'fused'"),
        ("differential", {"head_dim": 5}, "head_dim must be even, not 5"),
        ("coda", {"alpha": 3}, "alpha must be 2, 4 or 8"),
        ("coda", {"variant": "book"}, "variant must be 'code' or 'paper'"),
        ("coda", {"residual": False}, "residual=False belongs to variant='paper'"),
        ("softmax1", {"n": 0.0}, "n must be positive"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        attention(name, **{"heads": 4, "head_dim": 6} | options)


def test_shaped_refuses_more_queries_than_keys():
    with pytest.raises(ValueError, match="5 queries cannot be among 3 keys"):
        attention("shaped", heads=1, head_dim=2).weights(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 3, 2))
