"""Tables 2–8 and Figure 2 of Snell et al. 2021: what was printed, how it is read, and what is measured, by hand."""

import json
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from item_runs import make_setting
from scipy.stats import kendalltau

from attnlab.studies.snell2021 import STUDY, agreements, published
from attnlab.studies.snell2021.agreements import (
    CHANCE,
    DEFINED,
    NEGATED,
    ONE,
    TABLES,
    ScorePair,
    make_table,
    read_columns,
)
from attnlab.studies.snell2021.frozen import table10
from attnlab.studies.snell2021.measures import AgreementMeans, make_mask, select_words
from attnlab.studies.snell2021.plan import CORPORA, MULTI, OFFICIAL, ROLES, SMS, SST
from attnlab.studies.snell2021.role_run import RoleRun
from attnlab.studies.snell2021.training_curves import find_peaks
from attnlab.studies.snell2021.trials import Field, Trial
from attnlab.tasks.classification import Classification, ClassificationConfig
from attnlab.tasks.translation import Translation, TranslationConfig

COUNTS = {
    "Multi30k": (20, 36_000), "IWSLT14": (23, 300_000), "News En-Nl": (23, 130_000), "News En-Pt": (21, 90_000),
    "News It-Pt": (18, 52_000),
}  # fmt: skip
TABLE2 = """
IMDB        53 82 62 60 5 87 87 90
AG_News     39 55 43 48 6 94 95 96
20_NG       65 41 65 63 5 91 85 94
SST         20 34 22 25 8 78 82 84
Multi30k    31 34 27 49 7 43 49 66
IWSLT14     36 39 28 55 7 36 44 67
News_It-Pt  29 39 25 52 6 22 25 55
"""  # as the paper prints it, without ξ(β^uf, β^px) and ξ(Δ, β^uf)


def test_table_2_is_table_5_rounded():
    for line in TABLE2.strip().splitlines():
        name, *numbers = line.split()
        row = published.TABLE5[name.replace("_", " ")]
        kept = [x.value for column, x in row.items() if column not in ("ξ(β^uf, β^px)", "ξ(Δ, β^uf)")]
        assert [math.floor(x + 0.5) for x in kept] == [int(x) for x in numbers], name


def test_the_tables_are_whole_and_stars_stand_on_the_best():
    every = {name: printed for name, (_, printed) in TABLES.items()}
    assert {name: len(printed) for name, printed in every.items()} == dict(
        zip(TABLES, (11, 11, 5, 5, 11, 5), strict=True)
    )
    cells = [x for printed in every.values() for row in printed.values() for x in row.values()]
    assert len(cells) == 110 + 88 + 40 + 50 + 110 + 40
    for printed in every.values():
        for row in printed.values():
            assert all(x.value == row["ξ*"].value for x in row.values() if x.starred)
            assert row["ξ*"].value == max(x.value for name, x in row.items() if name.startswith("ξ"))
    assert sum(x.starred for x in cells) == 1 + 3 + 5
    assert {corpus.published for corpus in CORPORA} == set(published.TABLE5)
    assert set(published.TABLE10) == {corpus.published for corpus in CORPORA if not corpus.translates}


def test_every_run_is_trained_as_the_paper_trained_it():
    for corpus in (*CORPORA, *OFFICIAL, SMS):
        recipe = corpus.recipe("full", "A", 0)
        training, steps = recipe.training, corpus.measured_at
        assert (len(steps), steps[-1]) == COUNTS.get(corpus.published, (22, 4000))
        assert list(steps) == sorted(set(steps))
        assert training.evaluate_at == steps[1:]
        assert (training.steps, training.lr, training.betas) == (steps[-1], 1e-3, (0.9, 0.999))
        assert (training.precision, training.schedule, training.clip) == ("fp32", "constant", 0.0)
        assert training.batch_examples == (16 if corpus.translates else 32)
        assert (recipe.model.width, recipe.model.attention, recipe.model.trained) == (256, "dot", "all")
    assert MULTI.recipe("full", "additive", 0).model.combine == "add"
    assert SST.recipe("full", "uniform", 0).model.attention == "uniform"
    assert SST.recipe("full", "frozen", 0).model.trained == "attention"
    of_seed_0 = {role: SST.recipe("full", role, 0).training.seed for role in "ABCDEF"}
    assert of_seed_0 == {"A": 20, "B": 13, "C": 14, "D": 15, "E": 16, "F": 17}
    starts = [MULTI.recipe("full", role, seed).training.seed for role, seed in product(ROLES, range(20))]
    assert len(set(starts)) == len(starts)


