"""The study of convertibility: when a model is back, what is planned, what is found, and what is refused."""

import json
import shutil

import pytest
import tiny_models
from inline_scheduler import InlineScheduler
from item_runs import KnownRows, make_setting, run_item
from safetensors.torch import load_file, save_file

from attnlab.experiments.deadline import OutOfTimeError
from attnlab.experiments.ledger import Ledger
from attnlab.experiments.reproduction import StudyTerms, draw_study, reproduce
from attnlab.experiments.study_page import tabulate_wide, write_study
from attnlab.huggingface.neutral import NEUTRAL
from attnlab.mechanisms import MECHANISMS
from attnlab.studies.convert import STUDY, convertibility, plan, tiny_llama
from attnlab.studies.convert.convertibility import BACK, END, RATIO, SHARE, START, convert
from attnlab.studies.convert.excerpts import cut_text, write_excerpts
from attnlab.studies.convert.figures import draw_recoveries
from attnlab.studies.convert.recovery import Recovery
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.training.scoring import score_batches

TEXT = "the cat sat on the mat .\nnobody saw it .\n"
TINY = plan.ConversionSize(
    ("softmax", "dagpam", "sigmoid", "differential"), block=8, examples=2, updates=4, evaluated=(0, 2, 4), lora=2,
    rate=1e-2, characters=(4000, 400),
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "little"
    tiny_models.llama().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 200)
    return path


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(plan.SIZES, "small", TINY)


# --- when a model is back ---


def recover(losses, original, tokens=(0, 10, 20, 30)):
    return Recovery(tokens, tuple(losses), tuple(original))


def test_a_model_is_back_from_the_first_evaluation_that_later_ones_confirm():
    original = (2.0, 2.0, 2.0, 2.0)
    assert recover((2.02, 2.0, 2.0, 2.0), original).back == 0
    assert recover((2.03, 2.02, 1.9, 2.0), original).back == 10
    assert recover((2.0, 2.03, 2.02, 2.01), original).back == 20  # it was lost in between
    assert recover((9.0, 5.0, 3.0, 2.03), original).back is None
    assert recover((9.0, float("nan"), 2.0, 2.0), original).back == 20


def test_the_original_is_trained_alike_or_left_untouched():
    one = recover((3.0, 2.0, 1.9, 1.5), (2.0, 1.8, 1.6, 1.4))
    assert (one.back, one.as_untouched, one.budget) == (None, 10, 30)
    assert one.ratio == pytest.approx(1.5 / 1.4)
    with pytest.raises(ValueError, match=r"evaluated after \[0, 5\] tokens, the original after \[0, 10\]"):
        Recovery.from_values({"tokens": [0, 5], "loss": [1, 1]}, {"tokens": [0, 10], "loss": [1, 1]})


# --- what is planned ---


def test_every_mechanism_is_planned_one_seed_after_the_other(tmp_path):
    asked = KnownRows(lambda run: {"tokens": [0, 100], "loss": [3.0, 2.0]})
    convert(make_setting(tmp_path, "full", (0, 1), rows=replace_running(asked), options={"model": "owner/Model"}))
    assert [run.trained.model.attention for run in asked.asked] == 2 * ["softmax", *list(MECHANISMS)[1:]]
    assert [run.seed for run in asked.asked] == [0] * len(MECHANISMS) + [1] * len(MECHANISMS)
    for run in asked.asked:
        name = run.trained.model.attention
        assert run.trained.model.neutral == (name in NEUTRAL and name != "softmax")
        assert run.recipe["model"]["path"] == run.recipe["data"]["tokenizer"] == "Model"
        assert str(tmp_path) not in json.dumps(run.recipe)
    assert asked.asked[0].trained.training.steps * asked.asked[0].trained.training.batch_tokens == 2**19


def replace_running(rows):
    rows.running = False  # so that no text and no model is needed
    return rows


def test_the_key_of_a_run_does_not_depend_on_folders(tmp_path):
    keys = [
        plan.ConversionPlan(make_setting(tmp_path / out, "small", options={"model": path}), "wikitext-2")
        .plan_run("dagpam", 0).key
        for out, path in (("a", f"{tmp_path}/x/Model"), ("b", "owner/Model"))
        if (tmp_path / "x" / "Model").mkdir(parents=True, exist_ok=True) is None
    ]  # fmt: skip
    assert keys[0] == keys[1]


