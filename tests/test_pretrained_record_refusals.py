"""Hugging Face models and inputs that cannot be recorded."""

import importlib
import json
import time
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from torch import nn

import attnlab
from attnlab.huggingface import pretrained, support

TEXTS = ["the cat sat on the mat .", "nobody saw it"]


def tiny(name: str) -> transformers.PreTrainedModel:
    return getattr(tiny_models, name)()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Mamba", "MambaForCausalLM has no attention.*state-space"),
        ("Rwkv", "RwkvForCausalLM has no attention.*recurrent"),
        ("Longformer", "LongformerForMaskedLM .*sliding windows.*no reader"),
        ("Reformer", "ReformerModel .*hashed"),
    ],
)
def test_the_config_alone_decides_before_weights_are_loaded(kind, message, tmp_path):
    """The folder has no weights: what is refused is refused without them, in less than two seconds."""
    config = getattr(transformers, f"{kind}Config")()
    head = {"Longformer": "ForMaskedLM", "Reformer": "Model"}.get(kind, "ForCausalLM")
    config.architectures = [f"{kind}{head}"]
    config.save_pretrained(tmp_path)
    importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        pretrained.record(tmp_path, {"input_ids": torch.ones(1, 3).long()})
    assert time.perf_counter() - started < 2
    assert "\n" not in str(caught.value)


def test_a_config_without_architectures_is_refused_before_weights_too(tmp_path):
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MambaModel has no attention"):
        pretrained.record(tmp_path, {"input_ids": torch.ones(1, 3).long()})


def test_a_loaded_model_without_attention_is_refused():
    model = transformers.MambaModel(
        transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=11, state_size=2)
    )
    for attempt in (
        lambda: pretrained.record(model.eval(), {"input_ids": torch.ones(1, 3).long()}),
        lambda: pretrained.adapt(model, "softmax"),
    ):
        with pytest.raises(ValueError, match="MambaModel has no attention"):
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
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self, weights.* 0\.001"):
        pretrained.record(model, tiny_models.padded_batch(model))


def test_an_output_projection_that_is_not_linear_is_refused():
    model = tiny("llama")
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*o_proj \(Linear\)"):
        pretrained.record(model, tiny_models.padded_batch(model))


def test_training_mode_is_refused():
    model = tiny("bert").train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        pretrained.record(model, tiny_models.padded_batch(model))


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("bert", "a text", {"tokenizer": None}, "needs a tokenizer="),
        ("bert", "", {}, r"text\[0\] of 1 is empty"),
        ("bert", ["the cat", " "], {}, r"text\[1\] of 2 is empty"),
        ("bert", [], {}, "empty list"),
        ("bert", [3], {}, "list with int"),
        ("bert", "the cat " * 40, {}, "80 tokens.* 53 positions; max_length=53"),
        ("roberta", "the cat " * 26, {}, "52 positions"),
        ("bert", "the cat", {"target": "it"}, "target=.*encoder-decoder"),
        ("t5", "the cat", {}, "encoder-decoder.*target="),
        ("t5", TEXTS, {"target": "it"}, "1 targets for 2 texts"),
        ("t5", {"input_ids": torch.ones(1, 3).long()}, {}, "decoder_input_ids"),
        ("bert", {"input_ids": [[1, 2]]}, {}, "input_ids must be a tensor"),
        ("bert", "the cat", {"device": "cpu"}, "already loaded"),
        ("bert", "the cat", {"noise": 3}, "noise=3"),
        ("bert", "the cat", {"noise": "3"}, "noise.*'3'"),
        ("bert", None, {"tokenizer": None}, "text must be a string.* NoneType"),
        ("bert", 3, {}, "text must be a string.* int"),
        ("t5", "the cat", {"target": 3}, "target must be a string.* int"),
        ("bert", "the cat", {"tokenizer": "bert-base"}, "tokenizer=.*'bert-base'"),
        ("bert", torch.ones(1, 3).long(), {"tokenizer": None}, r'{"input_ids": tensor}'),
        ("bert", {}, {}, "BertModel reads input_ids.*nothing"),
        ("bert", {"inputs": torch.ones(1, 3)}, {}, "BertModel reads input_ids.* inputs"),
        ("bert", {"input_ids": torch.ones(1, 3).long()}, {"max_length": 2}, "max_length=.*text"),
        ("bert", {"input_ids": torch.tensor([[5, 97]])}, {}, "input_ids has the token 97.* 0 to 96"),
        ("bert", {"input_ids": torch.tensor([[-1, 5]])}, {}, "input_ids has the token -1"),
        ("bert", {"input_ids": torch.ones(3).long()}, {}, r"input_ids must be integers.*torch.int64 \(3,\)"),
        ("bert", {"input_ids": torch.ones(1, 3)}, {}, "input_ids must be integers.*torch.float32"),
        ("bert", {"input_ids": torch.ones(2, 0).long()}, {}, r"input_ids must be integers.*\(2, 0\)"),
        ("bert", "the cat", {"max_length": 0}, "max_length.* at least 1 .* 0"),
        ("bert", "the cat", {"max_length": -1}, "max_length.* at least 1 .* -1"),
        ("bert", "the cat", {"max_length": 2.0}, "max_length must be an integer.* 2.0"),
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
            r"attention_mask has shape \(2, 11\).* \(3, 11\)",
        ),
        ("bert", {"attention_mask": torch.ones(3, 7)}, r"\(3, 7\).* 3 examples of 11 tokens"),
        ("bert", {"attention_mask": torch.ones(11)}, r"\(11,\).* input_ids"),
        ("bert", {"attention_mask": torch.ones(2, 1, 11, 11)}, r"\(2, 1, 11, 11\).* input_ids"),
        ("bert", {"token_type_ids": torch.zeros(3, 7).long()}, r"token_type_ids has shape \(3, 7\)"),
        ("bert", {"position_ids": torch.zeros(1, 7).long()}, r"position_ids has shape \(1, 7\)"),
        ("bert", {"attention_mask": torch.ones(3, 11).tril(-1).flip(0)}, "attention_mask hides .* example 2"),
        ("t5", {"decoder_attention_mask": torch.ones(3, 11)}, r"decoder_attention_mask .* 3 examples of 5 tokens"),
        ("t5", {"decoder_attention_mask": torch.zeros(3, 5)}, "decoder_attention_mask hides .* example 0"),
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
    path, text = tiny_models.minilm(), "The cat sat on the mat."
    for short in (1, 2):
        with pytest.raises(ValueError, match=f"at least 3.*{short}"):
            attnlab.record(path, text, max_length=short)
    assert attnlab.record(path, text, max_length=3).words["source"] == [["[CLS]", "the", "[SEP]"]]


