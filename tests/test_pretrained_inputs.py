"""Hugging Face models whose mechanisms read more than q, k and v: the layer's input, former queries, more queries."""

import copy

import pytest
import tiny_models
import torch
from adapted_models import EXACT, assert_decodes, assert_translates, attention_modules, output, place, shake, tiny
from torch.nn import functional as F

import attnlab
from attnlab.huggingface import pretrained
from attnlab.mechanisms import MECHANISMS, Mechanism, Softmax, attention
from attnlab.mechanisms.mechanism import logits, masked_softmax
from attnlab.records.record import apply_turning


class Second(MECHANISMS["differential-v2"]):
    """Softmax of the second queries alone."""

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, sides=(None, None)):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        bias = None if bias is None else bias[:, 1::2]
        return masked_softmax(logits(q[:, 1::2], k, self.scale, bias), seen), None

    mix = Mechanism.mix


class Delayed(Softmax):
    """Adds the gated logits of the two queries before."""

    lookback = 2

    def __init__(self, heads, head_dim, **base) -> None:
        super().__init__(heads, head_dim, **base)
        self.gate, self.share = torch.nn.Linear(self.model_size, heads), torch.nn.Parameter(torch.tensor([0.5, -0.3]))

    def query_side(self, x):
        return self.gate(x).sigmoid().transpose(1, 2).unsqueeze(-1)

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None, sides=(None, None)):
        seen = self.visible(q, k, mask, causal=causal, at=at)
        z = sides[0] * logits(q, k, self.scale, bias).masked_fill(~seen, 0.0)
        former = (self.share[n - 1] * F.pad(z, (0, 0, n, 0))[:, :, :-n] for n in (1, 2))
        return masked_softmax(z + sum(former), seen), None

    mix = Mechanism.mix


def is_wide(name: str) -> bool:
    built = attention(name, heads=2, head_dim=4)
    return built.needs_layer or built.carry_of == "keys" or type(built).turn is not Mechanism.turn


WIDE = [*filter(is_wide, MECHANISMS), Delayed]
every_wide = pytest.mark.parametrize("mechanism", WIDE)


def adapted(name: str, mechanism, **options):
    """An adapted model in double precision, away from initial values; self-attention only where there is no other."""
    model = tiny(name)
    kind = MECHANISMS[mechanism] if isinstance(mechanism, str) else mechanism
    if kind.self_only and model.config.is_encoder_decoder:
        options["kinds"] = ("encoder-self", "decoder-self")
    pretrained.adapt(model, mechanism, **options)
    shake(model)
    return model


@every_wide
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_decoding_with_a_cache_is_decoding_without(name, mechanism):
    model = adapted(name, mechanism)
    batch = tiny_models.padded_batch(model, "left")
    assert_decodes(model, batch["input_ids"], batch["attention_mask"])


@every_wide
def test_translating_with_a_cache_is_translating_without(mechanism):
    model = adapted("marian", mechanism)
    assert_translates(model, tiny_models.padded_batch(model))


def test_further_queries_get_the_position_bias_of_their_head():
    model = adapted("t5", "differential-v2")
    assert_translates(model, tiny_models.padded_batch(model))
    model = pretrained.adapt(tiny("t5"), Second)
    batch = tiny_models.padded_batch(model)
    copy_queries(model)
    torch.testing.assert_close(output(model, batch), output(tiny("t5"), batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["fox", "resformer", "differential-v2"])
@pytest.mark.parametrize("name", ["gemma3", "phi3", "deepseek"])
def test_windows_fused_projections_and_compressed_keys(name, mechanism):
    model = adapted(name, mechanism)
    assert_decodes(model, torch.arange(3, 23).view(2, 10))


def test_every_layer_reads_what_its_own_mechanism_needs(tmp_path):
    model = pretrained.adapt(tiny("llama"), "fox,differential-v2,multi-token")
    shake(model)
    assert_decodes(model, torch.arange(3, 23).view(2, 10))
    model.float().save_pretrained(tmp_path)
    batch = tiny_models.padded_batch(model)
    torch.testing.assert_close(output(attnlab.load(tmp_path), batch), output(model, batch), rtol=0, atol=1e-3)


@torch.no_grad()
def test_a_cache_is_copied_with_what_it_keeps():
    """As for a prompt that several texts continue. What was not kept cannot be cropped away."""
    model, tokens = adapted("llama", Delayed), torch.arange(3, 13)[None]
    cache = model(tokens[:, :6], use_cache=True).past_key_values
    for each in (copy.deepcopy(cache), cache):
        rest = model(tokens[:, 6:], past_key_values=each, use_cache=True).logits
        torch.testing.assert_close(rest, model(tokens).logits[:, 6:], **EXACT)
    with pytest.raises(ValueError, match="cropped"):
        cache.crop(-1)


@pytest.mark.parametrize("static", [None, "static"])
@pytest.mark.parametrize("mechanism", ["fox", "resformer", "differential-v2", Delayed])
@pytest.mark.parametrize("name", ["llama", "marian"])
def test_beams_reorder_what_the_cache_keeps(name, mechanism, static):
    model = adapted(name, mechanism)
    batch = tiny_models.padded_batch(model, "right" if name == "marian" else "left")
    inputs = {key: value for key, value in batch.items() if not key.startswith("decoder")}
    how = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 3, "do_sample": False, "eos_token_id": None}
    how |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True, "disable_compile": True}
    plain = model.generate(**inputs, **how, use_cache=False)
    cached = model.generate(**inputs, **how, cache_implementation=static)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=0, atol=1e-6)


