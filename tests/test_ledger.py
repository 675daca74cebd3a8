"""The ledger: no row is lost, whatever happens to the file, and what is odd about it is one clear line."""

import json
import multiprocessing
import re
import warnings

import pytest
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.ledger import Ledger, Row, digest_recipe, merge_ledgers


def make_row(seed=0, *, values=None, attention="coda", **about):
    recipe = {"task": "language", "model": {"attention": attention, "heads": 4}}
    return Row(
        recipe=recipe,
        seed=seed,
        measure="quality",
        edition=1,
        values={"x": seed} if values is None else values,
        **about,
    )


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_row_is_read_as_it_was_written(ledger):
    row = make_row(3, wall_s=1.5, provenance={"commit": "abc"}, values={"curve": [1.0, 2.5], "λ": float("inf")})
    ledger.append(row)
    assert Ledger(ledger.path).rows() == [row]
    assert Ledger(ledger.path).find(row.key) == row


def test_a_row_from_before_a_key_counts_if_the_key_is_at_its_default(ledger):
    stored = Row(recipe={"training": {"betas": (0.9, 0.98)}}, seed=0, measure="quality", edition=1, values={"x": 1})
    ledger.append(stored)
    defaults = {"training": {"z_loss": 0.0, "cuts": ()}}
    for wanted, found in (
        ({"betas": (0.9, 0.98), "z_loss": 0.0, "cuts": ()}, stored),
        ({"betas": (0.9, 0.98), "z_loss": 0.1}, None),
        ({"betas": (0.9, 0.99), "z_loss": 0.0}, None),
    ):
        assert ledger.find_older(stored.key, {"training": wanted}, defaults) == found


def test_the_digest_does_not_depend_on_the_order_of_keys_and_knows_every_value():
    assert digest_recipe({"a": 1, "b": {"c": 2}}) == digest_recipe({"b": {"c": 2}, "a": 1})
    assert digest_recipe({"a": 1}) != digest_recipe({"a": 2})
    assert Row(recipe={"a": (1, 2)}, seed=0, measure="m", edition=1).digest == digest_recipe({"a": [1, 2]})


def test_of_one_key_the_newest_row_counts_but_a_failure_never_replaces_a_value(ledger):
    ledger.append(make_row(failed="no data", values={}))
    assert ledger.rows()[0].failed
    ledger.append(make_row(values={"x": 1}))
    ledger.append(make_row(values={"x": 2}))
    ledger.append(make_row(failed="out of memory", values={}))
    (row,) = ledger.rows()
    assert row.values == {"x": 2}
    assert len(ledger.path.read_text().splitlines()) == 4  # append-only: all of them are still there


def test_a_torn_last_line_is_reported_and_the_next_row_replaces_it(ledger):
    for seed in range(3):
        ledger.append(make_row(seed))
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data[:-20])
    with pytest.warns(UserWarning, match="incomplete"):
        assert [row.seed for row in Ledger(ledger.path).rows()] == [0, 1]
    Ledger(ledger.path).append(make_row(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [row.seed for row in Ledger(ledger.path).rows()] == [0, 1, 9]


def test_an_open_ledger_reads_what_replaces_a_torn_line(ledger):
    ledger.append(make_row(0))
    with open(ledger.path, "ab") as file:
        file.write(make_row(1, values={"text": "x" * 500}).as_line().encode()[:400])
    with pytest.warns(UserWarning, match="incomplete"):
        assert [row.seed for row in ledger.rows()] == [0]
    Ledger(ledger.path).append(make_row(2))
    assert [row.seed for row in ledger.rows()] == [0, 2]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_values_may_hold_other_line_separators(ledger, character):
    for seed in (0, 1):
        ledger.append(make_row(seed, values={"text": f"a{character}b"}))
    assert [row.values["text"] for row in Ledger(ledger.path).rows()] == [f"a{character}b"] * 2


def test_merging_into_a_ledger_keeps_its_rows_and_ignores_times_and_folders(tmp_path):
    a, b = Ledger(tmp_path / "a.jsonl"), Ledger(tmp_path / "b.jsonl")
    for ledger, seed in ((a, 0), (a, 1), (b, 1), (b, 2)):
        ledger.append(make_row(seed, values={"x": seed, "seconds": [len(ledger.rows())], "run": str(ledger.path)}))
    assert merge_ledgers([b.path], a.path) == 3
    assert [row.seed for row in Ledger(a.path).rows()] == [0, 1, 2]


def test_a_whole_last_row_without_a_line_end_is_not_lost(ledger):
    ledger.append(make_row(0))
    ledger.append(make_row(1))
    ledger.path.write_bytes(ledger.path.read_bytes().rstrip(b"\n"))
    Ledger(ledger.path).append(make_row(2))
    assert [row.seed for row in Ledger(ledger.path).rows()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "JSON|Expecting"),
        ('{"format": 99, "seed": 0}', "format 1"),
        ('{"format": 1, "seed": 0}', "recipe"),
    ],
)
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(ledger, line, message):
    ledger.append(make_row(0))
    with open(ledger.path, "a") as file:
        file.write(line + "\n" + make_row(1).as_line() + "\n")
    with pytest.raises(ValueError, match=f"ledger.jsonl:2 .*({message})"):
        Ledger(ledger.path).rows()


