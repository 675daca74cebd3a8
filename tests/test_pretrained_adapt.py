"""Hugging Face models with another attention: what they compute, how they decode, train and come back from a folder."""

import copy
import json
import math
import re
from contextvars import ContextVar
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import eager_mask

import attnlab
from attnlab.huggingface import carries as cascade
from attnlab.huggingface import dispatch, pretrained
from attnlab.mechanisms import MECHANISMS, Mechanism, Softmax

MODELS = ("bert", "gpt2", "llama", "marian", "t5")
GENERATING = ("gpt2", "llama", "marian", "t5")
CARRYING = ("realformer", "coda")
EXACT = {"rtol": 0, "atol": 1e-9}


def tiny(name: str) -> transformers.PreTrainedModel:
    return getattr(tiny_models, name)().double()


def output(model, batch) -> torch.Tensor:
    """The first output at the tokens, not at the padding."""
    with torch.no_grad():
        return model(**batch)[0][batch.get("decoder_attention_mask", batch["attention_mask"]).bool()]


def attention_modules(model) -> list:
    return [module for module in model.modules() if hasattr(module, "attnlab_place")]


def place(module) -> cascade.Place:
    return module.attnlab_place


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


def shake(model) -> None:
    """Away from where the mechanisms' parameters begin."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Mechanism):
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))


class Outside(Softmax):
    pass


# ---------------------------------------------------------------------------------------------------- what it computes


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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_differential_scales_its_halves_as_the_model_scales_its_heads(name):
    """By 1/√(d/2) where the model has 1/√d; Gemma 3 has 1/16, with heads of 10."""
    plain = tiny(name)
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), "differential")
    shake(model)
    mechanisms = {place(m).name: m.attnlab for m in attention_modules(model)}

    def attend(name, query, key, value, scaling, bias, hidden):
        own, scale = mechanisms[name], scaling * 2**0.5
        halves = [(query[..., half] * scale) @ key[..., half].mT for half in (slice(0, 5), slice(5, 10))]
        first, second = ((half + hidden).softmax(-1) @ value for half in halves)
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


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_obeys_the_laws_of_the_record_and_decodes_with_a_cache(mechanism):
    model = pretrained.adapt(tiny("llama"), mechanism)
    shake(model)
    batch = tiny_models.padded_batch(model, "left")
    record = attnlab.record(model, batch)
    tokens = record.masks["target"]
    for layer in record.layers:
        torch.testing.assert_close(layer.weights @ layer.values, layer.context, **EXACT)
        made = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
        torch.testing.assert_close(made, layer.outputs, **EXACT)
        built = model.get_submodule(layer.name).attnlab
        torch.testing.assert_close(built.finish(layer.context), layer.mixed, **EXACT)
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
    monkeypatch.setattr(dispatch.native, "fused_refuses", lambda options: True)
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
def test_generating_with_a_cache_is_generating_without(name, mechanism):
    model = pretrained.adapt(tiny(name), mechanism)
    shake(model)
    side = "right" if model.config.is_encoder_decoder else "left"
    assert_same_generation(model, tiny_models.padded_batch(model, side))


@pytest.mark.parametrize("mechanism", ["softmax", "coda"])
def test_static_caches_and_beams(mechanism):
    model = pretrained.adapt(tiny("llama"), mechanism)
    shake(model)
    batch = tiny_models.padded_batch(model, "left")
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    growing = model.generate(**batch, **how)
    assert torch.equal(model.generate(**batch, **how, cache_implementation="static"), growing)
    assert_same_generation(model, batch, num_beams=3)


def test_a_static_cache_hides_which_key_is_a_querys_own():
    model = pretrained.adapt(tiny("llama"), "shaped")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: with a static cache, Shaped cannot know"):
        model.generate(
            **tiny_models.padded_batch(model, "left"), max_new_tokens=5, pad_token_id=0, cache_implementation="static"
        )


# ------------------------------------------------------------------------------------------------------------- carries


def test_caches_of_unequal_length_are_refused():
    model = pretrained.adapt(tiny("gemma3"), "realformer")
    batch = {"input_ids": torch.arange(3, 6)[None]}
    with pytest.raises(
        ValueError, match=r"layers\.\d\.self_attn hands on a carry of shape .*layers\.\d\.self_attn needs .*unequal"
    ):
        model.generate(**batch, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)


def test_layers_that_see_different_keys_do_not_carry():
    model = pretrained.adapt(tiny("gemma3"), "realformer")
    short, long = torch.arange(3, 7)[None], torch.arange(3, 12)[None]
    assert model(short).logits.isfinite().all()  # the window is longer than that
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn and model\.layers\.1\.self_attn see different keys"):
        model(long)


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
    monkeypatch.setattr(cascade, "_FLOW", ContextVar("of this test", default=None))
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
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.attn was called outside a call of its model"):
        model.transformer.h[0](torch.randn(1, 3, 15).double())


# ------------------------------------------------------------------------------------------------------------ training


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
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.attn runs without gradients.*\"use_reentrant\": False"):
        model(**tiny_models.padded_batch(model))


def test_checkpointing_by_hand_is_refused():
    """Its recomputation would begin without the carry."""
    model = pretrained.adapt(tiny("gpt2"), "realformer").train()
    layer, call = model.transformer.h[1], model.transformer.h[1].forward
    layer.forward = lambda *args, **named: checkpoint(call, *args, use_reentrant=False, **named)
    loss = model(**tiny_models.padded_batch(model))[0].sum()
    with pytest.raises(
        RuntimeError, match=r"h\.1\.attn was called outside a call of its model.*gradient_checkpointing_enable"
    ):
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


# -------------------------------------------------------------------------------------------------- copies and folders


@pytest.mark.parametrize("mechanism", ["dagpam", "realformer", "coda"])
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back_as_it_was(name, mechanism, tmp_path):
    options = {"alpha": 2} if mechanism == "coda" else {}
    model = pretrained.adapt(getattr(tiny_models, name)(), mechanism, **options)
    shake(model)
    model.save_pretrained(tmp_path)
    again = attnlab.load(tmp_path)
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(again, batch), output(model, batch))
    assert not any(module.training for module in again.modules())
    about = json.loads((tmp_path / "attnlab.json").read_text())
    assert (about["attention"], about["options"]) == (mechanism, options)
    assert about["versions"]["transformers"] == transformers.__version__
    twice = attnlab.record(str(tmp_path), batch).layers[0].weights
    assert torch.equal(twice, attnlab.record(model, batch).layers[0].weights)


def test_options_and_kinds_come_back(tmp_path):
    model = pretrained.adapt(tiny_models.marian(), "dagpam", kinds=["cross"], initial=(0.5, 0.25), tied=False)
    model.save_pretrained(tmp_path)
    again = attnlab.load(tmp_path)
    assert {place(m).kind for m in attention_modules(again)} == {"cross"}
    assert attention_modules(again)[0].attnlab.lambdas.flatten().tolist() == [0.5, 0.25]


def test_a_copy_is_a_model_of_its_own():
    model = pretrained.adapt(tiny("marian"), "coda")
    shake(model)
    batch = tiny_models.padded_batch(model)
    other = copy.deepcopy(model)
    before = output(model, batch)
    assert torch.equal(output(other, batch), before)
    shake(other)
    assert not torch.allclose(output(other, batch), before, atol=1e-3)
    assert torch.equal(output(model, batch), before)


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_a_pickled_model_is_the_same(name, tmp_path):
    model = pretrained.adapt(getattr(tiny_models, name)(), "coda")
    shake(model)
    torch.save(model, tmp_path / "model.pt")
    again, batch = torch.load(tmp_path / "model.pt", weights_only=False), tiny_models.padded_batch(model)
    assert torch.equal(output(again, batch), output(model, batch))
    shake(again)  # it saves itself, not the model it came from
    again.save_pretrained(tmp_path / "saved")
    assert torch.equal(output(attnlab.load(tmp_path / "saved"), batch), output(again, batch))
    with pytest.raises(ValueError, match="a part of an adapted model"):
        again.base_model.save_pretrained(tmp_path / "part")


MINE = """
import attnlab
from attnlab.mechanisms import Softmax

