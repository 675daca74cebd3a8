"""Probes: β and γ by brute force with the context replaced, Δ by finite differences, and what equation 12 says."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import LM, TRANSLATOR
from small_models import made as transformer
from torch.func import functional_call
from turnings import TURNINGS, made_turning

from attnlab.models.lstm import build
from attnlab.models.lstm_config import SETTINGS, TRANSLATION
from attnlab.models.transformer_config import TransformerConfig
from attnlab.recording.probe import beta, gamma, record_probes, saliency
from attnlab.recording.watch import record
from attnlab.records.record import Record

SMALL = replace(TRANSLATION, vocabulary=19, width=6, embedding_width=7, dropout=0.5)
CLASSIFIER = replace(SETTINGS["classification"], vocabulary=19, width=6, embedding_width=7)
close = {"rtol": 0.0, "atol": 1e-10}


def made(config=SMALL, **changes):
    return build(replace(config, **changes)).double().eval()


def batch():
    """A source in which no word is twice, none of them in the target; some padding in each."""
    source = torch.stack([torch.randperm(9)[:7] + 10 for _ in range(3)])
    target, targets = torch.randint(1, 10, (2, 3, 5))
    source[1, 4:], target[2, 3:], targets[2, 3:] = 0, 0, 0
    return (source, target), targets


def replaced(model, inputs, attention, place):
    """Logits (b,i,vocabulary) of the whole model, the mechanism's context being its value at one place."""

    def swap(mechanism, args, named, output):
        values = mechanism.values(args[2], args[4])[0]
        v = values.repeat_interleave(mechanism.heads // values.shape[1], dim=1)
        context = v[:, :, place : place + 1].expand(-1, -1, args[0].shape[2], -1)
        return mechanism.finish(mechanism.turn(context, values, named["at"], named.get("sides"))), None

    with attention.mechanism.register_forward_hook(swap, with_kwargs=True), torch.no_grad():
        logits = model(*inputs)
    return logits


MODELS = {
    "lstm": lambda: made(),
    "lstm, one direction, tanh": lambda: made(bidirectional=False, activation="tanh", layers=1),
    "lstm, uniform": lambda: made(attention="uniform"),
    "lstm, three heads": lambda: made(heads=3),
    "lstm, three heads averaged": lambda: made(heads=3, join="mean"),
    "lstm, additive": lambda: made(combine="add"),
    "lstm, differential": lambda: made(attention="differential"),
    "transformer": lambda: transformer(TRANSLATOR),
    "transformer, post-norm": lambda: transformer(TRANSLATOR, norm="post", final_norm=False),
    "transformer, grouped differential": lambda: transformer(TRANSLATOR, "differential", key_value_heads=1),
    "transformer, resformer": lambda: transformer(TRANSLATOR, "resformer"),
    "transformer, grouped gated": lambda: transformer(TRANSLATOR, "gated", key_value_heads=1),
} | {f"transformer, turning by {which}": partial(made_turning, which, TRANSLATOR) for which in TURNINGS}


def cross(model):
    return model.attention if hasattr(model, "attention") else model.decoder.blocks[-1].cross


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 20, 4096])
def test_beta_is_brute_force(name, rows):
    model, (inputs, targets) = MODELS[name](), batch()
    found = beta(model, inputs, targets, rows=rows)
    assert found.shape == (3, 5, 7)
    live = (targets != 0)[..., None] & (inputs[0] != 0)[:, None]
    assert torch.equal(found == -torch.inf, ~live)
    for place in range(7):
        log_p = replaced(model, inputs, cross(model), place).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(found[..., place][live[..., place]], log_p[live[..., place]], **close)


@pytest.mark.parametrize("name", MODELS)
def test_gamma_is_brute_force(name):
    model, (inputs, _) = MODELS[name](), batch()
    words = torch.tensor([11, 2])
    for position in (0, 4):
        some, every = gamma(model, inputs, position=position, words=words), gamma(model, inputs, position=position)
        assert torch.equal(every[..., words], some)
        for place in range(7):
            expected = replaced(model, inputs, cross(model), place)[:, position]
            live = inputs[0][:, place] != 0
            torch.testing.assert_close(every[live, place], expected[live], **close)
            assert not every[~live, place].any()


def test_the_additive_models_logits_are_the_mean_of_gamma():
    """Σ_l α_l γ_l is the model's own logit (A.1, eq. 33): what makes its optimal attention a convex problem."""
    model, (inputs, _) = made(combine="add"), batch()
    alpha, logits = record(model, inputs).layers[0].weights[:, 0], model(*inputs)
    for t in range(5):
        mixed = torch.einsum("bj,bjw->bw", alpha[:, t], gamma(model, inputs, position=t))
        torch.testing.assert_close(mixed, logits[:, t], **close)


@pytest.mark.parametrize("attention", ["dot", "uniform", "sparsemax"])
def test_equation_12(attention):
    """p(correct) = σ(Σ_l α_l σ⁻¹(β_l)), and γ is the log-odds of β."""
    model, ((source, _), _) = made(CLASSIFIER, attention=attention), batch()
    classes = torch.tensor([0, 1, 1])
    b = beta(model, source, classes)[:, 0].exp()
    alpha = record(model, source).layers[0].weights[:, 0, 0]
    live = source != 0
    odds = torch.where(live, torch.logit(b), 0.0)
    p = model(source).softmax(-1).gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(torch.sigmoid((alpha * odds).sum(1)), p, **close)
    g = gamma(model, source)
    torch.testing.assert_close((2 * classes - 1)[:, None] * g[..., 1], odds, **close)
    assert not g[..., 0].any()


