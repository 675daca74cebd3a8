"""Adapted Hugging Face models whose mechanisms something else has wrapped: they must not fall back to softmax."""

import copy

import pytest
import tiny_models
import torch
from adapted_models import EXACT, attention_modules, output, shake, tiny
from torch import nn

import attnlab
from attnlab.huggingface import pretrained


class ModulesToSave(nn.Module):
    """Holds the original and a copy to be trained, and calls the copy, as PEFT's ModulesToSaveWrapper does."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original).requires_grad_(True)})

    def forward(self, *args, **named):
        return self.modules_to_save["default"](*args, **named)

    def __getattr__(self, name):
        """Hand everything else on to what is called."""
        own = ("original_module", "modules_to_save")
        return super().__getattr__(name) if name in own else getattr(self.modules_to_save["default"], name)


class Mute(ModulesToSave):
    """Does not say which of its mechanisms it calls."""

    def __getattr__(self, name):
        return nn.Module.__getattr__(self, name)


def wrap(model, wrapper) -> None:
    for module in attention_modules(model):
        module.attnlab = wrapper(module.attnlab).train(model.training)


def adapted(mechanism: str):
    model = pretrained.adapt(tiny("gpt2", n_embd=30), mechanism)
    shake(model)
    return model


@pytest.mark.parametrize("mechanism", ["dagpam", "coda", "differential"])
def test_what_is_wrapped_is_still_called(mechanism):
    model = adapted(mechanism)
    batch = tiny_models.padded_batch(model)
    before, record = output(model, batch), attnlab.record(model, batch)
    wrap(model, ModulesToSave)
    assert torch.equal(output(model, batch), before)
    again = attnlab.record(model, batch)
    assert torch.equal(again.layers[2].weights, record.layers[2].weights)
    torch.testing.assert_close(again.layers[2].mixed, record.layers[2].mixed, **EXACT)


def test_the_copy_is_what_is_trained_and_recorded():
    model = adapted("dagpam")
    wrap(model, ModulesToSave)
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    model.train()
    for module in attention_modules(model):
        assert not [p for p in module.attnlab.original_module.parameters() if p.requires_grad]
    model(**batch)[0].sum().backward()
    with torch.no_grad():
        for module in attention_modules(model):
            for parameter in module.attnlab.modules_to_save.parameters():
                assert parameter.grad.abs().sum() > 0
                parameter.add_(0.3)
    model.eval()
    assert not torch.allclose(output(model, batch), before, atol=1e-3)
    own = attention_modules(model)[0].attnlab.modules_to_save["default"]
    sums = attnlab.record(model, batch).layers[0].weights.sum(-1)[0]
    torch.testing.assert_close(sums, own.row_sum.detach().expand_as(sums.T).T, **EXACT)


def test_compiled_mechanisms_are_saved_as_plain_ones(tmp_path):
    model = adapted("dagpam")
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    wrap(model, lambda mechanism: torch.compile(mechanism, backend="eager"))
    torch.testing.assert_close(output(model, batch), before, **EXACT)
    assert attnlab.record(model, batch).meta["mechanism"] == "dagpam"
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(attnlab.load(tmp_path), batch), before, **EXACT)


def test_a_wrapper_that_does_not_say_what_it_calls_is_refused():
    model = adapted("dagpam")
    wrap(model, Mute)
    with pytest.raises(ValueError, match=r"h\.0\.attn is wrapped in Mute"):
        output(model, tiny_models.padded_batch(model))


def test_other_wrappers_are_not_saved(tmp_path):
    model = adapted("dagpam")
    wrap(model, ModulesToSave)
    with pytest.raises(ValueError, match=r"h\.0\.attn is wrapped in ModulesToSave"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("other", [None, nn.Identity()])
def test_a_lost_mechanism_is_an_error(other):
    model = adapted("dagpam")
    attention_modules(model)[1].attnlab = other
    with pytest.raises(ValueError, match=r"h\.1\.attn has lost its mechanism"):
        output(model, tiny_models.padded_batch(model))
