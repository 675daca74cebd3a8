"""Carries between the layers of an adapted Hugging Face model, and training with them."""

import pytest
import tiny_models
import torch
import transformers
from adapted_models import CARRYING, MODELS, assert_decodes, attention_modules, output, place, shake, tiny
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab.huggingface import carries as cascade
from attnlab.huggingface import pretrained
from attnlab.huggingface.running import Running


@pytest.mark.parametrize("mechanism", CARRYING)
@pytest.mark.parametrize("name", ["gemma3", "cohere2"])
def test_layers_of_one_window_carry_to_each_other_over_the_others(name, mechanism):
    """Texts longer than the window: the first and the last layer see five keys, the one between them sees all."""
    model = pretrained.adapt(tiny(name), mechanism)
    shake(model)
    assert_decodes(model, torch.arange(3, 23).view(2, 10))
    layers = [(place(module).cascade, place(module).layer) for module in attention_modules(model)]
    assert layers[0][0] == layers[2][0] != layers[1][0]
    assert [layer for _, layer in layers] == [0, 0, 1]


def test_an_encoder_with_windows_carries():
    model = pretrained.adapt(tiny("modernbert"), "realformer")
    record = attnlab.record(model, {"input_ids": torch.arange(3, 17)[None]})
    seen = [layer.mask.expand(1, 1, 14, 14).sum().item() for layer in record.layers]
    assert seen[0] == 14 * 14 == seen[2] > seen[1]


def test_layers_that_see_different_keys_do_not_carry():
    model = pretrained.adapt(tiny("gemma3"), "realformer")
    first, _, last = attention_modules(model)
    shut = torch.zeros(1, 1, 4, 4, dtype=torch.bool).diagonal_scatter(torch.ones(1, 1, 4).bool(), dim1=-2, dim2=-1)
    model.model.layers[2].register_forward_pre_hook(
        lambda _, args, named: (args, named | {"attention_mask": shut}), with_kwargs=True
    )
    with pytest.raises(ValueError, match=rf"{place(first).name} and {place(last).name}.*different keys"):
        model(torch.arange(3, 7)[None])


