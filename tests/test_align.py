"""attnlab align: every model against a slow transcription, and the command line as a person uses it."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_text import cli, slow_links, write_pairs

from attnlab.aligning import AlignmentRequest, align
from attnlab.aligning.choice import Candidate, Reading
from attnlab.aligning.extraction import find_links
from attnlab.aligning.ibm1_aligner import WordModel
from attnlab.aligning.pair_readers import open_run_reader
from attnlab.analysis.alignment import aer
from attnlab.commands.align import AlignOptions, read_words
from attnlab.recording import probe
from attnlab.recording.watch import record
from attnlab.tasks.links import Gold
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.tasks.task import BOS, EOS
from attnlab.tasks.vocabulary import Subwords
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe

TRAINING = {"steps": "1", "batch_examples": "8", "evaluate_every": "1", "checkpoint_every": "1", "compile": "no"}
SMALL = {"layers": "3", "width": "12", "heads": "3", "feed_forward": "13", "dropout": "0"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("text"))


def trained(folder, task, **values):
    runs.start_run(
        resolve_recipe(task, TRAINING | values),
        out=str(folder),
        device="cpu",
        report=lambda _: None,
        note=lambda _: None,
    )
    return folder


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    """Its weights are shaken away from the start, where attention is even."""
    return shaken(trained(tmp_path_factory.mktemp("runs") / "transformer", "synthetic", **SMALL))


@pytest.fixture(scope="module")
def lstm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "lstm"
    sizes = {"width": "11", "embedding_width": "7", "share_embeddings": "false"}
    return shaken(trained(folder, "synthetic", model="lstm", data="lexicon", **sizes))


@pytest.fixture(scope="module")
def subword(tmp_path_factory, text):
    """A run of subwords with <s> before the source, in lower case."""
    folder, *_ = text
    own = {"src": str(folder / "s"), "tgt": str(folder / "s"), "vocabulary": "40", "lower": "true", "held_out": "0.2"}
    return shaken(
        trained(tmp_path_factory.mktemp("runs") / "subword", "translation", source_begin="true", **own, **SMALL)
    )


def shaken(folder):
    run = runs.open_run(folder, device="cpu")
    torch.manual_seed(3)
    for parameter in run.model.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    return replace(run, model=run.model.double())


def slow(run, x_ids, y_ids, by, layer, head):
    """One pair alone: the map (rows, source tokens), with every vector α f(x) made."""
    inputs = torch.tensor([x_ids]), torch.tensor([[BOS, *y_ids]])
    if by == "probe":
        return probe.beta(run.model, inputs, torch.tensor([[*y_ids, EOS]]))[0].exp()
    found = record(run.model, inputs).kind("cross")[layer]
    f = torch.einsum("bhjd,hde->bhje", found.values, found.output_weight)  # (1,h,j,e)
    vectors = found.weights.unsqueeze(-1) * f.unsqueeze(2)  # (1,h,i,j,e)
    if by == "weight":
        return found.weights[0].mean(0) if head == "mean" else found.weights[0, head]
    return vectors.sum(1).norm(dim=-1)[0] if head == "mean" else vectors[0, head].norm(dim=-1)


PLACES = [("weight", 0, "mean"), ("weight", 2, 1), ("norm", 1, "mean"), ("norm", 2, 0), ("probe", 2, "mean")]


@pytest.mark.parametrize("setting", ["awo", "awi"])
@pytest.mark.parametrize(("by", "layer", "head"), PLACES)
@pytest.mark.parametrize("which", ["transformer", "subword"])
def test_links_are_those_of_one_pair_at_a_time(which, by, layer, head, setting, request, text):
    if by == "probe" and setting == "awi":
        return
    run, (_, source, target, _) = request.getfixturevalue(which), text
    target = source[::-1] if which == "subword" else target
    begin = which == "subword"
    reader = open_run_reader(run, source, target)
    asked = Candidate(by, setting, layer, head)
    made = find_links(reader, lambda layers, heads: [asked]).aligned[asked].links()
    vocabularies = (run.task.source_vocabulary, run.task.target_vocabulary) if begin else (
        run.task.problem.source, run.task.problem.target
    )  # fmt: skip
    some = 0
    for number, (x, y) in enumerate(zip(source, target, strict=True)):
        if not y:
            assert made[number] == set()
            continue
        pieces = [[list(p) for p in v.encode(words)] for v, words in zip(vocabularies, (x, y), strict=True)]
        x_ids = [BOS] * begin + [token for word in pieces[0] for token in word] + [EOS]
        found = slow(run, x_ids, [token for word in pieces[1] for token in word], by, layer, head)
        wanted = slow_links(found, [*map(len, pieces[0])], [*map(len, pieces[1])], setting, begin)
        assert made[number] == wanted, number
        some += len(wanted)
    assert some > 10


def test_the_highest_norm_is_the_largest_mean_over_all_tokens(transformer, text):
    source, target = (side[:6] for side in text[1:3])
    reading = Reading(by="weight", setting="awi", layer="highest-norm", head="highest-norm")
    found = find_links(open_run_reader(transformer, source, target), reading.candidates, with_norms=True)
    assert len(found.aligned) == 9
    sums, count = np.zeros((3, 3)), 0
    encode = [v.encode for v in (transformer.task.problem.source, transformer.task.problem.target)]
    for x, y in zip(source, target, strict=True):
        if y:
            ids = [
                [int(token) for pieces in e(words) for token in pieces] for e, words in zip(encode, (x, y), strict=True)
            ]
            count += (len(x) + 1) * (len(y) + 1)
            for layer in range(3):
                sums[layer] += [
                    float(slow(transformer, [*ids[0], EOS], ids[1], "norm", layer, h).sum()) for h in range(3)
                ]
    for candidate in found.aligned:
        assert found.mean_norm(candidate) == pytest.approx(sums[candidate.layer, candidate.head] / count)
    best = found.choose_best(reading)
    assert (best.layer, best.head) == np.unravel_index(sums.argmax(), sums.shape)


def test_layers_together_are_the_mean_of_their_maps(transformer, text):
    _, source, target, _ = text
    asked = Candidate("norm", "awo", "mean", "mean")
    made = (
        find_links(open_run_reader(transformer, source[:5], target[:5]), lambda layers, heads: [asked])
        .aligned[asked]
        .scores()
    )
    encode = [v.encode for v in (transformer.task.problem.source, transformer.task.problem.target)]
    for number in (0, 1, 3, 4):
        x, y = (
            [int(p[0]) for p in e(words)] for e, words in zip(encode, (source[number], target[number]), strict=True)
        )
        maps = [slow(transformer, [*x, EOS], y, "norm", layer, "mean") for layer in range(3)]
        assert set(made[number]) == slow_links(sum(maps) / 3, [1] * len(x), [1] * len(y), "awo", False)
        for (place, row), value in made[number].items():
            assert value == pytest.approx(float(sum(maps)[row, place]) / 3)


def test_best_on_gold_is_the_lowest_error(transformer, text):
    _, source, target, links = text
    reading = Reading(by="norm", setting="awo", layer="best-on", head="best-on")
    found = find_links(open_run_reader(transformer, source, target), reading.candidates)
    best = found.choose_best(reading, Gold(links, links))
    errors = {candidate: aer(made.links(), links, links) for candidate, made in found.aligned.items()}
    assert len(set(errors.values())) > 1
    assert errors[best] == min(errors.values())


def test_words_cut_one_by_one_are_cut_as_in_their_line(text):
    _, source, _, _ = text
    lines = [" ".join(words) for words in source]
    for kind in ("unigram", "bpe"):
        vocabulary = Subwords.train(lines, 41, kind=kind)
        whole = [list(ids) for ids in vocabulary.encode(lines)]
        assert whole == [[token for ids in vocabulary.encode(words) for token in ids] for words in source]


def test_a_line_for_every_line(transformer, text, tmp_path):
    folder, source, target, _ = text
    run = transformer.folder.path
    done = cli(run, folder / "s", folder / "t", "--gold", folder / "gold", "--out", tmp_path / "deep" / "links")
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "deep" / "links").read_text().split("\n")
    assert len(lines) == 21
    assert lines[2] == lines[-1] == ""
    assert re.search("read by norm, aw[io], layer", done.stderr)
    assert "AER" in done.stderr
    plain = cli(run, folder / "s", folder / "t")
    assert plain.stdout == "\n".join(lines)
    scored = cli(run, folder / "s", folder / "t", "--scores").stdout.split("\n")
    for line, with_scores, x, y in zip(lines, scored, source, target, strict=False):
        links = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert [link.split(":")[0] for link in with_scores.split()] == line.split()
        assert all(0 <= s < len(x) and 0 <= t < len(y) for s, t in links)
        assert all(float(link.split(":")[1]) > 0 for link in with_scores.split())


def test_both_directions_are_joined(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, *_ = text
    both = ["ibm1", folder / "s", folder / "t", "--reverse", "ibm1", "--gold", folder / "gold"]
    made = {how: cli(*both, "--symmetrise", how).stdout.split("\n") for how in ("intersection", "union")}
    grown = cli(*both).stdout.split("\n")
    for least, middle, most in zip(made["intersection"], grown, made["union"], strict=True):
        assert set(least.split()) <= set(middle.split()) <= set(most.split())
    ahead, back = cli("ibm1", folder / "s", folder / "t"), cli("ibm1", folder / "t", folder / "s")
    assert [set(line.split()) for line in made["intersection"]] == common(ahead, back)


def common(ahead, back):
    """The links that both directions have, line by line."""
    turned = [{"-".join(reversed(link.split("-"))) for link in line.split()} for line in back.stdout.split("\n")]
    return [set(a.split()) & b for a, b in zip(ahead.stdout.split("\n"), turned, strict=True)]


def test_attention_and_ibm1_are_joined_each_with_its_own_options(transformer, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, files = transformer.folder.path, [text[0] / "s", text[0] / "t"]
    for_run, for_ibm1 = ["--by", "weight", "--setting", "awo", "--layer", "1"], ["--diagonal"]
    join = [*for_run, *for_ibm1, "--symmetrise", "intersection"]
    for ahead, back in (((run, for_run), ("ibm1", for_ibm1)), (("ibm1", for_ibm1), (run, for_run))):
        alone = cli(ahead[0], *files, *ahead[1]), cli(back[0], *reversed(files), *back[1])
        made = cli(ahead[0], *files, "--reverse", back[0], *join)
        assert [set(line.split()) for line in made.stdout.split("\n")] == common(*alone)


def test_ibm1_is_trained_once_saved_and_opened_again(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, source, target, links = text
    task = Synthetic(SyntheticConfig(examples=600))
    for name, side in (("big.s", task.read_sources("train")), ("big.t", task.read_references("train"))):
        (tmp_path / name).write_text("\n".join(side) + "\n")
    words = ["ibm1", folder / "s", folder / "t", "--train-on", "big.s", "big.t", "--gold", folder / "gold"]
    first, second = cli(*words), cli(*words)
    assert "trained on 600 pairs" in first.stderr
    assert "trained earlier" in second.stderr
    assert first.stdout == second.stdout
    (saved,) = (tmp_path / "runs").iterdir()
    assert cli(saved, folder / "s", folder / "t").stdout == first.stdout
    model = WordModel.load(saved)
    assert aer(model.align(source, target)[0].links(), links, links) < 0.12
    for x, y, made in zip(source, target, model.align(source, target)[0].links(), strict=True):
        ids = [[int(i) for ids in v.encode(words) for i in ids] for v, words in ((model.source, x), (model.target, y))]
        assert made == model.model.links(*ids)
    assert cli("ibm1", folder / "s", folder / "t", "--diagonal").exit_code == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_word_that_ibm1_never_saw_is_linked_to_nothing(text):
    model = WordModel.train([["a", "b"], ["a"]], [["x", "y"], ["x"]])
    assert model.align([["a", "zzz"], ["zzz"]], [["x", "new"], ["y"]])[0].links() == [{(0, 0)}, set()]


def test_an_lstm_is_read_with_its_output_and_a_probe_finds_its_rows(lstm, text):
    _, source, target, _ = text
    for by in ("norm", "weight", "probe"):
        answer = align(str(lstm.folder.path), (source, target), AlignmentRequest(by=by, setting="awo", device="cpu"))
        assert len(answer.aligned) == 20
        assert any("awo, layer 0" in note for note in answer.notes)


def test_words_are_between_white_space_or_as_moses_cuts_them(tmp_path):
    files = tmp_path / "s", tmp_path / "t"
    files[0].write_text("Das Haus, es ist  groß.\n\n")
    files[1].write_text("The house's big.\n\n")
    plain = [*map(list, read_words(*files, AlignOptions()))]
    assert plain == [[["Das", "Haus,", "es", "ist", "groß."], []], [["The", "house's", "big."], []]]
    cut = [*map(list, read_words(*files, AlignOptions(tokenize="moses", pair="de-en")))]
    assert cut == [[["Das", "Haus", ",", "es", "ist", "groß", "."], []], [["The", "house", "'s", "big", "."], []]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--by", "wieght"], "--by .*did you mean 'weight'"),
        (["RUN", "--layer", "7"], "--layer must be 0 to 2"),
        (["RUN", "--layer", "top"], "--layer must be a number"),
        (["RUN", "--setting", "out"], "--setting must be one of awo, awi"),
        (["RUN", "--layer", "best-on"], "best-on needs gold links"),
        (["RUN", "--layer", "best-on", "--head", "highest-norm"], "layer and head must use the same rule"),
        (["RUN", "--by", "probe", "--setting", "awi"], "--by probe"),
        (["RUN", "--by", "encode"], "--by .*did you mean 'encoder'"),
        (["RUN", "--diagonal"], "--diagonal is for MODEL ibm1"),
        (["RUN", "--train-on", "s", "t"], "--train-on is for MODEL fertility, hmm, ibm1 or eflomal"),
        (["RUN", "--grow", "0.3"], "--grow is for --decide grow, but links are decided by argmax"),
        (["RUN", "--combine", "geometric"], "--combine joins two directions"),
        (["RUN", "--reverse", "RUN", "--threshold", "0.3"], "--threshold is for --decide threshold, .* by grow"),
        (["ibm1", "--decide", "mutual"], "--decide is for models with attention; omit it for ibm1"),
        (["ibm1", "--null", "0"], "--null is for models with attention"),
        (["hmm", "--combine", "geometric"], "--combine is for models with attention"),
        (["ibm1", "--layer", "2"], "--layer is for models with attention"),
        (["ibm1", "--symmetrise", "union"], "--symmetrise needs two directions"),
        (["ibm1", "--reverse", "ibm1", "--symmetrise", "grow"], "--symmetrise must be one of intersection, union"),
        (["ibm1", "--reverse", "ibm1", "--scores"], "--scores"),
        (["ibm1", "--tokenize", "moses"], "--tokenize moses needs the languages"),
        (["ibm1", "--tokenize", "spacy"], "--tokenize must be none"),
        (["./nowhere"], "no model found at ./nowhere"),
        (["fertilty"], ".*; did you mean fertility"),
    ],
)
def test_what_is_wrong_is_said(words, message, transformer, text):
    folder = text[0]
    places = {"RUN": transformer.folder.path, "s": folder / "s", "t": folder / "t"}
    model, *more = (str(places.get(word, word)) for word in words)
    done = cli(model, folder / "s", folder / "t", *more)
    assert isinstance(done.exception, ValueError | OSError)
    assert re.match(message, str(done.exception))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "s"], "--out .* is the same file as SRC"),
        (["--out", "./gold", "--gold", "gold"], "--out .* is the same file as --gold"),
        (["--terms", "x", "--show", "x"], "--show .* is the same file as --terms"),
        (["--terms", "t2", "--train-on", "s2", "t2"], "--terms .* is the same file as --train-on"),
        (["--out", "."], "--out .* is a folder"),
        (["--out", "/dev/null"], "--out /dev/null is not a regular file"),
        (["--show", "s/page.html"], "--show .*s is not a folder"),
        (["--out", "/proc/nowhere/links"], "cannot write /proc/nowhere/links"),
    ],
)
def test_an_output_is_refused_before_anything_is_lost(words, message, text, tmp_path, monkeypatch):
    for name, copy in (("s", "s"), ("t", "t"), ("gold", "gold"), ("s", "s2"), ("t", "t2")):
        (tmp_path / copy).write_text((text[0] / name).read_text())
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = cli("hmm", "s", "t", *words)
    assert isinstance(done.exception, ValueError | OSError)
    assert re.match(message, str(done.exception))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_layer_is_chosen_on_other_text(transformer, text, tmp_path):
    folder, *_ = text
    run, files = transformer.folder.path, (folder / "s", folder / "t")
    here = cli(run, *files, "--layer", f"best-on:{folder / 'gold'}", "--setting", "awo")
    there = cli(run, *files, "--layer", f"best-on {folder / 'gold'}", "--best-on-text", *files, "--setting", "awo")
    assert here.exit_code == there.exit_code == 0, here.output + there.output
    assert here.stdout == there.stdout
    again = cli(run, *files, "--layer", "best-on", "--gold", folder / "gold", "--setting", "awo", "--bootstrap", "20")
    assert again.stdout == here.stdout
    assert "20 resamplings" in again.stderr
