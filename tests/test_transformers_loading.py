"""Adapted models through transformers' own doors: from_pretrained, pipeline, Trainer, Accelerate, push_to_hub."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tiny_models
import torch
import transformers
from adapted_models import attention_modules, output, shake

import attnlab
from attnlab.huggingface import model_card, pretrained
from attnlab.mechanisms import DaGPAM


def adapted(model: str = "llama", mechanism: str = "dagpam", **options):
    result = pretrained.adapt(getattr(tiny_models, model)(), mechanism, **options)
    shake(result)
    return result


@pytest.mark.parametrize(
    ("model", "mechanism", "auto"),
    [
        ("llama", "dagpam", transformers.AutoModelForCausalLM),
        ("gpt2", "sigmoid", transformers.AutoModelForCausalLM),
        ("llama", "differential-v2", transformers.LlamaForCausalLM),
        ("bert", "coda", transformers.AutoModel),
        ("marian", "dagpam", transformers.AutoModelForSeq2SeqLM),
        ("t5", "realformer", transformers.AutoModelForSeq2SeqLM),
    ],
)
def test_from_pretrained_loads_the_mechanisms(model, mechanism, auto, tmp_path, caplog):
    before = adapted(model, mechanism)
    before.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        after = auto.from_pretrained(tmp_path)
    batch = tiny_models.padded_batch(before)
    assert torch.equal(output(after, batch), output(before, batch))
    assert "attnlab" not in caplog.text  # their weights are not reported as unexpected
    after.save_pretrained(tmp_path / "again")
    assert torch.equal(output(attnlab.load(tmp_path / "again"), batch), output(before, batch))


def test_the_inner_model_is_loaded_with_its_mechanisms(tmp_path):
    before = adapted()
    before.save_pretrained(tmp_path)
    inner = transformers.AutoModel.from_pretrained(tmp_path)
    batch = tiny_models.padded_batch(before)
    assert torch.equal(output(inner, batch), output(before.model, batch))


def test_loading_info_and_subfolders_work(tmp_path):
    before = adapted()
    before.save_pretrained(tmp_path / "inside")
    how = {"subfolder": "inside", "output_loading_info": True}
    after, about = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert len(attention_modules(after)) == 3
    assert "attnlab" not in str(vars(transformers.LlamaForCausalLM).get("_keys_to_ignore_on_load_unexpected"))


def test_plain_models_load_as_before(tmp_path):
    tiny_models.llama().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(OSError, match="nothing"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nothing")


def test_from_pretrained_refuses_what_would_bypass_or_miss_the_mechanisms(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with pytest.raises(ValueError, match="leave out attn_implementation='eager'"):
            kind.from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.raises(ValueError, match="needs its folder or id"):
        transformers.LlamaForCausalLM.from_pretrained(
            None, config=transformers.AutoConfig.from_pretrained(tmp_path), state_dict={}
        )
    (tmp_path / "attnlab.json").unlink()
    with pytest.raises(ValueError, match=r"attnlab\.json is missing"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_from_pretrained_runs_no_file_of_a_user(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from attnlab.mechanisms import Softmax\nclass Mine(Softmax):\n    pass\n")
    pretrained.adapt(tiny_models.llama(), f"{file}:Mine").save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="allow_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert attention_modules(attnlab.load(tmp_path / "saved", allow_code=True))


def test_a_pipeline_generates_with_the_mechanisms(tmp_path):
    model, tokenizer = adapted(), tiny_models.tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), tokenizer=tokenizer)
    assert isinstance(attention_modules(pipe.model)[0].attnlab, DaGPAM)
    text = "the cat sat on"
    how = {"max_new_tokens": 3, "do_sample": False, "return_full_text": False, "clean_up_tokenization_spaces": False}
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert pipe(text, **how)[0]["generated_text"] == tokenizer.decode(expected[0, ids.shape[1] :])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_saves_and_resumes(checkpointing, tmp_path):
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (8, 7))]

    def make_trainer(steps: int, model) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=2, per_device_train_batch_size=4, learning_rate=0.01,
            gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
            report_to="none", disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant", logging_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        return transformers.Trainer(model, arguments, train_dataset=data)

    whole = adapted("llama", "coda")
    start = attention_modules(whole)[1].attnlab.state_dict()
    start = {name: x.clone() for name, x in start.items()}
    make_trainer(4, whole).train()
    end = attention_modules(whole)[1].attnlab.state_dict()
    assert all(not torch.equal(x, end[name]) for name, x in start.items() if x.is_floating_point())
    resumed = adapted("llama", "coda")
    make_trainer(4, resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    batch = tiny_models.padded_batch(whole)
    torch.testing.assert_close(output(resumed.eval(), batch), output(whole.eval(), batch))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(output(saved, batch), output(whole.eval(), batch))


def test_accelerate_prepares_and_unwraps_an_adapted_model(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = adapted("gpt2", "dagpam")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(3, 13)[None]
    accelerator.backward(prepared(ids, labels=ids).loss)
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.unwrap_model(prepared).save_pretrained(tmp_path / "model", save_function=accelerator.save)
    batch = tiny_models.padded_batch(model)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(output(after, batch), output(model.eval(), batch))


COMPILED = """
import torch, transformers, attnlab.huggingface
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=31, hidden_size=16, num_attention_heads=2, num_hidden_layers=2,
                                  intermediate_size=8)
