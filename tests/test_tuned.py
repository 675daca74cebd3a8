"""Fine-tuning a Hugging Face model: the same loss as its own, through the command line, and back to Hugging Face."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from in_process import run_attnlab
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import attnlab
from attnlab.decoding.generation import Sampling, generate_tokens
from attnlab.huggingface.adaptation import is_added
from attnlab.huggingface.fine_tuning import TunedConfig, open_tuned_model
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.training.objective import Objective
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import DamagedError, RunFolder, read_checkpoint
from attnlab.training.runs import open_run, start_run

SMALL = ["block=13", "context=5", "batch_tokens=130", "lr=5e-3", "warmup=5", "log_every=10", "device=cpu"]
LINES = ["the cat sat on the mat .", "nobody saw it .", "the mat sat on it .", "nobody saw the cat ."]


@pytest.fixture
def folder(tmp_path):
    return saved(tiny_models.gpt2(), tmp_path / "gpt2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    draw = random.Random(0)
    path.write_text("".join(f"{draw.choice(LINES)}\n" for _ in range(160)))
    return path


def saved(model, folder):
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


def command(*words):
    return [sys.executable, "-c", "from attnlab.cli import main; main()", "train", *map(str, words)]


def train(*words):
    return run_attnlab("train", *words)


def trained(out, folder, text, *words):
    done = train("language", f"model={folder}", f"data={text}", *SMALL, f"out={out}", *words)
    assert done.returncode == 0, done.stderr
    return done


def language(text, folder, **changes):
    values = {"data": str(text), "tokenizer": str(folder), "block": 13, "context": 5} | changes
    return Language.prepare(LanguageConfig(**values), folder.parent / "vocabulary")


# --- the model ---


def test_tokens_are_those_of_the_tokenizer_and_text_comes_back(text, folder):
    task, theirs = language(text, folder), tiny_models.tokenizer()
    ids = next(iter(task.vocabulary.encode(["the cat saw a mat ."])))
    assert [k - 4 for k in ids] == theirs("the cat saw a mat .")["input_ids"]
    assert task.vocabulary.get_tokens([2, *ids]) == ["</s>", "the", "cat", "saw", "<unk>", "mat", "."]
    assert task.decode([0, *ids, 2, 5]) == theirs.decode(theirs("the cat saw a mat .")["input_ids"])
    assert len(task.vocabulary) == 4 + len(tiny_models.WORDS)
    stream = np.concatenate([task.make_batch("valid", [k]).inputs[0][0] for k in range(task.count_examples("valid"))])
    whole = theirs(task._get_text("valid"))["input_ids"]
    assert stream.tolist() == [2, *(k + 4 for k in whole)][:-1]


def test_line_breaks_are_tokens_where_the_tokenizer_has_them(text, folder):
    alphabet = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(alphabet, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters.enable_truncation(7)
    letters.save(str(folder / "tokenizer.json"))
    task = language(text, folder, valid=str(text))
    tokens = np.concatenate([task.make_batch("valid", [k]).targets[0] for k in range(task.count_examples("valid"))])
    assert task.decode(tokens) == text.read_text()


def test_text_that_looks_like_the_end_is_text(text, folder):
    ids = next(iter(language(text, folder).vocabulary.encode(["cat <eos> cat"])))
    assert tiny_models.WORDS.index("<eos>") + 4 not in ids


def test_the_loss_is_that_of_the_model_itself(text, folder):
    """Of whole blocks, and of padded ones by what is not padding; before a first token stands the end."""
    task, theirs = language(text, folder), tiny_models.gpt2()
    model = open_tuned_model(TunedConfig(path=str(folder))).eval()
    for indices in ([0, 1, 2], [0, task.count_examples("train") - 1]):
        batch = task.make_batch("train", indices)
        mask = batch.targets != 0
        ids = torch.where(batch.inputs[0] == 2, 1, (batch.inputs[0] - 4).clamp_min(0))
        labels = torch.where(mask, batch.targets - 4, -100)
        whole = torch.cat([ids, labels[:, -1:].clamp_min(0)], dim=1)  # it shifts the labels itself
        shifted = torch.cat([torch.full_like(labels[:, :1], -100), labels], dim=1)
        own = theirs(input_ids=whole, labels=shifted).loss
        loss = Objective(model)(batch.inputs, batch.targets) / batch.count
        torch.testing.assert_close(loss, own)
        scored = -model.readout.log_prob(model.hidden(*batch.inputs))[mask].gather(1, batch.targets[mask][:, None])
        torch.testing.assert_close(scored.mean(), own)


def test_what_is_predicted_is_a_distribution_over_the_ids_of_the_task(folder):
    model = open_tuned_model(TunedConfig(path=str(folder))).eval()
    tokens = torch.tensor([[2, 7, 9, 8, 15]])
    logits, own = model(tokens), tiny_models.gpt2()(input_ids=torch.tensor([[1, 3, 5, 4, 11]])).logits
    assert logits.shape == (1, 5, tiny_models.VOCABULARY + 4)
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(1, 5))
    torch.testing.assert_close(logits[..., 2], own[..., 1])
    torch.testing.assert_close(logits[..., 6:], own[..., 2:])
    assert torch.isneginf(logits[..., [0, 1, 3, 5]]).all()
    targets = torch.tensor([[7, 9, 8, 15, 2]])
    nll = -model.readout.log_prob(own).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(model.readout.nll(own, targets), nll)


def test_softmax_leaves_the_model_as_it_is_and_others_replace_its_attention(folder):
    plain, changed = (
        open_tuned_model(TunedConfig(path=str(folder), attention=name)).eval() for name in ("softmax", "dagpam")
    )
    assert not any(isinstance(module, attnlab.Mechanism) for module in plain.modules())
    assert sum(isinstance(module, attnlab.Mechanism) for module in changed.modules()) == 3


# --- a run ---


def test_fine_tuning_learns_and_hugging_face_gets_the_best_weights(tmp_path, folder, text):
    out = tmp_path / "run"
    done = trained(out, folder, text, "attention=dagpam", "steps=120", "evaluate_every=40")
    losses = [row["valid_loss"] for row in RunFolder(out).metrics() if "valid_loss" in row]
    opened = open_run(out, device="cpu")
    batch = opened.task.make_batch("valid", [0, 1])
    before = open_tuned_model(TunedConfig(path=str(folder), attention="dagpam")).eval()
    untrained = (Objective(before)(batch.inputs, batch.targets) / batch.count).item()
    assert min(losses) < 1.3 < 2.5 < untrained  # log 12 would be a guess among all words
    assert f"attnlab.record: {out / 'hugging_face'}" in done.stdout
    model = attnlab.load(out / "hugging_face")
    tokens = batch.inputs[0]
    own = model(input_ids=torch.where(tokens < 4, 1, tokens - 4)).logits
    torch.testing.assert_close(opened.model.hidden(tokens), own)
    record = attnlab.record(out / "hugging_face", "nobody saw the cat .")
    assert len(record.kind("decoder-self")) == 3
    evaluated = run_attnlab("evaluate", out, "part=valid", "device=cpu")
    (loss,) = re.findall(r"loss +([\d.]+)", evaluated.stdout)
    assert float(loss) == pytest.approx(min(losses), abs=1e-4)


def test_without_another_attention_it_is_plain_fine_tuning(tmp_path, folder, text):
    trained(tmp_path / "run", folder, text, "steps=3")
    assert not (tmp_path / "run" / "hugging_face" / "attnlab.json").exists()
    assert (tmp_path / "run" / "hugging_face" / "tokenizer.json").exists()
    before = load_file(tmp_path / "run" / "hugging_face" / "model.safetensors")
    shutil.rmtree(tmp_path / "run" / "hugging_face")  # as if it had been killed before this was written
    trained(tmp_path / "run", folder, text, "steps=3")
    after = load_file(tmp_path / "run" / "hugging_face" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_greedy_text_is_that_of_transformers(tmp_path, folder, text):
    trained(tmp_path / "run", folder, text, "steps=20")
    run = open_run(tmp_path / "run", device="cpu")
    ids = run.task.encode(["nobody saw"])[0].tolist()
    inner = run.model.model
    there = inner.generate(
        run.model.readout.to_model_ids(torch.tensor([ids])), max_new_tokens=6, do_sample=False, eos_token_id=None
    )[0, len(ids) :]
    here = generate_tokens(run.model, ids, tokens=6, sampling=Sampling(), cached=False)
    assert list(here) == [int(token) + 4 for token in there]
    assert attnlab.generate(run, "nobody saw", tokens=6) == run.task.decode([*ids[1:], *(there + 4).tolist()])[10:]


def step_of(folder):
    for name in ("last", "previous"):
        try:
            return read_checkpoint(folder / f"{name}.safetensors").state["step"]
        except (FileNotFoundError, DamagedError):
            continue
    return 0


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, folder, text):
    words = ["attention=coda", "steps=90", "checkpoint_every=5", "evaluate_every=40"]
    trained(tmp_path / "whole", folder, text, *words)
    out = tmp_path / "killed"
    process = subprocess.Popen(
        command("language", f"model={folder}", f"data={text}", *SMALL, f"out={out}", *words),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while step_of(out) < 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < step_of(out) < 90, "the kill must fall after a checkpoint and before the last step"
    trained(out, folder, text, *words)
    for file in ("last.safetensors", "best.safetensors", "hugging_face/model.safetensors"):
        whole, killed = (load_file(tmp_path / name / file) for name in ("whole", "killed"))
        assert whole.keys() == killed.keys()
        assert all(torch.equal(x, killed[name]) for name, x in whole.items()), file


# --- LoRA ---


def tuned(folder, **config):
    torch.manual_seed(0)
    return open_tuned_model(TunedConfig(path=str(folder), **config)).eval()


@pytest.mark.parametrize("make", [tiny_models.gpt2, tiny_models.llama])
@pytest.mark.parametrize("attention", ["softmax", "dagpam", "differential-v2"])
def test_lora_trains_updates_and_mechanism_and_begins_with_the_model(tmp_path, make, attention):
    folder = saved(make(), tmp_path / "model")
    plain, model = (tuned(folder, attention=attention, lora=rank) for rank in (0, 3))
    tokens = torch.tensor([[2, 7, 9, 8, 15]])
    torch.testing.assert_close(model(tokens), plain(tokens))
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters()
        if name.endswith((".a.weight", ".b.weight")) or is_added(name)
    }  # fmt: skip
    assert any(name.endswith(".b.weight") for name in trained)
    assert not trained & model.restored
    inner = model.model
    fixed = {name for name, x in inner.named_parameters() if f"model.{name}" in model.restored}
    assert {name.replace(".base_layer", "") for name in fixed} == {name for name, _ in make().named_parameters()}


@pytest.mark.parametrize("make", [tiny_models.gpt2, tiny_models.llama])
def test_merged_lora_is_w_plus_ba(tmp_path, make):
    folder = saved(make(), tmp_path / "model")
    model = tuned(folder, lora=3)
    for name, x in model.named_parameters():
        if name.endswith(".b.weight"):
            torch.nn.init.normal_(x, std=0.3)
    tokens = torch.tensor([[2, 7, 9, 8, 15]])
    before, start = model(tokens), tuned(folder)(tokens)
    assert (before - start)[..., 6:].abs().max() > 0.1
    model.save(tmp_path / "saved", str(folder))
    merged = tuned(tmp_path / "saved")
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in tuned(folder).named_parameters()}
    torch.testing.assert_close(merged(tokens), before, rtol=1e-4, atol=1e-4)


@pytest.mark.ecosystem
def test_lora_is_that_of_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: make test-ecosystem installs it")
    folder = saved(tiny_models.llama(), tmp_path / "model")
    ours = tuned(folder, lora=3).model
    config = peft.LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    theirs = peft.get_peft_model(tiny_models.llama(), config)
    own = dict(ours.named_parameters())
    for name, x in theirs.get_base_model().named_parameters():
        if "lora_" in name:
            same = own[name.replace("lora_A.default", "a").replace("lora_B.default", "b")]
            torch.nn.init.normal_(x, std=0.3)
            same.data.copy_(x)
    ids = torch.tensor([[3, 9, 4, 7, 11]])
    for model in (ours, theirs):
        model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    for name, x in theirs.get_base_model().named_parameters():
        if "lora_" in name:
            same = own[name.replace("lora_A.default", "a").replace("lora_B.default", "b")]
            torch.testing.assert_close(same.grad, x.grad)


def test_a_run_with_lora_stores_only_what_it_trains_and_saves_the_whole_model(tmp_path, folder, text):
    out = tmp_path / "run"
    words = ["attention=dagpam", "neutral=true", "lora=4", "steps=30", "evaluate_every=15", "evaluate_at=0"]
    trained(out, folder, text, *words)
    rows = [row for row in RunFolder(out).metrics() if "valid_loss" in row]
    assert [row["step"] for row in rows] == [0, 15, 30]
    assert rows[0]["valid_loss"] > rows[-1]["valid_loss"]
    kept = read_checkpoint(out / "last.safetensors").part("model/")
    assert kept
    assert all(name.endswith((".a.weight", ".b.weight")) or is_added(name) for name in kept)
    opened = open_run(out, device="cpu")
    valid = opened.task.make_batch("valid", list(range(opened.task.count_examples("valid"))))
    plain = Objective(open_tuned_model(TunedConfig(path=str(folder))).eval())(valid.inputs, valid.targets)
    assert rows[0]["valid_loss"] == pytest.approx(plain.item() / valid.count, rel=1e-5)
    tokens = valid.inputs[0]
    merged = attnlab.load(out / "hugging_face")
    own = merged(input_ids=torch.where(tokens < 4, 1, tokens - 4)).logits
    torch.testing.assert_close(opened.model.hidden(tokens), own, rtol=1e-4, atol=1e-4)


def test_a_run_with_lora_is_not_opened_on_other_weights(tmp_path, folder, text):
    values = {"model": str(folder), "data": str(text), "lora": "4", "steps": "2", "block": "13", "context": "5"}
    start = partial(start_run, resolve_recipe("language", values | {"batch_tokens": "130"}), out=tmp_path / "run",
                    device="cpu", report=ignore, note=ignore, export=False)  # fmt: skip
    start()
    open_run(tmp_path / "run", device="cpu")
    file = folder / "model.safetensors"
    save_file({name: x + 1 for name, x in load_file(file).items()}, file, {"format": "pt"})
    for act in (start, partial(open_run, tmp_path / "run", device="cpu")):
        with pytest.raises(ValueError, match=r"gpt2: the weights have changed since .*run began"):
            act()


def test_a_stopped_run_with_lora_ends_as_one_that_was_not(tmp_path, folder, text):
    values = {"model": str(folder), "data": str(text), "attention": "coda", "lora": "4", "steps": "20", "block": "13"}
    values |= {"context": "5", "batch_tokens": "130", "log_every": "5", "evaluate_at": "0"}
    recipe = resolve_recipe("language", values)

    def stop(row):
        if row["step"] == 10:
            signal.raise_signal(signal.SIGINT)

    ends = []
    for name, reports in (("whole", [ignore]), ("stopped", [stop, ignore])):
        for report in reports:
            _, result = start_run(recipe, out=tmp_path / name, device="cpu", report=report, note=ignore, export=False)
            ends.append(result.step)
        assert not (tmp_path / name / "hugging_face").exists()
    assert ends == [20, 11, 20]
    whole, stopped = (read_checkpoint(tmp_path / name / "last.safetensors").tensors for name in ("whole", "stopped"))
    assert all(torch.equal(x, stopped[name]) for name, x in whole.items())


def ignore(_):
    """Take a report or a note."""


# --- what is refused ---


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("translation", {}, "attnlab train language.*translation"),
        ("language", {"width": "32"}, "width= .*pretrained"),
        ("language", {"scale": "2"}, "'scale'"),
        ("language", {"capture": "auto"}, "capture="),
        ("language", {"tokenizer": "none"}, "tokenizer"),
        ("language", {"units": "word"}, "exclude each other"),
        ("language", {"model": "gpt3"}, "'gpt3'.*Hugging Face"),
    ],
)
def test_what_does_not_go_together_is_said(folder, task, given, said):
    with pytest.raises(ValueError, match=said):
        resolve_recipe(task, {"model": str(folder), "attention": "dagpam"} | given)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, text):
    tiny_models.gpt2().save_pretrained(tmp_path / "bare")
    done = train("language", f"model={tmp_path / 'bare'}", f"data={text}", *SMALL, f"out={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "bare has no tokenizer.json" in done.stderr


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (tiny_models.bert, "BertModel, not a causal language model"),
        (
            lambda: tiny_models._model(tiny_models.hf.BertForMaskedLM, tiny_models.bert().config),
            "BertForMaskedLM, not a causal language model.* sees",
        ),
        (tiny_models.marian, "MarianMTModel, not a causal language model"),
        (lambda: tiny_models.llama(eos_token_id=None), "eos_token_id=None"),
    ],
)
def test_models_that_are_not_causal_or_have_no_end_are_refused(tmp_path, make, said):
    make().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=said):
        open_tuned_model(TunedConfig(path=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"vocabulary": 102}, "98 tokens.* 97"),
        ({"max_length": 54}, "53 tokens.* 54: .*block=53"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(folder, sizes, said):
    open_tuned_model(TunedConfig(path=str(folder), vocabulary=101, max_length=53))
    with pytest.raises(ValueError, match=said):
        open_tuned_model(TunedConfig(path=str(folder), **sizes))


def test_label_smoothing_is_refused(folder):
    with pytest.raises(ValueError, match="label_smoothing"):
        Objective(open_tuned_model(TunedConfig(path=str(folder))), smoothing=[0.1])