@every_wide
def test_a_saved_model_comes_back(mechanism, tmp_path):
    model = adapted("gpt2", mechanism).float()
    model.save_pretrained(tmp_path)
    batch = tiny_models.padded_batch(model)
    again = attnlab.load(tmp_path, allow_code=True)
    assert torch.equal(output(again, batch), output(model, batch))


@every_wide
@pytest.mark.parametrize("name", ["bert", "marian"])
def test_what_is_recorded_adds_up(name, mechanism):
    """Weights · values is the context, and what each key contributes sums to the output, through a gate too."""
    model = adapted(name, mechanism)
    batch = tiny_models.padded_batch(model)
    record = attnlab.record(model, batch)
    for layer in record.layers:
        torch.testing.assert_close(layer.weights @ layer.values, layer.context, **EXACT)
        held = getattr(model.get_submodule(layer.name), "attnlab", None)
        if held is None or type(held).finish is not Mechanism.finish:
            continue
        parts = layer.weights.unsqueeze(-1) * layer.values.unsqueeze(2)  # (b,h,i,j,d)
        if layer.turning is not None:
            parts = torch.stack([apply_turning(layer.turning, part) for part in parts.unbind(3)], dim=3)
        made = torch.einsum("bhijd,hde->bie", parts, layer.output_weight)
        made = made if layer.output_bias is None else made + layer.output_bias
        torch.testing.assert_close(made, layer.outputs, **EXACT)


@pytest.mark.parametrize("mechanism", ["gated", "fox", "resformer", "differential-v2", Delayed])
def test_checkpointing_does_not_change_gradients(mechanism):
    model = adapted("llama", mechanism).train()
    batch = tiny_models.padded_batch(model)
    model(**batch)[0].sin().sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for module in attention_modules(model):
        for name, parameter in module.named_parameters():
            if "attnlab" in name and parameter.requires_grad:
                assert parameter.grad.abs().sum() > 0, name
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch)[0].sin().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-9, atol=1e-9)


def forget_nothing(held) -> None:
    held.forget.bias.fill_(1000.0)