model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="attnlab-{name}").eval()
ids = torch.arange(12).view(2, 6)
expected = model(ids).logits
graph = torch.compile(model, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(graph(ids).logits, expected)
torch.testing.assert_close(graph(ids.flip(1)).logits, model(ids.flip(1)).logits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "stick-breaking", "alibi"])
def test_a_model_with_a_registered_attention_compiles_as_one_graph(name):
    code = COMPILED.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class FakeHub:
    """Keeps what is uploaded, as huggingface_hub's HfApi would."""

    files: ClassVar[dict[str, str]] = {}

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, *, exist_ok, private=None):
        assert exist_ok
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message, **rest):
        assert not rest
        FakeHub.files = {path.name: path.read_bytes().decode("latin-1") for path in Path(folder_path).iterdir()}
        return f"https://hub.example/{repo_id}/commit/1"


def write_ledger(path: Path) -> Path:
    rows = []
    for seed, attention, loss in [(1, "dagpam", 2.0), (2, "dagpam", 3.0), (1, "softmax", 9.0)]:
        model = {"attention": attention, "attention_options": {"initial": 0.5} if attention == "dagpam" else {}}
        recipe = {"task": "language", "data": {"data": "wikitext-2"}, "model": model}
        row = {"recipe": recipe, "digest": attention, "seed": seed, "measure": "loss", "edition": 1}
        rows.append(row | {"values": {"valid_loss": loss, "curve": [1, 2], "scores": {"bleu": 10.0 * seed}}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_push_to_hub_writes_a_card_with_the_attention_and_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    monkeypatch.setattr("attnlab.huggingface.model_card.is_hub_reachable", lambda: True)
    model = adapted("llama", "dagpam", initial=0.5)
    model.attnlab_adaptation = replace(model.attnlab_adaptation, parent="owner/parent")
    address = model.push_to_hub("mine", ledger=write_ledger(tmp_path / "ledger.jsonl"), tags=["tiny"], private=True)
    assert address.endswith("me/mine/commit/1")
    assert {"README.md", "attnlab.json", "config.json", "model.safetensors"} <= FakeHub.files.keys()
    card = FakeHub.files["README.md"].encode("latin-1").decode()
    for part in ('base_model: "owner/parent"', '- "tiny"', "`dagpam`", "initial=0.5", "decoder-self"):
        assert part in card
    assert 'LlamaForCausalLM.from_pretrained("me/mine")' in card
    assert "| language wikitext-2 | valid_loss | 2.5 | 2 to 3 | 2 |" in card
    assert "| language wikitext-2 | bleu | 15 | 10 to 20 | 2 |" in card
    assert "9" not in card.split("## Measured")[1]


@pytest.mark.parametrize("parent", ["/home/somebody/models/tiny", "./models/tiny", str(Path(__file__).parent)])
def test_a_card_names_no_folder_of_the_machine(parent, tmp_path):
    model = adapted("llama", "dagpam")
    model.attnlab_adaptation = replace(model.attnlab_adaptation, parent=parent)
    model_card.write_card(model, tmp_path, "me/mine")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"a local model, {Path(parent).name} |" in card
    assert parent not in card
    assert "base_model" not in card


def test_what_a_card_cannot_show_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    model = adapted("llama", "sigmoid")
    with pytest.raises(ValueError, match="no figures of attention sigmoid"):
        model.push_to_hub("mine", ledger=write_ledger(tmp_path / "ledger.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"ledger=.*none\.jsonl: no such file"):
        model.push_to_hub("mine", ledger=tmp_path / "none.jsonl")
    monkeypatch.setattr("attnlab.huggingface.model_card.is_hub_reachable", lambda: False)
    with pytest.raises(ConnectionError, match=r"mine cannot be uploaded: .* does not answer"):
        model.push_to_hub("mine")
    with pytest.raises(ValueError, match=r"call model\.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(ValueError, match="part of an adapted model"):
        model.model.push_to_hub("mine")