def test_attention_takes_names_or_all(tmp_path):
    def names(**options):
        return convertibility.select_attentions(make_setting(tmp_path, "small", options=options))

    assert names() == list(plan.FEW)
    assert names(attention="coda,softmax,coda") == ["softmax", "coda"]
    assert set(names(attention="all")) == set(MECHANISMS)
    with pytest.raises(ValueError, match=r"attention: unknown name 'dagpan' \(did you mean 'dagpam'\?\)"):
        names(attention="dagpan")


# --- what is found ---


def known(run):
    name = run.trained.model.attention
    curves = {"softmax": [3.0, 2.5, 2.0], "coda": [9.0, 2.5, 2.0], "nap": [9.0, 9.0, 9.0]}
    if name not in curves:
        raise ValueError("it does not fit")
    if name == "coda" and run.seed == 2:
        return {"tokens": [0, 50, 100], "loss": [9.0, 9.0, 2.5]}
    return {"tokens": [0, 50, 100], "loss": curves[name]}


def test_cells_remarks_and_figures_say_what_converts(tmp_path):
    rows = replace_running(KnownRows(known))
    options = {"attention": "coda,nap,differential"}
    findings = convert(make_setting(tmp_path, "small", (0, 1, 2), rows=rows, options=options))
    cells = {(cell.row.partition(": ")[2], cell.column): cell for cell in findings.cells}
    assert cells["coda", BACK].values == (50, 50, 100)
    assert cells["coda", BACK].note == "not back within 8,192 tokens: seed 2"
    assert cells["coda", SHARE].values == (1, 1, 0)
    assert cells["nap", RATIO].values == (4.5, 4.5, 4.5)
    assert cells["nap", START].values == cells["nap", END].values == (9, 9, 9)
    assert cells["differential", START].not_run == "it does not fit"
    assert {cell.verdict for cell in cells.values()} == {"no verdict", "not run"}
    said = "\n".join(findings.remarks)
    assert "Back in some seeds: coda (2 of 3)." in said
    assert "Not back within 8,192 tokens (times the original's log-perplexity at the end): nap (4.50)." in said
    assert "No value: differential: it does not fit." in said
    assert {name.rpartition("-")[2] for name in findings.figures} == {"curves", "tokens"}
    table = tabulate_wide(list(findings.cells))
    assert [row[0] for row in table.rows] == ["WikiText-2: softmax", "WikiText-2: coda", "WikiText-2: nap"]
    assert len(table.columns) == 7


def test_a_place_without_a_mechanism_is_empty():
    one = recover((3.0, 2.0, 2.0, 2.0), (2.0, 2.0, 2.0, 2.0))
    axes = draw_recoveries({str(number): [one] for number in range(8)}).axes
    assert [axis.axison for axis in axes] == [True] * 8 + [False] * 4


def test_a_model_is_converted_and_a_mechanism_that_does_not_fit_is_a_row(tmp_path, tiny, model, text):
    """Killed after some jobs, it resumes; drawn again from the ledger, it is the same."""
    little = shutil.copytree(model, tmp_path / "little")
    options = {"model": str(little), "data": str(text)}
    out, terms = tmp_path / "out", StudyTerms("small", seeds=1, options=options)
    few = InlineScheduler()
    few.run = stop_after(few, 2)
    with pytest.raises(OutOfTimeError, match="2 of 4 runs are left"):
        reproduce(STUDY, terms, out, few)
    on = InlineScheduler()
    (result,) = reproduce(STUDY, terms, out, on)
    assert len(on.names) == 2
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    start = {name: cells[f"text.txt: {name}", START].values[0] for name in ("softmax", "dagpam", "sigmoid")}
    assert start["dagpam"] == pytest.approx(start["softmax"], rel=1e-5)  # a neutral start
    assert abs(start["sigmoid"] - start["softmax"]) > 0.01
    assert cells["text.txt: softmax", END].values[0] < start["softmax"]
    assert "rotates whole heads (RoPE)" in cells["text.txt: differential", START].not_run
    rows = {row.recipe["model"]["attention"]: row for row in Ledger(out / "ledger.jsonl").rows() if row.seed == 0}
    assert rows["dagpam"].values["tokens"] == [0, 32, 64]
    assert rows["dagpam"].values["mechanism_parameters"] > 0 == rows["softmax"].values["mechanism_parameters"]
    assert len(rows["softmax"].values["weights"][0]) == 64
    assert [path.name.split("-")[1] for path in (out / "work" / "runs").iterdir()] == ["differential"]  # it failed
    shutil.rmtree(little)
    shutil.rmtree(out / "work")
    (again,) = draw_study(STUDY, "small", out)
    assert again.cells == result.cells
    page = write_study(STUDY, "small", [again], out).read_text()
    assert "What was measured" in page
    assert "What was reproduced" not in page
    assert "text.txt: sigmoid" in page