def test_beta_keeps_its_order_where_probabilities_round_to_1():
    model, ((source, _), _) = build(CLASSIFIER).eval(), batch()
    model.readout.positive.weight.data.mul_(60 / model.readout.positive.weight.abs().sum())
    model.readout.positive.bias.data.fill_(40.0)
    classes = torch.ones(3, dtype=torch.long)
    live = source[0] != 0
    b, g = beta(model, source, classes)[0, 0][live], gamma(model, source)[0, :, 1][live]
    assert torch.equal(b.exp(), torch.ones_like(b))
    assert torch.equal(b.argsort(), g.argsort())


def by_differences(model, inputs, targets, e=1e-5):
    """Δ: how log p changes as the vector of one source word grows; each word is once in a row, and in no target."""
    name = "encoder.embedding.words.weight"
    words = model.get_parameter(name).detach()

    def log_p(factor, word):
        scaled = words.clone()
        scaled[word] *= factor
        log_p = functional_call(model, {name: scaled}, inputs).log_softmax(-1)
        return log_p.gather(-1, targets[..., None])[..., 0].view(len(targets), -1)

    found = torch.zeros(len(targets), targets[0].numel(), inputs[0].shape[1], dtype=torch.float64)
    for example, row in enumerate(inputs[0].tolist()):
        for place, word in enumerate(row):
            if word:
                found[example, :, place] = ((log_p(1 + e, word) - log_p(1 - e, word)) / (2 * e))[example]
    return found


@pytest.mark.parametrize(
    "name", ["lstm", "lstm, three heads", "lstm, uniform", "transformer", "transformer, post-norm"]
)
def test_saliency_is_finite_differences(name):
    model, (inputs, targets) = MODELS[name](), batch()
    with torch.no_grad():
        expected = by_differences(model, inputs, targets) * (targets != 0)[..., None]
    found = saliency(model, inputs, targets)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert found.abs().max() > 1e-3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("classes", [2, 4])
def test_saliency_of_classifiers(classes):
    (source, _), _ = batch()
    y = torch.tensor([0, 1, classes - 1])
    small = {"vocabulary": 19, "layers": 1, "width": 12, "heads": 3, "feed_forward": 13}
    config = TransformerConfig(model="classifier", classes=classes, **small)
    for model in (made(CLASSIFIER, classes=classes), transformer(config)):
        with torch.no_grad():
            expected = by_differences(model, (source,), y)
        torch.testing.assert_close(saliency(model, source, y), expected, rtol=1e-6, atol=1e-8)


def test_saliency_has_the_right_sign():
    """A word whose vector pushes towards the class has Δ > 0: scaling it up makes the class likelier."""
    model, ((source, _), _) = made(CLASSIFIER), batch()
    y = torch.tensor([1, 1, 1])
    found = saliency(model, source, y)[:, 0]
    example, place = divmod(int(found.argmax()), 7)
    before = model(source).log_softmax(-1)[example, 1]
    model.encoder.embedding.words.weight.data[source[example, place]] *= 1.01
    assert model(source).log_softmax(-1)[example, 1] > before


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_record_holds_its_probes(name, tmp_path):
    model, (inputs, targets) = MODELS[name](), batch()
    found = record_probes(model, inputs, targets)
    *others, last = found.kind("cross")
    assert set(last.extras) == {"targets", "beta", "saliency"}
    assert all(not layer.extras for layer in others)
    torch.testing.assert_close(last.extras["beta"], beta(model, inputs, targets))
    torch.testing.assert_close(last.extras["saliency"], saliency(model, inputs, targets))
    found.save(tmp_path / "found.safetensors")
    again = Record.load(tmp_path / "found.safetensors")[2].kind("cross")[-1]
    for key, value in last.extras.items():
        assert torch.equal(again.extras[key], value[2:])
    named = record_probes(model, dict(zip(("source", "target"), inputs, strict=True)), targets)
    assert torch.equal(named.kind("cross")[-1].extras["beta"], last.extras["beta"])


def test_a_classifiers_record_holds_its_probes():
    model, ((source, _), _) = made(CLASSIFIER), batch()
    layer = record_probes(model, source, torch.tensor([0, 1, 1])).layers[0]
    assert layer.extras["beta"].shape == layer.extras["saliency"].shape == (3, 1, 7)
    assert layer.extras["targets"].tolist() == [[0], [1], [1]]


def test_what_is_refused():
    model, (inputs, targets) = made(), batch()
    with pytest.raises(ValueError, match=r"targets.*\(3, 5\)"):
        beta(model, inputs, targets[:, 1:])
    with pytest.raises(ValueError, match=r"targets.*float32"):
        beta(model, inputs, targets.float())
    with pytest.raises(ValueError, match=r"targets.*\(3,\)"):
        beta(made(CLASSIFIER), inputs[0], targets)
    with pytest.raises(ValueError, match=r"targets.*\(3, 4\)"):
        saliency(model, inputs, targets[:, 1:])
    with pytest.raises(ValueError, match="0 to 4"):
        gamma(model, inputs, position=5)
    with pytest.raises(ValueError, match="rows"):
        beta(model, inputs, targets, rows=0)
    with pytest.raises(ValueError, match="in training mode"):
        beta(made().train(), inputs, targets)
    with pytest.raises(ValueError, match="LanguageModel"):
        gamma(transformer(LM), inputs[0])
    with pytest.raises(ValueError, match="encoder"):
        saliency(transformer(LM), inputs[0], inputs[0])
