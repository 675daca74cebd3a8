"""What needs the model: the loss without each head, and the noise that makes heads differ by itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from materialised import vectors
from representatives import every_kind
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from tiny_models import gpt2, padded_batch
from turnings import TURNINGS, made_turning

import attnlab
from attnlab.analysis.diversity import diversity, heads, jsd
from attnlab.models.attention import MultiHead
from attnlab.models.lstm import LSTMTranslator
from attnlab.models.presets import SETTINGS, build
from attnlab.recording.ablation import record_ablation
from attnlab.recording.noise_null import add_noise, make_noisy_model
from attnlab.records.record import Record
from attnlab.training.scoring import score_batches

SOURCE, TARGET = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 0, 0, 0]]), torch.tensor([[1, 4, 9, 0], [1, 6, 7, 2]])
NEXT = torch.tensor([[4, 9, 2, 0], [6, 7, 2, 5]])


def without_head(attention, head):
    """What the output projection has of one head, set to 0: the same as the head's contribution."""
    size = attention.mechanism.head_dim
    attention.output.weight.data[:, head * size : (head + 1) * size] = 0.0


@every_kind
def test_ablation_is_a_projection_without_the_head(name):
    model = made(TRANSLATOR, name)
    record = record_ablation(model, (SOURCE, TARGET), NEXT)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    whole = score_batches(model, [((SOURCE, TARGET), NEXT)])
    for layer in record.layers:
        np.testing.assert_allclose(layer.extras["nll"].sum(), whole.nll_sum)
        assert layer.extras["scored"].tolist() == [3, 4]
        for head in range(3):
            without_head(model.get_submodule(layer.name), head)
            found = score_batches(model, [((SOURCE, TARGET), NEXT)])
            np.testing.assert_allclose(layer.extras["ablated_nll"][:, head].sum(), found.nll_sum, rtol=1e-9)
            model.load_state_dict(state)


def test_the_table_has_what_a_target_costs_more():
    model = made(LM)
    record = record_ablation(model, TARGET, NEXT)
    layer = record.layers[1]
    want = (layer.extras["ablated_nll"].sum(0) - layer.extras["nll"].sum()) / 7
    table = heads(record)
    np.testing.assert_allclose(table[table["layer"] == 1]["ablation_nats"], want)
    assert "ablation_nats" not in heads(attnlab.record(model, TARGET))


def test_ablation_of_a_classifier_and_of_an_lstm(tmp_path):
    record = record_ablation(made(CLASSIFIER), SOURCE, torch.tensor([1, 4]))
    assert record.layers[0].extras["ablated_nll"].shape == (2, 3)
    config = replace(SETTINGS["translation"], vocabulary=23, width=6, embedding_width=7, heads=3)
    model = build(config).double().eval()
    assert isinstance(model, LSTMTranslator)
    record = record_ablation(model, (SOURCE, TARGET), NEXT)
    record.save(tmp_path / "ablated.safetensors")
    kept = Record.load(tmp_path / "ablated.safetensors")
    assert torch.equal(kept.layers[0].extras["ablated_nll"], record.layers[0].extras["ablated_nll"])
    assert kept[0].layers[0].extras["ablated_nll"].shape == (1, 3)


def test_what_ablation_refuses():
    model = made(LM)
    with pytest.raises(ValueError, match="targets"):
        record_ablation(model, TARGET, NEXT[:, :2])
    with pytest.raises(ValueError, match="in training mode"):
        record_ablation(model.train(), TARGET, NEXT)


# --- noise ---


def test_noise_on_a_record_is_what_coda_cs_draws_where_layers_do_not_feel_one_another():
    model = made(TRANSLATOR, "coda-cs")
    mean, sampled = (attnlab.record(model, (SOURCE, TARGET), noise=seed) for seed in (None, 5))
    later, felt = (add_noise(mean, 5).layers[1], sampled.layers[1])
    assert not torch.allclose(later.weights, felt.weights)
    for module in model.modules():
        if isinstance(module, MultiHead):
            module.output.weight.data.zero_()
    mean, sampled = (attnlab.record(model, (SOURCE, TARGET), noise=seed) for seed in (None, 5))
    null = add_noise(mean, 5)
    assert null.meta["noise"] == 5
    for ours, theirs, before in zip(null.layers, sampled.layers, mean.layers, strict=True):
        for name in ("weights", "context", "mixed", "outputs"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        assert not torch.allclose(ours.weights, before.weights)
        assert bool((ours.weights.masked_select(~ours.mask.expand_as(ours.weights)) == 0).all())


def test_a_softmax_model_with_noise_is_coda_cs_and_stays_as_it_was():
    model, other = made(TRANSLATOR), made(TRANSLATOR, "coda-cs")
    other.load_state_dict(model.state_dict())
    noisy = make_noisy_model(model)
    for seed in (None, 5):
        ours, theirs = (attnlab.record(each, (SOURCE, TARGET), noise=seed) for each in (noisy, other))
        for mine, its in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(mine.weights, its.weights)
    assert noisy.encoder.blocks[0].attention.query.weight is model.encoder.blocks[0].attention.query.weight
    with pytest.raises(ValueError, match="stochastic"):
        attnlab.record(model, (SOURCE, TARGET), noise=5)
    with pytest.raises(ValueError, match="RealFormer"):
        make_noisy_model(made(LM, "realformer"))


def test_noise_alone_makes_equal_heads_differ():
    """Two equal heads, uniform over 29 keys: by how much, from numpy's own normals."""
    model = made(LM)
    for block in model.decoder.blocks:
        for part in (block.attention.query, block.attention.key):
            part.weight.data.zero_()
            part.bias.data.zero_()
    record = attnlab.record(model, torch.randint(1, 23, (40, 29)))
    assert diversity(record)["jsd"].max() == 0.0
    found = diversity(add_noise(record, 3))
    random, rows = np.random.default_rng(0), []
    for keys in range(1, 30):
        p = torch.from_numpy(random.standard_normal((4000, 2, 1, keys))).softmax(-1)
        rows.append(float(jsd(p)[0, 1]))
    np.testing.assert_allclose(found["jsd"], sum(rows), rtol=0.03)
    assert found["jsd"].min() > 3.0


@pytest.mark.parametrize("which", TURNINGS)
def test_noise_keeps_the_turning(which):
    for layer in add_noise(attnlab.record(made_turning(which), TARGET), 5).layers:
        torch.testing.assert_close(layer.mixed, layer.turned_context)
        torch.testing.assert_close(layer.outputs, vectors(layer).sum((1, 3)) + layer.output_bias)


@pytest.mark.parametrize("name", ["dagpam", "sigmoid", "nap", "softmax1"])
def test_weights_without_logits_are_refused(name):
    with pytest.raises(ValueError, match=r"decoder\.blocks\.0\.attention is no softmax"):
        add_noise(attnlab.record(made(LM, name), TARGET), 5)


def test_noise_on_a_hugging_face_record_and_what_is_no_seed():
    model = gpt2()
    batch = padded_batch(model)
    lazy, eager = (add_noise(attnlab.record(model, batch, lazy=flag), 7) for flag in (True, False))
    for mine, its in zip(lazy.layers, eager.layers, strict=True):
        torch.testing.assert_close(mine.weights, its.weights, atol=1e-5, rtol=1e-4)
    assert math.isfinite(diversity(lazy)["jsd"].mean())
    for seed in (-1, 1.5, 2**32):
        with pytest.raises(ValueError, match="seed"):
            add_noise(eager, seed)
    with pytest.raises(TypeError, match="Record"):
        add_noise(model, 7)