def test_max_length_cuts_off():
    record = pretrained.record(tiny("bert"), "the cat " * 40, tokenizer=tiny_models.tokenizer(), max_length=53)
    assert record.layers[0].weights.shape[-1] == 53


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nobody/has-this-model", FileNotFoundError, "Hugging Face hub"),
        ("./no/such/folder", FileNotFoundError, "no model found at ./no/such/folder"),
        (str(Path(__file__).parent), ValueError, "no config.json"),
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
    with pytest.raises(ValueError, match=r"cannot read.*valid JSON" if config == "{" else "cannot read") as caught:
        attnlab.record(tmp_path, "the cat")
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_weights_or_with_broken_ones(tmp_path):
    tiny("bert").config.save_pretrained(tmp_path)
    for allow in (False, True):
        with pytest.raises(ValueError, match="no weights"):
            attnlab.record(tmp_path, "the cat", allow_pickle=allow)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(OSError, match="cannot load the weights"):
        attnlab.record(tmp_path, "the cat")


def test_pickled_weights_need_a_flag(tmp_path):
    model = tiny("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    batch = tiny_models.padded_batch(model)
    with pytest.raises(ValueError, match=r"safetensors.*--allow-pickle \(allow_pickle=True\)"):
        pretrained.record(tmp_path, batch)
    record = pretrained.record(tmp_path, batch, allow_pickle=True)
    assert torch.equal(record.layers[2].weights, pretrained.record(model, batch).layers[2].weights)


def test_weights_that_are_missing_are_named(tmp_path):
    model = tiny("bert")
    weights = {name: x for name, x in model.state_dict().items() if not name.startswith("pooler")}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.warns(UserWarning, match=r"pooler\.dense\.bias, pooler\.dense\.weight.*random"):
        pretrained.record(tmp_path, tiny_models.padded_batch(model))


def test_remote_code_needs_a_flag(tmp_path):
    about = {
        "model_type": "mine",
        "architectures": ["Mine"],
        "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ValueError, match=r"code.*--trust-remote-code \(trust_remote_code=True\)"):
        pretrained.record(tmp_path, {"input_ids": torch.ones(1, 3).long()})


def test_a_folder_without_a_tokenizer(tmp_path):
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        pretrained.record(tmp_path, "the cat")


def test_not_a_hugging_face_model():
    with pytest.raises(TypeError, match="Linear"):
        pretrained.record(nn.Linear(2, 3), {"input_ids": torch.ones(1, 3).long()})


def test_windows_of_a_picture_are_refused_not_taken_for_examples(monkeypatch):
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4)).eval()
    with pytest.raises(ValueError, match=r"SwinModel is not supported: it attends within windows of a picture"):
        attnlab.record(model, {"pixel_values": torch.rand(2, 3, 32, 32)})
    monkeypatch.delitem(support.OTHER_ATTENTION, "swin")  # an unknown model of this kind
    with pytest.raises(ValueError, match=r"SwinModel cannot be recorded: \S+attention attends to 8 parts of the 2"):
        attnlab.record(model, {"pixel_values": torch.rand(2, 3, 32, 32)})


def test_an_example_of_a_record_with_fewer_pictures_than_texts_cannot_be_cut_out():
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    text, vision = {"vocab_size": 11, "eos_token_id": 2, **tower}, {"image_size": 8, "patch_size": 4, **tower}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    batch = {"input_ids": torch.tensor([[3, 4, 2], [5, 6, 2]]), "pixel_values": torch.rand(1, 3, 8, 8)}
    record = attnlab.record(model, batch)
    assert [len(layer.weights) for layer in record.layers] == [1, 2]
    for read in (lambda: record[1], lambda: attnlab.show(record)):
        with pytest.raises(ValueError, match="the record has 2 examples, and a layer 1,"):
            read()


def test_a_model_without_weights_and_adapters_without_a_model_are_refused(tmp_path):
    model = tiny("llama").to("meta")
    for attempt in (
        lambda: attnlab.record(model, {"input_ids": torch.ones(1, 3).long()}),
        lambda: attnlab.adapt(model, "dagpam"),
    ):
        with pytest.raises(ValueError, match="this LlamaForCausalLM is on the device meta and has no weights"):
            attempt()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has adapters of PEFT, without their model: load both"):
        attnlab.record(tmp_path, "a cat")
