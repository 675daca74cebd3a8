"""Records of Hugging Face models: their weights are those of the models' own eager attention, lazily too."""

import copy

import pytest
import tiny_models
import torch
import transformers
from adapted_models import make_double
from largest_tensor import LargestTensor

import attnlab
from attnlab.huggingface import native, pretrained
from attnlab.records.record import KINDS, Record

ENCODER_DECODERS = ("marian", "t5")
ENCODERS = ("bert", "roberta", "albert", "modernbert")
DECODERS = ("gpt2", "llama", "gemma", "gemma2", "gemma3", "gpt_oss")
MODELS = (*ENCODERS, *DECODERS, *ENCODER_DECODERS)
TEXTS = ["the cat sat on the mat .", "nobody saw it"]


def tiny(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    model = getattr(tiny_models, name)()
    return make_double(model) if dtype == torch.float64 else model.to(dtype)


def eager_attentions(model, batch) -> dict[str, list[torch.Tensor]]:
    """The model's own weights by kind of layer, from transformers alone."""
    model = copy.deepcopy(model)
    tiny_models.set_implementation(model, "eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    if model.config.is_encoder_decoder:
        names = {
            "encoder-self": "encoder_attentions",
            "decoder-self": "decoder_attentions",
            "cross": "cross_attentions",
        }
    else:
        names = {"decoder-self" if model.can_generate() else "encoder-self": "attentions"}
    return {kind: list(output[name]) for kind, name in names.items()}


def hooks(model) -> list:
    """Those of attnlab; transformers leaves its own behind when it was asked for attentions."""
    both = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook for hook in both if hook.__module__.startswith("attnlab")]


def of_tokens(record: Record, layer, weights: torch.Tensor) -> torch.Tensor:
    """The rows whose queries are tokens, not padding."""
    return weights.transpose(1, 2)[record.masks[KINDS[layer.kind][0]]]


def law_of_contexts(layer) -> float:
    return (layer.weights @ layer.values - layer.context).abs().max().item()


def law_of_outputs(layer) -> float:
    made = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
    made = made if layer.output_bias is None else made + layer.output_bias
    return (made - layer.outputs).abs().max().item()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_eager_attention(name, side):
    model = tiny(name)
    batch = tiny_models.padded_batch(model, side)
    record, expected = pretrained.record(model, batch), eager_attentions(model, batch)
    assert {kind: len(record.kind(kind)) for kind in expected} == {kind: len(own) for kind, own in expected.items()}
    for layer in record.layers:
        torch.testing.assert_close(layer.weights, expected[layer.kind][layer.index], rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_lazy_weights_are_those_of_eager_attention(name, side, monkeypatch):
    monkeypatch.setattr(native, "ROWS", 3)
    model = tiny(name)
    batch = tiny_models.padded_batch(model, side)
    record, expected = pretrained.record(model, batch, lazy=True), eager_attentions(model, batch)
    assert all(layer.lazy for layer in record.layers)
    for layer in record.layers:
        whole = of_tokens(record, layer, layer.weights)
        torch.testing.assert_close(
            whole, of_tokens(record, layer, expected[layer.kind][layer.index]), rtol=0, atol=1e-6
        )
        parts = torch.cat([part for _, part in layer.chunks(5)], dim=2)
        torch.testing.assert_close(parts, layer.weights, rtol=0, atol=1e-6)
        assert law_of_contexts(layer) < 1e-5


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_laws(name, lazy):
    model = tiny(name)
    record = pretrained.record(model, tiny_models.padded_batch(model), lazy=lazy)
    for layer in record.layers:
        assert law_of_contexts(layer) < 1e-5, layer.name
        assert law_of_outputs(layer) < 1e-5, layer.name
        hidden = ~layer.mask.expand(*layer.weights[:, :1].shape)
        assert not of_tokens(record, layer, layer.weights.masked_fill(~hidden, 0.0)).any(), "weights on hidden keys"


@pytest.mark.parametrize("name", MODELS)
def test_inputs_and_outputs_are_those_of_the_attention_module(name):
    """Found by name here, as a user would: the states that go into the attention, and W_O by its own module."""
    model = tiny(name)
    batch = tiny_models.padded_batch(model)
    seen = []
    names = {layer.name for layer in pretrained.record(model, batch).layers}
    for module_name, module in model.named_modules():
        if module_name in names:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
    proved_already = pretrained.record(model, batch)
    assert len(seen) == len(proved_already.layers), "a model is proved once"
    for layer, states in zip(proved_already.layers, seen, strict=True):
        assert torch.equal(layer.inputs, states)
        assert layer.outputs.shape[:2] == states.shape[:2]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_it_was(name):
    model = tiny(name)
    batch = tiny_models.padded_batch(model)
    before, own = model.config._attn_implementation, model(**batch)[0]
    for lazy in (False, True):
        pretrained.record(model, batch, lazy=lazy)
    assert model.config._attn_implementation == before
    assert torch.equal(model(**batch)[0], own)
    assert hooks(model) == []


def test_a_failing_pass_leaves_the_model_as_it_was():
    model = tiny("gpt2")
    batch = tiny_models.padded_batch(model) | {"position_ids": torch.full((3, 11), 53)}  # one beyond the last
    with pytest.raises(ValueError, match="IndexError"):
        pretrained.record(model, batch)
    assert model.config._attn_implementation == "sdpa"
    assert hooks(model) == []


def test_unpadded_causal_lazy_record_needs_no_mask_from_the_model():
    """Under sdpa such a batch has no mask: only the module says that it is causal."""
    model = tiny("llama", torch.float64)
    batch = {"input_ids": tiny_models.padded_batch(model)["input_ids"][:1]}
    record, expected = pretrained.record(model, batch, lazy=True), eager_attentions(model, batch)["decoder-self"]
    assert record.meta["implementation"] == "sdpa"
    for layer, own in zip(record.layers, expected, strict=True):
        torch.testing.assert_close(layer.weights, own, rtol=0, atol=1e-6)
        assert not layer.weights.triu(1).any()


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gemma3"])
def test_a_lazy_pass_never_holds_all_the_weights_of_a_layer(name, monkeypatch):
    monkeypatch.setattr(native, "ROWS", 3)
    model = tiny(name)
    ids = torch.arange(3, 51).expand(2, 48)
    pretrained.record(model, {"input_ids": ids[:, :5]}, lazy=True)  # proved, on five tokens
    with LargestTensor() as largest:
        record = pretrained.record(model, {"input_ids": ids}, lazy=True)
    assert largest.numbers < record.layers[0].context.shape[1] * 2 * 48 * 48


@pytest.mark.parametrize(("name", "masks"), [("llama", 1), ("bert", 1), ("gemma3", 2), ("modernbert", 2), ("t5", 3)])
def test_a_lazy_record_shares_masks_and_keeps_keys_ungrouped(name, masks):
    model = tiny(name)
    record = pretrained.record(model, tiny_models.padded_batch(model), lazy=True)
    assert len({layer.mask.data_ptr() for layer in record.layers}) == masks
    groups = getattr(model.config, "num_key_value_heads", None) or record.layers[0].context.shape[1]
    assert record.layers[0].grouped_values.shape[1] == groups


@pytest.mark.parametrize(
    ("name", "ran"), [("gemma2", "eager in row chunks"), ("gpt_oss", "eager in row chunks"), ("gemma3", "sdpa")]
)
def test_lazy_says_what_ran(name, ran):
    model = tiny(name)
    assert pretrained.record(model, tiny_models.padded_batch(model), lazy=True).meta["implementation"] == ran


def test_lazy_weights_do_not_change_when_the_model_is_trained_on():
    model = tiny("gpt_oss")
    record = pretrained.record(model, tiny_models.padded_batch(model), lazy=True)
    before = [layer.weights for layer in record.layers]
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for layer, weights in zip(record.layers, before, strict=True):
        assert torch.equal(layer.weights, weights)
        assert law_of_outputs(layer) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "marian"])
