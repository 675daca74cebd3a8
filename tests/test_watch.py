"""Recording: what is recorded is what happened, for every mechanism, and nothing is left behind."""

import copy
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch
from representatives import every_kind
from small_models import CLASSIFIER, LM, TRANSLATOR, made
from torch import nn
from turnings import TurnsByAMatrix, made_of

import attnlab.huggingface
from attnlab.huggingface.recorder import record
from attnlab.mechanisms import MECHANISMS, Mechanism
from attnlab.mechanisms.mechanism import logits, masked_softmax
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.attention import MultiHead
from attnlab.models.transformer import Transformer, TransformerConfig

close = {"rtol": 0.0, "atol": 1e-11}


def padded(batch: int = 3, length: int = 7) -> torch.Tensor:
    tokens = torch.randint(1, 19, (batch, length))
    tokens[1, 4:] = 0
    return tokens


def batch_of(config: TransformerConfig) -> tuple[torch.Tensor, ...]:
    return (padded(), padded(length=5)) if config.model == "translator" else (padded(),)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def check_laws(model: Transformer, made_record) -> None:
    parts = {name: module for name, module in model.named_modules() if isinstance(module, MultiHead)}
    assert {layer.name for layer in made_record.layers} == set(parts)
    for layer in made_record.layers:
        mechanism = parts[layer.name].mechanism
        torch.testing.assert_close(layer.weights @ layer.values, layer.context, **close)
        torch.testing.assert_close(mechanism.finish(layer.turned_context), layer.mixed, **close)
        summed = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
        summed = summed if layer.output_bias is None else summed + layer.output_bias
        torch.testing.assert_close(summed, layer.outputs, **close)
        assert not layer.weights.masked_select(~layer.mask.expand_as(layer.weights)).any()


@every_kind
@pytest.mark.parametrize("config", [LM, TRANSLATOR, CLASSIFIER], ids=lambda config: config.model)
def test_what_is_recorded_is_what_happened(name, config):
    model, batch = made(config, name), batch_of(config)
    happened = {}
    for part_name, part in model.named_modules():
        if isinstance(part, MultiHead):
            part.register_forward_hook(lambda _, args, out, key=part_name: happened.update({key: (args[0], out[0])}))
    with torch.no_grad():
        model(*batch)
    found = record(model, batch)
    check_laws(model, found)
    for layer in found.layers:
        assert torch.equal(layer.inputs, happened[layer.name][0])
        assert torch.equal(layer.outputs, happened[layer.name][1])
    for kind in {layer.kind for layer in found.layers}:
        assert [layer.index for layer in found.kind(kind)] == [0, 1]


class ShiftsTheValues(Mechanism):
    """It mixes other values than it is given, so its weights do not say what it reads."""

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        return masked_softmax(logits(q, k, self.scale, bias), seen), None

    def mix(self, q, k, v, mask=None, carry=None, **options):
        return super().mix(q, k, v + 1.5, mask, carry, **options)


class TurnsWithoutALine(Softmax):
    def turn(self, context, v, at, sides):
        return context.square()


@pytest.mark.parametrize("kind", [ShiftsTheValues, TurnsWithoutALine])
def test_a_mechanism_that_weights_do_not_describe_is_refused(kind):
    with pytest.raises(ValueError, match=kind.__name__):
        record(made_of(kind), batch_of(LM))


def test_a_turning_by_matrices_is_recorded():
    model = made_of(TurnsByAMatrix)
    found = record(model, batch_of(LM))
    check_laws(model, found)
    assert [layer.turning.shape[-2:] for layer in found.layers] == [(4, 4)] * 2


@every_kind
def test_recording_changes_nothing(name):
    model, batch = made(TRANSLATOR, name), batch_of(TRANSLATOR)
    before, state, random = model(*batch), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    record(model, batch)
    assert hooks(model) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model(*batch), before)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("changes", [{"key_value_heads": 1}, {"attention_bias": False}, {"norm": "post"}])
