"""The demo: its measures are right, its sentences follow from them, and nothing is left half written."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from attnlab.analysis.alignment import aer
from attnlab.cli import app
from attnlab.commands.demo.demo_page import choose_typical, compute_sentence_rate, render_copying
from attnlab.commands.demo.desktop import has_desktop
from attnlab.commands.demo.findings import list_findings
from attnlab.commands.demo.learners import AER, SOONEST, DemoResults, Learner
from attnlab.commands.demo.measures import RECORDS, compute_error_rate, measure_moment
from attnlab.commands.demo.sentences import Sentences, choose_shown
from attnlab.commands.demo.settings import DemoConfig
from attnlab.experiments.local import Local
from attnlab.experiments.study import Findings
from attnlab.experiments.verdicts import Cell
from attnlab.models.presets import build
from attnlab.recording.watch import record
from attnlab.records.record import Record
from attnlab.report.view import ViewGold
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.training.runs import open_run

SMALL = ("steps=5", "seeds=2", "batch=7", "copying=false")


def demo(*words):
    return CliRunner().invoke(app, ["demo", *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A demo of a few steps: where it is, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = demo(*SMALL, "attention=softmax,dagpam", f"out={folder}")
    assert done.exit_code == 0, (done.output, done.exception)
    return folder, done.stdout


@pytest.fixture(scope="module")
def task():
    return Synthetic(SyntheticConfig(data="lexicon", held_out=11))


def test_the_moments_go_from_the_start_to_the_end():
    assert DemoConfig(steps=400).moments == (0, 12, 25, 37, 50, 62, 75, 87, 100, 125, 150, 200, 300, 400)
    assert DemoConfig(steps=1).moments == (0, 1)


def test_an_attention_for_self_attention_alone_leaves_the_cross_attention_softmax():
    assert DemoConfig().recipe("shaped", 0).model.cross_attention == "softmax"
    assert DemoConfig().recipe("coda", 0).model.cross_attention is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"attention": ("softmax", "softmax")}, "different names"),
        ({"attention": ("sofmax",)}, "did you mean 'softmax'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(values, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**values)


def test_sentences_say_which_word_is_of_which(task):
    indices = [0, 3, 7]
    sentences = Sentences.take(task, "valid", indices)
    for place, index in enumerate(indices):
        source, target = (side[index].split() for side in (task.read_sources("valid"), task.read_references("valid")))
        links = task.read_alignments("valid")[index]
        assert {(int(j), int(i)) for i, j in sentences.right[place].nonzero()} == set(links)
        assert sentences.words["source"][place][: len(source) + 1] == [*source, "</s>"]
        assert sentences.words["target"][place][: len(target) + 1] == ["<s>", *target]
        gold = sentences.list_gold()[place]
        assert gold.rows == (*range(len(target)), -1)
        assert gold.keys == (*range(len(source)), len(source))
        assert gold.words == len(source)


def test_the_error_rate_is_that_of_the_links_by_hand(task):
    """Of random maps: each target word is linked to the source word with the largest weight, unless that is </s>."""
    sentences = Sentences.take(task, "valid")
    source, given = sentences.batch.inputs
    torch.manual_seed(0)
    maps = torch.rand(11, given.shape[1], source.shape[1]) * (source != 0)[:, None]
    links = []
    for k, (left, right) in enumerate(zip(task.read_sources("valid"), task.read_references("valid"), strict=True)):
        words = len(left.split())
        best = maps[k, : len(right.split()), : words + 1].argmax(-1).tolist()
        links.append({(j, i) for i, j in enumerate(best) if j < words})
    gold = task.read_alignments("valid")
    assert compute_error_rate(maps, sentences) == pytest.approx(aer(links, gold, gold))
    assert compute_error_rate(sentences.right.float(), sentences) < compute_error_rate(maps, sentences)


def test_the_weight_on_the_source_is_the_mean_over_linked_words(task):
    torch.manual_seed(0)
    recipe = DemoConfig().recipe("dagpam", 0)
    model = build(recipe.resolve_model(task)).eval()
    sentences = Sentences.take(task, "valid", range(5))
    found = measure_moment(model, sentences)
    weights = record(model, sentences.batch.inputs).kind("cross")[1].weights  # (b,h,i,j)
    sums, negative = [], []
    for k, links in enumerate(sentences.links):
        for target in {target for _, target in links}:
            sums.append(sum(weights[k, 2, target, word] for word, there in links if there == target))
            negative.append(weights[k, 2, target].clamp_max(0).sum())
    assert found["right"][1][2] == pytest.approx(float(torch.stack(sums).mean()), rel=1e-5)
    assert found["below"][1][2] == pytest.approx(float(torch.stack(negative).mean()), rel=1e-5)
    assert found["below"][1][2] < 0


def test_everything_is_written(made):
    folder, output = made
    whole = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert set(whole["attentions"]) == {"softmax", "dagpam"}
    for values in whole["attentions"].values():
        assert set(values["seeds"]) == {"0", "1"}
        assert [len(seed["at"]) for seed in values["seeds"].values()] == [5, 5]
    assert all((folder / "figures" / f"{name}{suffix}").stat().st_size > 1000
               for name in ("maps", "learning", "inside") for suffix in (".png", ".svg", ".pdf"))  # fmt: skip
    assert (folder / "table.csv").read_text(encoding="utf-8").startswith("attention,parameters,accuracy,")
    flat = " ".join(output.split())
    assert len(whole["findings"]) == 8  # half of the words are not right after 5 steps
    for about, sentence in whole["findings"]:
        assert f"{about} {' '.join(sentence.split())}" in flat
    assert output.splitlines()[-1] == f"report: {folder / 'report.html'}"


def test_the_page_is_one_small_file_with_all_that_makes_it_again(made):
    folder, _ = made
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert len(text) < 4_000_000
    assert "attnlab demo attention=softmax,dagpam steps=5 batch=7 lr=0.003 seed=0 copying=false --seeds 2" in text
    for fact in ("torch", "python", "hardware", "commit", "seeds"):
        assert f"<dt>{fact}</dt>" in text


def test_a_record_is_of_the_model_at_its_step(made):
    """What is on the page is what the run's own weights attend to."""
    folder, _ = made
    recipe = DemoConfig(attention=("softmax", "dagpam"), steps=5, seeds=2, batch=7).recipe("dagpam", 0)
    run = folder / "work" / "runs" / recipe.name()
    opened_run = open_run(run, device="cpu", weights="last")
    page = Sentences.take(opened_run.task, "valid", choose_shown(opened_run.task))
    seen, kept = record(opened_run.model, page.batch.inputs), Record.load(run / RECORDS / "5.safetensors")
    for ours, theirs in zip(seen.layers, kept.layers, strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights)
    assert {"beta", "saliency"} <= set(kept.kind("cross")[-1].extras)
    assert not (run / "steps").exists()