def keep_own_values(held) -> None:
    held.lambdas.copy_(torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(("mechanism", "neutralise"), [("fox", forget_nothing), ("resformer", keep_own_values)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert", "marian"])
def test_neutral_parameters_change_nothing(name, mechanism, neutralise):
    plain = tiny(name)
    batch = tiny_models.padded_batch(plain)
    model = adapted(name, mechanism)
    with torch.no_grad():
        for module in attention_modules(model):
            neutralise(module.attnlab)
    torch.testing.assert_close(output(model, batch), output(plain, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "phi3", "bert", "marian"])
def test_further_queries_go_the_way_of_the_models_own(name):
    """Second queries alone, with the weights of the first: whatever the model does to queries must happen to them."""
    plain = tiny(name)
    batch = tiny_models.padded_batch(plain)
    model = pretrained.adapt(copy.deepcopy(plain), Second)
    before = output(model, batch)
    copy_queries(model)
    torch.testing.assert_close(output(model, batch), output(plain, batch), rtol=0, atol=1e-6)
    assert not torch.allclose(before, output(plain, batch), atol=1e-3)


@torch.no_grad()
def copy_queries(model) -> None:
    """Give the further queries the weights of the model's own."""
    for module in attention_modules(model):
        names = ("q_proj", "qkv_proj", "c_attn", "query", "q")
        own = next(getattr(module, name) for name in names if hasattr(module, name))
        features = place(module).query_features
        weight = own.weight if isinstance(own, torch.nn.Linear) else own.weight.T  # a Conv1D has it transposed
        module.attnlab_queries.weight.copy_(weight[features])
        if own.bias is not None:
            module.attnlab_queries.bias.copy_(own.bias[features])


# ----------------------------------------------------------------------------------------------------- what is refused


class Odd(MECHANISMS["differential-v2"]):
    @property
    def query_heads(self) -> int:
        return self.heads + 1


class Wrapper(torch.nn.Module):
    """Holds the original and a copy, and hands everything on to the copy, as PEFT's wrapper does."""

    def __init__(self, original) -> None:
        super().__init__()
        self.original_module, self.copy = original, copy.deepcopy(original)

    def forward(self, *args, **named):
        return self.copy(*args, **named)

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("original_module", "copy") else getattr(self.copy, name)


@pytest.mark.parametrize(
    ("name", "mechanism", "message"),
    [
        ("gpt2", Odd, "4 query heads.*multiple"),
        ("gemma3", Delayed, r"former queries.*sliding window of model\.layers\.0"),
        ("t5", Delayed, "former queries.*position bias"),
        ("deepseek", "gated", r"Gated does not fit model\.layers\.0\.self_attn: its values have heads of size 5"),
    ],
)
def test_what_a_model_cannot_give_is_refused(name, mechanism, message):
    model = tiny(name)
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    with pytest.raises(ValueError, match=message):
        pretrained.adapt(model, mechanism)
    assert torch.equal(output(model, batch), before)
    assert not attention_modules(model)


def test_queries_without_a_projection_of_their_own_are_refused(monkeypatch):
    from attnlab.huggingface import query_projection

    monkeypatch.setattr(query_projection, "is_linear", lambda module: False)
    with pytest.raises(ValueError, match=r"h\.0\.attn has no linear map of its queries"):
        pretrained.adapt(tiny("gpt2"), "differential-v2")


class LowRank(torch.nn.Module):
    """Adds a low-rank map to a linear one, as LoRA does."""

    def __init__(self, base) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False).to(base.weight)
        self.up = torch.nn.Linear(2, base.out_features, bias=False).to(base.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def replace_linear(base):
    return torch.nn.Linear(base.in_features, base.out_features, bias=False).to(base.weight)


@pytest.mark.parametrize("change", [LowRank, replace_linear])
def test_a_query_projection_that_was_wrapped_or_replaced_is_refused(change):
    """What is added to the model's own queries must not be added to the further ones."""
    model = adapted("llama", "differential-v2")
    batch = tiny_models.padded_batch(model)
    before = output(model, batch)
    attention = model.model.layers[1].self_attn
    own, attention.q_proj = attention.q_proj, change(attention.q_proj)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj"):
        output(model, batch)
    attention.q_proj = own
    assert torch.equal(output(model, batch), before)
    assert torch.equal(output(copy.deepcopy(model), batch), before)


def test_a_wrapped_query_projection_gets_no_further_queries():
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj = LowRank(model.model.layers[1].self_attn.q_proj)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn has no linear map"):
        pretrained.adapt(model, "differential-v2")


def test_a_cache_of_another_model_is_refused():
    plain, model = tiny("llama"), adapted("llama", "fox")
    tokens = torch.arange(3, 7)[None]
    cache = plain(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache"):
        model(tokens[:, :1], past_key_values=cache)


def test_a_layer_that_runs_without_its_hooks_is_refused():
    model = adapted("gpt2", "gated")
    with pytest.raises(RuntimeError, match=r"h\.0\.attn runs without its hooks"):
        model.transformer.h[0].attn.forward(torch.randn(1, 3, 15).double())


@pytest.mark.parametrize("mechanism", ["fox", "gated", "differential-v2"])
def test_a_wrapped_mechanism_reads_its_inputs(mechanism):
    model = adapted("gpt2", mechanism)
    for module in attention_modules(model):
        module.attnlab = Wrapper(module.attnlab).eval()
    shake(model)  # the copy, not only the original
    batch = tiny_models.padded_batch(model)
    wrapped, record = output(model, batch), attnlab.record(model, batch)
    for module in attention_modules(model):
        module.attnlab = module.attnlab.copy
    assert torch.equal(output(model, batch), wrapped)
    assert torch.equal(attnlab.record(model, batch).layers[1].weights, record.layers[1].weights)
    assert_decodes(model, batch["input_ids"][:1])