def test_a_recipe_that_was_edited_by_hand_is_refused(ledger):
    stored = json.loads(make_row().as_line())
    stored["recipe"]["model"]["heads"] = 8
    ledger.path.write_text(json.dumps(stored) + "\n")
    with pytest.raises(ValueError, match="crc32"):
        ledger.rows()
    del stored["crc32"]
    ledger.path.write_text(json.dumps(stored) + "\n")
    with pytest.raises(ValueError, match="digest"):
        ledger.rows()


def test_rows_without_a_checksum_are_read(ledger):
    """Those of ledgers from before there were checksums."""
    stored = json.loads(make_row().as_line())
    del stored["crc32"]
    ledger.path.write_text(json.dumps(stored) + "\n")
    assert ledger.rows() == [make_row()]


def write_many(path, first):
    for seed in range(first, first + 40):
        Ledger(path).append(make_row(seed, values={"text": "x" * 5000}))


def test_two_writers_at_once_lose_no_row(ledger):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(ledger.path, first)) for first in (0, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(row.seed for row in ledger.rows()) == list(range(80))


def test_merging_keeps_every_row_once_and_names_conflicts(tmp_path):
    a, b, out = Ledger(tmp_path / "a.jsonl"), Ledger(tmp_path / "b.jsonl"), tmp_path / "out.jsonl"
    for ledger, seeds in ((a, (0, 1)), (b, (1, 2))):
        for seed in seeds:
            ledger.append(
                make_row(seed, wall_s=float(len(ledger.path.name) + seed), provenance={"hardware": str(ledger.path)})
            )
    b.append(make_row(3, failed="no data", values={}))
    a.append(make_row(3))
    assert merge_ledgers([a.path, b.path], out) == 4
    assert {row.seed: bool(row.failed) for row in Ledger(out).rows()} == {0: False, 1: False, 2: False, 3: False}
    assert merge_ledgers([b.path, a.path], out) == 4
    assert not any(row.failed for row in Ledger(out).rows())
    b.append(make_row(0, values={"x": 99}))
    out.unlink()
    with pytest.raises(ValueError, match=f"seed 0.*{re.escape(str(a.path))} and {re.escape(str(b.path))}"):
        merge_ledgers([a.path, b.path], out)


def test_rows_are_selected_by_recipe_keys(ledger):
    for seed in (0, 1):
        for attention in ("coda", "softmax"):
            ledger.append(make_row(seed, attention=attention))
    assert len(ledger.select({"attention": "coda"})) == 2
    assert len(ledger.select({"attention": "coda", "seed": "1", "heads": "4"})) == 1
    with pytest.raises(ValueError, match=r"atention.*attention"):
        ledger.select({"atention": "coda"})


def test_the_command_line_shows_and_merges(tmp_path):
    run = lambda *words: CliRunner().invoke(app, ["ledger", *map(str, words)])  # noqa: E731
    Ledger(tmp_path / "one" / "ledger.jsonl").append(make_row(5))
    Ledger(tmp_path / "two" / "ledger.jsonl").append(make_row(6, attention="softmax", failed="no data", values={}))
    merged = run("merge", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "all.jsonl")
    assert "2 rows" in merged.stdout
    shown = run("show", tmp_path / "all.jsonl").stdout
    assert "coda" in shown
    assert "no data" in shown
    assert "1 of 2 rows" in run("show", tmp_path / "all.jsonl", "attention=coda").stdout
    assert isinstance(run("show", tmp_path / "none").exception, FileNotFoundError)
