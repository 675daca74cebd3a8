"""What attnlab align makes of links: tags, terms, guided links, a page; and both directions from the command line."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from aligned_text import cli, write_pairs
from safetensors import safe_open
from safetensors.torch import save_file
from test_align_pretrained import bpe

from attnlab.aligning.choice import Candidate
from attnlab.aligning.exporting import choose_first_heads, expand_links, measure_first_heads
from attnlab.aligning.extraction import find_links
from attnlab.aligning.model_inputs import ModelLoader
from attnlab.aligning.pair_readers import PretrainedTranslator
from attnlab.aligning.projection import parse_spans, parse_tags, write_spans, write_tags
from attnlab.aligning.row_evidence import WordIds, measure_evidence
from attnlab.aligning.term_list import TermCounter, find_phrases
from attnlab.commands import align as command

LINKS = {(0, 0), (1, 2), (2, 1), (3, 3)}


@pytest.mark.parametrize(
    ("tagged", "wanted", "lost"),
    [
        ("the <b> red </b> house falls", "la casa <b> roja </b> cae", 0),
        ("the <b> red house </b> falls", "la <b> casa roja </b> cae", 0),
        ("<p> the <i> red </i> house </p> falls", "<p> la casa <i> roja </i> </p> cae", 0),
        ('the red house <br id="1"/> falls', 'la casa roja <br id="1"/> cae', 0),
        ("the red house falls", "la casa roja cae", 0),
        ("the r<b>ed</b> house falls", "la casa <b> roja </b> cae", 0),
        ("<p>the <b>red</b> house</p> falls", "<p> la casa <b> roja </b> </p> cae", 0),
    ],
)
def test_tags_follow_the_links(tagged, wanted, lost):
    source, target = ["the", "red", "house", "falls"], ["la", "casa", "roja", "cae"]
    assert write_tags(parse_tags(tagged, source, "f:1"), LINKS, target) == (wanted, lost)


def test_spans_follow_the_links_and_those_without_links_are_counted():
    source = ["the", "red", "house", "falls"]
    spans = parse_spans("1-3:OBJ 3-4:VERB", source, "f:1")
    assert write_spans(spans, {(1, 2), (2, 1)}, ["la", "casa", "roja"]) == ("1-3:OBJ", 1)
    for line, message in (("1-9:X", "not in its sentence"), ("one", "must be a span")):
        with pytest.raises(ValueError, match=message):
            parse_spans(line, source, "f:1")
    for line, message in (("<b> the red house falls", "never closed"), ("the </b> red house falls", "closes no open")):
        with pytest.raises(ValueError, match=message):
            parse_tags(line, source, "f:1")
    with pytest.raises(ValueError, match=r"f:1: .*differs"):
        parse_tags("<b> another </b> line", source, "f:1")


def test_terms_are_consistent_phrases_with_their_dice():
    assert set(find_phrases({(0, 0), (1, 2), (2, 1)}, 2)) == {
        ((0, 1), (0, 1)), ((1, 2), (2, 3)), ((2, 3), (1, 2)), ((1, 3), (1, 3)),
    }  # fmt: skip
    counter = TermCounter()
    for _ in range(2):
        counter.add(["Red", "house"], ["casa", "roja"], {(0, 1), (1, 0)})
    counter.add(["red", "car"], ["coche", "rojo"], {(1, 0)})
    terms = {(s, t): (n, score) for s, t, n, score in counter.list_terms()}
    assert terms["red", "roja"] == (2, pytest.approx(2 * 2 / (3 + 2)))
    assert terms["red house", "casa roja"] == (2, 1.0)
    assert ("car", "coche") not in terms


def test_links_of_words_become_links_of_pieces():
    assert expand_links({(0, 1), (1, 0)}, "re@@ d house", "casa ro@@ ja", (2, 2), "f:1") == [
        (0, 1), (0, 2), (1, 1), (1, 2), (2, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="f:1: the source pieces make 2 words"):
        expand_links(set(), "re@@ d house", "casa", (3, 1), "f:1")


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    text = write_pairs(folder)
    torch.manual_seed(1)
    tiny_models.marian().save_pretrained(folder / "model")
    bpe([" ".join(words) for words in text[1] + text[2]]).save_pretrained(folder / "model")
    return folder


def write_converted(folder, extra=b""):
    """Write the parts of a CTranslate2 model that the export reads, as ctranslate2.specs serializes them."""
    folder.mkdir(exist_ok=True)
    name = lambda text: struct.pack("<H", len(text) + 1) + text.encode() + b"\0"  # noqa: E731
    number = lambda text, value: name(text) + b"\0" + b"\2" + struct.pack("<Ih", 2, value)  # noqa: E731
    matrix = name("decoder/layer_0/weight") + struct.pack("<BIIBI", 2, 3, 5, 0, 60) + bytes(range(60))
    body = number("decoder/alignment_heads", 1) + matrix + number("decoder/alignment_layer", -1) + extra
    head = struct.pack("<I", 6) + name("TransformerSpec") + struct.pack("<II", 7, 3)
    (folder / "model.bin").write_bytes(head + body + struct.pack("<I", 0))
    return head + body + struct.pack("<I", 0)


def read_converted(folder, bare):
    """Return the layer and the number of heads; no other byte may differ from what was written first."""
    made = (folder / "model.bin").read_bytes()
    values = []
    for text in (b"decoder/alignment_layer\0", b"decoder/alignment_heads\0"):
        at = bare.index(text) + len(text) + 6
        values.append(struct.unpack("<h", made[at : at + 2])[0])
        made = made[:at] + bare[at : at + 2] + made[at + 2 :]
    assert made == bare
    return values


def test_heads_for_ctranslate2_have_the_evidence_of_their_links(marian):
    """With two heads the candidates, head 0 and both heads, are also candidates of find_links."""
    sides = read_sides(marian)
    reader = PretrainedTranslator.open(str(marian / "model"), ModelLoader(torch.device("cpu"))).open_pairs(*sides)
    candidates = lambda layers, _: [Candidate("weight", "awo", n, h) for n in range(layers) for h in (0, "mean")]  # noqa: E731
    x, y = WordIds.number_words(*sides)
    found = find_links(reader, candidates).aligned.items()
    nats = {(c.layer, 1 if c.head == 0 else 2): measure_evidence(x, y, links) for c, links in found}
    measured = measure_first_heads(reader, *sides)
    assert measured.keys() == nats.keys()
    assert all(np.array_equal(values, nats[place]) for place, values in measured.items())
    assert len({round(values.mean(), 6) for values in nats.values()}) == len(nats)


def test_the_fewest_heads_are_taken_where_the_evidence_does_not_tell():
    one = np.array([1.0, 2.0, 3.0, 0.0])
    noise = np.array([1.0, -1.0, 1.0, -0.6])  # mean 0.1, standard error 0.47
    assert choose_first_heads({(5, 1): one, (5, 2): one + noise, (4, 1): one - 1}) == (5, 1)
    assert choose_first_heads({(5, 1): one, (5, 2): one + 0.1}) == (5, 2)


def read_sides(folder):
    return tuple([line.split() for line in (folder / name).read_text().splitlines()] for name in ("s", "t"))


def test_a_folder_that_ctranslate2_did_not_convert_is_refused_before_anything_is_aligned(marian, tmp_path):
    words = [marian / "model", marian / "s", marian / "t", "--export", "ctranslate2", "--export-to", tmp_path]
    for content, message in (
        (None, "no model.bin"),
        (b"ab", "damaged"),
        (struct.pack("<IH", 6, 0) + bytes(8), "has no"),
    ):
        if content is not None:
            (tmp_path / "model.bin").write_bytes(content)
        done = cli(*words, "--out", tmp_path / "links")
        assert message in str(done.exception)
        assert not (tmp_path / "links").exists()
    done = cli("ibm1", *words[1:])
    assert "has no attention" in str(done.exception)


def test_both_directions_give_links_a_page_terms_and_heads(marian, tmp_path):
    model, s, t = marian / "model", marian / "s", marian / "t"
    (marian / "tags").write_text("\n".join(s.read_text().split("\n")))
    wanted = ["--show", tmp_path / "page.html", "--terms", tmp_path / "terms.tsv", "--project", marian / "tags"]
    bare = write_converted(tmp_path / "converted")
    wanted += ["--export", "ctranslate2", "--export-to", tmp_path / "converted", "--gold", marian / "gold"]
    done = cli(model, s, t, "--reverse", model, "--out", tmp_path / "links", *wanted)
    assert done.exit_code == 0, done.output
    assert "chosen without gold links" in done.stderr
    assert (tmp_path / "links").read_text().count("\n") == 20
    assert (marian / "tags.projected").read_text() == t.read_text()
    assert "stroke-dasharray" in (tmp_path / "page.html").read_text()
    layer, heads = read_converted(tmp_path / "converted", bare)
    assert layer in (0, 1, 2)
    assert heads in (1, 2)
    assert f"layer {layer}, " in done.stderr
    assert "page.html: the links of 20 of 20 pairs" in done.stderr
    assert not list(tmp_path.glob("links.partial*"))


def test_a_line_that_no_model_can_read_does_not_count_in_the_choice(marian, tmp_path):
    folder, model = marian, str(marian / "model")
    for name in ("s", "t"):
        lines = (folder / name).read_text().split("\n")[:3]
        (tmp_path / name).write_text("\n".join([*lines, " ".join(lines[0].split() * 2000), ""]))
    done = cli(model, tmp_path / "s", tmp_path / "t", "--reverse", model)
    assert done.exit_code == 0, done.output
    assert "too few to compare layers by agreement" in done.stderr
    assert "without links: 1 pair" in done.stderr
    assert done.stdout.split("\n")[3:] == ["", ""]


def test_a_text_of_few_words_is_read_in_the_layers_of_the_highest_norm(marian, tmp_path):
    for name in "st":
        (tmp_path / name).write_text((marian / name).read_text().splitlines()[0] + "\n")
    text = [tmp_path / "s", tmp_path / "t", "--reverse", marian / "model"]
    by_default, by_norm = (cli(marian / "model", *text, *more) for more in ([], ["--by", "norm"]))
    assert "too few to compare layers by agreement" in by_default.stderr
    assert "chosen without gold links" not in by_default.stderr
    assert by_default.stdout == by_norm.stdout != ""


@pytest.mark.parametrize(
    ("size", "how"), [("CHUNK", ["--reverse", "M"]), ("PART", ["--reverse", "M"]), ("CHUNK", ["--by", "encoder"])]
)
def test_an_interrupted_file_is_resumed(size, how, marian, tmp_path, monkeypatch):
    monkeypatch.setattr(command, size, 6)
    more = [marian / "model" if word == "M" else word for word in how]
    words = [marian / "model", marian / "s", marian / "t", *more, "--scores", "--out", tmp_path / "links"]
    whole = cli(*words)
    assert whole.exit_code == 0, whole.output
    expected = (tmp_path / "links").read_text()
    (tmp_path / "links").unlink()
    real, calls = command.MapAligner.align, []

    def fail_later(self, pairs, tick=None):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(command.MapAligner, "align", fail_later)
        assert cli(*words).exit_code == 130
    partial = tmp_path / "links.partial"
    assert partial.read_text().count("\n") == 12
    partial.write_text(partial.read_text() + "0-0 1-")  # a broken line
    again = cli(*words)
    assert again.exit_code == 0, again.output
    assert "resumed after 12 lines" in again.stderr
    assert (tmp_path / "links").read_text() == expected


def test_a_resumed_file_whose_other_lines_are_empty_was_aligned(marian, tmp_path, monkeypatch):
    source, target, out = tmp_path / "s", tmp_path / "t", tmp_path / "links"
    source.write_text("a b\n\n")
    target.write_text("x y\n\n")
    monkeypatch.setattr(command, "CHUNK", 1)
    real = command.MapAligner.align

    def fail_later(self, pairs, tick=None):
        if pairs == ([[]], [[]]):
            raise KeyboardInterrupt
        return real(self, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(command.MapAligner, "align", fail_later)
        assert cli(marian / "model", source, target, "--out", out).exit_code == 130
    done = cli(marian / "model", source, target, "--out", out)
    assert "resumed after 1 lines" in done.stderr
    assert "no pair was aligned" not in done.stderr
    assert out.read_text().count("\n") == 2


def test_a_partial_file_of_another_command_is_kept(marian, tmp_path, monkeypatch):
    words = [marian / "model", marian / "s", marian / "t", "--out", tmp_path / "links"]
    (tmp_path / "links.partial").write_text("0-0\n1-1\n")
    (tmp_path / "links.partial.json").write_text('{"command": {"model": "another"}, "chosen": []}')
    refused = cli(*words)
    assert "links.partial has 2 lines of another command" in str(refused.exception)
    assert (tmp_path / "links.partial").read_text() == "0-0\n1-1\n"


def test_tags_are_checked_before_anything_is_aligned(marian, tmp_path):
    lines = (marian / "s").read_text().splitlines()
    for tags, message in ((lines[:-1], "has 19 lines for 20"), ([*lines[:-1], "<b> x"], "tags:20: without its tags")):
        (tmp_path / "tags").write_text("".join(f"{line}\n" for line in tags))
        done = cli(marian / "model", marian / "s", marian / "t", "--project", tmp_path / "tags")
        assert message in str(done.exception)
        assert done.stdout == ""


def test_pairs_that_a_model_cannot_read_are_counted_over_all_chunks(marian, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CHUNK", 2)
    source, target = tmp_path / "s", tmp_path / "t"
    long = " ".join(["a"] * 60)
    source.write_text(f"a b\n{long}\na\n{long}\n\n")
    target.write_text("x y\nx\nx\nx\nx\n")
    done = cli(marian / "model", source, target)
    assert done.exit_code == 0, done.output
    assert "without links: 2 pairs longer than the model's 53 positions (lines 2, 4)" in done.stderr
    assert done.stdout.count("\n") == 5


def test_an_aligner_is_trained_saved_and_used_by_name(marian, tmp_path):
    from typer.testing import CliRunner

    from attnlab.cli import app

    words = [marian / "model", marian / "s", marian / "t", "--reverse", marian / "model", "--out", tmp_path / "mine"]
    done = CliRunner().invoke(app, ["align-train", *map(str, words), "--width", "7", "--pairs", "15"])
    assert done.exit_code == 0, done.output
    made = cli(tmp_path / "mine", marian / "s", marian / "t")
    assert made.exit_code == 0, made.output
    assert made.stdout.count("\n") == 20
    with safe_open(tmp_path / "mine/aligner.safetensors", "pt") as file:
        ((form, about),) = file.metadata().items()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    (tmp_path / "coded").mkdir()
    coded = json.dumps(json.loads(about) | {"languages": "en-fr"})
    save_file(weights, tmp_path / "coded/aligner.safetensors", metadata={form: coded})
    assert "takes no language codes" in str(cli(tmp_path / "coded", marian / "s", marian / "t").exception)
    again = CliRunner().invoke(app, ["align-train", *map(str, words)])
    assert isinstance(again.exception, FileExistsError)
    refused = cli(tmp_path / "mine", marian / "s", marian / "t", "--layer", "1")
    assert "--layer is of cross attention" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--decide", "mutual", "--reverse", "M", "--symmetrise", "union"], "pass one of them"),
        (["--decide", "mutal"], "decide .*did you mean 'mutual'"),
        (["--null", "1.5"], "null must be"),
        (["--export", "guided"], "--export guided needs the subword files"),
        (["--export", "ct2"], "--export must be one of"),
        (["--languages", "en"], "--languages must be two codes"),
        (["--languages", "en-fr"], "takes no language codes"),
        (["--by", "encoder", "--layer", "99"], "layer must be 0"),
    ],
)
def test_bad_options_get_one_line(words, message, marian):
    import re

    given = [str(marian / "model") if word == "M" else word for word in words]
    done = cli(marian / "model", marian / "s", marian / "t", *given)
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


def test_a_decoder_only_model_and_long_lines_are_told(marian, tmp_path):
    tiny_models.gpt2().save_pretrained(tmp_path)
    bpe(["a b"]).save_pretrained(tmp_path)
    for by in ([], ["--by", "encoder"]):
        done = cli(tmp_path, marian / "s", marian / "t", *by)
        assert isinstance(done.exception, ValueError)
        assert "pass a translator" in str(done.exception)
    for name in ("s", "t"):
        (tmp_path / name).write_text("wa " * 10_000 + "\nwa\n\n")
    done = cli(marian / "model", tmp_path / "s", tmp_path / "t")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 3
    assert "1 pair longer than" in done.stderr
    (tmp_path / "t").write_text("wa\n")
    assert "has no partner" in str(cli(marian / "model", tmp_path / "s", tmp_path / "t").exception)


@pytest.mark.docs
def test_the_table_of_readings_is_that_of_the_results():
    root = Path(__file__).parent.parent
    text = (root / "docs/alignment.md").read_text()
    rows = json.loads((root / "results/alignment-readings/cpu-en-fr.json").read_text())["rows"]
    assert rows
    for row in rows:
        numbers = f"{row['aer_percent']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"
        speed = f"{row['pairs_per_second']:.0f} | {row['peak_gib']:.1f}"
        assert f"| {row['reading']} | {numbers} | {row['precision']:.1f} | {row['recall']:.1f} | {speed} |" in text
