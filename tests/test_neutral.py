"""Neutral starts: an adapted model computes what it did before, and its mechanisms can still learn."""

import pytest
import tiny_models
import torch
from adapted_models import EXACT, output, tiny

import attnlab
from attnlab.huggingface.neutral import NEUTRAL
from attnlab.mechanisms import Mechanism


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_model_is_unchanged_at_the_start_and_every_parameter_can_learn(model, name):
    plain, batch = tiny(model), tiny_models.padded_batch(tiny(model))
    adapted = attnlab.adapt(tiny(model), name, neutral=True)
    exact = {"rtol": 0, "atol": 0.02} if NEUTRAL[name].near else EXACT
    torch.testing.assert_close(output(adapted, batch), output(plain, batch), **exact)
    adapted(**batch)[0][..., 0].square().sum().backward()
    mechanisms = [module for module in adapted.modules() if isinstance(module, Mechanism)]
    for key, parameter in mechanisms[-1].named_parameters():
        dead = name == "dagpam" and key == "negative"  # λ⁻ = 0 multiplies it: it learns after λ does
        dead = dead or (name == "dcmha" and ("inward" in key or "outward" in key))  # partly behind w = 0
        if not dead:
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key


def test_an_adapted_model_without_a_neutral_start_differs():
    plain, batch = tiny("llama"), tiny_models.padded_batch(tiny("llama"))
    for name in ("dagpam", "resformer", "shaped", "fox", "sink", "dcmha"):
        adapted = attnlab.adapt(tiny("llama"), name)
        assert (output(adapted, batch) - output(plain, batch)).abs().max() > 0.02, name


def test_what_has_no_neutral_start_is_refused():
    for name, options, message in (
        ("sigmoid", {}, "no start for sigmoid: choose from softmax, dagpam"),
        ("dagpan", {}, "no attention is called 'dagpan' .*'dagpam'"),
        ("softmax*2,dagpam", {}, "no start for different layers"),
        ("dagpam", {"initial": 0.5}, r"neutral=True sets initial=0\.0: leave out initial=0\.5"),
    ):
        with pytest.raises(ValueError, match=message):
            attnlab.adapt(tiny("llama"), name, neutral=True, **options)


def test_a_neutral_start_is_saved(tmp_path):
    model = attnlab.adapt(tiny_models.llama(), "shaped", neutral=True)
    model.save_pretrained(tmp_path)
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(attnlab.load(tmp_path), batch), output(model, batch))
