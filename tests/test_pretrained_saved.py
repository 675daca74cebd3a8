"""Adapted Hugging Face models that are copied, pickled, saved and loaded."""

import copy
import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from adapted_models import MODELS, attention_modules, output, place, shake, tiny
from huggingface_hub import constants

import attnlab
from attnlab.huggingface import pretrained
from attnlab.mechanisms import Softmax


class Outside(Softmax):
    pass


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


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen2_vl"])
def test_a_model_whose_weights_are_renamed_comes_back(name, tmp_path):
    model = pretrained.adapt(getattr(tiny_models, name)(), "dagpam")
    shake(model)
    model.save_pretrained(tmp_path)
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(attnlab.load(tmp_path), batch), output(model, batch))


def put_on_hub(model, folder: Path, monkeypatch) -> str:
    """Save a model as the local cache of the hub has it, and return its id."""
    place = folder / "models--owner--name"
    model.save_pretrained(place / "snapshots" / "0123abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return "owner/name"


@pytest.mark.parametrize("mechanism", ["sigmoid", "dagpam"])
def test_an_adapted_model_on_the_hub_is_not_mistaken_for_the_original(mechanism, tmp_path, monkeypatch):
    model = pretrained.adapt(tiny_models.gpt2(), mechanism)
    shake(model)
    name, batch = put_on_hub(model, tmp_path, monkeypatch), tiny_models.padded_batch(model)
    assert torch.equal(output(attnlab.load(name), batch), output(model, batch))
    record = attnlab.record(name, batch)
    assert record.meta["mechanism"] == mechanism
    assert torch.equal(record.layers[2].weights, attnlab.record(model, batch).layers[2].weights)
    (tmp_path / "models--owner--name" / "snapshots" / "0123abc" / "attnlab.json").unlink()
    with pytest.raises(ValueError, match=r"attnlab\.json is missing"):
        attnlab.record(name, batch)


def test_a_plain_model_on_the_hub_is_not_adapted(tmp_path, monkeypatch):
    model = tiny_models.gpt2()
    name = put_on_hub(model, tmp_path, monkeypatch)
    assert attnlab.record(name, tiny_models.padded_batch(model)).meta["mechanism"] == "softmax"
    with pytest.raises(FileNotFoundError, match="not an adapted model"):
        attnlab.load(name)
    with pytest.raises(FileNotFoundError, match="neither a folder nor"):
        attnlab.load("nobody/nothing")


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
    with pytest.raises(ValueError, match="part of an adapted model"):
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
    with pytest.raises(ValueError, match=r"mine\.py:Cooler.*allow_code=True"):
        attnlab.load(tmp_path / "saved")
    again = attnlab.load(tmp_path / "saved", allow_code=True)
    batch = tiny_models.padded_batch(model)
    assert torch.equal(output(again, batch), output(model, batch))
    assert attnlab.record(model, batch).meta["mechanism"] == name
    with pytest.raises(ValueError, match="allow_code=True"):
        attnlab.record(tmp_path / "saved", batch)
    assert attnlab.record(tmp_path / "saved", batch, allow_code=True).meta["mechanism"] == name


def test_a_class_is_saved_by_its_name_or_its_file(tmp_path):
    for mechanism, written in ((Softmax, "softmax"), (Outside, f"{__file__}:Outside")):
        pretrained.adapt(tiny_models.gpt2(), mechanism).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "attnlab.json").read_text())["attention"] == written

    class Inside(Softmax):
        pass

    model = pretrained.adapt(tiny_models.gpt2(), Inside)
    with pytest.raises(ValueError, match=r"Inside.*top level"):
        model.save_pretrained(tmp_path / "inside")
    assert not (tmp_path / "inside").exists()


def test_weights_that_lack_the_mechanisms_are_refused(tmp_path):
    tiny_models.bert().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"attnlab\.json"):
        attnlab.load(tmp_path)
    about = {"format": "attnlab-adapted-1", "attention": "dagpam", "options": {}, "kinds": ["encoder-self"]}
    (tmp_path / "attnlab.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"lack encoder\.layer\.0\.attention\.self\.attnlab\.lambdas"):
        attnlab.load(tmp_path)
    (tmp_path / "attnlab.json").write_text(json.dumps(about | {"format": "attnlab-adapted-9"}))
    with pytest.raises(ValueError, match="format 'attnlab-adapted-9'"):
        attnlab.load(tmp_path)


DEEP = "[" * 10**5


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", DEEP, '{"format": "attnlab-adapted-1", "options": {}}'])
def test_a_broken_description_is_named(broken, tmp_path):
    tiny_models.bert().save_pretrained(tmp_path)
    (tmp_path / "attnlab.json").write_text(broken)
    for attempt in (attnlab.load, lambda folder: attnlab.record(folder, "the cat")):
        with pytest.raises(ValueError, match=r"attnlab\.json is damaged"):
            attempt(tmp_path)


def test_parameters_of_another_shape_are_refused(tmp_path):
    """Copied, one λ would silently become one for each head."""
    pretrained.adapt(tiny_models.bert(), "dagpam").save_pretrained(tmp_path)
    about = json.loads((tmp_path / "attnlab.json").read_text())
    (tmp_path / "attnlab.json").write_text(json.dumps(about | {"options": {"per_head": True}}))
    with pytest.raises(ValueError, match=r"attnlab\.lambdas of shape \(1, 1\).* \(1, 3\)"):
        attnlab.load(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_a_part_is_not_saved_without_the_whole(name, tmp_path):
    model = pretrained.adapt(getattr(tiny_models, name)(), "dagpam")
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="part of an adapted model"):
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
    with pytest.raises(ValueError, match=r"attnlab\.json is missing"):
        attnlab.record(str(tmp_path), tiny_models.padded_batch(model))


def test_the_examples_in_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "hugging-face.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 6
    exec("\n".join(blocks), {})


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_is_not_blamed_on_the_config(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    tiny_models.gpt2().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", fail)
    with pytest.raises(error):
        pretrained.open_model(str(tmp_path))