def test_stand_ins_are_cut_to_the_sizes_of_what_they_stand_for():
    most = {corpus.name: corpus.recipe("full", "A", 0).data.most_train for corpus in CORPORA if corpus.translates}
    assert list(most.values()) == [None, 160_000, 21_572, 52_070, 48_538]
    assert all("other data" in corpus.tags for corpus in CORPORA if corpus.data.data == "europarl")
    assert SST.recipe("smoke", "A", 0).data.max_length == 20


def test_most_train_keeps_a_draw_of_so_many_and_leaves_validation_alone(tmp_path):
    lines = [json.dumps({"text": f"word{k}", "label": "ab"[k % 2]}) for k in range(37)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "train.tsv").write_text("".join(f"x{k}\ty{k}\n" for k in range(37)))
    files = {
        kind: {"data": str(tmp_path / f"train.{kind}"), "valid": str(tmp_path / f"train.{kind}")}
        for kind in ("jsonl", "tsv")
    }

    def texts(number, **options):
        config = ClassificationConfig(**files["jsonl"], at_least=1, **options)
        return Classification.prepare(config, tmp_path / f"texts{number}")

    def sources(number, **options):
        config = TranslationConfig(**files["tsv"], units="word", **options)
        return Translation.prepare(config, tmp_path / f"pairs{number}")

    for prepared in (texts, sources):
        whole, some, again, other = (
            prepared(0), prepared(1, most_train=11), prepared(2, most_train=11),
            prepared(3, most_train=11, data_seed=5),
        )  # fmt: skip
        assert [task.count_examples("train") for task in (whole, some, again, other)] == [37, 11, 11, 11]
        assert some.count_examples("valid") == 37
    kept = [task.read_sources("train") for task in (whole, some, again, other)]
    assert kept[1] == kept[2] != kept[3]
    assert kept[1] == [x for x in kept[0] if x in set(kept[1])]


@pytest.mark.parametrize("sizes", [(7, 11), (23, 47)])
def test_pooling_is_the_mean_of_a_slow_transcription(sizes):
    """Eq. 10 word by word, and scipy's τ_b; the second batch has other lengths."""
    pooled, held, taus = AgreementMeans(kendall=True), [], []
    for length in sizes:
        u, v = torch.randn(2, 13, length)
        u[3], v[5] = u[3].round(), 0.0  # ties, and a constant row, which τ_b leaves out
        mask = torch.arange(length) < torch.randint(2, length + 1, (13, 1))
        pooled.add(u, v, mask)
        for a, b, kept in zip(u, v, mask, strict=True):
            a, b = a[kept].tolist(), b[kept].tolist()
            best = a.index(max(a))
            held.append(sum(x > b[best] for x in b) < 0.05 * len(b))
            taus.append(kendalltau(a, b).statistic)
    ordered = [tau for tau in taus if not math.isnan(tau)]
    assert 0 < len(ordered) < len(taus)
    found = pooled.compute()
    assert found["agreement"] == pytest.approx(100 * sum(held) / len(held))
    assert found["kendall"] == pytest.approx(100 * sum(ordered) / len(ordered))
    assert set(AgreementMeans(kendall=False, words=1).compute()) == {"agreement"}


def test_rows_are_the_words_of_a_batch():
    source = torch.tensor([[5, 6, 7], [5, 6, 0]])
    pairs = SimpleNamespace(inputs=(source, None), targets=torch.tensor([[8, 9], [8, 0]]))
    scores = torch.arange(12.0).view(2, 2, 3)
    assert select_words(scores, pairs).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert select_words(make_mask(pairs), pairs).tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    texts = SimpleNamespace(inputs=(source,), targets=torch.tensor([0, 1]))  # class 0 is a class, not padding
    assert select_words(scores[:, :1], texts).tolist() == [[0, 1, 2], [6, 7, 8]]


def make_trial(tmp_path, curves):
    """A trial of SST whose curves are given."""
    field = Field(SST, make_setting(tmp_path))
    field.size = replace(field.size, measured_at=(0, 10, 20), comparisons="BC")
    return Trial(field, 0, curves)


def known_curves():
    """A is best after 20 updates; pairs at another reference must not be read."""
    other = {"valid/10/attention/agreement": [90.0] * 3, "valid/10/probe/agreement": [99.0] * 3}
    chance = {"valid/20/chance/agreement": [5.0, 6.0, 7.0]}
    return {
        "A": {"valid/accuracy": [50.0, 80.0, 81.0], "valid/20/own/agreement": [61.0]},
        "B": other | chance | {
            "valid/accuracy": [40.0, 60.0, 80.0], "valid/20/attention/agreement": [10.0, 30.0, 50.0],
            "valid/20/probe/agreement": [12.0, 55.0, 41.0],
        },
        "C": other | {
            "valid/accuracy": [44.0, 70.0, 78.0], "valid/20/attention/agreement": [0.0, 20.0, 40.0],
            "valid/20/chance/agreement": [8.0, 9.0, 10.0],
        },
        "uniform": other | {
            "valid/20/probe/agreement": [3.0, 24.0, 17.0], "valid/20/proxy/agreement": [25.0, 2.0, 2.0],
            "valid/20/equation/agreement": [1.0, 2.0, 33.0], "valid/20/saliency/agreement": [4.0, 4.5, 3.0],
            "valid/20/negated/agreement": [0.5, 0.25, 0.0],
        },
    }  # fmt: skip


