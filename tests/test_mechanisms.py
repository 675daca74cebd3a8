"""Each definition against an independent one: written out for a single row in numpy, or another library's function."""

import math

import numpy as np
import pytest
import torch
from representatives import REPRESENTATIVES
from scipy.special import expit, softmax
from torch.nn import functional as F

from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.mechanisms.law_trial import make_trial, shake_parameters

entmax = pytest.importorskip("entmax")  # none of these tests needs a GPU

HEADS, SIZE, QUERIES, KEYS = 3, 6, 5, 7


@pytest.fixture
def tensors():
    q = torch.randn(2, HEADS, QUERIES, SIZE, dtype=torch.float64)
    k, v = torch.randn(2, 2, HEADS, KEYS, SIZE, dtype=torch.float64)
    mask = torch.rand(2, 1, QUERIES, KEYS) < 0.7
    mask[..., 0] = True
    return q, k, v, mask


def built(name, **options):
    return shake_parameters(attention(name, heads=HEADS, head_dim=SIZE, **options))


def row_by_row(mechanism, q, k, mask, row):
    """Weights made one row at a time from the visible keys alone: row(head, q (d,), K (n,d)) -> (n,)."""
    weights = np.zeros((*q.shape[:3], k.shape[2]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, 0, i].numpy())
        weights[b, h, i, seen] = row(h, q[b, h, i].numpy(), k[b, h, seen].numpy())
    return torch.from_numpy(weights)


