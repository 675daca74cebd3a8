"""attn_implementation="attnlab-NAME": mechanisms without parameters, registered with transformers."""

import subprocess
import sys

import pytest
import tiny_models
import torch
import transformers
from adapted_models import EXACT, MODELS, output, tiny

import attnlab
from attnlab.huggingface import dispatch, pretrained
from attnlab.huggingface.registration import PARAMETER_FREE, PREFIX
from attnlab.mechanisms import MECHANISMS

SELF_ONLY = {name for name in PARAMETER_FREE if MECHANISMS[name].self_only}
TWO_SEQUENCES = ("marian", "t5")


def is_parameter_free(name: str) -> bool:
    mechanism = MECHANISMS[name](4, 8)
    simple = not (mechanism.carries or mechanism.needs_layer or mechanism.stochastic or mechanism.head_parts > 1)
    return simple and not list(mechanism.parameters())


def test_every_mechanism_without_parameters_is_registered():
    assert {name for name in MECHANISMS if is_parameter_free(name)} == set(PARAMETER_FREE)
    for name in PARAMETER_FREE:
        assert PREFIX + name in transformers.AttentionInterface()
        assert PREFIX + name in transformers.AttentionMaskInterface()
        assert "/" not in name  # transformers would fetch a kernel of that name from the hub


CASES = [*((name, "llama") for name in PARAMETER_FREE), *(("sigmoid", model) for model in MODELS), ("xsa", "t5")]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_it_computes_what_an_adapted_model_computes(name, model):
    plain, batch = tiny(model), tiny_models.padded_batch(tiny(model))
    dispatch.set_implementation(plain, PREFIX + name)
    if name in SELF_ONLY and model in TWO_SEQUENCES:
        with pytest.raises(ValueError, match="self-attention"):
            output(plain, batch)
        return
    adapted = pretrained.adapt(tiny(model), name)
    torch.testing.assert_close(output(plain, batch), output(adapted, batch), **EXACT)


@pytest.mark.parametrize("model", MODELS)
def test_softmax_is_the_models_own_attention(model):
    own, batch = tiny(model), tiny_models.padded_batch(tiny(model))
    plain = tiny(model)
    dispatch.set_implementation(plain, "attnlab-softmax")
    torch.testing.assert_close(output(plain, batch), output(own, batch), **EXACT)


@pytest.mark.parametrize("model", MODELS)
def test_output_attentions_returns_the_weights_of_the_mechanism(model):
    plain, batch = tiny(model), tiny_models.padded_batch(tiny(model))
    dispatch.set_implementation(plain, "attnlab-sigmoid")
    with torch.no_grad():
        result = plain(**batch, output_attentions=True)
        none = plain(**batch)
    kinds = {"encoder-self": "encoder_attentions", "decoder-self": "decoder_attentions", "cross": "cross_attentions"}
    record = attnlab.record(pretrained.adapt(tiny(model), "sigmoid"), batch)
    seen = 0
    for kind, name in kinds.items():
        expected = [layer.weights for layer in record.layers if layer.kind == kind]
        name = name if model in TWO_SEQUENCES else "attentions"
        if expected:
            for ours, theirs in zip(expected, result[name], strict=True):
                torch.testing.assert_close(theirs, ours, **EXACT)
                seen += 1
            assert not none.get(name)
    assert seen == len(record.layers)


@pytest.mark.parametrize("name", ["sigmoid", "stick-breaking", "alibi", "xsa"])
@pytest.mark.parametrize("static", [False, True])
def test_generation_with_a_cache_gives_the_tokens_of_full_passes(name, static):
    model = tiny("llama")
    model.set_attn_implementation(PREFIX + name)
    ids = torch.tensor([[0, 0, 5, 9, 2], [3, 8, 1, 7, 4]]) + 3
    mask = torch.ones_like(ids)
    how = {"cache_implementation": "static", "disable_compile": True} if static else {}
    made = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, **how)
    again = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=False
    )
    assert torch.equal(made, again)


def test_dropout_acts_in_training_only():
    model = tiny("bert", attention_probs_dropout_prob=0.5)
    model.set_attn_implementation("attnlab-sigmoid")
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(model, batch), output(model, batch))
    for module in model.modules():
        module.training = type(module).__name__ == "BertSelfAttention"
    assert not torch.equal(output(model, batch), output(model, batch))


def test_a_soft_cap_stays_as_in_an_adapted_model():
    model = tiny("gemma2")
    batch = tiny_models.padded_batch(model)
    model.set_attn_implementation("attnlab-sigmoid")
    by_name = output(model, batch)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(by_name, output(pretrained.adapt(model, "sigmoid"), batch))


def test_sinks_and_records_are_refused():
    model = tiny("gpt_oss")
    model.set_attn_implementation("attnlab-sigmoid")
    with pytest.raises(ValueError, match="attention sinks"):
        output(model, tiny_models.padded_batch(model))
    other = tiny("llama")
    other.set_attn_implementation("attnlab-sigmoid")
    with pytest.raises(ValueError, match=r"attnlab-sigmoid.*attnlab\.adapt\(model, 'sigmoid'\)"):
        attnlab.record(other, tiny_models.padded_batch(other))


def test_a_name_would_bypass_the_mechanisms_of_an_adapted_model():
    model = pretrained.adapt(tiny("llama"), "dagpam")
    model.set_attn_implementation("attnlab-sigmoid")
    with pytest.raises(RuntimeError, match=r"'attnlab-sigmoid', which bypasses"):
        output(model, tiny_models.padded_batch(model))


FIRST = "import attnlab.huggingface, sys; assert 'transformers' not in sys.modules; import transformers"
USE = """
import torch
model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(
    vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8,
), attn_implementation="attnlab-sigmoid")
weights = model(torch.arange(3)[None], output_attentions=True).attentions[0]
assert abs(weights[0, 0, 0, 0].item() - 0.5) > 0 and weights[0, 0, 0, 1] == 0
"""


def test_attnlab_may_be_imported_before_transformers():
    done = subprocess.run([sys.executable, "-c", FIRST + USE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
