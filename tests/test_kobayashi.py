"""The BERT part of Kobayashi et al. 2020: its sequences, its measures, and the reasons why it cannot run."""

import csv
import gzip

import numpy as np
import pandas as pd
import pytest
import tiny_models
from item_runs import make_setting, run_item
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.ledger import FILE, Ledger
from attnlab.experiments.reproduction import StudyTerms
from attnlab.studies import open_study
from attnlab.studies.kobayashi2020 import bert, sequences
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe

ITEMS = ("table1", "figure3", "table2", "figure4", "frequency")
MODEL = tiny_models.minilm()
WIKI = """
 = Cats =

 The <unk> cat , a well @-@ known animal .

 It sleeps .
 = = Sleep = =

 All night , and 1 @,@ 000 days .
 Then it wakes .
 Then it eats .
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 40 paragraphs."""
    path = tmp_path_factory.mktemp("text") / "wiki.txt"
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "while",
        "nobody",
        "saw",
        "it",
        ",",
        "and",
        "slept",
        ".",
        "pangolins",
    ]
    draw = np.random.default_rng(3)
    lines = [" ".join(draw.choice(words, size=draw.integers(5, 30))) for _ in range(40)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def setting(tmp_path, **options):
    return make_setting(tmp_path, seeds=(0, 1, 2), data_dir=str(tmp_path), options=options)


# --- what is read ---


def test_pairs_are_neighbouring_paragraphs_without_a_heading_between():
    found = [tuple(side.split(" ", 1)[0] for side in pair) for pair in sequences.pair_neighbours(WIKI.split("\n"))]
    assert found == [("The", "It"), ("All", "Then"), ("Then", "Then")]
    assert sequences.clean_text("a well @-@ known <unk> of 1 @,@ 000", "[UNK]") == "a well-known [UNK] of 1,000"


def test_a_seed_draws_its_own_pairs_from_the_set_or_a_file(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    with gzip.open(tmp_path / "wikitext-2" / "train.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(f"paragraph {k}" for k in range(50)))
    how = {"unknown": "?", "data_dir": str(tmp_path)}
    first, same, other = (sequences.draw_sequences(None, 13, seed, **how) for seed in (1, 1, 2))
    assert first == same != other
    assert len({example.text for example in first}) == 13
    numbers = [(int(e.text.split()[1]), int(e.second.split()[1])) for e in first]
    assert all(after == before + 1 for before, after in numbers)
    (tmp_path / "short.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"short.txt has 1 pairs"):
        sequences.draw_sequences(str(tmp_path / "short.txt"), 13, 0, **how)


# --- what is measured ---


@pytest.fixture(scope="module")
def tables():
    """Two layers of two heads: numbers that can be checked by hand."""
    names = ["[CLS]", "[SEP]", "comma, period", "other"]
    numbers = {  # Σ α, Σ ‖αf‖, mean ‖f‖ by category
        (0, 0): [(0.1, 0.2, 1.0), (0.2, 0.4, 4.0), (0.1, 0.1, 2.0), (0.6, 3.3, 5.0)],
        (0, 1): [(0.3, 0.2, 1.0), (0.2, 0.2, 3.0), (0.1, 0.1, 2.0), (0.4, 3.5, 5.0)],
        (1, 0): [(0.0, 0.1, 1.0), (0.8, 0.1, 0.5), (0.1, 0.3, 2.0), (0.1, 1.5, 5.0)],
        (1, 1): [(0.0, 0.1, 1.0), (0.6, 0.3, 1.0), (0.1, 0.3, 2.0), (0.3, 1.3, 5.0)],
    }
    rows = [(*at, name, *row) for at, some in numbers.items() for name, row in zip(names, some, strict=True)]
    columns = ["layer", "head", "category", "weight_share", "norm_sum", "norm_mean"]
    heads = pd.DataFrame({"kind": "encoder-self", "layer": [0, 0, 1], "head": [0, 1, 0], "norm_cv": [0.2, 0.5, 0.1]})
    heads = heads.assign(norm_mean=[1.0, 2.0, 3.0], norm_sd=[0.2, 1.0, 0.3], norm_max=[2.0, 5.0, 4.0], norm_min=0.5)
    return {
        "heads": heads,
        "categories": pd.DataFrame(rows, columns=columns).assign(kind="encoder-self"),
        "spearman": pd.DataFrame({"category": names, "spearman": [-0.3, -0.7, -0.2, 0.1], "error_bound": 0.01}),
        "frequency": pd.DataFrame({"of": ["norm", "weight"], "spearman": [0.8, 0.3]}),
    }  # fmt: skip


def test_cells_are_what_the_tables_say(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(bert, "read_surveys", lambda setting: bert.DrawTables([tables] * 3, ("other model",)))
    values = {}
    for name in ITEMS:
        findings = getattr(bert, name)(setting(tmp_path))
        values |= {(name, cell.row, cell.column): cell.mean for cell in findings.cells}
    assert values["table1", "head of greatest CV", "max"] == 5.0
    assert values["table1", "head of least CV", "mean"] == 3.0
    assert values["table1", "mean over heads", "CV"] == pytest.approx(0.8 / 3)
    assert values["figure3", "[SEP]", "greatest Σ α of a layer"] == pytest.approx(0.7)
    assert values["figure3", "other", "greatest Σ ‖αf‖ of a layer"] == pytest.approx(3.4)
    drop = "its share by weight − by norm, where it has most weight"
    assert values["figure3", "[SEP]", drop] == pytest.approx(0.7 - 0.2 / (0.1 + 0.2 + 0.3 + 1.4))
    assert values["table2", "[SEP]", "Spearman's ρ"] == pytest.approx(-0.7)
    assert values["figure4", "[SEP]", "Spearman's ρ of weight and mean ‖f‖ over heads"] == pytest.approx(
        -0.9486832980505138  # ranks 1.5 1.5 4 3 and 4 3 1 2
    )
    assert values["frequency", "‖f(x)‖ − α", "Spearman's ρ"] == pytest.approx(0.5)


@pytest.mark.slow  # five seconds or more on an idle core
def test_the_study_runs_on_a_model_and_a_file_of_ones_own(text, tmp_path):
    """All five items, one survey a seed; the same options are the same result, others another."""
    words = ["reproduce", "kobayashi2020", f"model={MODEL}", f"file={text}", "--device", "cpu"]
    words += [f"--only={name}" for name in ITEMS]
    result = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.exception
    with open(tmp_path / "out" / "smoke" / "cells.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 13 + 10 + 4 + 1 + 3
    assert all(cell["seeds"] == "3" and cell["group"] == "stand-in" for cell in cells)
    assert {cell["tags"] for cell in cells} == {"other data; other model; smaller scale; one model"}
    assert {cell["verdict"] for cell in cells} == {"no verdict"}  # draws of text replicate no model
    assert "come from counts of these sequences" in (tmp_path / "out" / "smoke" / "report.html").read_text()
    surveys = Ledger(tmp_path / "out" / FILE).select({"measure": "survey"})
    assert sorted(row.seed for row in surveys) == [0, 1, 2]  # parallel jobs end in any order
    assert len(list((tmp_path / "out" / "smoke" / "figures").glob("*.png"))) == 2


def test_options_are_part_of_what_a_result_is_of():
    study = open_study("kobayashi2020")
    plain, other = (StudyTerms("smoke", options=options).configure(study, "table1") for options in ({}, {"model": "x"}))
    assert plain.as_recipe() != other.as_recipe()
    assert plain == StudyTerms("smoke").configure(study, "table1")
    with pytest.raises(ValueError, match=r"no option 'modle' \(did you mean 'model'\?\)"):
        study.check_options(["modle"], ["table1"])


def test_the_authors_ranks_are_taken_where_they_are(tmp_path):
    reader = bert.open_reader(MODEL, device="cpu")
    assert bert._find_published_ranks(reader, str(tmp_path)) is None
    (tmp_path / "bert-frequency").mkdir()
    (tmp_path / "bert-frequency" / "rank_count_ids.txt").write_text("1 9 1996\n")
    assert bert._find_published_ranks(reader, str(tmp_path)).endswith("rank_count_ids.txt")


# --- where it cannot be ---


def test_a_model_that_is_not_there_is_not_run_and_says_why(tmp_path):
    for name in ITEMS:
        findings = getattr(bert, name)(setting(tmp_path, model="no/such-model"))
        assert all(cell.verdict == "not run" for cell in findings.cells)
        assert all("local cache" in c.not_run and "model=FOLDER" in c.not_run for c in findings.cells)


def test_text_that_is_not_at_hand_is_not_run_and_a_file_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError("wikitext-2 could not be fetched:\n get it from elsewhere")

    monkeypatch.setattr(sequences, "obtain_file", unreachable)
    findings = run_item(bert.table2, tmp_path, seeds=(0, 1), options={"model": MODEL})
    assert {cell.not_run for cell in findings.cells} == {"wikitext-2 could not be fetched: get it from elsewhere"}
    for name in ("file", "frequency"):
        with pytest.raises(FileNotFoundError, match=f"{name}=.*nowhere"):
            bert.read_surveys(setting(tmp_path, **{"model": MODEL, name: str(tmp_path / "nowhere")}))


def test_a_run_of_ours_is_no_bert(tmp_path):
    values = {"data": "lexicon", "steps": "1", "batch_examples": "8", "width": "12", "heads": "3", "layers": "1"}
    values |= {"evaluate_every": "1", "checkpoint_every": "1", "compile": "no"}
    quiet = {"report": lambda _: None, "note": lambda _: None}
    runs.start_run(resolve_recipe("synthetic", values), out=str(tmp_path / "run"), device="cpu", **quiet)
    with pytest.raises(ValueError, match=r"run does not read \[CLS\] p1 \[SEP\] p2 \[SEP\]"):
        bert.read_surveys(setting(tmp_path, model=str(tmp_path / "run")))


def test_a_model_that_reads_no_pairs_of_segments_is_refused(tmp_path):
    for part in (tiny_models.llama(max_position_embeddings=139), tiny_models.tokenizer()):
        part.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="model= must be an encoder such as BERT"):
        bert.read_surveys(setting(tmp_path, model=str(tmp_path / "llama")))
