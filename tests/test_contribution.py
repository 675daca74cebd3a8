"""Norms of contributions equal the materialised ones, whatever the model, and never make what those make."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from largest_tensor import LargestTensor
from materialised import turned, vectors
from representatives import REPRESENTATIVES, every_kind
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from turnings import TURNINGS, made_turning

import attnlab
from attnlab.analysis import contribution
from attnlab.analysis.contribution import norms
from attnlab.huggingface import pretrained
from attnlab.mechanisms import MECHANISMS, Mechanism
from attnlab.records.record import Layer, Record

exact = {"rtol": 0.0, "atol": 1e-10}


def padded(batch: int = 3, length: int = 7) -> torch.Tensor:
    tokens = torch.randint(1, 19, (batch, length))
    tokens[1, 4:] = 0
    return tokens


def recorded(config, name: str = "softmax", **changes) -> Record:
    batch = (padded(), padded(length=5)) if config.model == "translator" else padded()
    return attnlab.record(made(config, name, **changes), batch)


def check(layer: Layer) -> None:
    every = vectors(layer)  # (b,h,i,j,e)
    found = norms(layer)
    f = layer.values.double() @ layer.output_weight.double()
    torch.testing.assert_close(found.vector, f.norm(dim=-1), **exact)
    torch.testing.assert_close(found.head, every.norm(dim=-1), **exact)
    torch.testing.assert_close(found.layer, every.sum(1).norm(dim=-1), **exact)
    torch.testing.assert_close(found.weight, layer.weights.double().mean(1), **exact)
    v = layer.values.double()[:, :, None].expand(-1, -1, layer.context.shape[2], -1, -1)
    alone = layer.weights.abs() * turned(layer, v).norm(dim=-1)
    torch.testing.assert_close(found.value, alone, **exact)


SUMMING = [name for name in REPRESENTATIVES if MECHANISMS[name].finish is Mechanism.finish]


@pytest.mark.parametrize("name", SUMMING)
@pytest.mark.parametrize("config", [LM, TRANSLATOR, CLASSIFIER], ids=lambda config: config.model)
def test_norms_are_those_of_the_vectors(name, config):
    for layer in recorded(config, name).layers:
        check(layer)


@pytest.mark.parametrize("which", TURNINGS)
@pytest.mark.parametrize("config", [LM, TRANSLATOR], ids=lambda config: config.model)
def test_a_turning_is_part_of_every_contribution(which, config, monkeypatch):
    monkeypatch.setattr(contribution, "TURNED", 3 * 3 * 7 * 4 * 2)  # two queries at a time
    batch = (padded(), padded(length=5)) if config.model == "translator" else padded()
    for layer in attnlab.record(made_turning(which, config), batch).layers:
        assert layer.turning.shape[3:] == {"head": (1,), "element": (4,), "matrix": (4, 4)}[which]
        check(layer)
        summed = vectors(layer).sum((1, 3)) + layer.output_bias
        torch.testing.assert_close(summed, layer.outputs, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", ["gated", "xsa", "resformer"])
def test_an_adapted_hugging_face_model(name):
    model = attnlab.adapt(tiny_models.llama(), name).double()
    for layer in pretrained.record(model, tiny_models.padded_batch(model)).layers:
        check(layer)
        torch.testing.assert_close(vectors(layer).sum((1, 3)), layer.outputs, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("which", TURNINGS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_ranges_of_queries_keep_their_turning(which, size):
    found = norms(attnlab.record(made_turning(which), padded()).layers[1])
    parts = [part for _, part in found.chunks(size)]
    for name, axis in (("head", 2), ("layer", 1), ("value", 2)):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts], axis), getattr(found, name), **exact)


def test_a_value_that_the_turning_removes_gives_nothing():
    """The square of a small norm loses half of its digits; this one must not."""
    layer = attnlab.record(made_turning("matrix"), padded()).layers[0]
    line = torch.linalg.eigh(layer.turning)[1][..., 0]  # (b,h,i,d) the direction that A removes
    sizes = norms(replace(layer, grouped_values=line)).head.diagonal(dim1=2, dim2=3)
    assert float(sizes.max()) < 1e-14


def test_grouped_heads():
    for layer in recorded(TRANSLATOR, key_value_heads=1).layers:
        assert layer.grouped_values.shape[1] == 1
        check(layer)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian", "t5"])
def test_hugging_face_models(name, lazy, monkeypatch):
    monkeypatch.setattr(contribution, "ROWS", 3)
    monkeypatch.setattr(contribution, "KEYS", 5)
    model = getattr(tiny_models, name)().double()
    for layer in pretrained.record(model, tiny_models.padded_batch(model), lazy=lazy).layers:
        assert layer.lazy == lazy
        check(layer)


def test_bert_by_its_own_modules():
    """W_V, b_V and W_O by name; head h has the columns h·d … of the weight of nn.Linear. b_O belongs to no token."""
    model = tiny_models.bert().double()
    layer = pretrained.record(model, tiny_models.padded_batch(model)).layers[1]
    attention = model.encoder.layer[1].attention
    v, dense = attention.self.value(layer.inputs), attention.output.dense
    f = torch.stack([v[..., n : n + 5] @ dense.weight[:, n : n + 5].T for n in (0, 5, 10)], dim=1)  # (b,h,j,e)
    torch.testing.assert_close(norms(layer).vector, f.norm(dim=-1).detach(), **exact)
    summed = torch.einsum("bhij,bhje->bie", layer.weights, f) + dense.bias
    torch.testing.assert_close(summed.detach(), layer.outputs, **exact)


def test_by_hand():
    """Two heads, two keys: f_1 = (3,4) and (0,0), f_2 = (0,8) and (5,12); α_1 = (½, ½), α_2 = (−¼, 1)."""
    values = torch.tensor([[[[1.0], [0.0]], [[0.0], [1.0]]]])  # (1,2,2,1), W picks the row below
    projection = torch.tensor([[[3.0, 4.0]], [[5.0, 12.0]]])
    weights = torch.tensor([[[[0.5, 0.5]], [[-0.25, 1.0]]]])  # (1,2,1,2)
    context = weights @ values
    layer = Layer(
        "cross", 0, "hand", weights, values, context, context, projection, None,
        torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.ones(1, 1, 1, 2, dtype=torch.bool),
    )  # fmt: skip
    found = norms(layer)
    assert found.vector.tolist() == [[[5.0, 0.0], [0.0, 13.0]]]
    assert found.head.tolist() == [[[[2.5, 0.0]], [[0.0, 13.0]]]]
    assert found.layer.tolist() == [[[2.5, 13.0]]]
    both = replace(layer, grouped_values=torch.ones(1, 1, 2, 1))  # f_1 = (3,4), f_2 = (5,12) at both keys
    torch.testing.assert_close(norms(both).layer, torch.tensor([[[(0.25**2 + 1) ** 0.5, (6.5**2 + 14**2) ** 0.5]]]))


def test_signed_weights_can_cancel_between_heads():
    layer = recorded(LM, "dagpam").layers[0]
    assert (layer.weights < 0).any()
    found = norms(layer)
    assert (found.head >= 0).all()
    assert (found.layer <= found.head.sum(1) + 1e-12).all()
    negated = norms(replace(layer, attended=-layer.weights))
    torch.testing.assert_close(negated.layer, found.layer, **exact)
    torch.testing.assert_close(negated.head, found.head, **exact)


def test_hidden_keys_give_nothing():
    for layer in recorded(TRANSLATOR).layers:
        hidden = ~layer.mask.expand(*layer.weights[:, :1].shape)
        assert hidden.any()
        assert not norms(layer).layer[hidden[:, 0]].any()
        assert not norms(layer).head.masked_select(hidden).any()


@pytest.mark.parametrize("size", [1, 2, 5, 11, 100])
def test_ranges_of_queries_are_the_whole(size, monkeypatch):
    monkeypatch.setattr(contribution, "ROWS", 4)
    model = tiny_models.llama().double()
    layer = pretrained.record(model, tiny_models.padded_batch(model), lazy=True).layers[0]
    found, places, parts = norms(layer), [], []
    for rows, part in found.chunks(size):
        places += list(range(rows.start, rows.stop))
        assert part.head.shape[2] == part.layer.shape[1] == rows.stop - rows.start <= size
        parts.append(part)
    assert places == list(range(11))
    for name, axis in (("head", 2), ("layer", 1), ("weight", 1), ("value", 2), ("weights", 2)):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts], axis), getattr(found, name), **exact)
    assert all(torch.equal(part.vector, found.vector) for part in parts)


def test_nothing_is_made_that_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(contribution, "ROWS", 3)
    model = tiny_models.llama()
    layer = pretrained.record(model, {"input_ids": torch.arange(3, 50)[None]}, lazy=True).layers[1]
    (_, h, n, _), e = layer.context.shape, 18
    with LargestTensor() as largest:
        _ = norms(layer).vector
    assert largest.numbers <= h * n * 10  # the values
    with LargestTensor() as largest:
        _ = norms(layer).layer
    assert largest.numbers <= max(n * h * e, n * n, 3 * h * n, h * 10 * e) < h * n * n


def test_half_precision_is_measured_in_float32():
    layer = recorded(LM).layers[1]
    exactly = norms(layer)
    half = norms(layer.map(lambda _, x: x.bfloat16() if x.is_floating_point() else x))
    assert half.head.dtype == half.layer.dtype == half.weight.dtype == torch.float32
    torch.testing.assert_close(half.layer.double(), exactly.layer, rtol=0.03, atol=0.01)


@every_kind
def test_a_changed_context_is_refused(name):
    layer = recorded(LM, name).layers[0]
    if name in SUMMING:
        norms(layer)
    else:
        with pytest.raises(ValueError, match=r"decoder\.blocks\.0\.attention: .* finish"):
            norms(layer)


def test_chunks_must_hold_something():
    with pytest.raises(ValueError, match="got 0"):
        list(norms(recorded(LM).layers[0]).chunks(0))


def test_a_real_model():
    import tiny_models

    record = attnlab.record(tiny_models.minilm(), "The cat sat on the mat, and nobody saw it.")
    for layer in record.layers:
        found, every = norms(layer), vectors(layer)
        torch.testing.assert_close(found.head.double(), every.norm(dim=-1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.layer.double(), every.sum(1).norm(dim=-1), rtol=1e-4, atol=1e-6)
