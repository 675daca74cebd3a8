"""LoRA with an adapted model: its mechanisms are trained, saved and loaded beside the adapter."""

import pytest
import tiny_models
import torch
import transformers
from adapted_models import attention_modules, output
from peers import need

import attnlab
from attnlab.huggingface.adaptation import is_added

pytestmark = [pytest.mark.ecosystem, need("peft")]
SAVED = ["attnlab", "attnlab_queries"]  # what attnlab adds to an attention module


def make_lora(model, targets=("q_proj", "v_proj"), **options):
    import peft

    config = peft.LoraConfig(r=2, target_modules=list(targets), modules_to_save=SAVED, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def train(model, steps: int = 4) -> list[float]:
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (4, 9))
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, 0.02), []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize("mechanism", ["dagpam", "coda", "shaped", "fox", "multi-token"])
def test_lora_trains_the_mechanism_and_leaves_the_model(mechanism):
    base = attnlab.adapt(tiny_models.llama(), mechanism)
    frozen = {name: x.clone() for name, x in base.named_parameters() if not is_added(name)}
    model = make_lora(base)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        name for name, _ in model.named_parameters() if ".attnlab.modules_to_save." in name
    }
    before = {name: x.clone() for name, x in model.named_parameters() if name in trained}
    losses = train(model)
    assert losses[-1] < losses[0]
    moved = {name for name, x in model.named_parameters() if name in before and not torch.equal(x, before[name])}
    assert any(".attnlab.modules_to_save." in name for name in moved)
    assert any("lora_B" in name for name in moved)
    inner = model.get_base_model()
    for name, x in frozen.items():
        found = inner.get_parameter(name) if "q_proj" not in name and "v_proj" not in name else None
        assert found is None or torch.equal(found, x)


@pytest.mark.parametrize(("mechanism", "targets"), [("dagpam", ("q_proj", "v_proj")), ("differential-v2", ("v_proj",))])
def test_a_saved_adapter_comes_back_on_its_adapted_base(mechanism, targets, tmp_path):
    import peft

    base = attnlab.adapt(tiny_models.llama(), mechanism)
    base.save_pretrained(tmp_path / "base")
    model = make_lora(base, targets)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    batch = tiny_models.padded_batch(base)
    expected = output(model, batch)
    by_hand = peft.PeftModel.from_pretrained(attnlab.load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(output(by_hand, batch), expected)
    found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert len(attention_modules(found)) == 3
    assert torch.equal(output(found.eval(), batch), expected)


def test_a_merged_adapter_is_an_adapted_model(tmp_path):
    model = make_lora(attnlab.adapt(tiny_models.llama(), "dagpam"))
    train(model)
    batch = tiny_models.padded_batch(model.get_base_model())
    expected = output(model, batch)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(output(attnlab.load(tmp_path), batch), expected, rtol=1e-4, atol=1e-5)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(output(after, batch), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_never_names_the_model_that_was_adapted(tmp_path):
    """PEFT would load the adapter on it, without the mechanisms and without a word."""
    tiny_models.llama().save_pretrained(tmp_path / "parent")
    base = attnlab.adapt(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parent"), "dagpam")
    assert base.attnlab_adaptation.parent == str(tmp_path / "parent")
    assert not make_lora(base).peft_config["default"].base_model_name_or_path


def test_a_neutral_start_is_the_pretrained_model():
    plain = tiny_models.llama()
    model = make_lora(attnlab.adapt(tiny_models.llama(), "dagpam", neutral=True))
    batch = tiny_models.padded_batch(plain)
    torch.testing.assert_close(output(model.eval(), batch), output(plain, batch), rtol=1e-5, atol=1e-5)