def test_other_forms_of_attention(changes):
    model = made(TRANSLATOR, "dagpam", **changes)
    check_laws(model, found := record(model, batch_of(TRANSLATOR)))
    if "key_value_heads" in changes:
        assert found.layers[0].grouped_values.shape == (3, 1, 7, 4)
        assert found.layers[0].values.shape == (3, 3, 7, 4)
    assert (found.layers[0].output_bias is None) == ("attention_bias" in changes)


def test_weights_by_hand():
    model, tokens = made(LM), padded()
    first = record(model, tokens).layers[0]
    attention = model.decoder.blocks[0].attention
    q, k = ((p(first.inputs)).view(3, 7, 3, 4).transpose(1, 2) for p in (attention.query, attention.key))
    scores = logits(q, k, 0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(first.weights, scores.softmax(-1), **close)


@pytest.mark.parametrize("config", [LM, TRANSLATOR, CLASSIFIER], ids=lambda config: config.model)
def test_tokens_masks_and_readout(config):
    model, batch = made(config), batch_of(config)
    found = record(model, batch)
    names = {"language-model": ["target"], "translator": ["source", "target"], "classifier": ["source"]}[config.model]
    assert list(found.tokens) == list(found.masks) == names
    for name, tokens in zip(names, batch, strict=True):
        assert torch.equal(found.tokens[name], tokens)
        assert torch.equal(found.masks[name], tokens != 0)
    bias = found.readout.get("bias", 0.0)
    torch.testing.assert_close(found.readout["hidden"] @ found.readout["weight"].T + bias, model(*batch), **close)
    assert found.meta == {"model": type(model).__name__, "mechanism": "softmax", "noise": None}
    assert len(found) == 3


def test_an_adaptive_readout_has_no_weight():
    found = record(made(LM, width=48, adaptive_cutoffs=(5, 11)), padded())
    assert set(found.readout) == {"hidden"}


def test_batches_can_be_named():
    model, (source, target) = made(TRANSLATOR, "shaped"), batch_of(TRANSLATOR)
    named, listed = record(model, {"source": source, "target": target}), record(model, [source, target])
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(named.layers, listed.layers, strict=True))
    assert named.meta["mechanism"] == "shaped, softmax"


def test_a_mechanism_made_of_others_is_one_mechanism():
    found = attnlab.record(made(LM, "coda+dagpam"), torch.randint(1, 23, (1, 5)))
    assert found.meta["mechanism"] == "coda+dagpam"


def test_a_given_mask_is_the_one_recorded():
    tokens, mask = padded(), torch.ones(3, 7, dtype=torch.bool)
    mask[0, 2] = False
    found = record(made(LM), {"tokens": tokens, "mask": mask})
    assert torch.equal(found.masks["target"], mask)
    assert not found.layers[1].weights[0, :, :, 2].any()


def test_layers_share_their_mask_and_an_unfinished_context():
    found = record(made(TRANSLATOR), batch_of(TRANSLATOR))
    for kind in ("encoder-self", "decoder-self", "cross"):
        first, second = found.kind(kind)
        assert first.mask is second.mask
        assert first.context is first.mixed
    assert found.kind("encoder-self")[0].mask.shape == (3, 1, 1, 7)
    assert found.kind("decoder-self")[0].mask.shape == (1, 1, 5, 5)


def test_training_on_does_not_change_a_record():
    model, tokens = made(LM), padded()
    found = record(model, tokens)
    kept = found.layers[0].output_weight.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    tokens.zero_()
    assert torch.equal(found.layers[0].output_weight, kept)
    assert found.tokens["target"].any()
    assert not any(x.requires_grad for layer in found.layers for x in layer.tensors().values())


# noise


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.stochastic])
def test_one_sampled_pass(name):
    model, batch = made(TRANSLATOR, name), batch_of(TRANSLATOR)
    mean, sample, again, other = (record(model, batch, noise=seed) for seed in (None, 5, 5, 7))
    check_laws(model, sample)
    for layers in zip(mean.layers, sample.layers, again.layers, other.layers, strict=True):
        average, first, second, third = (layer.weights for layer in layers)
        assert torch.equal(first, second)
        assert not torch.allclose(first, average)
        assert not torch.allclose(first, third)
    assert sample.meta["noise"] == 5
    assert all(m.sample_seed is None for m in model.modules() if isinstance(m, Mechanism))


