"""Damaged, hostile and oversized files are refused in one sentence that names the file, within bounded memory."""

import gzip
import json
import random
import re
import shutil
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attnlab.analysis.frequency import parse_counts
from attnlab.config import parse_numbers, parse_value
from attnlab.counting.ibm1 import Ibm1, fit_ibm1
from attnlab.experiments.ledger import Ledger
from attnlab.files import user_files
from attnlab.files.user_files import decode_lines, iterate_lines, parse_json, read_bytes, read_json, read_text
from attnlab.tasks.embeddings import read_vectors
from attnlab.tasks.links import read_gold
from attnlab.tasks.text import read_labelled, read_lines, read_pairs, read_parallel
from attnlab.tasks.unpack import read_members
from attnlab.tasks.vocabulary import Words
from attnlab.training.recipe import resolve_recipe, restore_recipe
from attnlab.training.run_folder import RunFolder
from attnlab.training.runs import open_run, start_run

LINES = "".join(f"line {k} of {random.Random(k).random()}\n" for k in range(500)).encode()


def damage(data, kind):
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "corrupt":
        return data[:100] + bytes(255 - x for x in data[100:200]) + data[200:]
    return b"not gzip" + data


@pytest.mark.parametrize("kind", ["truncated", "corrupt", "foreign"])
@pytest.mark.parametrize("read", [read_bytes, read_text, lambda path: list(iterate_lines(path)), read_lines])
def test_damaged_gzip_names_the_file(tmp_path, kind, read):
    path = tmp_path / "text.gz"
    path.write_bytes(damage(gzip.compress(LINES), kind))
    with pytest.raises(ValueError, match=r"text\.gz: cannot be read"):
        read(path)


def test_damaged_gzip_of_labelled_text_and_pairs(tmp_path):
    for name, read in {
        "a.jsonl.gz": lambda path: read_labelled(path, "text", "label"),
        "a.csv.gz": lambda path: read_labelled(path, "text", "label"),
        "a.tmx.gz": lambda path: read_pairs(path, ("de", "en")),
        "a.tsv.gz": lambda path: read_pairs(path, ("de", "en")),
    }.items():
        rows = b'{"text": "a", "label": 1}\n' if "json" in name else b"text,label\n" + b"a\tb,1\n" * 300
        (tmp_path / name).write_bytes(gzip.compress(rows)[:-9])
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)


def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(128):
            file.write(bytes(2**20))
    monkeypatch.setattr(user_files, "FREE_EXPANSION", 2**22)
    tracemalloc.start()
    for read in (read_bytes, read_text, read_lines):
        with pytest.raises(ValueError, match=r"bomb\.gz.*ATTNLAB_BUDGET"):
            read(path)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    monkeypatch.setenv("ATTNLAB_BUDGET", "100")
    assert len(read_bytes(path)) == 2**27


def test_budgets_of_size_line_and_nesting_can_be_raised(tmp_path, monkeypatch):
    (tmp_path / "long").write_bytes(b"a\n" + b"b" * 100 + b"\n")
    (tmp_path / "deep").write_text("[" * 30 + '"]]"' + "]" * 30)
    monkeypatch.setattr(user_files, "MOST_LINE", 50)
    monkeypatch.setattr(user_files, "MOST_NESTING", 20)
    with pytest.raises(ValueError, match=r"long:2.*50 bytes.*ATTNLAB_BUDGET"):
        read_lines(tmp_path / "long")
    with pytest.raises(ValueError, match=r"deep.*20 levels.*ATTNLAB_BUDGET"):
        read_json(tmp_path / "deep", list)
    monkeypatch.setattr(user_files, "MOST_BYTES", 90)
    with pytest.raises(ValueError, match=r"long has more than 90 bytes"):
        read_bytes(tmp_path / "long")
    monkeypatch.setenv("ATTNLAB_BUDGET", "3")
    assert read_lines(tmp_path / "long") == ["a", "b" * 100]
    assert read_json(tmp_path / "deep", list)
    for value in ("many", "inf", "nan"):
        monkeypatch.setenv("ATTNLAB_BUDGET", value)
        with pytest.raises(ValueError, match="ATTNLAB_BUDGET"):
            read_lines(tmp_path / "long")


def test_a_long_quote_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("attnlab.tasks.text.MOST_LINE", 1000)
    (tmp_path / "open.csv").write_text('text,label\n"' + "word\n" * 1000)
    with pytest.raises(ValueError, match=r"open\.csv:2.*ATTNLAB_BUDGET"):
        read_labelled(tmp_path / "open.csv", "text", "label")
    (tmp_path / "unlimited.csv").write_text('text,label\n"a"b,c\n')
    with pytest.raises(ValueError, match=r"unlimited\.csv:2") as caught:
        read_labelled(tmp_path / "unlimited.csv", "text", "label")
    assert "BUDGET" not in str(caught.value)


