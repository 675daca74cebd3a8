"""The authors' GRU form of Figure 6 against torch's own GRU and a loop over heads."""

import torch
from torch import nn

from attnlab.experiments.population import Population
from attnlab.studies.snell2021.copying import attend
from attnlab.studies.snell2021.gru import GRU, GRUTranslator
from attnlab.studies.snell2021.heads import GRUCombination, make_head

WORDS, WIDTH = 11, 7


def make_oracle(layer):
    """Return nn.GRU with the weights of a layer."""
    oracle = nn.GRU(WIDTH, WIDTH, batch_first=True).double()
    pairs = {"ih": layer.inputs, "hh": layer.recurrent}
    oracle.load_state_dict(
        {f"{kind}_{name}_l0": getattr(linear, kind) for name, linear in pairs.items() for kind in ("weight", "bias")}
    )
    return oracle


def test_the_layer_is_that_of_torch_in_values_and_gradients():
    torch.manual_seed(0)
    layer, tokens = GRU(WORDS, WIDTH).double(), torch.randint(WORDS, (3, 5))
    start = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    oracle = make_oracle(layer)
    for given in (None, start):
        states, last = layer(tokens, start=given)
        wanted, wanted_last = oracle(layer.words(tokens), None if given is None else given[None])
        torch.testing.assert_close(states, wanted)
        torch.testing.assert_close(last, wanted_last[0])
    own = [layer.words.weight, start, *layer.inputs.parameters(), *layer.recurrent.parameters()]
    names = ("weight_ih_l0", "bias_ih_l0", "weight_hh_l0", "bias_hh_l0")
    theirs = [layer.words.weight, start, *(getattr(oracle, name) for name in names)]
    pairs = zip(
        torch.autograd.grad(states.sin().sum() + last.cos().sum(), own),
        torch.autograd.grad(wanted.sin().sum() + wanted_last.cos().sum(), theirs),
        strict=True,
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


def test_heads_project_values_and_are_averaged():
    """A loop over heads, examples and targets; logits and weights."""
    torch.manual_seed(1)
    heads = 3
    model = GRUTranslator(WORDS, WIDTH, heads=heads).double()
    source, given = torch.randint(WORDS, (2, 5)), torch.randint(WORDS, (2, 4))
    encoded, last = make_oracle(model.encoder)(model.encoder.words(source))
    states, _ = make_oracle(model.decoder)(model.decoder.words(given), last)
    queries, outputs = model.attention.query, model.attention.outputs
    logits, weights = attend(model, source, given)
    torch.testing.assert_close(model(source, given), logits)
    for b in range(2):
        for t in range(4):
            contexts = []
            for k in range(heads):
                rows = slice(k * WIDTH, (k + 1) * WIDTH)
                query = queries.weight[rows] @ states[b, t] + queries.bias[rows]
                alpha = torch.softmax(encoded[b] @ query, dim=0)
                values = torch.stack([outputs[k].weight @ h + outputs[k].bias for h in encoded[b]])
                contexts.append(alpha @ values)
                torch.testing.assert_close(weights[b, k, t], alpha)
            context = torch.stack(contexts).mean(0)
            inner, out = model.combine.inner, model.readout
            hidden = torch.tanh(inner.weight @ torch.cat([states[b, t], context]) + inner.bias)
            torch.testing.assert_close(logits[b, t], out.weight @ hidden + out.bias)


def test_it_has_the_authors_number_of_parameters():
    """Two embeddings 42×256, two GRUs, N, the readout, and two maps 256×256 with bias for each head."""
    embeddings, gru, square = 2 * 42 * 256, 2 * (3 * 256 * 256 + 3 * 256), 256 * 256 + 256
    wanted = embeddings + 2 * gru + (512 * 256 + 256) + (256 * 42 + 42) + 8 * 2 * square
    assert sum(x.numel() for x in GRUTranslator(42, 256, heads=8).parameters()) == wanted


CASE = GRUCombination(
    length=3, types=5, width=8, steps=2, every=1, backbone=1, combinations=((2,), (0, 2), (2, 4)), streams=(0, 1, 2)
)


def test_a_combination_has_one_backbone_and_its_own_heads():
    alone, *together = (CASE.model(seed) for seed in range(3))
    shared = {name: x for name, x in alone.named_parameters() if not name.startswith("attention.")}
    assert len(shared) > 10
    for model in together:
        for name, x in shared.items():
            assert torch.equal(x, model.get_parameter(name)), name
    head = make_head(2, 8)
    for model, place in zip((alone, *together), (0, 1, 0), strict=True):
        assert torch.equal(model.attention.query.weight[8 * place : 8 * place + 8], head.query.weight)
        assert torch.equal(model.attention.query.bias[8 * place : 8 * place + 8], head.query.bias)
        assert torch.equal(model.attention.outputs[place].weight, head.value.weight)
        assert torch.equal(model.attention.outputs[place].bias, head.value.bias)
    assert not torch.equal(head.query.weight, head.value.weight)


def test_a_population_computes_what_each_model_computes_alone():
    models = [CASE.model(seed).double() for seed in (1, 2)]
    population = Population(models, torch.device("cpu"))
    source, given, targets = CASE.draw((1, 2), 0, 6, torch.device("cpu"))
    losses = population.losses((source, given), targets)
    gradients = dict(
        zip(population.weights, torch.autograd.grad(losses.sum(), list(population.weights.values())), strict=True)
    )
    for k, model in enumerate(models):
        loss = nn.functional.cross_entropy(model(source[k], given[k]).flatten(0, 1), targets[k].flatten())
        torch.testing.assert_close(losses[k].double(), loss, rtol=1e-5, atol=1e-6)
        loss.backward()
        for name, x in model.named_parameters():
            torch.testing.assert_close(gradients[name][k], x.grad, rtol=1e-4, atol=1e-6)