def test_rows_of_another_model_of_the_same_name_are_not_joined(tmp_path, tiny, model, text):
    little = shutil.copytree(model, tmp_path / "little")
    options = {"model": str(little), "data": str(text), "attention": "softmax"}
    run_item(convert, tmp_path / "out", scale="small", options=options)
    file = little / "model.safetensors"
    save_file({name: 2 * x for name, x in load_file(file).items()}, file, {"format": "pt"})
    said = refusal(tmp_path, little, text, attention="softmax,uniform")
    assert said.endswith("the ledger has rows of another model with the name little; choose another --out")


def stop_after(on, count):
    """Return a scheduler's run that stops, as at a deadline, after some jobs."""

    def run(jobs, **how):
        InlineScheduler.run(on, jobs[:count])
        raise OutOfTimeError

    return run


# --- texts ---


def test_an_excerpt_ends_with_a_line(tmp_path, text):
    assert cut_text("one\ntwo\nthree\n", 9) == "one\ntwo\n"
    assert cut_text("one long line", 5) == "one l"
    assert cut_text("short\n", 100) == "short\n"
    write_excerpts(str(text), (60, 30), tmp_path / "cut", None)
    assert (tmp_path / "cut" / "train.txt").read_text() == TEXT
    assert (tmp_path / "cut" / "valid.txt").read_text() in TEXT * 2
    write_excerpts(str(text), (60, 30), tmp_path / "cut", None)
    text.write_text("another text\n" * 200)
    with pytest.raises(ValueError, match=r"text.txt has changed since .*train.txt was cut from it"):
        write_excerpts(str(text), (60, 30), tmp_path / "cut", None)


def test_the_tiny_llama_has_learned_to_use_its_attention(tmp_path):
    folder, text = tmp_path / tiny_llama.NAME, tmp_path / "text"
    tiny_llama.write_tiny_llama(folder, text)
    task = Language.prepare(
        LanguageConfig(data=str(text / "train.txt"), valid=str(text / "valid.txt"), tokenizer=str(folder), block=32),
        tmp_path / "vocabulary",
    )
    batch = task.make_batch("valid", list(range(task.count_examples("valid"))))

    def score(**config):
        tuned = convertibility.open_tuned_model(convertibility.TunedConfig(path=str(folder), **config)).eval()
        scored = score_batches(tuned, [(batch.inputs, batch.targets)])
        return scored.nll_sum / scored.count

    original = score()
    assert original < 2.5 < 3.9  # log 50: a guess among all words
    assert score(attention="uniform") > original + 0.1


# --- what is refused ---


def refusal(tmp_path, model, data, **options):
    options = {"model": str(model), "data": str(data), "attention": "softmax", **options}
    with pytest.raises((ValueError, OSError)) as error:
        run_item(convert, tmp_path / "out", scale="small", options=options)
    return str(error.value)


def test_a_model_that_is_not_causal_is_refused_before_any_run(tmp_path, tiny, text):
    tiny_models.bert().save_pretrained(tmp_path / "bert")
    tiny_models.tokenizer().save_pretrained(tmp_path / "bert")
    assert "BertModel, not a causal language model" in refusal(tmp_path, tmp_path / "bert", text)
    assert "no such folder" in refusal(tmp_path, tmp_path / "nothing", text)
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_texts_that_are_missing_or_too_short_are_refused(tmp_path, tiny, model, text):
    assert "unknown name 'wikitext2' (did you mean 'wikitext-2'?)" in refusal(tmp_path, model, "wikitext2")
    assert "data=none.txt: no such file" in refusal(tmp_path, model, "none.txt")
    text.write_text("too short\n")
    assert "is too short to hold out a validation text" in refusal(tmp_path, model, text)
    short = tmp_path / "short.txt"
    short.write_text(TEXT * 10)
    said = refusal(tmp_path, model, short)
    assert "the validation part of data=" in said
    assert "has 6 tokens, but this scale needs at least 8: give a longer text" in said


def test_data_sets_that_are_not_there_are_rows_that_say_so(tmp_path):
    setting = make_setting(tmp_path, "small", data_dir=str(tmp_path))
    findings = convert(setting)
    assert all("does not exist" in cell.not_run for cell in findings.cells)


def test_the_smoke_scale_has_its_own_model_and_text(tmp_path):
    for key in ("model", "data"):
        with pytest.raises(ValueError, match=f"leave {key}= out"):
            convert(make_setting(tmp_path, options={key: "x"}))
