"""Hugging Face models from GGUF files and from revisions on the hub; caps and sinks around a mechanism."""

import copy

import pytest
import tiny_models
import torch

import attnlab
from attnlab.huggingface import pretrained


def write_hub(cache, models: dict) -> None:
    """The cache of the hub with one model, owner/name, at several revisions."""
    place = cache / "models--owner--name"
    (place / "refs").mkdir(parents=True)
    for number, (revision, model) in enumerate(models.items()):
        commit = f"{number}" * 40
        model.save_pretrained(place / "snapshots" / commit)
        (place / "refs" / revision).write_text(commit)


def test_revisions_feed_the_slider_of_the_viewer(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants
    from transformers.utils import hub

    models = {"main": tiny_models.llama()}
    for step in (1, 100):
        models[f"step{step}"] = copy.deepcopy(models["main"])
        with torch.no_grad():
            models[f"step{step}"].model.layers[0].self_attn.q_proj.weight.mul_(1 / (1 + step))
    write_hub(tmp_path, models)
    for place, name in ((constants, "HF_HUB_CACHE"), (hub, "HF_HUB_CACHE"), (constants, "HF_HUB_OFFLINE")):
        if hasattr(place, name):
            monkeypatch.setattr(place, name, True if name.endswith("OFFLINE") else str(tmp_path))
    batch = tiny_models.padded_batch(models["main"])
    records = {}
    for revision, model in models.items():
        record = attnlab.record("owner/name", batch, revision=None if revision == "main" else revision)
        assert record.meta.get("revision", "main") == revision
        assert torch.equal(record.layers[0].weights, pretrained.record(model, batch).layers[0].weights)
        records[revision] = record
    assert not torch.equal(records["step1"].layers[0].weights, records["step100"].layers[0].weights)
    view = attnlab.show({step: records[f"step{step}"] for step in (1, 100)})
    assert view._repr_html_()
    with pytest.raises(FileNotFoundError, match="owner/name"):
        attnlab.record("owner/name", batch, revision="step7")


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_a_gguf_file(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    import gguf_models

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = tiny_models.llama(**sizes, intermediate_size=32)
    stored = None if kind is None else gguf.GGMLQuantizationType[kind]
    gguf_models.write_llama(model, tmp_path / "tiny.gguf", stored)
    if stored is not None:
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                codes = gguf.quants.quantize(weight.detach().numpy(), stored)
                weight.data = torch.from_numpy(gguf.quants.dequantize(codes, stored).copy())
    batch = tiny_models.padded_batch(model)
    record = attnlab.record(tmp_path, batch, gguf_file="tiny.gguf")
    for ours, own in zip(record.layers, pretrained.record(model, batch).layers, strict=True):
        torch.testing.assert_close(ours.weights, own.weights, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.output_weight, own.output_weight, rtol=0, atol=1e-6)
    assert record.meta["gguf_file"] == "tiny.gguf"
    with pytest.raises(FileNotFoundError, match=r"no other\.gguf in .*, which has tiny\.gguf"):
        attnlab.record(tmp_path, batch, gguf_file="other.gguf")


def test_what_does_not_belong_together(tmp_path, monkeypatch):
    model = tiny_models.llama()
    batch = tiny_models.padded_batch(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"revision='x' is for an id.*is a folder"):
        attnlab.record(tmp_path, batch, revision="x")
    for option in ({"revision": "x"}, {"gguf_file": "x.gguf"}):
        with pytest.raises(ValueError, match="already loaded"):
            attnlab.record(model, batch, **option)
    monkeypatch.setattr("attnlab.huggingface.support.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        attnlab.record(tmp_path, batch, gguf_file="x.gguf")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softmax_with_the_cap_or_sink_has_the_weights_of_the_model(name):
    model = getattr(tiny_models, name)()
    batch = tiny_models.padded_batch(model)
    own = pretrained.record(model, batch)
    adapted = pretrained.record(pretrained.adapt(model, "softmax"), batch)
    real = batch["attention_mask"].bool()
    for ours, theirs in zip(adapted.layers, own.layers, strict=True):
        assert ours.weights.shape == theirs.weights.shape
        pair = (x.weights.transpose(1, 2)[real] for x in (ours, theirs))
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5)
    if name == "gpt_oss":
        assert adapted.layers[0].weights[0].sum(-1).max() < 0.999, "the sink keeps a part"


@pytest.mark.parametrize(
    ("name", "mechanism"), [("gemma2", "dagpam"), ("gpt_oss", "dagpam"), ("gpt_oss", "realformer")]
)
def test_gradients_reach_the_sink_and_the_mechanism(name, mechanism):
    model = pretrained.adapt(getattr(tiny_models, name)(), mechanism)
    model(**tiny_models.padded_batch(model)).logits.square().sum().backward()
    attention = model.model.layers[0].self_attn
    wanted = [*attention.attnlab.parameters(), *([attention.sinks] if name == "gpt_oss" else [])]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in wanted)