@pytest.mark.parametrize("mechanism", CARRYING)
def test_nothing_is_carried_from_one_pass_to_the_next(mechanism):
    model = pretrained.adapt(tiny("gpt2"), mechanism)
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    torch.testing.assert_close(output(model, batch), before, rtol=0, atol=0)

    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    handle = model.transformer.h[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(StopError):
        model(**batch)
    handle.remove()
    assert cascade._FLOW.get() is None
    torch.testing.assert_close(output(model, batch), before, rtol=0, atol=0)


class Twice(transformers.GPT2LMHeadModel):
    """Goes through its layers twice in one pass, and returns what came of each."""

    def forward(self, input_ids, attention_mask=None, **named):
        states = [self.transformer(input_ids, attention_mask=attention_mask)[0] for _ in range(2)]
        return torch.stack(states)


@pytest.mark.parametrize("mechanism", CARRYING)
def test_nothing_is_carried_from_the_last_layer_to_the_first(mechanism):
    plain = tiny("gpt2")
    model = Twice(plain.config).double().eval()
    model.load_state_dict(plain.state_dict())
    first, second = pretrained.adapt(model, mechanism)(**tiny_models.padded_batch(model))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("mechanism", CARRYING)
def test_nothing_is_carried_out_of_an_interrupted_pass(mechanism, monkeypatch):
    """torch runs no hooks after a pass that the keyboard interrupts."""
    monkeypatch.setattr(cascade, "_FLOW", Running())
    interrupted, other = (pretrained.adapt(tiny("gpt2"), mechanism) for _ in range(2))
    shake(other)
    batch = tiny_models.padded_batch(other)
    expected = {model: output(model, batch) for model in (interrupted, other)}

    def stop(*_):
        raise KeyboardInterrupt

    for model in (interrupted, other) * 2:
        handle = model.transformer.h[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            output(model, batch)
        handle.remove()
    for model in (other, other, interrupted, other):
        torch.testing.assert_close(output(model, batch), expected[model], rtol=0, atol=0)
    flow, left = cascade._FLOW.get(), 0
    while flow is not None:
        flow, left = flow.outer, left + 1
    assert left <= 2, "what interrupted passes leave behind must not pile up"


@pytest.mark.parametrize("mechanism", CARRYING)
def test_a_pass_within_a_pass_leaves_its_carries_alone(mechanism):
    model, other = (pretrained.adapt(tiny(name), mechanism) for name in ("gpt2", "llama"))
    batch = tiny_models.padded_batch(model)
    before, seen = output(model, batch), []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: seen.append(output(other, batch)))
    torch.testing.assert_close(output(model, batch), before, rtol=0, atol=0)
    torch.testing.assert_close(seen[0], output(other, batch), rtol=0, atol=0)


def test_a_layer_called_by_itself_has_no_carry():
    model = pretrained.adapt(tiny("gpt2"), "realformer")
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.attn runs outside"):
        model.transformer.h[0](torch.randn(1, 3, 15).double())


# ------------------------------------------------------------------------------------------------------------- training


def gradients(model, batches) -> dict[str, torch.Tensor]:
    """Of one loss over several passes, so that a checkpoint of one must not meet the carries of another."""
    model.zero_grad()
    torch.manual_seed(11)
    sum(model(**batch)[0].sin().sum() for batch in batches).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def two_batches(model):
    batch = tiny_models.padded_batch(model)
    return batch, {name: value.flip(0) for name, value in batch.items()}


@pytest.mark.parametrize("mechanism", ["dagpam", *CARRYING])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_mechanisms_and_checkpointing_does_not_change_them(name, mechanism):
    model = pretrained.adapt(tiny(name), mechanism).train()
    batches = two_batches(model)
    plain = gradients(model, batches)
    for module in attention_modules(model):
        for parameter, value in module.attnlab.named_parameters():
            unused = (
                mechanism == "coda" and module.attnlab.layer == 0
            )  # the first layer of a cascade has nothing to mix
            assert (f"{place(module).name}.attnlab.{parameter}" in plain) == (not unused), parameter
            assert unused or value.grad.abs().sum() > 0 or parameter.endswith("bias"), parameter
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients(model, batches)
    assert checkpointed.keys() == plain.keys()
    for parameter, gradient in checkpointed.items():
        torch.testing.assert_close(gradient, plain[parameter], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpointing_is_refused():
    model = pretrained.adapt(tiny("gpt2"), "realformer").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.attn.*\"use_reentrant\": False"):
        model(**tiny_models.padded_batch(model))


def test_checkpointing_by_hand_is_refused():
    """Its recomputation would begin without the carry."""
    model = pretrained.adapt(tiny("gpt2"), "realformer").train()
    layer, call = model.transformer.h[1], model.transformer.h[1].forward
    layer.forward = lambda *args, **named: checkpoint(call, *args, use_reentrant=False, **named)
    loss = model(**tiny_models.padded_batch(model))[0].sum()
    with pytest.raises(RuntimeError, match=r"h\.1\.attn runs outside.*gradient_checkpointing_enable"):
        loss.backward()


def test_what_the_trainer_passes_along_is_no_matter():
    model = pretrained.adapt(tiny("llama"), "dagpam").train()
    batch = tiny_models.padded_batch(model)
    loss = model(**batch, labels=batch["input_ids"], num_items_in_batch=torch.tensor(20)).loss
    loss.backward()
    assert attention_modules(model)[0].attnlab.lambdas.grad.abs().sum() > 0


def test_the_models_dropout_falls_on_the_mechanism():
    model = pretrained.adapt(tiny_models.gpt2(attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0), "softmax")
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(model, batch), output(model, batch))
    model.train()
    assert not torch.allclose(output(model, batch), output(model, batch), atol=1e-3)
    assert {module.attnlab.dropout for module in attention_modules(model)} == {0.5}