def test_noise_is_refused_where_there_is_none():
    model = made(LM, "realformer")
    with pytest.raises(ValueError, match=r"noise=5.*realformer"):
        record(model, padded(), noise=5)
    with pytest.raises(ValueError, match="noise seed must be"):
        record(made(LM, "coda"), padded(), noise=-1)
    assert hooks(model) == 0


# wrapped and compiled models


def test_a_wrapped_model_is_recorded_inside():
    model, tokens = made(LM, "coda"), padded()
    expected = record(model, tokens)
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    assert torch.equal(record(wrapped, tokens).layers[1].weights, expected.layers[1].weights)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_recorded_eagerly(in_place):
    model, tokens = made(LM, "coda"), padded()
    expected = record(model, tokens)
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(tokens)
        found = record(compiled, tokens)
        assert len(found.layers) == 2
        assert torch.equal(found.layers[1].weights, expected.layers[1].weights)
        assert torch.equal(compiled(tokens), before)


# what is refused


def test_training_mode_is_refused():
    model = made(LM).train()
    with pytest.raises(ValueError, match="training mode"):
        record(model, padded())
    model.eval().decoder.blocks[1].feed_forward.train()
    with pytest.raises(ValueError, match="training mode"):
        record(model, padded())
    assert hooks(model) == 0


def test_an_error_leaves_no_hook():
    model = made(LM, "coda")
    with pytest.raises(ValueError, match="got 23"):
        record(model, torch.full((2, 3), 23), noise=5)
    assert hooks(model) == 0
    assert all(m.sample_seed is None for m in model.modules() if isinstance(m, Mechanism))


def test_foreign_models_batches_and_options_are_refused():
    for foreign in (nn.Linear(2, 3), nn.DataParallel(nn.Linear(2, 3)), 5):
        with pytest.raises(TypeError, match="cannot record"):
            record(foreign, padded())
    with pytest.raises(TypeError, match=r"batch.*str"):
        record(made(LM), "some text")
    with pytest.raises(TypeError, match=r"lazy.*LanguageModel"):
        record(made(LM), padded(), lazy=True)


@pytest.mark.parametrize(
    ("config", "batch", "message"),
    [
        (LM, [], "missing a required argument: 'tokens'"),
        (LM, [padded()] * 3, "too many positional arguments"),
        (LM, {"input_ids": padded()}, "tokens, mask"),
        (TRANSLATOR, padded(), "missing a required argument: 'target'"),
        (LM, [[3, 5, 7]], "tokens must be a tensor"),
    ],
)
def test_batches_that_the_model_does_not_take(config, batch, message):
    model = made(config)
    with pytest.raises(TypeError, match=message):
        record(model, batch)
    assert hooks(model) == 0


@pytest.mark.parametrize("noise", ["5", 5.0])
def test_a_noise_seed_is_a_whole_number(noise):
    with pytest.raises(TypeError, match=f"noise.*{noise!r}"):
        record(made(LM, "coda"), padded(), noise=noise)


def test_a_wrapper_of_ones_own_is_told_which_model_to_give():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Linear(2, 3), made(LM)

    with pytest.raises(TypeError, match="'inner'"):
        record(Wrapper(), padded())


def test_hugging_face_models_are_passed_on(monkeypatch):
    calls = []
    door = types.ModuleType("attnlab.huggingface.pretrained")
    door.record = lambda *args, **options: calls.append((args, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attnlab.huggingface.pretrained", door)
    monkeypatch.setattr(attnlab.huggingface, "pretrained", door, raising=False)
    base = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})
    model = type("Mine", (base,), {"__module__": "mine"})()
    record(nn.DataParallel(torch.compile(model, backend="eager")), "some text", lazy=True)
    for path in ("some/path", Path("some/path")):
        record(path, ["some text"], noise=5)
    kinds = {name: each.default for name, each in inspect.signature(record).parameters.items() if each.kind == 3}
    assert calls == [
        ((model, "some text"), kinds | {"lazy": True}),
        (("some/path", ["some text"]), kinds | {"noise": 5}),
        ((Path("some/path"), ["some text"]), kinds | {"noise": 5}),
    ]
