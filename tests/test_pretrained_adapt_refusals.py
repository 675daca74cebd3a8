"""Hugging Face models that cannot be adapted, and calls that an adapted model refuses."""

import pytest
import tiny_models
import torch
import transformers
from adapted_models import MODELS, output, tiny

import attnlab
from attnlab.huggingface import pretrained
from attnlab.mechanisms import Mechanism, Softmax

IDS = torch.arange(3, 9)[None]


class QueryConvolution(Softmax):
    """Each query is mixed with the one before it, which a cache of keys does not have."""

    def weights(self, q, k, *rest, **named):
        before = torch.nn.functional.pad(q, (0, 0, 1, 0))[:, :, :-1]
        return super().weights(q + before, k, *rest, **named)

    def mix(self, q, k, v, *rest, **named):
        return Mechanism.mix(self, q, k, v, *rest, **named)


class SquareOnly(Softmax):
    def weights(self, q, k, *rest, **named):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("only square attention")
        return super().weights(q, k, *rest, **named)

    def mix(self, q, k, v, *rest, **named):
        return Mechanism.mix(self, q, k, v, *rest, **named)


@pytest.mark.parametrize(
    ("name", "mechanism", "options", "message"),
    [
        ("bert", "sofmax", {}, "did you mean 'softmax'"),
        ("bert", "dagpam", {"inital": 0.0}, "did you mean 'initial'"),
        ("bert", "softmax", {"scale": 1.0}, "scale"),
        ("bert", "softmax", {"kinds": ["self"]}, "kind of attention 'self'"),
        ("bert", "softmax", {"kinds": ["encoder"]}, "'encoder'.*did you mean 'encoder-self'"),
        ("bert", "softmax", {"kinds": ()}, "kinds is empty"),
        ("bert", "softmax", {"kinds": ["cross"]}, "no cross attention"),
        ("bert", "dagpam", {"initial": torch.ones(2)}, "initial must be"),
        ("t5", "shaped", {}, r"kinds=\('encoder-self', 'decoder-self'\)"),
        ("gemma2", "differential-v2", {}, r"further queries.*cap of model\.layers\.0\.self_attn"),
        ("gpt_oss", "alibi", {}, r"ALiBi reads the position.*sink of model\.layers\.0\.self_attn"),
        ("gpt_oss", "fox", {}, r"FoX reads .*sink"),
        ("albert", "realformer", {}, "several layers"),
        ("llama", "differential", {}, r"rotates.*differential-v2"),
        ("modernbert", "softmax,differential,softmax", {}, r"layers\.1\.attn rotates"),
        ("gpt2", QueryConvolution, {}, "QueryConvolution.*cache"),
        ("marian", QueryConvolution, {"kinds": ["cross"]}, "QueryConvolution.*cache"),
        ("gpt2", SquareOnly, {}, "SquareOnly.*cache.*square"),
    ],
)
def test_what_cannot_be_adapted(name, mechanism, options, message):
    model = getattr(tiny_models, name)()
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    with pytest.raises((ValueError, TypeError), match=message):
        pretrained.adapt(model, mechanism, **options)
    assert not any(isinstance(module, Mechanism) for module in model.modules())
    assert torch.equal(output(model, batch), before)


def test_a_mechanism_that_cannot_be_built_leaves_the_model_alone():
    model = tiny("bert")
    with pytest.raises(ValueError, match=r"head_dim.*5"):
        pretrained.adapt(model, "differential")
    assert not hasattr(model.encoder.layer[0].attention.self, "attnlab")
    pretrained.adapt(model, "softmax")


def test_adapted_once_only():
    model = pretrained.adapt(tiny("bert"), "softmax")
    with pytest.raises(ValueError, match="already adapted"):
        pretrained.adapt(model, "dagpam")
    with pytest.raises(TypeError, match=r"Hugging Face.*str"):
        pretrained.adapt("bert", "dagpam")


def test_another_implementation_would_forget_the_mechanisms():
    model = pretrained.adapt(tiny("t5"), "softmax")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"'sdpa'.*set_attn_implementation\('attnlab'\)"):
        model(**tiny_models.padded_batch(model))
    model.set_attn_implementation("attnlab")
    model(**tiny_models.padded_batch(model))


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_would_be_empty(name):
    model = pretrained.adapt(tiny(name), "softmax")
    with pytest.raises(ValueError, match=r"output_attentions.*attnlab\.record"):
        model(**tiny_models.padded_batch(model), output_attentions=True)


