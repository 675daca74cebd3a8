"""The bag-of-words proxy: its loss and gradients are those of the equations, and it finds a dictionary."""

import math

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from attnlab.counting.proxy import Proxy, polarity, proxy_loss, train_proxy

SOURCE = torch.tensor([[4, 2, 4, 0, 0], [3, 1, 2, 5, 6], [6, 0, 0, 0, 0]])
TARGET = torch.tensor([[2, 3, 0], [1, 4, 2], [4, 0, 0]])


def slow_loss(e, w, source, target, bias=None):
    """Eq. 14 by loops over words that are not padding."""
    total = torch.zeros((), dtype=e.dtype)
    for x, y in zip(source.tolist(), target.tolist(), strict=True):
        words = [i for i in x if i]
        logits = torch.stack([w @ e[i] for i in words]).sum(0) / len(words)
        p = (logits if bias is None else logits + bias).exp()
        total = total - sum(torch.log(p[o] / p.sum()) for o in y if o)
    return total


def test_the_loss_and_its_gradients_are_equation_14():
    model = Proxy(7, 5, width=3).double()
    proxy_loss(model, SOURCE, TARGET).backward()
    e, w = (x.detach().clone().requires_grad_() for x in (model.embedding, model.weight))
    expected = slow_loss(e, w, SOURCE, TARGET)
    expected.backward()
    torch.testing.assert_close(proxy_loss(model, SOURCE, TARGET), expected)
    torch.testing.assert_close(model.embedding.grad, e.grad)
    torch.testing.assert_close(model.weight.grad, w.grad)


def test_the_authors_form_predicts_begin_and_padding_too():
    model = Proxy(7, 5, width=3, authors=True).double()
    log_p = model(SOURCE).log_softmax(-1)
    extra = -log_p[:, 1].sum() - sum(log_p[row, 0] * int((TARGET[row] == 0).sum()) for row in range(3))
    expected = slow_loss(model.embedding, model.weight, SOURCE, TARGET, model.bias) + extra
    torch.testing.assert_close(proxy_loss(model, SOURCE, TARGET, authors=True), expected)
    assert Proxy(7, 5).bias is None


def test_padding_has_no_influence():
    model = Proxy(7, 5, width=3)
    short = proxy_loss(model, SOURCE[[0]][:, :3], TARGET[[0]][:, :2])
    torch.testing.assert_close(proxy_loss(model, SOURCE[[0]], TARGET[[0]]), short)


def test_theta_and_beta_are_equations_13_and_6():
    model = Proxy(7, 5, width=3, authors=True)
    theta = model.theta()
    torch.testing.assert_close(theta.sum(-1), torch.ones(7))
    assert theta[4, 2].item() == pytest.approx(((model.weight @ model.embedding[4]).softmax(0)[2]).item())
    beta = model.beta(SOURCE, TARGET)
    assert beta.shape == (3, 3, 5)
    for b, t, place in np.ndindex(3, 3, 5):
        x, y = SOURCE[b, place], TARGET[b, t]
        assert beta[b, t, place].sigmoid().item() == pytest.approx(theta[x, y].item() if x and y else 0.0)


def test_the_probe_of_a_classifier_is_equation_9():
    model = Proxy(7, 1, width=3)
    labels = torch.tensor([1, 0, 1])
    beta = model.beta(SOURCE, labels)
    for b, place in np.ndindex(3, 5):
        gamma = (model.weight[0] @ model.embedding[SOURCE[b, place]]).item()
        expected = 1 / (1 + math.exp(-gamma if labels[b] else gamma)) if SOURCE[b, place] else 0.0
        assert beta[b, place].sigmoid().item() == pytest.approx(expected, rel=1e-5)
    p = model(SOURCE)[:, 0].sigmoid()
    own = torch.where(labels == 1, p, 1 - p)
    torch.testing.assert_close(proxy_loss(model, SOURCE, labels), -own.log().sum())


