"""The adaptive input and softmax, with torch's as oracle, and the interface of every readout."""

from dataclasses import replace

import pytest
import torch
from small_models import LM
from torch import nn

from attnlab.models.dropout import Dropout
from attnlab.models.embedding import AdaptiveEmbedding, AdaptiveReadout, LinearReadout
from attnlab.models.transformer import build

close = {"rtol": 0.0, "atol": 1e-10}


def adaptive(cutoffs=(5, 11), vocabulary=29, width=32) -> tuple[AdaptiveEmbedding, AdaptiveReadout]:
    embedding = AdaptiveEmbedding(vocabulary, width, cutoffs)
    readout = AdaptiveReadout(embedding)
    for parameter in readout.parameters():
        nn.init.normal_(parameter, std=0.3)
    return embedding.double(), readout.double()


def test_adaptive_readout_equals_torchs():
    _, ours = adaptive()
    theirs = nn.AdaptiveLogSoftmaxWithLoss(32, 29, [5, 11], div_value=4.0).double()
    theirs.head.weight.data = torch.cat([ours.words[0], ours.classes.weight]).detach()
    for band, (inner, words) in enumerate(theirs.tail, start=1):
        inner.weight.data, words.weight.data = ours.projections[band].T.detach(), ours.words[band].detach()
    hidden, targets = torch.randn(3, 7, 32, dtype=torch.float64), torch.arange(21).view(3, 7) + 6
    flat = hidden.flatten(0, 1)
    torch.testing.assert_close(ours.log_prob(hidden).flatten(0, 1), theirs.log_prob(flat), **close)
    torch.testing.assert_close(ours.nll(hidden, targets).flatten(), -theirs(flat, targets.flatten()).output, **close)


@pytest.mark.parametrize("cutoffs", [(5,), (5, 11)])
def test_adaptive_probabilities(cutoffs):
    _, readout = adaptive(cutoffs)
    hidden, targets = torch.randn(2, 7, 32, dtype=torch.float64), torch.randint(29, (2, 7))
    log_prob = readout.log_prob(hidden)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(2, 7, dtype=torch.float64), **close)
    torch.testing.assert_close(readout(hidden).log_softmax(-1), log_prob, **close)
    torch.testing.assert_close(readout.nll(hidden, targets), -log_prob.gather(-1, targets[..., None])[..., 0], **close)
    torch.testing.assert_close(readout.nll(hidden, targets % 5), -log_prob.gather(-1, targets[..., None] % 5)[..., 0])


def test_each_dropout_of_an_adaptive_readout_is_of_one_tensor():
    """On a GPU a module has one seed in a batch, and two tensors would lose the same entries."""
    readout = AdaptiveReadout(AdaptiveEmbedding(29, 32, (5, 11)), dropout=0.3).train()
    calls = []
    for module in readout.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(id(module)))
    for method, given in ((readout.log_prob, ()), (readout.nll, (torch.tensor([[1, 7, 12]]),))):
        calls.clear()
        method(torch.randn(1, 3, 32), *given)
        assert len(calls) == len(set(calls)) == 3
    assert not [name for name in readout.state_dict() if "dropout" in name]


def test_adaptive_embedding_by_hand():
    embedding, _ = adaptive()
    expected = [
        embedding.projections[band] @ embedding.words[band][place]
        for band, place in ((0, 4), (1, 0), (1, 5), (2, 0), (2, 17))
    ]
    torch.testing.assert_close(embedding(torch.tensor([[4, 5, 10, 11, 28]]))[0], torch.stack(expected), **close)
    for outside in (-1, 29):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[outside]]))


def test_adaptive_language_model_shares_everything_but_the_classes():
    config = replace(LM, vocabulary=29, width=48, adaptive_cutoffs=(5, 11), adaptive_dropout=0.0)
    model = build(config).double()
    alone = {name for name, _ in model.readout.named_parameters()} - {"classes.weight"}
    shared = {id(p) for p in model.decoder.embedding.words.parameters()}
    assert alone
    assert {id(p) for name, p in model.readout.named_parameters() if name in alone} == shared
    words = model.decoder.embedding.words
    assert not words(torch.tensor([[0]])).any()
    targets = torch.arange(1, 29).view(2, 14)
    model.readout.nll(model.hidden(targets.flip(1)), targets).sum().backward()
    assert all(p.grad.any(-1).all() for p in (*words.words[1:], *words.projections))
    torch.testing.assert_close(model(targets).exp().sum(-1), torch.ones(2, 14, dtype=torch.float64))


def test_linear_readout_has_the_same_interface():
    readout = LinearReadout(nn.Parameter(torch.randn(23, 12)), nn.Parameter(torch.randn(23)))
    hidden, targets = torch.randn(2, 7, 12), torch.randint(23, (2, 7))
    log_prob = readout(hidden).log_softmax(-1)
    torch.testing.assert_close(readout.log_prob(hidden), log_prob)
    torch.testing.assert_close(readout.nll(hidden, targets), -log_prob.gather(-1, targets[..., None])[..., 0])
    half = LinearReadout(readout.weight.data.bfloat16())
    assert half.log_prob(hidden.bfloat16()).dtype == half.nll(hidden.bfloat16(), targets).dtype == torch.float32
