"""Gates, norms, adapters and quantised weights between the context of a Hugging Face model and its output."""

import copy
from dataclasses import replace

import pytest
import tiny_models
import torch
from torch import nn

import attnlab
from attnlab.huggingface import dispatch, pretrained
from attnlab.huggingface.decomposition import decompose
from attnlab.huggingface.effects import measure_effect, rank_heads
from attnlab.recording.interventions import KnockOutHead, PatchHead, Steer
from attnlab.records.record import Record, apply_turning

CLOSE = {"rtol": 0, "atol": 1e-5}


def record_last(model):
    """The last layer that attends, and its attention module."""
    layer = pretrained.record(model, tiny_models.padded_batch(model)).layers[-1]
    return layer, model.get_submodule(layer.name)


def assert_complete(layer) -> None:
    """Σ_j α (v A) W + b is what the output projection returned."""
    context = apply_turning(layer.turning, layer.weights @ layer.values)
    made = torch.einsum("bhid,hde->bie", context, layer.output_weight)
    made = made if layer.output_bias is None else made + layer.output_bias
    torch.testing.assert_close(made, layer.outputs, **CLOSE)


def test_an_elementwise_gate_by_hand():
    model = tiny_models.qwen3_next()
    layer, module = record_last(model)
    _, gate = module.q_proj(layer.inputs).unflatten(-1, (6, 16)).chunk(2, dim=-1)  # (b,i,h,d)
    torch.testing.assert_close(layer.turning, gate.sigmoid().transpose(1, 2), **CLOSE)
    assert_complete(layer)


def test_layers_of_a_hybrid_model_have_its_own_numbers(tmp_path):
    model = tiny_models.qwen3_next(["linear_attention", "full_attention", "linear_attention", "full_attention"])
    batch = tiny_models.padded_batch(model)
    record = pretrained.record(model, batch)
    assert record.meta["unrecorded"] == "2 of 4 layers (linear_attention): 0, 2"
    record.save(tmp_path / "record.safetensors")
    for one in (record, Record.load(tmp_path / "record.safetensors")):
        assert one.places == [("decoder-self", 1), ("decoder-self", 3)]
        table = attnlab.contribution(one, level="layer", layers=[3])
        assert table["layer"].unique().tolist() == [3]
        with pytest.raises(ValueError, match="no layer 2; its layers are 1, 3"):
            attnlab.contribution(one, layers=[2])
    states = dispatch.run_forward(model.base_model, batch, output_hidden_states=True).hidden_states
    with attnlab.intervene(model, KnockOutHead(layer=3, head=0)):
        changed = dispatch.run_forward(model.base_model, batch, output_hidden_states=True).hidden_states
    assert [torch.equal(x, y) for x, y in zip(states, changed, strict=True)] == [True, True, True, True, False]
    for wrong in (0, 2, 4):
        with pytest.raises(ValueError, match=f"no layer {wrong}; the decoder-self layers are 1, 3"):
            measure_effect(model, batch, KnockOutHead(layer=wrong, head=0))
    assert measure_effect(model, batch, PatchHead(layer=3, head=0, record=record)).distance < 1e-6
    other = replace(record, layers=record.layers[:1])
    with pytest.raises(ValueError, match="no decoder-self layer 3"):
        measure_effect(model, batch, PatchHead(layer=3, head=0, record=other))
    ranked = rank_heads(model, batch)
    assert sorted(ranked["layer"].unique()) == [1, 3]


def test_layers_of_two_towers_have_different_numbers():
    model = tiny_models.siglip()
    ids, pixels = torch.arange(3, 9)[None], torch.randn(1, 3, *[model.config.vision_config.image_size] * 2)
    record = pretrained.record(model, {"input_ids": ids, "pixel_values": pixels})
    count = sum(each.num_hidden_layers for each in (model.config.text_config, model.config.vision_config))
    assert record.places == [("encoder-self", number) for number in range(count)]
    assert record.meta["unrecorded"] == "vision_model.head.attention (torch.nn.MultiheadAttention)"


def test_a_mechanism_in_a_gated_model_is_turned_by_both():
    model = pretrained.adapt(tiny_models.qwen3_next(), "gated", per="element")
    layer, module = record_last(model)
    _, gate = module.q_proj(layer.inputs).unflatten(-1, (6, 16)).chunk(2, dim=-1)
    side = module.attnlab.query_side(layer.inputs)
    ours = module.attnlab.turn(torch.ones_like(layer.context), layer.values, None, (side, None))
    torch.testing.assert_close(layer.turning, gate.sigmoid().transpose(1, 2) * ours, **CLOSE)
    assert_complete(layer)


