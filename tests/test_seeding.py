"""Mechanisms that were given seeds draw noise and dropout from these, and never from torch's generator."""

import pytest
import torch
from kernel_cases import DEVICE

from attnlab.mechanisms import MECHANISMS, attention, by_rows, sliding_window
from attnlab.mechanisms.mechanism import logits
from attnlab.mechanisms.seeding import DROPOUT, draw_seed
from attnlab.mechanisms.softmax import Softmax, attend

SEEDS = torch.tensor([[3], [5 << 40 | 7]])  # of noise and of dropout
OPTIONS = {"sliding-window": {"size": 2}}  # so that there are chunks


def draw_context(name, impl, causal, seeds=SEEDS):
    """Context in training, from the seeds."""
    torch.manual_seed(11)
    options = OPTIONS.get(name, {})
    mechanism = attention(name, heads=4, head_dim=8, layer=1, impl=impl, dropout=0.3, **options).train()
    mechanism.take_seeds(seeds)
    q, k, v = (torch.randn(2, heads, 13, 8) for heads in (mechanism.query_heads, 4, 4))
    x = torch.randn(2, 13, 32)
    torch.seed()
    before = torch.get_rng_state()
    context = mechanism(q, k, v, causal=causal, sides=(mechanism.query_side(x), mechanism.key_side(x)))[0]
    assert torch.equal(torch.get_rng_state(), before)
    return context


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_nothing_is_drawn_from_torchs_generator(name, impl, causal, monkeypatch):
    monkeypatch.setattr(sliding_window, "CHUNK", 2)
    context = draw_context(name, impl, causal)
    assert torch.equal(context, draw_context(name, impl, causal))
    assert not torch.equal(context, draw_context(name, impl, causal, SEEDS + 1))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_two_maps_of_differential_drop_different_weights(impl, monkeypatch):
    """With v = 1 and equal halves, both maps of a row are the same before dropout."""
    mechanism = attention("differential", heads=2, head_dim=26, dropout=0.3, impl=impl).train()
    mechanism.take_seeds(SEEDS)
    monkeypatch.setattr(type(mechanism), "subtraction", 1.0 + torch.zeros(()))
    half = torch.randn(1, 2, 13, 13)
    q, v = torch.cat([half, half], -1), torch.eye(26)[:13].expand(1, 2, 13, 26)
    difference = mechanism.mix(q, q, v)[0][..., :13]
    p = torch.softmax(logits(half, half, mechanism.scale), -1) / 0.7
    signs = (difference / p).round()
    torch.testing.assert_close(difference, signs * p, atol=1e-6, rtol=1e-5)
    assert set(signs.unique().tolist()) == {-1.0, 0.0, 1.0}  # kept by the second alone, by both or none, by the first


def test_bands_of_the_definition_drop_different_weights_and_the_same_in_both_passes(monkeypatch):
    mechanism = Softmax(4, 13, dropout=0.3).train()
    mechanism.take_seeds(SEEDS)
    monkeypatch.setattr(by_rows, "LOGITS", 4 * 4 * 13)
    q, k = torch.randn(2, 1, 4, 13, 13)
    v = torch.eye(13).expand(1, 4, 13, 13).clone().requires_grad_()
    context = attend(mechanism, q, k, v, None, causal=False, at=None, bias=None, kernel=False)
    kept = context.detach() / torch.softmax(logits(q, k, mechanism.scale), -1)
    assert not torch.equal(kept[:, :, :4] > 0, kept[:, :, 4:8] > 0)
    torch.testing.assert_close(torch.autograd.grad(context.sum(), v)[0], context.detach().sum(2)[..., None] + 0 * v)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uniform", "shaped", "talking-heads"])
def test_the_size_of_bands_does_not_change_what_is_dropped(name, monkeypatch):
    torch.manual_seed(5)
    mechanism = attention(name, heads=4, head_dim=16, dropout=0.3).cuda().train()
    mechanism.take_seeds(SEEDS.cuda())
    q, k, v = torch.randn(3, 2, 4, 53, 16, device="cuda")
    contexts = []
    for rows in (53, 16, 7):
        monkeypatch.setattr(by_rows, "LOGITS", rows * 2 * 4 * 53)
        contexts.append(mechanism(q, k, v, causal=True)[0])
    torch.testing.assert_close(contexts[1:], contexts[:1] * 2, atol=1e-4, rtol=1e-4)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")
@pytest.mark.parametrize(
    ("rows", "width", "number"), [(13, 8, 0), (13, 8, 1), (13, 16, 0), (13, 16, 1), (70, 8, 0), (70, 16, 1)]
)
def test_kernels_drop_what_the_definition_drops(rows, width, number):
    """Short and long rows, and values wider than the queries, as those of differential attention."""
    pytest.importorskip("triton")
    from attnlab.mechanisms.kernels.dropout import fill_kept

    torch.manual_seed(3)
    mechanism = Softmax(2, 8, dropout=0.3, impl="fused").train()
    mechanism.take_seeds(SEEDS.to(DEVICE))
    q, k = torch.randn(2, 3, 2, rows, 8, device=DEVICE)
    v = torch.randn(3, 2, rows, width, device=DEVICE, requires_grad=True)
    options = {"at": None, "bias": None, "kernel": rows < 64 and width == 8, "number": number}
    context = attend(mechanism, q, k, v, None, causal=False, **options)
    seed = draw_seed(mechanism, DROPOUT, q.device, number)
    p = torch.softmax(logits(q, k, mechanism.scale), -1)
    expected = (p * fill_kept(torch.empty_like(p), seed, 0.3)) @ v
    torch.testing.assert_close(context, expected, atol=3e-5, rtol=1e-4)
    grads = (torch.autograd.grad(x, v, torch.ones_like(x))[0] for x in (context, expected))
    torch.testing.assert_close(*grads, atol=3e-5, rtol=1e-4)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["softmax", "dagpam"])
def test_members_are_one_call_only_where_kernels_read_the_seed_of_each(name):
    pytest.importorskip("triton")
    q = torch.randn(4, 2, 5, 8, device=DEVICE)
    for impl, expected in (("fused", True), ("reference", False)):
        mechanism = attention(name, heads=2, head_dim=8, dropout=0.3, impl=impl).train()
        assert mechanism.takes_members(q, q, q, None, None) == expected