class Cooler(Softmax):
    def weights(self, q, k, *rest, **named):
        return super().weights(q / 2, k, *rest, **named)

    def mix(self, q, k, v, *rest, **named):
        return super().mix(q / 2, k, v, *rest, **named)
"""


def test_a_mechanism_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path}/mine.py:Cooler"
    model = pretrained.adapt(tiny_models.gpt2(), name)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"would run .*mine\.py:Cooler.*allow_code=True"):
        attnlab.load(tmp_path / "saved")
    again = attnlab.load(tmp_path / "saved", allow_code=True)
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(again, batch), output(model, batch))
    assert attnlab.record(model, batch).meta["mechanism"] == name
    with pytest.raises(ValueError, match="allow_code=True allows it"):
        attnlab.record(tmp_path / "saved", batch)
    assert attnlab.record(tmp_path / "saved", batch, allow_code=True).meta["mechanism"] == name


def test_a_class_is_saved_by_its_name_or_its_file(tmp_path):
    for mechanism, written in ((Softmax, "softmax"), (Outside, f"{__file__}:Outside")):
        pretrained.adapt(tiny_models.gpt2(), mechanism).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "attnlab.json").read_text())["attention"] == written

    class Inside(Softmax):
        pass

    model = pretrained.adapt(tiny_models.gpt2(), Inside)
    with pytest.raises(ValueError, match=r"could not find .*Inside again: put it at the top level"):
        model.save_pretrained(tmp_path / "inside")
    assert not (tmp_path / "inside").exists()


def test_weights_that_lack_the_mechanisms_are_refused(tmp_path):
    tiny_models.bert().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no attnlab\.json"):
        attnlab.load(tmp_path)
    about = {"format": "attnlab-adapted-1", "attention": "dagpam", "options": {}, "kinds": ["encoder-self"]}
    (tmp_path / "attnlab.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"its weights lack encoder\.layer\.0\.attention\.self\.attnlab\.lambdas"):
        attnlab.load(tmp_path)
    (tmp_path / "attnlab.json").write_text(json.dumps(about | {"format": "attnlab-adapted-9"}))
    with pytest.raises(ValueError, match="is of format 'attnlab-adapted-9'"):
        attnlab.load(tmp_path)


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", '{"format": "attnlab-adapted-1", "options": {}}'])
def test_a_broken_description_is_named(broken, tmp_path):
    tiny_models.bert().save_pretrained(tmp_path)
    (tmp_path / "attnlab.json").write_text(broken)
    for attempt in (attnlab.load, lambda folder: attnlab.record(folder, "the cat")):
        with pytest.raises(ValueError, match=r"attnlab\.json is not as save_pretrained wrote it \(.*save the adapted"):
            attempt(tmp_path)


def test_parameters_of_another_shape_are_refused(tmp_path):
    """Copied, one λ would silently become one for each head."""
    pretrained.adapt(tiny_models.bert(), "dagpam").save_pretrained(tmp_path)
    about = json.loads((tmp_path / "attnlab.json").read_text())
    (tmp_path / "attnlab.json").write_text(json.dumps(about | {"options": {"per_head": True}}))
    with pytest.raises(ValueError, match=r"attnlab\.lambdas of shape \(1, 1\), and the options .* make it \(1, 3\)"):
        attnlab.load(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_a_part_is_not_saved_without_the_whole(name, tmp_path):
    model = pretrained.adapt(getattr(tiny_models, name)(), "dagpam")
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"a part of an adapted model.*save_pretrained of the whole model"):
            one.base_model.save_pretrained(tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_saved_model_is_not_proved_again(tmp_path):
    """Whatever training made of its weights; here float16 cannot hold what they give."""
    model = pretrained.adapt(tiny_models.gpt2().half(), "dagpam")
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.mul_(1000.0)
    model.save_pretrained(tmp_path)
    again, batch = attnlab.load(tmp_path), tiny_models.padded_batch(model)
    assert output(model, batch).isnan().any()
    torch.testing.assert_close(output(again, batch), output(model, batch), rtol=0, atol=0, equal_nan=True)


def test_adapted_weights_are_not_mistaken_for_the_original(tmp_path):
    model = pretrained.adapt(tiny_models.bert(), "dagpam")
    model.save_pretrained(tmp_path)
    (tmp_path / "attnlab.json").unlink()
    with pytest.raises(ValueError, match=r"was adapted, but its attnlab\.json is missing"):
        attnlab.record(str(tmp_path), tiny_models.padded_batch(model))


def test_the_examples_in_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "hugging-face.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "mechanism", "options", "message"),
    [
        ("bert", "sofmax", {}, "did you mean 'softmax'"),
        ("bert", "dagpam", {"inital": 0.0}, "did you mean 'initial'"),
        ("bert", "softmax", {"scale": 1.0}, "scale: in an adapted model these come from the model"),
        ("bert", "softmax", {"kinds": ["self"]}, "no kind of attention is called 'self'"),
        ("bert", "softmax", {"kinds": ["encoder"]}, r"called 'encoder' \(did you mean 'encoder-self'\?\)"),
        ("bert", "softmax", {"kinds": ()}, "kinds is empty: name some of encoder-self, decoder-self, cross"),
        ("bert", "softmax", {"kinds": ["cross"]}, "no cross attention; it has encoder-self"),
        ("bert", "dagpam", {"initial": torch.ones(2)}, "could not be saved"),
        ("t5", "shaped", {}, r"say kinds=\('encoder-self', 'decoder-self'\)"),
        ("gemma2", "softmax", {}, r"layers\.0\.self_attn caps its logits \(softcap=3\.0\)"),
        ("gpt_oss", "softmax", {}, r"layers\.0\.self_attn passes the tensor 's_aux'"),
        ("albert", "realformer", {}, "is used by several layers"),
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
    with pytest.raises(ValueError, match="head_dim must be even, not 5"):
        pretrained.adapt(model, "differential")
    assert not hasattr(model.encoder.layer[0].attention.self, "attnlab")
    pretrained.adapt(model, "softmax")


def test_adapted_once_only():
    model = pretrained.adapt(tiny("bert"), "softmax")
    with pytest.raises(ValueError, match="adapted already"):
        pretrained.adapt(model, "dagpam")
    with pytest.raises(TypeError, match="not a Hugging Face model but a str"):
        pretrained.adapt("bert", "dagpam")


def test_another_implementation_would_forget_the_mechanisms():
    model = pretrained.adapt(tiny("t5"), "softmax")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"implementation is now 'sdpa'.*set_attn_implementation\('attnlab'\)"):
        model(**tiny_models.padded_batch(model))
    model.set_attn_implementation("attnlab")
    model(**tiny_models.padded_batch(model))


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_would_be_empty(name):
    model = pretrained.adapt(tiny(name), "softmax")
    with pytest.raises(ValueError, match=r"no attentions under output_attentions: attnlab\.record shows them"):
        model(**tiny_models.padded_batch(model), output_attentions=True)


def test_additive_masks_are_refused():
    model = pretrained.adapt(tiny("gpt2"), "softmax")
    with pytest.raises(ValueError, match=r"h\.0\.attn was given a mask of torch\.float64, not bool"):
        model(torch.ones(1, 3).long(), attention_mask=torch.zeros(1, 1, 3, 3).double())


def test_what_a_model_does_beside_softmax_is_found_by_the_dry_run(monkeypatch):
    file = transformers.models.bert.modeling_bert
    own = file.eager_attention_forward

    def sharpened(module, query, *rest, **named):
        return own(module, query * 1.5, *rest, **named)

    monkeypatch.setattr(file, "eager_attention_forward", sharpened)
    with pytest.raises(
        ValueError,
        match=r"BertModel cannot be adapted faithfully: in encoder\.layer\.0\.attention\.self, plain softmax",
    ):
        pretrained.adapt(tiny("bert"), "dagpam")


def test_a_model_that_is_another_through_the_door_is_found_by_the_dry_run():
    model = tiny("bert")

    def otherwise(module, args):
        return args if model.config._attn_implementation == "eager" else (args[0] * 1.5, *args[1:])

    model.encoder.layer[1].register_forward_pre_hook(otherwise)
    with pytest.raises(ValueError, match="BertModel cannot be adapted faithfully: through this door, its output"):
        pretrained.adapt(model, "dagpam")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_deep_model_is_not_refused_for_its_rounding(dtype):
    """In so many layers and large weights a last bit becomes the whole difference."""
    model = tiny_models.llama(num_hidden_layers=24, initializer_range=1.0).to(dtype)
    model = pretrained.adapt(model, "realformer")
    assert output(model, tiny_models.padded_batch(model)).isfinite().all()


def test_models_that_read_no_tokens_are_refused():
    with pytest.raises(ValueError, match="ViTModel reads pixel_values, and only models that read tokens can be"):
        pretrained.adapt(tiny_models.vit(), "softmax")


def test_lazy_records_are_of_a_models_own_attention():
    model = pretrained.adapt(tiny("bert"), "softmax")
    with pytest.raises(ValueError, match="this model was adapted: record it without lazy"):
        attnlab.record(model, tiny_models.padded_batch(model), lazy=True)


def test_one_sampled_pass_of_an_adapted_model():
    model = pretrained.adapt(tiny("gpt2"), "coda")
    batch = tiny_models.padded_batch(model)
    mean, one, same, other = (attnlab.record(model, batch, noise=seed).layers[2].weights for seed in (None, 1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, mean, atol=1e-3)
    assert not torch.allclose(one, other, atol=1e-3)