def test_a_norm_by_hand():
    model = tiny_models.bitnet()
    layer, module = record_last(model)
    flat = layer.context.transpose(1, 2).flatten(2)
    scale = (flat.square().mean(-1, keepdim=True) + module.attn_sub_norm.variance_epsilon).rsqrt()
    expected = (scale * module.attn_sub_norm.weight).unflatten(-1, (6, 4)).transpose(1, 2)
    torch.testing.assert_close(layer.turning, expected, **CLOSE)
    assert_complete(layer)


def test_differential_weights_by_hand():
    model = tiny_models.diffllama()
    batch = tiny_models.padded_batch(model)
    layer, module = record_last(model)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = eager(**batch, output_attentions=True).attentions[-1].chunk(2, dim=1)
    pairs = ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    one, two = (torch.exp(q @ k) for q, k in pairs)
    expected = first - (one - two + module.lambda_init) * second
    torch.testing.assert_close(layer.weights, expected, **CLOSE)
    assert layer.weights.shape[1] == 2
    assert_complete(layer)


def test_linear_attention_by_hand():
    """MiniMax: w_ij = q_i·k_j exp(−s (i − j)), over more than one of its blocks of 4."""
    model = tiny_models.minimax()
    batch = tiny_models.padded_batch(model)
    record = pretrained.record(model, batch)
    layer, module = record.layers[0], model.model.layers[0].self_attn
    assert len(record.layers) == 3
    mixed = module.act_fn(module.qkv_proj(layer.inputs)) * batch["attention_mask"][..., None]
    q, k, _ = mixed.unflatten(-1, (6, 3, 10))[0].unbind(-2)  # (n,h,d)
    for i, j in ((0, 0), (10, 3), (7, 6)):
        expected = (q[i] * k[j]).sum(-1) * torch.exp(-module.slope_rate[:, 0, 0] * (i - j))
        torch.testing.assert_close(layer.weights[0, :, i, j], expected, **CLOSE)
    assert not layer.weights[0].triu(1).any()
    assert_complete(layer)
    lazy = pretrained.record(model, batch, lazy=True).layers[0]
    torch.testing.assert_close(lazy.rows(5, 9), layer.rows(5, 9), **CLOSE)


class Gate(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, x):
        return self.gate(x)


@pytest.mark.parametrize(
    ("gate", "turning"),
    [(lambda x: 0.5 * x, 0.5), (lambda x: x * torch.linspace(1, 2, 60), None), (lambda x: x + 3, 1)],
)
def test_what_is_affine_before_the_output_projection(gate, turning):
    model = tiny_models.llama()
    attention = model.model.layers[2].self_attn
    attention.o_proj = nn.Sequential(Gate(gate), attention.o_proj).eval()
    layer, _ = record_last(model)
    assert turning is None or torch.equal(layer.turning, torch.full((3, 6, 11, 1), float(turning)))
    assert_complete(layer)


@pytest.mark.parametrize("gate", [lambda x: x * x, nn.LayerNorm(60), lambda x: x.roll(1, -1), lambda x: x.cumsum(1)])
def test_what_is_not_a_factor_of_each_number_is_refused(gate):
    model = tiny_models.llama()
    attention = model.model.layers[1].self_attn
    attention.o_proj = nn.Sequential(Gate(gate), attention.o_proj).eval()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn is not supported: .*more than a gate"):
        pretrained.record(model, tiny_models.padded_batch(model))


class LowRank(nn.Module):
    """A linear map with an adapter beside it, named as PEFT names it."""

    def __init__(self, base_layer, curved=False):
        super().__init__()
        self.base_layer, self.curved = base_layer, curved

    def forward(self, x):
        more = x.sum(-1, keepdim=True)
        return self.base_layer(x) + (more.square() if self.curved else more)