@pytest.mark.slow
def test_a_run_found_without_what_is_wanted_of_it_is_made_again_and_is_the_same(made, tmp_path):
    """The second seed left no records; as the first one of another demo it does, and finds the same numbers."""
    folder, _ = made
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    words = [word for word in SMALL if word != "seeds=2"]
    assert demo(*words, "attention=dagpam", "seed=1", "seeds=1", f"out={again}").exit_code == 0
    before, after = (json.loads((there / "results.json").read_text())["attentions"] for there in (folder, again))
    assert before["dagpam"]["seeds"]["1"] == after["dagpam"]["seeds"]["1"]
    recipe = DemoConfig(attention=("dagpam",), steps=5, seed=1, batch=7).recipe("dagpam", 1)
    records = [there / "work" / "runs" / recipe.name() / RECORDS / "5.safetensors" for there in (folder, again)]
    assert [file.exists() for file in records] == [False, True]


def test_what_is_finished_is_used_again(made, monkeypatch):
    folder, first = made
    monkeypatch.setattr(Local, "run", lambda *_, **__: pytest.fail("trained again"))
    assert demo(*SMALL, "attention=softmax,dagpam", f"out={folder}").stdout == first


def test_one_attention_of_one_s_own_and_one_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from attnlab.mechanisms.differential import Differential as Mine\n")
    done = demo("attention=./mine.py:Mine", "steps=2", "seeds=1", "batch=3", "copying=false")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "./mine.py:Mine" in (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")


def test_a_run_that_fails_is_said_and_the_others_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(
        "from attnlab.mechanisms.softmax import Softmax\n\n\n"
        "class Bad(Softmax):\n    def weights(self, *a, **k):\n        raise ValueError('out of weights')\n"
        "    def mix(self, *a, **k):\n        raise ValueError('out of weights')\n"
    )
    done = demo("attention=softmax,./bad.py:Bad", "steps=2", "seeds=1", "batch=3", "copying=false")
    assert done.exit_code == 1, (done.output, done.exception)
    assert "./bad.py:Bad, seed 0 failed: out of weights" in done.output
    page = (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")
    assert "out of weights" in page
    assert "1 attention learning" in page


@pytest.mark.slow
def test_interrupted_it_leaves_nothing_half_written(tmp_path):
    code = "from attnlab.cli import main; main()"
    words = [sys.executable, "-c", code, "demo", "attention=softmax", "steps=300", "seeds=1", "copying=false",
             f"out={tmp_path}"]  # fmt: skip
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not any(tmp_path.glob("work/runs/*/metrics.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 130, told
    assert told.splitlines()[-1].startswith(
        "attnlab: stopped, nothing is lost; to resume: attnlab demo attention=softmax"
    )
    assert not (tmp_path / "report.html").exists()
    assert not [file for file in tmp_path.rglob(".*") if file.name != ".lock"]


@pytest.mark.parametrize(
    ("platform", "environment", "interactive", "there"),
    [
        ("linux", {"DISPLAY": ":0"}, True, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ("linux", {}, True, False),
        ("linux", {"DISPLAY": ":0"}, False, False),
        ("linux", {"DISPLAY": ":0", "CI": "true"}, True, False),
        ("linux", {"DISPLAY": "localhost:10", "SSH_CONNECTION": "1 2 3 4"}, True, False),
        ("darwin", {}, True, True),
    ],
)
def test_a_page_is_opened_only_for_somebody(platform, environment, interactive, there):
    assert has_desktop(platform, environment, interactive=interactive) is there


def run_of(accuracies, aers, jsd):
    """What a run has that learns so."""
    at = [
        {"accuracy": x, "aer_weight": [[y]], "aer_norm": [None], "right": [[1 - y]], "below": [[0.0]],
         "agreement": 0.5, "chance": 0.25} for x, y in zip(accuracies, aers, strict=True)
    ]  # fmt: skip
    return {"moments": [0, 10, 20], "at": at, "head": (0, 0), "inside": {"jsd": jsd}}


def results(first, second):
    config = replace(DemoConfig(), attention=("softmax", "coda"), steps=20, seeds=2)
    learners = [Learner(name, 7, dict(enumerate(x)), {}) for name, x in (("softmax", first), ("coda", second))]
    return DemoResults(config, learners, {}, None)


def test_sentences_follow_the_numbers():
    low, high = run_of([0.1, 0.6, 0.97], [0.9, 0.7, 0.2], 1.0), run_of([0.1, 0.4, 0.9], [0.9, 0.8, 0.1], 3.0)
    told = dict(list_findings(results([low, low], [high, high])))
    assert (
        "coda's heads differ most, by 3.00 nats over a sentence, softmax's least, by 1.00 (in each of 2 seeds)"
        in (told["diversity"])
    )
    assert told["weight"].startswith(
        "coda's best head gives the translated word a weight of 0.90, softmax's a weight of 0.80 (in each"
    )
    assert "97.0\N{NO-BREAK SPACE}% (softmax) and 90.0\N{NO-BREAK SPACE}% (coda)" in told["learning"]
    assert "at step 15 on average, the error rate of the best head is 40" in told["order"]  # 70 at 10, 10 at 20
    assert "rank" not in told  # nothing was measured
    assert "contributions" not in told
    turned = dict(list_findings(results([low, high], [high, high | {"inside": {"jsd": 2.0}}])))
    assert "(mean of 2 seeds, which disagree)" in turned["diversity"]


def test_the_study_of_copying_is_told_by_its_cells():
    column = "share of seeds that reach accuracy 0.99"
    cells = [
        Cell(item="fig3", row=row, column=column, values=x) for row, x in (("5 of 7", (1.0, 1.0)), ("5", (0.0, 1.0)))
    ]
    run = run_of([0.1, 0.6, 0.97], [0.9, 0.7, 0.2], 1.0)
    found = replace(results([run, run], [run, run]), copying=Findings(cells, remarks=("a remark",)))
    sentence = "An LSTM learns to copy 5 of 7 in 2 of 2 seeds and 5 in 1 of 2 seeds."
    assert dict(list_findings(found))["copying"] == sentence
    assert "a remark" in "".join(part.html() for part in render_copying(found))


def test_the_page_opens_at_the_sentence_with_the_median_error():
    """By hand: every word right, one of two wrong, both wrong; each word has one link, so AER is 0, 1/2 and 1."""
    gold = ViewGold(frozenset({(0, 0), (1, 1)}), frozenset(), (0, 1, -1), (0, 1, 2), 2)
    maps = [torch.eye(3), torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 1]]), torch.eye(3).flip(1)[:, [1, 2, 0]]]
    rates = [compute_sentence_rate(weights, gold) for weights in maps]
    assert rates == [0.0, 0.5, 1.0]
    for order in ([0, 1, 2], [2, 0, 1]):
        layer = SimpleNamespace(weights=torch.stack([maps[k] for k in order])[:, None])
        record = SimpleNamespace(kind=lambda kind, layer=layer: [layer])
        learner = SimpleNamespace(first={"head": (0, 0)}, moments=[0, 7], records={7: record})
        assert choose_typical([learner], [gold] * 3) == order.index(1)


def test_an_attention_that_did_not_get_there_in_every_seed_is_not_ranked():
    learnt, late = run_of([0.1, 0.96, 0.97], [0.9, 0.7, 0.2], 1.0), run_of([0.1, 0.4, 0.9], [0.9, 0.8, 0.1], 3.0)
    found = results([learnt, late], [learnt, learnt])
    ranking = found.rank(SOONEST)
    assert not ranking.has_several
    assert ranking.highest.name == "coda"
    assert SOONEST.format_mean(found.learners[0].measured) == "10 (1 of 2 seeds)"
    assert found.rank(AER).lowest.name == "softmax"


def test_the_page_in_a_browser(made, opened):
    folder, _ = made
    page = opened(folder / "report.html").ready()
    assert page.locator("h1").inner_text() == "attnlab: 2 attentions learning to translate"
    assert page.locator(".training .step").inner_text() == "step 5"
    assert page.locator(".legend").inner_text().startswith("accuracy of the next word")
    page.locator(".training input[type=range]").fill("0")
    assert page.ready().locator(".training .step").inner_text() == "step 0"
    assert page.locator(".findings li").count() == 3
    assert "held-out words are correct" in page.locator(".findings").inner_text()
    assert "typical sentence" in page.locator("main").inner_text()
    page.locator("section > details summary").first.click()
    assert page.locator(".facts dt").first.inner_text() == "contributions"
    assert page.locator(".heads .best[aria-pressed='true']").count() == 1  # it opens at the head that the text is about


def test_rows_have_the_same_names_in_the_figure_and_in_the_viewer(made, opened):
    folder, _ = made
    page = opened(folder / "report.html").ready()
    shown = page.locator(".tokens").first.locator(".token").all_inner_texts()
    drawn = (folder / "figures" / "maps.svg").read_text(encoding="utf-8")
    rows = [text for text in re.findall(r"<!-- (.*?) -->", drawn) if text in {"&lt;s&gt;", *shown}]
    assert [text.replace("&lt;", "<").replace("&gt;", ">") for text in rows][: len(shown) - 1] == shown[:-1]
