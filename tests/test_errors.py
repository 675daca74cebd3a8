"""Every bad argument gets a sentence that says what was wrong and what to do."""

import pytest
import torch

from attnlab.mechanisms import attention

Q, K = torch.zeros(2, 4, 3, 6), torch.zeros(2, 2, 5, 6)


@pytest.mark.parametrize("method", ["weights", "mix"])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q[0], K), {}, ValueError, r"\(batch, 4, length, 6\), got \(4, 3, 6\)"),
        ((Q, K[0]), {}, ValueError, r"k must be \(batch, heads, length, head_dim\)"),
        ((Q[:1], K), {}, ValueError, "differ in batch or head_dim"),
        ((Q, K[..., :4]), {}, ValueError, "differ in batch or head_dim"),
        ((Q[..., :4], K), {}, ValueError, r"\(batch, 4, length, 6\), got \(2, 4, 3, 4\)"),
        ((Q[:, :3], K), {}, ValueError, r"\(batch, 4, length, 6\), got \(2, 3, 3, 6\)"),
        ((Q, torch.zeros(2, 3, 5, 6)), {}, ValueError, "4 query heads cannot share 3 key heads: 3 does not divide 4"),
        ((Q, K), {"bias": torch.zeros(3, 5) > 0}, TypeError, "bias must be floating-point, got torch.bool.* mask="),
        ((Q, K, torch.zeros(3, 5)), {}, TypeError, "mask must be bool .*got torch.float32.* bias="),
        ((Q, K, torch.ones(2, 4, 3, 5) > 0), {}, ValueError, "differs between heads"),
        ((Q, K, torch.ones(3, 4) > 0), {}, ValueError, r"does not broadcast to \(b,1,i,j\) = \(2, 1, 3, 5\)"),
        ((Q, K, torch.ones(1, 2, 1, 3, 5) > 0), {}, ValueError, "does not broadcast"),
        ((Q, K), {"at": torch.arange(2)}, ValueError, "one key index for each of the 3"),
        ((Q, K), {"at": torch.zeros(3)}, ValueError, "one key index .*got torch.float32"),
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
        ("softmax", {"heads": 0}, "heads must be .*at least 1, got 0"),
        ("softmax", {"head_dim": 2.0}, "head_dim must be .*got 2.0"),
        ("softmax", {"layer": -1}, "layer must be .*at least 0, got -1"),
        ("softmax", {"scale": float("nan")}, "scale must be .*got nan"),
        ("dagpam", {"initial": (1.0, 2.0, 3.0)}, "initial must be"),
        ("softmax", {"dropout": 1.0}, "dropout must be .*below 1"),
        ("dagpam", {"inital": 1.0}, "dagpam has no option 'inital' .did you mean 'initial'"),
        ("dagpam", {"impl": "fast"}, "impl must be .*got 'fast'"),
        ("differential", {"head_dim": 5}, "head_dim must be even.*5"),
        ("coda", {"alpha": 3}, "alpha must be one of 2, 4, 8"),
        ("coda", {"variant": "book"}, "variant must be one of code, paper"),
        ("coda", {"residual": False}, "residual=False needs variant='paper'"),
        ("sigmoid", {"offset": float("inf")}, "offset must be finite"),
        ("softmax1", {"n": 0.0}, "n must be above 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        attention(name, **{"heads": 4, "head_dim": 6} | options)


def test_shaped_refuses_more_queries_than_keys():
    with pytest.raises(ValueError, match="5 queries and 3 keys"):
        attention("shaped", heads=1, head_dim=2).weights(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 3, 2))


def test_values_must_fit_the_keys():
    for name in ("softmax", "dagpam", "cog"):
        mechanism = attention(name, heads=4, head_dim=6)
        with pytest.raises(ValueError, match=r"k \(2, 2, 5, 6\) and v \(2, 2, 3, 6\) differ in batch, heads or length"):
            mechanism(Q, K, K[:, :, :3])


@pytest.mark.parametrize("name", ["realformer", "coda"])
def test_a_carry_must_fit_and_not_come_to_layer_0(name):
    with pytest.raises(ValueError, match="layer 0 takes no carry"):
        attention(name, heads=4, head_dim=6).weights(Q, K, None, torch.zeros(2, 4, 3, 5))
    with pytest.raises(ValueError, match=r"the carry is \(2, 4, 3, 4\) .*\(2, 4, 3, 5\)"):
        attention(name, heads=4, head_dim=6, layer=1).weights(Q, K, None, torch.zeros(2, 4, 3, 4))


def test_fused_dagpam_says_what_it_does_not_cover(monkeypatch):
    pytest.importorskip("triton")
    mechanism = attention("dagpam", heads=4, head_dim=6, impl="fused")
    with pytest.raises(ValueError, match=r"does not cover torch\.float64"):
        mechanism(Q.double(), K.double(), K.double())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="does not cover tensors on cpu"):
            mechanism(Q, K, K)