def test_additive_masks_are_refused():
    model = pretrained.adapt(tiny("gpt2"), "softmax")
    with pytest.raises(ValueError, match=r"h\.0\.attn.*torch\.float64"):
        model(torch.ones(1, 3).long(), attention_mask=torch.zeros(1, 1, 3, 3).double())


def test_what_a_model_does_beside_softmax_is_found_by_the_dry_run(monkeypatch):
    file = transformers.models.bert.modeling_bert
    own = file.eager_attention_forward

    def sharpened(module, query, *rest, **named):
        return own(module, query * 1.5, *rest, **named)

    monkeypatch.setattr(file, "eager_attention_forward", sharpened)
    with pytest.raises(
        ValueError,
        match=r"BertModel.*encoder\.layer\.0\.attention\.self, plain softmax",
    ):
        pretrained.adapt(tiny("bert"), "dagpam")


def test_a_model_that_is_another_through_the_door_is_found_by_the_dry_run():
    model = tiny("bert")

    def otherwise(module, args):
        return args if model.config._attn_implementation == "eager" else (args[0] * 1.5, *args[1:])

    model.encoder.layer[1].register_forward_pre_hook(otherwise)
    with pytest.raises(ValueError, match=r"BertModel.*output"):
        pretrained.adapt(model, "dagpam")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_deep_model_is_not_refused_for_its_rounding(dtype):
    """In so many layers and large weights a last bit becomes the whole difference."""
    model = tiny_models.llama(num_hidden_layers=24, initializer_range=1.0).to(dtype)
    model = pretrained.adapt(model, "realformer")
    assert output(model, tiny_models.padded_batch(model)).isfinite().all()


def test_models_that_read_something_else_are_refused():
    model = tiny_models.vit()
    model.main_input_name = "time_series"
    with pytest.raises(ValueError, match=r"ViTModel reads time_series, but only .* pictures"):
        pretrained.adapt(model, "softmax")


def test_a_mechanism_that_mixes_queries_is_allowed_where_nothing_is_cached():
    model = pretrained.adapt(tiny("bert"), QueryConvolution)
    assert output(model, tiny_models.padded_batch(model)).isfinite().all()


def test_a_model_of_two_towers_needs_both_inputs():
    model = tiny_models.clip()
    with pytest.raises(ValueError, match=r"CLIPModel.*'NoneType'"):
        attnlab.record(model, tiny_models.padded_batch(model))
    adapted = pretrained.adapt(model.text_model, "dagpam")
    assert attnlab.record(adapted, tiny_models.padded_batch(model)).meta["mechanism"] == "dagpam"


def test_linear_attention_is_left_alone():
    model = pretrained.adapt(tiny_models.minimax(), "dagpam")
    assert [hasattr(layer.self_attn, "attnlab") for layer in model.model.layers] == [False, True, False]


def test_a_model_that_fails_is_named(monkeypatch):
    """As experts of odd sizes do on some devices."""

    def fail(*_, **__):
        raise RuntimeError("strides should be multiple of 16 bytes")

    model = tiny_models.minimax()
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", fail)
    for attempt in (lambda: pretrained.adapt(model, "softmax"), lambda: attnlab.record(model, {"input_ids": IDS})):
        with pytest.raises(ValueError, match=r"MiniMax.*RuntimeError: strides"):
            attempt()


def test_lazy_records_are_of_a_models_own_attention():
    model = pretrained.adapt(tiny("bert"), "softmax")
    with pytest.raises(ValueError, match="lazy"):
        attnlab.record(model, tiny_models.padded_batch(model), lazy=True)


def test_one_sampled_pass_of_an_adapted_model():
    model = pretrained.adapt(tiny("gpt2"), "coda")
    batch = tiny_models.padded_batch(model)
    mean, one, same, other = (attnlab.record(model, batch, noise=seed).layers[2].weights for seed in (None, 1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, mean, atol=1e-3)
    assert not torch.allclose(one, other, atol=1e-3)