class Int8Linear(nn.Module):
    """A weight of 8 bits with one scale for each output, as quantised linear maps have."""

    def __init__(self, linear, steps=None):
        super().__init__()
        self.steps = steps  # of its inputs, if it rounds them
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = nn.Buffer(linear.weight.abs().amax(1, keepdim=True) / 127)
        self.codes = nn.Buffer((linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        if self.steps is not None:
            scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / self.steps
            x = (x / scale).round() * scale
        return x @ (self.codes.to(x.dtype) * self.scale.to(x.dtype)).T


@pytest.mark.parametrize("kind", [LowRank, Int8Linear])
def test_an_output_projection_is_recorded_as_what_it_does(kind):
    model = tiny_models.llama()
    attention = model.model.layers[2].self_attn
    plain = attention.o_proj.weight.detach().T.unflatten(0, (6, 10))
    attention.o_proj = kind(attention.o_proj).eval()
    record = pretrained.record(model, tiny_models.padded_batch(model))
    layer = record.layers[2]
    if kind is LowRank:
        torch.testing.assert_close(layer.output_weight, plain + 1, **CLOSE)
        assert record.meta["output_projection"].startswith("with its adapters")
    else:
        assert 0 < (layer.output_weight - plain).abs().max() < 0.01
        assert record.meta["output_projection"] == "dequantised from Int8Linear"
    made = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
    torch.testing.assert_close(made, layer.outputs, **CLOSE)
    batch, vector = tiny_models.padded_batch(model), torch.linspace(-1, 1, layer.outputs.shape[-1])
    with torch.no_grad():
        with attnlab.intervene(model, Steer(layer=2, vector=vector)):
            steered = model(**batch, use_cache=False).logits
        attention.o_proj.register_forward_hook(lambda _m, _a, output: output + vector)
        torch.testing.assert_close(steered, model(**batch, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_quantised_map_that_rounds_its_inputs_says_by_how_much():
    model = tiny_models.llama()
    batch, attention = tiny_models.padded_batch(model), model.model.layers[2].self_attn
    own = attention.o_proj
    attention.o_proj = Int8Linear(own, steps=127).eval()
    record = pretrained.record(model, batch)
    layer = record.layers[2]
    error = (torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight) - layer.outputs).abs().max()
    assert 1e-3 < error < 0.1
    assert f"differ from this matrix by up to {error:.2g}" in record.meta["output_projection"]
    attention.o_proj = Int8Linear(own, steps=3).eval()
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn.*does not return"):
        attnlab.record(model.eval(), {name: x.clone() for name, x in batch.items()})


def test_an_adapter_that_is_not_linear_is_refused():
    model = tiny_models.llama()
    attention = model.model.layers[1].self_attn
    attention.o_proj = LowRank(attention.o_proj, curved=True).eval()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*does not return"):
        pretrained.record(model, tiny_models.padded_batch(model))


def test_adapters_of_peft_are_applied():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = tiny_models.llama()
    batch, options = tiny_models.padded_batch(model), {"target_modules": ["q_proj", "o_proj"], "r": 3}
    plain = pretrained.record(model, batch).layers[2]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False)).eval()
    record = attnlab.record(adapted, batch)
    whole = copy.deepcopy(adapted).merge_and_unload().eval()
    merged = attnlab.record(whole, batch).layers[2]
    assert record.meta["adapters"] == "default (LORA)"
    assert record.meta["output_projection"] == "with its adapters (lora)"
    with adapted.disable_adapter():
        off = attnlab.record(adapted, batch)
    assert "adapters" not in off.meta
    torch.testing.assert_close(off.layers[2].output_weight, plain.output_weight, **CLOSE)
    adapted.add_adapter("second", peft.LoraConfig(**options, init_lora_weights=False))
    adapted.set_adapter("second")
    assert attnlab.record(adapted.eval(), batch).meta["adapters"] == "second (LORA)"
    adapted.set_adapter("default")
    torch.testing.assert_close(record.layers[2].output_weight, merged.output_weight, **CLOSE)
    torch.testing.assert_close(record.layers[2].weights, merged.weights, **CLOSE)
    assert (merged.output_weight - plain.output_weight).abs().max() > 0.01
    change = Steer(layer=1, vector=torch.ones(merged.outputs.shape[-1])), KnockOutHead(layer=2, head=1)
    effect, expected = (measure_effect(each, batch, *change) for each in (adapted, whole))
    torch.testing.assert_close(effect.changed_logits, expected.changed_logits, rtol=1e-4, atol=1e-4)
    assert decompose(adapted, {name: x[:1] for name, x in batch.items()}).error < 1e-5
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PROMPT_TUNING adds tokens"):
        attnlab.record(peft.get_peft_model(tiny_models.llama(), tuned).eval(), batch)