def test_the_columns_of_a_row_by_hand(tmp_path):
    found = read_columns(make_trial(tmp_path, known_curves()), ScorePair("agreement", "accuracy", "valid"))
    # two starts agree by 5, 25, 45 on average, and are right in 42, 65, 79 per cent
    assert found.values == {
        "A(α, β^uf)": 24.0, "A(β^uf, β^px)": 25.0, "A(Δ, β^uf)": 4.5, "A(α, β)": 55.0, CHANCE: 7.5,
        DEFINED: 33.0, NEGATED: 0.5, ONE: 61.0,
        "ξ(α, β^uf)": 65.0, "ξ(β^uf, β^px)": 79.0, "ξ(Δ, β^uf)": 42.0, "ξ(α, β)": 81.0, "ξ*": 81.0,
    }  # fmt: skip
    assert found.starred == {"ξ(α, β)"}


def test_runs_of_other_settings_are_other_rows_and_their_folders_are_refused(tmp_path):
    run, other = (
        RoleRun(SST, "smoke", 0, "A"),
        RoleRun(replace(SST, data=replace(SST.data, at_least=7)), "smoke", 0, "A"),
    )
    assert run.key != other.key
    trial = Trial(Field(SST, make_setting(tmp_path)), 0)
    trial.folder("A").path.mkdir(parents=True)
    trial.folder("A").claim(other.corpus.recipe("smoke", "A", 0).values())
    with pytest.raises(ValueError, match=r"at_least: 7"):
        trial.train("A")


def test_a_peak_is_where_the_other_seeds_have_it():
    assert find_peaks([[0.0, 9.0, 0.0], [0.0, 1.0, 5.0], [0.0, 2.0, 3.0]]) == [2, 1, 1]
    assert find_peaks([[3.0, 3.0], [0.0, 7.0]]) == [1, 0]


@pytest.mark.parametrize("run", [lambda setting: make_table("table2", setting), table10], ids=["table2", "table10"])
def test_without_data_every_cell_says_why(run, tmp_path):
    cells = list(run(make_setting(tmp_path, "full", (0, 1, 2), data_dir=str(tmp_path))).cells)
    assert all(cell.verdict == "not run" and "does not exist" in cell.not_run for cell in cells)
    smoke = list(run(make_setting(tmp_path, data_dir=str(tmp_path))).cells)
    assert [str(cell) for cell in smoke] == [str(cell) for cell in cells]
    of_imdb = [cell.not_run for cell in smoke if cell.row == "IMDB"]
    assert set(of_imdb) == {"this row runs from scale full on"}


def test_official_sets_stand_beside_their_stand_ins_if_they_are_asked_for(tmp_path):
    assert all("other data" not in corpus.tags for corpus in OFFICIAL)
    assert {corpus.published for corpus in OFFICIAL} <= {c.published for c in CORPORA if "other data" in c.tags}
    options = {"data": ",".join(corpus.name for corpus in OFFICIAL)}
    setting = make_setting(tmp_path, "full", data_dir=str(tmp_path), options=options)
    rows = {cell.row: cell for cell in agreements.table2(setting).cells}
    assert all("does not exist" in rows[corpus.row].not_run for corpus in OFFICIAL)
    assert "excluded" in rows["News it-pt, Europarl"].not_run
    plain = {cell.row for cell in agreements.table2(make_setting(tmp_path, "full", data_dir=str(tmp_path))).cells}
    assert not plain & {corpus.row for corpus in OFFICIAL}


def test_only_the_corpora_that_are_asked_for_are_run(tmp_path):
    def cells(data, scale="full"):
        setting = make_setting(tmp_path, scale, data_dir=str(tmp_path), options={"data": data})
        return {cell.row: cell.not_run for cell in table10(setting).cells}

    reasons = cells("sst,imdb")
    assert {row for row, reason in reasons.items() if "does not exist" in reason} == {"IMDB", "SST, official parts"}
    assert reasons["20 Newsgroups"] == "excluded by data=sst,imdb"
    with pytest.raises(ValueError, match=r"data: .*'imbd' \(did you mean 'imdb'\?\)"):
        cells("imbd")
    assert STUDY.items["table2"].options == ("data",)