def test_lines_end_at_line_feeds_alone(tmp_path):
    (tmp_path / "text").write_bytes("\ufeffa\u2028b\r\n\x0bc\rd\n\ne".encode())
    assert read_lines(tmp_path / "text") == ["a\u2028b", "\x0bc\rd", "", "e"]
    with (tmp_path / "text").open("rb") as file:
        assert list(decode_lines(file, "x", ends=True)) == ["a\u2028b\r\n", "\x0bc\rd\n", "\n", "e"]
    with pytest.raises(ValueError, match="folder"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "levels"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ('{"a": 1', "not JSON"),
        ("[1]", "object"),
        ("null", "object"),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "b"}\n' + text + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        read_labelled(tmp_path / "a.jsonl", "text", "label")
    with pytest.raises(ValueError, match=message):
        parse_json(text, "there")


def test_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud800", "label": "b"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*surrogate"):
        read_labelled(tmp_path / "a.jsonl", "text", "label")


UNIT = '<tu><tuv xml:lang="de"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>b</seg></tuv></tu>'
LAUGHS = "".join(f'<!ENTITY l{k + 1} "{f"&l{k};" * 10}">' for k in range(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'<?xml version="1.0" encoding="klingon"?><tmx>{UNIT}</tmx>', "encoding"),
        (f'<?xml version="1.0" encoding="utf-7"?><tmx>{UNIT}</tmx>', "encoding|multi-byte"),
        (f'<!DOCTYPE tmx [<!ENTITY l0 "ha">{LAUGHS}]><tmx>{UNIT.format("&l9;")}</tmx>', "amplification"),
        (f"<tmx>{UNIT.format('&nowhere;')}</tmx>", "entity"),
        (f"<tmx>{UNIT.format('')}", "XML"),
        ("<a>" * 50_000, "XML"),
        ("", "XML"),
        ("\0\0\0", "XML"),
    ],
)
def test_damaged_tmx_is_named(tmp_path, text, message):
    (tmp_path / "a.tmx").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.tmx.*({message})"):
        read_pairs(tmp_path / "a.tmx", ("de", "en"))


def test_an_encrypted_or_odd_zip_is_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text" * 100)
    whole = path.read_bytes()
    encrypted = bytearray(whole)
    for place, offset in ((whole.index(b"PK\x03\x04"), 6), (whole.index(b"PK\x01\x02"), 8)):
        encrypted[place + offset] |= 1
    unknown = bytearray(whole)
    for place, offset in ((whole.index(b"PK\x03\x04"), 8), (whole.index(b"PK\x01\x02"), 10)):
        unknown[place + offset] = 99
    for data in (encrypted, unknown, whole[:50], b""):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.zip: damaged or encrypted"):
            _ = [list(pieces) for _, pieces in read_members(path, lambda _: True)]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.gz"])