ROWS = {
    "softmax": lambda m: lambda h, q, k: softmax(k @ q / math.sqrt(SIZE)),
    "dot": lambda m: lambda h, q, k: softmax(k @ q),
    "uniform": lambda m: lambda h, q, k: np.full(len(k), 1 / len(k)),
    "coda-cs": lambda m: lambda h, q, k: softmax(k @ q / math.sqrt(SIZE)),
    "realformer": lambda m: lambda h, q, k: softmax(k @ q / math.sqrt(SIZE)),
    "coda": lambda m: lambda h, q, k: softmax(k @ q / math.sqrt(SIZE)),
    "non": lambda m: lambda h, q, k: k @ q / math.sqrt(SIZE) / math.sqrt(len(k)),
    "de-attention": lambda m: (
        lambda h, q, k: np.tanh(k @ q / math.sqrt(SIZE)) * 2 * expit(-np.abs(k - q).sum(1) / math.sqrt(SIZE))
    ),
    "cog": lambda m: lambda h, q, k: np.sign(k @ q) * softmax(np.abs(k @ q) / math.sqrt(SIZE)),
    "sigmoid": lambda m: lambda h, q, k: expit(k @ q / math.sqrt(SIZE) - math.log(len(k))),
    "softmax1": lambda m: lambda h, q, k: np.exp(k @ q / math.sqrt(SIZE)) / (1 + np.exp(k @ q / math.sqrt(SIZE)).sum()),
    "nap": lambda m: (
        lambda h, q, k: (
            float(m.gain[h]) * (k @ q - (k @ q).mean()) / (np.maximum((k @ q).std(), 1e-6) + 1e-3) + float(m.shift[h])
        )
    ),
    "dagpam": lambda m: (
        lambda h, q, k: (
            (1 + float(m.plus)) * softmax(k @ q / math.sqrt(SIZE))
            - float(m.minus) * softmax(k @ (np.maximum(q, 0) @ m.negative[h].detach().numpy()) / math.sqrt(SIZE))
        )
    ),
    "differential": lambda m: (
        lambda h, q, k: (
            softmax(k[:, : SIZE // 2] @ q[: SIZE // 2] / math.sqrt(SIZE // 2))
            - float(m.subtraction) * softmax(k[:, SIZE // 2 :] @ q[SIZE // 2 :] / math.sqrt(SIZE // 2))
        )
    ),
    "sparsemax": lambda m: lambda h, q, k: project_onto_the_simplex(k @ q / math.sqrt(SIZE)),
    "entmax15": lambda m: (
        lambda h, q, k: entmax.entmax_bisect(torch.from_numpy(k @ q / math.sqrt(SIZE)), 1.5, n_iter=100).numpy()
    ),
}


def project_onto_the_simplex(s):
    """By the definition: the threshold at which the positive parts sum to 1, found by halving."""
    low, high = s.min() - 1, s.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(s - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(s - low, 0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_weights_are_the_definition(name, tensors):
    q, k, _, mask = tensors
    mechanism = built(name)
    expected = row_by_row(mechanism, q, k, mask, ROWS[name](mechanism))
    torch.testing.assert_close(mechanism.weights(q, k, mask)[0].detach(), expected, atol=1e-9, rtol=0)


ROWS |= {
    "coda+dagpam": ROWS["dagpam"],
    "realformer+dagpam": ROWS["dagpam"],
}  # in the first layer; the others: test_signed_cascades


def test_the_representatives_are_of_all_kinds():
    """What one mechanism declares, one of the representatives declares too."""

    def list_kinds(kind):
        declared = {"carries", "stochastic", "self_only", "positional", "lookback"}
        replaced = {"query_side", "key_side", "values", "turn", "finish", "query_heads", "carry_heads"}
        return {(name, bool(getattr(kind, name))) for name in declared} | {
            (name, getattr(kind, name) is not getattr(Mechanism, name)) for name in replaced
        }

    covered = set().union(*(list_kinds(MECHANISMS[name]) for name in REPRESENTATIVES))
    for name, kind in MECHANISMS.items():
        assert list_kinds(kind) <= covered, name


def test_shaped_by_hand():
    """Two queries on two keys, causal, logits 0 and ln 3: P = [[1, 0], [1/4, 3/4]], C = [[1, 0], [1/2, 1/2]]."""
    shaped = attention("shaped", heads=1, head_dim=1, scale=1.0).double()
    for parameter, value in ((shaped.alpha, 2.0), (shaped.beta, 3.0), (shaped.gamma, 5.0)):
        parameter.data.fill_(value)
    q = torch.tensor([1.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1)
    k = torch.tensor([0.0, math.log(3)], dtype=torch.float64).view(1, 1, 2, 1)
    weights, _ = shaped.weights(q, k, causal=True)
    expected = torch.tensor([[2 + 3 - 5, 0], [3 / 4 - 5 / 2, 2 + 9 / 4 - 5 / 2]], dtype=torch.float64)
    torch.testing.assert_close(weights[0, 0].detach(), expected)


def test_shaped_with_zero_queries_is_the_identity():
    shaped = attention("shaped", heads=2, head_dim=3)
    weights, _ = shaped.weights(torch.zeros(1, 2, 5, 3), torch.randn(1, 2, 5, 3), causal=True)
    torch.testing.assert_close(weights, torch.eye(5).expand_as(weights))


def test_talking_heads_by_hand():
    """One key matters in head 0 and another in head 1; M_S swaps the heads, M_P subtracts them."""
    mechanism = attention("talking-heads", heads=2, head_dim=1, scale=1.0).double()
    mechanism.before.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    mechanism.after.data = torch.tensor([[1.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
    q = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    k = torch.tensor([[math.log(3), 0.0], [0.0, math.log(4)]], dtype=torch.float64).view(1, 2, 2, 1)
    weights, _ = mechanism.weights(q, k)
    first, second = np.array([1 / 5, 4 / 5]), np.array([3 / 4, 1 / 4])  # softmax of the swapped heads
    expected = torch.from_numpy(np.stack([first - second, 2 * second]))
    torch.testing.assert_close(weights[0, :, 0].detach(), expected)


def test_talking_heads_starts_as_softmax(tensors):
    q, k, _, mask = tensors
    talking, softmax = (attention(n, heads=HEADS, head_dim=SIZE).double() for n in ("talking-heads", "softmax"))
    torch.testing.assert_close(talking.weights(q, k, mask)[0], softmax.weights(q, k, mask)[0])


def test_softmax_is_torch_multi_head_attention(tensors):
    q, k, v, mask = tensors
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attention("softmax", heads=HEADS, head_dim=SIZE)(q, k, v, mask)[0], expected)


def test_realformer_is_a_running_sum_and_can_be_a_mean(tensors):
    q, k, _, mask = tensors
    previous = torch.randn(2, HEADS, QUERIES, KEYS, dtype=torch.float64)
    total = previous + q @ k.mT / math.sqrt(SIZE)
    for options, expected in (({}, total), ({"mean": True}, total / 3)):
        mechanism = attention("realformer", heads=HEADS, head_dim=SIZE, layer=2, **options)
        weights, carry = mechanism.weights(q, k, mask, previous)
        torch.testing.assert_close(weights, expected.masked_fill(~mask, -math.inf).softmax(-1))
        torch.testing.assert_close(carry[mask.expand_as(carry)], total[mask.expand_as(carry)])


def test_reductions_to_softmax(tensors):
    q, k, _, mask = tensors
    softmax = attention("softmax", heads=HEADS, head_dim=SIZE).weights(q, k, mask)[0]
    zero_lambda = attention("dagpam", heads=HEADS, head_dim=SIZE, initial=0.0).double()
    first_layer = attention("realformer", heads=HEADS, head_dim=SIZE)
    no_sink = attention("softmax1", heads=HEADS, head_dim=SIZE, n=1e-15)
    for mechanism in (zero_lambda, first_layer, no_sink):
        torch.testing.assert_close(mechanism.weights(q, k, mask)[0].detach(), softmax, msg=str(mechanism))


def test_nap_has_a_finite_gradient_at_zero_variance():
    nap = attention("nap", heads=HEADS, head_dim=SIZE).double()
    q = torch.zeros(1, HEADS, QUERIES, SIZE, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, HEADS, KEYS, SIZE, dtype=torch.float64, requires_grad=True)
    nap(q, k, k)[0].square().sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_nap_finish_is_layer_norm_and_gelu_over_the_concatenated_heads():
    nap = built("nap")
    context = torch.randn(2, HEADS, QUERIES, SIZE, dtype=torch.float64)
    together = context.permute(0, 2, 1, 3).reshape(2, QUERIES, HEADS * SIZE)
    normed = (together - together.mean(-1, keepdim=True)) / (together.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = F.gelu(normed * nap.norm.weight + nap.norm.bias)
    torch.testing.assert_close(nap.finish(context).permute(0, 2, 1, 3).reshape_as(expected), expected)


def test_differential_takes_lambda_init_from_its_layer_and_normalises_each_head():
    mechanism = attention("differential", heads=HEADS, head_dim=SIZE, layer=4).double()
    start = 0.8 - 0.6 * math.exp(-1.2)
    assert mechanism.lambda_init == pytest.approx(start)
    context = torch.randn(2, HEADS, QUERIES, SIZE, dtype=torch.float64)
    expected = (1 - start) * context / (context.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(mechanism.finish(context).detach(), expected)


def test_softmax1_does_not_overflow():
    mechanism = attention("softmax1", heads=1, head_dim=1, scale=1.0)
    for far, expected in ((1e4, 1 / 2), (-1e4, 0.0)):
        q, k = torch.ones(1, 1, 1, 1), torch.full((1, 1, 2, 1), far)
        assert mechanism.weights(q, k)[0].flatten().tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_and_finite(name, dtype, tensors):
    mask = tensors[3].repeat(1, 1, 2, 1)[:, :, :KEYS]
    trial = make_trial(lambda layer: attention(name, heads=HEADS, head_dim=SIZE, layer=layer), keys=KEYS)
    half = make_trial(trial.build, keys=KEYS, dtype=dtype)
    expected, got = trial.output(mask), half.output(mask)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().mean() < 0.02  # the mean: cog jumps where a logit changes its sign


@pytest.mark.parametrize("name", ["nap", "dot"])  # those without 1/√d
def test_logits_above_the_range_of_half_precision_give_no_nan(name):
    mechanism = built(name)
    q, k = (60 * torch.randn(2, 2, HEADS, 7, SIZE).half() + 100).unbind()
    expected = mechanism.weights(q.double(), k.double())[0]
    assert (q.double() @ k.double().mT).max() > 65504
    got = mechanism.half().weights(q, k)[0]
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", MECHANISMS)
def test_dropout_only_in_training_and_right_on_average(name):
    trial = make_trial(lambda layer: attention(name, heads=HEADS, head_dim=SIZE, layer=layer, dropout=0.5), batch=1)
    mechanism, still = trial.mechanism, trial.context()
    torch.testing.assert_close(trial.context(), still, rtol=0, atol=0)
    mechanism.train()
    many = trial.select_examples(torch.zeros(4000, dtype=torch.long)).context()
    assert not torch.equal(many[0], many[1])
    if not mechanism.stochastic:  # noise on the logits moves the mean of a softmax
        off = (many.mean(0) - still[0]) / (many.std(0) / math.sqrt(4000) + 1e-6)
        assert off.abs().max() < 5
