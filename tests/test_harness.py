"""Language models scored by lm-eval: adapted models load, and differences are paired by item."""

import csv
import json
import subprocess
import sys

import pytest
import tiny_models
import torch
from adapted_models import shake
from peers import need
from typer.testing import CliRunner

import attnlab
from attnlab.cli import app
from attnlab.commands.compare import harness

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["cat", "mat"]
doc_to_target: label
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain and an adapted model, and a task of eight items."""
    root = tmp_path_factory.mktemp("harness")
    for name, mechanism in (("plain", None), ("adapted", "dagpam")):
        model = tiny_models.llama()
        if mechanism:
            shake(attnlab.adapt(model, mechanism))
        model.save_pretrained(root / name)
        tiny_models.tokenizer().save_pretrained(root / name)
    lines = [
        {"text": f"the {word} saw the", "label": n % 2}
        for n, word in enumerate(["cat", "sat", "on", "mat", "nobody", "it", "saw", "the"])
    ]
    (root / "tasks").mkdir()
    (root / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "tasks" / "tiny.yaml").write_text(TASK.format(name="attnlab_tiny", file=root / "items.jsonl"))
    return root


def compare(folders, *words):
    models = f"model={folders / 'plain'},{folders / 'adapted'}"
    given = ["compare", models, "tasks=attnlab_tiny", f"include={folders / 'tasks'}", "--device", "cpu"]
    return CliRunner().invoke(app, [*given, *words])


@need("lm_eval")
@pytest.mark.ecosystem
def test_adapted_models_are_scored_and_paired_by_item(folders, tmp_path):
    done = compare(folders, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "out" / "scores.csv").read_text().splitlines()))
    assert [row["items"] for row in rows] == ["8", "8"]
    stored = [json.loads((tmp_path / "out" / f"items-{n}.json").read_text())["scores"] for n in (0, 1)]
    plain, adapted = (list(each["attnlab_tiny"]["acc"].values()) for each in stored)
    assert float(rows[1]["difference"]) == pytest.approx(sum(adapted) / 8 - sum(plain) / 8)
    assert set(plain + adapted) <= {0.0, 1.0}
    ids = tiny_models.tokenizer()(["the cat saw the cat", "the cat saw the mat"], return_tensors="pt")["input_ids"]
    model = attnlab.load(folders / "adapted")
    with torch.no_grad():
        scores = model(ids).logits.log_softmax(-1)[:, -2].gather(1, ids[:, -1:])  # of the last word
    assert adapted[0] == float(scores.argmax().item() == 0)  # the first item's answer is "cat"
    again = compare(folders, "--out", str(tmp_path / "out"))
    assert "scoring" not in again.output  # it reads what is there
    assert "other settings" in str(compare(folders, "limit=3", "--out", str(tmp_path / "out")).exception)


@need("lm_eval")
@pytest.mark.ecosystem
def test_the_entry_point_loads_adapted_models(folders, tmp_path):
    code = "from attnlab.commands.lm_eval_entry import main; main()"
    words = f"--model hf --model_args pretrained={folders / 'adapted'} --tasks attnlab_tiny --device cpu --batch_size 4"
    words = [*words.split(), "--include_path", folders / "tasks", "--output_path", tmp_path, "--log_samples"]
    done = subprocess.run([sys.executable, "-c", code, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.rglob("results*.json")
    found = json.loads(file.read_text())["results"]["attnlab_tiny"]["acc,none"]
    expected = harness.score_model(
        str(folders / "adapted"),
        harness.HarnessConfig(model=("x",), tasks=("attnlab_tiny",), include=str(folders / "tasks")),
        torch.device("cpu"),
    )
    values = expected["attnlab_tiny"]["acc"].values()
    assert found == pytest.approx(sum(values) / 8)


def test_differences_are_paired_by_item():
    first = {n: float(n % 2) for n in range(20)}
    other = first | {0: 1.0, 2: 1.0, 4: 1.0}
    rows = list(harness.contrast_models(["a", "b"], [{"t": {"acc": first}}, {"t": {"acc": other}}]))
    assert rows[0].contrast is None
    contrast = rows[1].contrast
    assert contrast.test == "paired"
    assert contrast.mean == pytest.approx(3 / 20)
    assert rows[1].holm == contrast.p
    with pytest.raises(ValueError, match="different items"):
        list(harness.contrast_models(["a", "b"], [{"t": {"acc": first}}, {"t": {"acc": {0: 1.0}}}]))


def test_measures_that_are_no_number_are_left_out():
    samples = [
        {"doc_id": 0, "filter": "none", "metrics": ["acc", "ppl"], "acc": 1, "ppl": (-3.0, 4)},
        {"doc_id": 0, "filter": "strict", "metrics": ["acc"], "acc": 0.0},
    ]
    assert harness.collect_items(samples) == {"acc": {0: 1.0}, "acc (strict)": {0: 0.0}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=a"], "tasks= is missing"),
        (["model=a", "tasks=b", "limt=3"], "did you mean 'limit'"),
        (["model=a", "tasks=b", "limit=0"], "limit must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said(words, message):
    assert message in str(CliRunner().invoke(app, ["compare", *words]).exception)


def test_a_missing_lm_eval_is_said(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert "pip install lm-eval" in str(CliRunner().invoke(app, ["compare", "model=a", "tasks=b"]).exception)