def test_a_missing_archive_is_not_called_damaged(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        list(read_members(tmp_path / name, lambda _: True))


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400, "9" * 30])
def test_overflowing_numbers_of_links_and_counts_are_named(tmp_path, digits):
    for name, text in {"a.txt": f"{digits}-0\n", "a.naacl": f"1 1 {digits}\n"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            read_gold(tmp_path / name, [(3, 3)])
    for line in (f"b\t{digits}", f"1 {digits} 0", f"1 2 {digits}", "b\t²"):
        with pytest.raises(ValueError, match="counts:1"):
            parse_counts(line, ["a", "b"], "counts")


@pytest.mark.parametrize("text", ["1e999", "-inf", "nan", "9" * 400, "9" * 5000])
def test_overflowing_settings_are_refused(text):
    for hint in (int, float, int | None, float | None, tuple[float, ...]):
        with pytest.raises(ValueError, match="lr="):
            parse_value(text, hint, "lr")
    with pytest.raises(ValueError, match="heads="):
        parse_numbers(f"0-{text}", "heads")


def test_vectors_that_are_not_finite_are_named(tmp_path):
    for number in ("1e999", "nan", "9" * 400, "1e39"):
        (tmp_path / "glove").write_text(f"a 1 2\nb 1 {number}\n")
        with pytest.raises(ValueError, match="glove:2"):
            read_vectors(tmp_path / "glove", {"a", "b"})
    (tmp_path / "glove.gz").write_bytes(gzip.compress(b"a 1 2\nb 1 3\n"))
    assert read_vectors(tmp_path / "glove.gz", {"b"})["b"].tolist() == [1, 3]


def test_lines_without_a_partner_are_counted_in_a_stream(tmp_path):
    (tmp_path / "a").write_text("x\n" * 5)
    (tmp_path / "b").write_text("y\n" * 3)
    with pytest.raises(ValueError, match=r"5 lines and .* 3: line 4"):
        read_parallel(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=r"3 lines and .* 5: line 4"):
        read_parallel(tmp_path / "b", tmp_path / "a")


# run folders


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        RunFolder(tmp_path).config()
    (tmp_path / "metrics.jsonl").write_bytes(content + b"x}\n")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl"):
        RunFolder(tmp_path).metrics()
    (tmp_path / "ledger.jsonl").write_bytes(content + b"\n{}\n")
    with pytest.raises(ValueError, match=r"ledger\.jsonl:[12]"):
        Ledger(tmp_path / "ledger.jsonl").rows()


@pytest.mark.parametrize("preset", ["tiny", "lstm"])
def test_a_recipe_with_damaged_values_is_refused(preset):
    whole = json.loads(json.dumps(resolve_recipe("translation", {"model": preset}).values()))
    assert restore_recipe(whole).values() == resolve_recipe("translation", {"model": preset}).values()
    for part, key, value in [
        ("model", "width", "wide"), ("model", "width", 10**400), ("model", "attention", 3), ("model", "dropout", None),
        ("model", "odd", 1), ("training", "lr", float("inf")), ("training", "betas", [0.9]),
        ("training", "steps", True), ("data", "data", None), ("decoding", "beam", 1.5),
        ("model", "attention_options", [1]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=key):
            restore_recipe(whole | {part: whole[part] | {key: value}}, "there")
    for part in whole:
        with pytest.raises(ValueError, match=f"there is damaged.*{part}"):
            restore_recipe({key: value for key, value in whole.items() if key != part}, "there")
        with pytest.raises(ValueError, match="there is damaged"):
            restore_recipe(whole | {part: 3}, "there")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\nb\n",
        "<pad>\n<s>\n</s>\n<unk>\na\na\n",
        "<pad>\n<s>\n</s>\n<unk>\n\\x\n",
        "<pad>\n<s>\n</s>\n<unk>\n\\ä\n",
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path, text):
    (tmp_path / "vocabulary.txt").write_text(text)
    with pytest.raises(ValueError, match=r"vocabulary\.txt"):
        Words.load(tmp_path / "vocabulary.txt")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    values = {"data": "lexicon", "width": "8", "layers": "1", "heads": "2", "feed_forward": "8", "steps": "1"}
    recipe = resolve_recipe("synthetic", values | {"examples": "50", "lr": "1e-3"})
    start_run(recipe, out=str(folder), device="cpu", report=lambda _: None, note=lambda _: None)
    return folder


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model.json", lambda text: text[:50]),
        ("model.json", lambda text: "[1]"),
        ("model.json", lambda text: text.replace('"width": 8', '"width": 16')),
        ("model.json", lambda text: text.replace('"width": 8', '"width": 7')),
        ("model.json", lambda text: text.replace('"width": 8', '"wide": 8')),
        ("model.json", lambda text: text.replace('"vocabulary": ', '"vocabulary": 1')),
        ("model.json", lambda text: text.replace('"softmax"', '"soft"')),
        ("config.json", lambda text: text[:50]),
        ("config.json", lambda text: text.replace('"synthetic"', '"unknown"')),
        ("config.json", lambda text: text.replace('"lexicon"', '"unknown"')),
    ],
)
def test_a_damaged_run_is_refused_by_name(run, tmp_path, file, change):
    shutil.copytree(run, tmp_path / "run")
    open_run(tmp_path / "run", device="cpu")
    path = tmp_path / "run" / file
    assert change(path.read_text()) != path.read_text()
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=re.escape(file)):
        open_run(tmp_path / "run", device="cpu")


def test_a_damaged_ibm1_is_named(tmp_path):
    path = tmp_path / "ibm1"
    fit_ibm1([([0, 1], [1, 0]), ([1], [1])]).save(path)
    tensors = load_file(path)
    about = {"null": "uniform", "diagonal": 0.0, "shape": [3, 2], "log_likelihood": [], "converged": True}
    for broken in ({"shape": [1, 1]}, {"shape": 3}, {"log_likelihood": None}, {"odd": 1}):
        save_file(tensors, path, metadata={"attnlab-ibm1-1": json.dumps(about | broken)})
        with pytest.raises(ValueError, match="ibm1"):
            Ibm1.load(path)
    save_file(tensors | {"indices": torch.from_numpy(np.array([9] * 4))}, path,
              metadata={"attnlab-ibm1-1": json.dumps(about)})  # fmt: skip
    with pytest.raises(ValueError, match="ibm1"):
        Ibm1.load(path)