def test_readout_gives_the_logits(name):
    model = tiny(name)
    batch = tiny_models.padded_batch(model)
    readout = pretrained.record(model, batch).readout
    logits = readout["hidden"] @ readout["weight"].T + getattr(model, "final_logits_bias", 0.0)
    torch.testing.assert_close(logits, model(**batch).logits, rtol=1e-5, atol=1e-5)


def test_texts_become_tokens_words_and_masks():
    model, tokenizer = tiny("gpt2"), tiny_models.tokenizer()
    record = attnlab.record(model, TEXTS, tokenizer=tokenizer)
    assert record.words["target"][0] == TEXTS[0].split()
    assert record.words["target"][1][:3] == TEXTS[1].split()
    assert record.masks["target"].sum(1).tolist() == [7, 3]
    assert record.tokens["target"].shape == (2, 7)
    alone = attnlab.record(model, TEXTS[1], tokenizer=tokenizer)
    torch.testing.assert_close(record.layers[2].weights[1:, :, :3, :3], alone.layers[2].weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_targets_are_read_shifted_by_one(name):
    model, tokenizer = tiny(name), tiny_models.tokenizer()
    record = pretrained.record(model, TEXTS, target=["the mat sat", "it"], tokenizer=tokenizer)
    assert record.words["source"][0] == TEXTS[0].split()
    assert record.words["target"][0] == ["<pad>", "the", "mat"]  # begun with the decoder's start token
    assert record.kind("cross")[0].weights.shape[2:] == (3, 7)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_mask_of_the_users_own_may_be_additive(lazy):
    model = tiny("gpt2")
    ids, seen = torch.arange(3, 8)[None], torch.ones(5, 5).tril().triu(-2).bool()  # the last three tokens
    given = torch.zeros(5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    batch = {"input_ids": ids, "attention_mask": given}
    record, expected = pretrained.record(model, batch, lazy=lazy), eager_attentions(model, batch)["decoder-self"]
    for layer, own in zip(record.layers, expected, strict=True):
        torch.testing.assert_close(layer.weights, own, rtol=0, atol=1e-6)
        assert torch.equal(layer.mask[0, 0], seen)


def test_pictures_are_recorded_too():
    model = tiny("vit")
    batch = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    record, expected = pretrained.record(model, batch), eager_attentions(model, batch)["encoder-self"]
    for layer, own in zip(record.layers, expected, strict=True):
        torch.testing.assert_close(layer.weights, own, rtol=0, atol=1e-6)


def test_save_and_load(tmp_path):
    model = tiny("llama")
    record = pretrained.record(model, tiny_models.padded_batch(model), lazy=True)
    record.save(tmp_path / "record.safetensors")
    again = Record.load(tmp_path / "record.safetensors")
    assert torch.equal(again.layers[1].weights, record.layers[1].weights)
    assert again.meta == record.meta


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
def test_a_compiled_model_is_recorded_eagerly():
    model = tiny("bert")
    batch = tiny_models.padded_batch(model)
    expected = pretrained.record(model, batch).layers[0].weights
    assert torch.equal(pretrained.record(torch.compile(model), batch).layers[0].weights, expected)


def test_bfloat16():
    model = tiny("llama", torch.bfloat16)
    for lazy in (False, True):
        assert (
            pretrained.record(model, tiny_models.padded_batch(model), lazy=lazy).layers[0].weights.dtype
            == torch.bfloat16
        )


def test_a_real_model():
    record = attnlab.record(tiny_models.minilm(), ["The cat sat on the mat.", "Nobody saw it happen."])
    assert len(record.kind("encoder-self")) == 6
    assert record.words["source"][0] == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]
    model = transformers.AutoModel.from_pretrained(tiny_models.minilm(), attn_implementation="eager")
    with torch.no_grad():
        own = model(record.tokens["source"], record.masks["source"].long(), output_attentions=True)
    for layer, weights in zip(record.layers, own.attentions, strict=True):
        torch.testing.assert_close(layer.weights, weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(record.readout["hidden"], own.last_hidden_state, rtol=0, atol=1e-5)
