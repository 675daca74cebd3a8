"""Hugging Face models with another attention: what they compute, and how they decode."""

import copy
import math
import re

import pytest
import tiny_models
import torch
import transformers
from adapted_models import (
    CARRYING,
    EXACT,
    MODELS,
    assert_decodes,
    assert_translates,
    attention_modules,
    output,
    place,
    shake,
    tiny,
)
from representatives import REPRESENTATIVES
from transformers.masking_utils import eager_mask

import attnlab
from attnlab.huggingface import dispatch, pretrained
from attnlab.mechanisms import MECHANISMS

GENERATING = ("gpt2", "llama", "marian", "t5")


def oracle(model, batch, attend) -> torch.Tensor:
    """The output of a plain model whose attention is a function of the test's own."""
    model = copy.deepcopy(model)
    names = {module: name for name, module in model.named_modules()}

    def function(module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        bias = 0.0 if position_bias is None else position_bias
        hidden = 0.0 if attention_mask is None else attention_mask
        return attend(names[module], query, key, value, scaling, bias, hidden).transpose(1, 2), None

    transformers.AttentionInterface.register("oracle", function)
    transformers.AttentionMaskInterface.register("oracle", eager_mask)
    tiny_models.set_implementation(model, "oracle")
    return output(model, batch)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("mechanism", "options"), [("softmax", {}), ("dagpam", {"initial": 0.0, "fixed": True})])
@pytest.mark.parametrize("name", [*MODELS, "roberta", "albert", "modernbert", "gemma", "gemma3"])
def test_what_should_change_nothing_changes_nothing(name, mechanism, options, side):
    model = tiny(name)
    batch = tiny_models.padded_batch(model, side)
    before = output(model, batch)
    assert pretrained.adapt(model, mechanism, **options) is model
    torch.testing.assert_close(output(model, batch), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_dagpam_is_two_softmaxes_of_the_models_own_queries_and_keys(name, side):
    plain = tiny(name)
    batch = tiny_models.padded_batch(plain, side)
    model = pretrained.adapt(copy.deepcopy(plain), "dagpam", tied=False, initial=(0.75, 0.375))
    negatives = {place(m).name: m.attnlab.negative.detach() for m in attention_modules(model)}

    def attend(name, query, key, value, scaling, bias, hidden):
        queries = query, query.clamp_min(0) @ negatives[name]
        plus, minus = ((q @ key.mT * scaling + bias + hidden).softmax(-1) @ value for q in queries)
        return 1.75 * plus - 0.375 * minus

    torch.testing.assert_close(output(model, batch), oracle(plain, batch, attend), **EXACT)


@pytest.mark.parametrize(("name", "sizes"), [("gpt2", {"n_embd": 30}), ("t5", {"d_kv": 10})])
def test_differential_scales_its_halves_as_the_model_scales_its_heads(name, sizes):
    """By 1/√(d/2) where the model has 1/√d; T5 has 1, with heads of 10."""
    plain = tiny(name, **sizes)
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), "differential")
    shake(model)
    mechanisms = {place(m).name: m.attnlab for m in attention_modules(model)}

    def attend(name, query, key, value, scaling, bias, hidden):
        own, scale = mechanisms[name], scaling * 2**0.5
        halves = [(query[..., half] * scale) @ key[..., half].mT for half in (slice(0, 5), slice(5, 10))]
        first, second = ((half + bias + hidden).softmax(-1) @ value for half in halves)
        products = [torch.dot(own.lambda_q[n], own.lambda_k[n]).exp() for n in range(2)]
        initial = 0.8 - 0.6 * math.exp(-0.3 * own.layer)
        context = first - (products[0] - products[1] + initial) * second
        return (1 - initial) * own.norm.weight * context / (context.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    torch.testing.assert_close(output(model, batch), oracle(plain, batch, attend), **EXACT)


@pytest.mark.parametrize(("name", "scale"), [("llama", 1.0), ("t5", 5**0.5)])
def test_nap_is_scaled_only_where_the_model_scales_otherwise(name, scale):
    """It is defined without 1/√d; a T5 has no 1/√d either, so its logits are √d times larger than others'."""
    model = pretrained.adapt(tiny(name), "nap")
    assert [m.attnlab.scale for m in attention_modules(model)] == pytest.approx([scale] * len(attention_modules(model)))


@pytest.mark.parametrize("name", MODELS)
def test_realformer_sums_the_logits_of_each_cascade(name):
    plain = tiny(name)
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), "realformer")
    sums: dict[str, torch.Tensor] = {}

    def attend(name, query, key, value, scaling, bias, hidden):
        kind = re.sub(r"\d", "", name)
        sums[kind] = query @ key.mT * scaling + bias + sums.get(kind, 0.0)
        return (sums[kind] + hidden).softmax(-1) @ value

    torch.testing.assert_close(output(model, batch), oracle(plain, batch, attend), **EXACT)
    assert len(sums) == (3 if plain.config.is_encoder_decoder else 1)