def test_probes_are_ordered_where_the_probability_rounds_to_one():
    """Words with logits 40 to 120, as on IMDB: σ and softmax are exactly 1 in float32, and every word would tie."""
    source, strong = torch.tensor([[1, 2, 3]]), torch.tensor([[0.0], [40.0], [120.0], [80.0]])
    binary, many = Proxy(4, 1, width=1), Proxy(4, 2, width=1)
    for model, weight in ((binary, [[1.0]]), (many, [[0.0], [1.0]])):
        model.embedding.data, model.weight.data = strong, torch.tensor(weight)
    assert binary.beta(source, torch.tensor([1])).argsort().tolist() == [[0, 2, 1]]
    assert binary.beta(source, torch.tensor([0])).argsort().tolist() == [[1, 2, 0]]
    torch.testing.assert_close(many.beta(source, torch.tensor([[1]])), torch.tensor([[[40.0, 120, 80]]]).double())


def dictionary(number=400, types=11):
    """Word i becomes word i + 2, in any order: 3 to 5 words of 11, ids from 2; target ids from 4."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randperm(types, generator=draw)[: 3 + k % 3] + 2 for k in range(number)]
    return pad_sequence(rows, batch_first=True), pad_sequence([row + 2 for row in rows], batch_first=True)


@pytest.mark.parametrize("authors", [False, True])
def test_the_dictionary_of_a_toy_corpus_is_found(authors):
    source, target = dictionary()
    model = train_proxy(
        source, target, source_types=13, outputs=15, width=17, epochs=20, lr=0.02, batch=32, authors=authors
    )
    assert (model.theta()[2:, 2:].argmax(1) + 2 == torch.arange(4, 15)).all()


def test_words_that_are_always_together_cannot_be_told_apart():
    """Permutations of one set (§3.3): θ stays even, whatever is trained."""
    draw = torch.Generator().manual_seed(5)
    source = torch.stack([torch.randperm(7, generator=draw) + 1 for _ in range(100)])
    model = train_proxy(source, source, source_types=8, outputs=8, width=5, epochs=40, lr=0.02)
    before = train_proxy(source, source, source_types=8, outputs=8, width=5, epochs=0)
    own, others = (model.theta() - before.theta())[1:, 1:].diagonal().mean(), (model.theta() - before.theta())[1:, 1:]
    assert abs(own - others.mean()) < 0.05


def test_training_is_a_pure_function_of_the_seed():
    source, target = dictionary(50)
    sizes = {"source_types": 13, "outputs": 15, "width": 5, "epochs": 2}
    state = torch.random.get_rng_state()
    first, again, other = (train_proxy(source, target, **sizes, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.embedding, other.embedding)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_epoch_that_validates_best_is_kept():
    source, target = dictionary(60)
    turned = target.flip(0)  # what is learnt makes this worse
    sizes = {"source_types": 13, "outputs": 15, "width": 5, "lr": 0.05}
    kept = train_proxy(source, target, **sizes, epochs=12, valid=(source, turned))
    models = [train_proxy(source, target, **sizes, epochs=n) for n in range(1, 13)]
    losses = [proxy_loss(model, source, turned).item() for model in models]
    assert min(losses) < losses[-1]
    assert proxy_loss(kept, source, turned).item() == pytest.approx(min(losses))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Proxy(0, 5), "source_types"),
        (lambda: Proxy(7, 5)(torch.tensor([[1], [0]])), "source 1.*empty"),
        (lambda: polarity(torch.zeros(1, 3), torch.tensor([2])), "labels"),
        (lambda: train_proxy(SOURCE, TARGET, source_types=7, outputs=1), "labels"),
        (lambda: train_proxy(SOURCE, TARGET, source_types=6, outputs=5), "source ids"),
        (lambda: train_proxy(SOURCE * 0, TARGET, source_types=6, outputs=5), "source 0 is empty"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
