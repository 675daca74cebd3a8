"""attnlab runs: one row per run, in the order of their dates, and a row for what is damaged."""

import json
import os

import pytest
from in_process import run_attnlab

from attnlab.training.run_list import list_runs

SMALL = ["data=lexicon", "examples=100", "held_out=10", "width=8", "layers=1", "heads=2", "feed_forward=8", "steps=2"]
SMALL += ["batch_tokens=200", "device=cpu"]


@pytest.fixture
def root(tmp_path):
    for number, name in enumerate(("later", "earlier")):
        done = run_attnlab("train", "synthetic", *SMALL, f"seed={number + 5}", f"out={tmp_path / 'runs' / name}")
        assert done.returncode == 0, done.stderr
    for file in (tmp_path / "runs" / "earlier").iterdir():
        os.utime(file, (1e9, 1e9))
    return tmp_path / "runs"


def test_rows_have_seed_date_task_and_the_best_score_with_its_name(root):
    rows = list_runs(root)
    assert [(row["run"], row["seed"], row["state"]) for row in rows] == [
        ("earlier", "6", "finished"), ("later", "5", "finished"),
    ]  # fmt: skip
    assert rows[0]["date"].startswith("2001-09-")
    assert rows[0]["task"] == "synthetic lexicon"
    measured = [json.loads(line) for line in (root / "earlier/metrics.jsonl").read_text().splitlines()]
    best = min(row["valid_perplexity"] for row in measured if "valid_perplexity" in row)
    assert rows[0]["best score"] == f"valid perplexity {best:.4g}"
    for part in ("valid", "test"):
        done = run_attnlab("evaluate", str(root / "earlier"), f"part={part}", "bootstrap=2", "device=cpu")
        assert done.returncode == 0, done.stderr
        assert list_runs(root)[0]["best score"].startswith(f"{part} BLEU ")
    shown = run_attnlab("runs", str(root)).stdout
    assert all(column in shown for column in ("seed", "date", "best score", "test BLEU"))


def test_a_score_of_a_run_that_was_trained_further_has_its_step(root):
    done = run_attnlab("evaluate", str(root / "later"), "part=valid", "bootstrap=2", "device=cpu")
    assert done.returncode == 0, done.stderr
    score = list_runs(root)[1]["best score"]
    assert "step" not in score
    longer = [word for word in SMALL if not word.startswith("steps=")]
    done = run_attnlab("train", "synthetic", *longer, "steps=3", "seed=5", f"out={root / 'later'}")
    assert done.returncode == 0, done.stderr
    assert list_runs(root)[1]["best score"] == f"{score} at step 2"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None), ("config.json", "{"), ("config.json", "[3]"), ("config.json", '{"data": 1}'),
        ("metrics.jsonl", '{"step": 2, "valid_loss": 1}\n'),
        ("last.safetensors", "nothing"), ("evaluation-test.json", "{"), ("evaluation-test.json", "[]"),
    ],
)  # fmt: skip
def test_a_damaged_run_has_a_row_that_says_so(file, content, root):
    path = root / "later" / file
    (root / "later" / "previous.safetensors").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    rows = {row["run"]: row for row in list_runs(root)}
    assert rows["later"]["state"].startswith("damaged: ")
    assert rows["earlier"]["state"] == "finished"
    assert run_attnlab("runs", str(root)).returncode == 0


def test_folders_of_others_are_left_out(root):
    for name, content in (("other", "{}"), ("number", "3"), ("broken", "{")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(content)
    assert {row["run"] for row in list_runs(root)} == {"earlier", "later"}