@pytest.mark.parametrize("name", MODELS)
def test_mechanisms_stand_where_the_model_says(name):
    model = pretrained.adapt(tiny(name), "coda")
    for module in attention_modules(model):
        number = re.findall(r"\d+", place(module).name)[0]  # T5 numbers the parts of a layer too
        assert (module.attnlab.layer, place(module).layer) == (int(number), int(number))
    cross = [m for m in attention_modules(model) if place(m).kind == "cross"]
    assert len(cross) == (3 if model.config.is_encoder_decoder else 0)
    first = attention_modules(model)[0]
    assert first.attnlab.scale == pytest.approx(1.0 if name == "t5" else first.attnlab.head_dim**-0.5, rel=1e-12)


@pytest.mark.parametrize("mechanism", REPRESENTATIVES)
def test_every_kind_obeys_the_laws_of_the_record_and_decodes_with_a_cache(mechanism):
    has_parts = MECHANISMS[mechanism].head_parts > 1  # rotary positions would cross them
    model = pretrained.adapt(tiny("gpt2", n_embd=30) if has_parts else tiny("llama"), mechanism)
    shake(model)
    batch = tiny_models.padded_batch(model, "left")
    record = attnlab.record(model, batch)
    tokens = record.masks["target"]
    for layer in record.layers:
        torch.testing.assert_close(layer.weights @ layer.values, layer.context, **EXACT)
        made = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
        bias = 0.0 if layer.output_bias is None else layer.output_bias
        torch.testing.assert_close(made + bias, layer.outputs, **EXACT)
        built = model.get_submodule(layer.name).attnlab
        torch.testing.assert_close(built.finish(layer.turned_context), layer.mixed, **EXACT)
        if (row_sum := built.row_sum) is not None:
            sums = layer.weights.sum(-1).transpose(1, 2)[tokens]  # (tokens, h)
            torch.testing.assert_close(sums, torch.as_tensor(row_sum).double().detach().expand_as(sums), **EXACT)
    assert record.meta["mechanism"] == mechanism
    assert_same_generation(model, batch)


def test_only_some_kinds():
    plain = tiny("marian")
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), "dagpam", kinds=("decoder-self",))
    assert {place(m).kind for m in attention_modules(model)} == {"decoder-self"}
    record, before = attnlab.record(model, batch), attnlab.record(plain, batch)
    for kind in ("encoder-self", "decoder-self"):
        same = torch.allclose(record.kind(kind)[0].weights, before.kind(kind)[0].weights, atol=1e-9)
        assert same == (kind == "encoder-self")
    assert not torch.allclose(output(model, batch), output(plain, batch), atol=1e-3)
    shaped = pretrained.adapt(tiny("marian"), "shaped", kinds=("encoder-self", "decoder-self"))
    assert output(shaped, batch).isfinite().all()


def test_a_kind_left_alone_keeps_its_own_attention(monkeypatch):
    """What is not adapted runs on the model's own attention, fused where it can be."""
    plain = tiny("t5")
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), "softmax", kinds=["cross"])
    torch.testing.assert_close(output(model, batch), output(plain, batch), **EXACT)
    monkeypatch.setattr(dispatch.AttentionCall, "needs_eager", lambda call: True)
    torch.testing.assert_close(output(model, batch), output(plain, batch), **EXACT)


def test_fused_attention_stays_within_reach():
    """An unpadded causal batch reaches the mechanism without a mask, and said to be causal."""
    model = pretrained.adapt(tiny("llama"), "softmax")
    seen = []
    for module in attention_modules(model):
        module.attnlab.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
    model(tiny_models.padded_batch(model)["input_ids"][:1])
    assert [(named["mask"], named["causal"]) for named in seen] == [(None, True)] * 3


# ------------------------------------------------------------------------------------------------------------- decoding


def assert_same_generation(model, batch, **options) -> None:
    inputs = {name: value for name, value in batch.items() if not name.startswith("decoder")}
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    how |= {"return_dict_in_generate": True, "output_scores": True}
    cached, plain = (model.generate(**inputs, **how, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    for one, other in zip(cached.scores, plain.scores, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("mechanism", ["softmax", "dagpam", *CARRYING])
@pytest.mark.parametrize("name", GENERATING)
def test_decoding_with_a_cache_is_decoding_without(name, mechanism):
    """In double precision; the scores of `generate` are rounded to float32."""
    model = pretrained.adapt(tiny(name), mechanism)
    shake(model)
    if model.config.is_encoder_decoder:
        assert_translates(model, tiny_models.padded_batch(model))
    else:
        batch = tiny_models.padded_batch(model, "left")
        assert_decodes(model, batch["input_ids"], batch["attention_mask"])


@pytest.mark.parametrize("mechanism", ["softmax", "coda"])
def test_static_caches_and_beams(mechanism):
    model = pretrained.adapt(tiny("llama"), mechanism)
    shake(model)
    batch = tiny_models.padded_batch(model, "left")
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    growing = model.generate(**batch, **how)
    assert torch.equal(model.generate(**batch, **how, cache_implementation="static"), growing)
    assert_same_generation(model, batch, num_beams=3)


def test_a_query_finds_its_own_key_in_a_static_cache():
    model = pretrained.adapt(tiny("llama"), "shaped")
    batch = tiny_models.padded_batch(model, "left")
    assert_decodes(model, batch["input_ids"], batch["attention_mask"])
