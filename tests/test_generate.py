"""Generation: the cache changes nothing, sampling has the stated distribution, and what is wrong is one line."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_process import run_attnlab as run
from scipy.stats import chisquare

import attnlab
from attnlab.decoding.generation import Sampling, TextGenerator, generate_tokens
from attnlab.mechanisms import MECHANISMS
from attnlab.models.transformer import TransformerConfig, build
from attnlab.training.runs import open_run

TEXT = "the cat sat on the mat.\nthe dog sat on the log.\n" * 40
SMALL = ["width=16", "layers=1", "heads=2", "feed_forward=32", "lr=1e-2", "device=cpu"]


def train(folder, *words, task="language"):
    own = ["block=32"] if task == "language" else []
    done = run("train", task, *SMALL, *own, *words, f"out={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cats.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def characters(text):
    return train(text.parent / "characters", f"data={text}", "units=character", "steps=30")


def build_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocabulary": 13, "layers": 2, "width": 12, "heads": 2, "feed_forward": 16, "dropout": 0.0}
    return build(TransformerConfig(model="language-model", **sizes | changes)).double().eval()


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_cache_changes_nothing(name):
    model = build_model(attention=name)
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=3)):
        both = [
            list(generate_tokens(model, [2, 5, 7], tokens=11, sampling=sampling, cached=cached))
            for cached in (True, False)
        ]
        assert both[0] == both[1]
        assert both[0]


def test_greedy_takes_the_likeliest_and_never_a_special_token():
    model = build_model()
    text = [2, 5]
    for token in generate_tokens(model, text, tokens=7, sampling=Sampling()):
        logits = model(torch.tensor([text]))[0, -1].detach()
        logits[[0, 1, 3]] = -torch.inf
        assert token == int(logits.argmax())
        text.append(token)
    one = list(generate_tokens(model, [2, 5], tokens=7, sampling=Sampling(top_k=1, seed=9)))
    assert [2, 5, *one] == text


def test_the_logits_of_the_caller_do_not_change():
    logits = torch.randn(9, dtype=torch.float64)
    before = logits.clone()
    Sampling(temperature=1.0).compute_probabilities(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-310, 5e-324])
def test_the_lowest_temperature_is_greedy(temperature):
    logits = torch.tensor([9.0, 9.0, 1.0, 9.0, 3.0, -2.0])
    found = Sampling(temperature=temperature).compute_probabilities(logits)
    assert found.tolist() == [0, 0, 0, 0, 1, 0]


def test_a_text_ends_at_its_end():
    model = build_model(tie="none")
    with torch.no_grad():
        model.readout.weight.zero_()
        model.decoder.norm.bias.fill_(1.0)
        model.readout.weight[2] = 1.0  # </s>
    assert list(generate_tokens(model, [2, 5], tokens=7, sampling=Sampling())) == []


def test_samples_have_the_probabilities_of_the_model():
    """Chi-square of 4,000 draws of one token, plain and restricted; a hundred runs would fail once."""
    model = build_model()
    logits = model(torch.tensor([[2, 5, 7]]))[0, -1].detach()
    allowed = [token for token in range(13) if token not in (0, 1, 3)]
    draw = torch.Generator().manual_seed(0)
    for settings in ({"temperature": 1.0}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.6}):
        heat = settings.get("temperature", 1.0)
        p = dict(zip(allowed, (logits[allowed] / heat).softmax(0).tolist(), strict=True))
        ranked = sorted(p, key=p.get, reverse=True)
        count = settings.get("top_k", len(ranked))
        if "top_p" in settings:
            count = next(n for n in range(1, 11) if sum(p[token] for token in ranked[:n]) >= 0.6)
        kept = {token: p[token] / sum(p[k] for k in ranked[:count]) for token in ranked[:count]}
        stated = Sampling(**settings).compute_probabilities(logits)
        torch.testing.assert_close(stated, torch.tensor([kept.get(k, 0.0) for k in range(13)], dtype=torch.float64))
        drawn = torch.multinomial(stated, 4000, replacement=True, generator=draw).bincount(minlength=13).tolist()
        assert chisquare([drawn[k] for k in kept], [4000 * kept[k] for k in kept]).pvalue > 0.01
    firsts = [next(generate_tokens(model, [2, 5, 7], tokens=1, sampling=Sampling(top_k=4, seed=n))) for n in range(400)]
    four = Sampling(top_k=4).compute_probabilities(logits)
    counts, kept = torch.tensor(firsts).bincount(minlength=13).tolist(), four.nonzero().flatten().tolist()
    assert sum(counts[k] for k in kept) == 400
    assert chisquare([counts[k] for k in kept], [400 * float(four[k]) for k in kept]).pvalue > 0.01


def test_a_prompt_is_continued_on_the_command_line_and_in_python(characters):
    done = run("generate", str(characters), "--prompt", "the cat", "--tokens", "12", "device=cpu")
    assert done.returncode == 0, done.stderr
    written = attnlab.generate(characters, "the cat", tokens=12, device="cpu")
    assert done.stdout == f"the cat{written}\n"
    assert len(written) == 12
    seeds = [attnlab.generate(characters, "the", tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_every_line_of_the_input_is_a_prompt(characters):
    done = run(
        "generate", str(characters), "--json", "--top-k", "3", "--seed", "5", "tokens=4", input="the\ndog\nthe\n"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["line"], row["prompt"]) for row in rows] == [(1, "the"), (2, "dog"), (3, "the")]
    assert rows[2]["text"] == attnlab.generate(characters, "the", tokens=4, top_k=3, seed=7)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--tokens", "0"], "tokens"),
        (["--prompt", "a", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--temperature", "0", "--top-k", "3"], "top_k"),
        (["--prompt", "a", "--temperature", "0", "--top-p", "0.5"], "top_p"),
        (["--prompt", "a", "wieghts=best"], "weights"),
        ([], "no prompt"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_one_line(characters, words, word):
    done = run("generate", str(characters), *words, input="")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr


def test_an_empty_line_is_named_and_the_next_is_read(characters):
    done = run("generate", str(characters), "--tokens", "2", "--json", input="the\n\ndog\n")
    assert done.returncode == 1
    assert "line 2" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [json.loads(line)["line"] for line in done.stdout.splitlines()] == [1, 3]


def test_what_the_vocabulary_lacks_and_what_training_never_saw_is_noted(characters):
    done = run("generate", str(characters), "--prompt", "the ÄÖ", "--tokens", "40")
    assert done.returncode == 0
    assert "'Ä', 'Ö'" in done.stderr
    assert "block=32" in done.stderr


@pytest.mark.parametrize("units", ["word", "subword", "byte"])
def test_other_units_are_written_as_text(text, tmp_path, units):
    folder = train(tmp_path, f"data={text}", f"units={units}", "steps=30")
    written = attnlab.generate(folder, "the cat", tokens=30, device="cpu")
    assert set(written) <= set(TEXT)
    assert attnlab.generate(folder, "the cat", tokens=30, device="cpu") == written
    generator = TextGenerator(open_run(folder, device="cpu"), Sampling(), tokens=30, cached=False)
    assert "".join(generator.stream("the cat")) == written


def test_half_a_character_waits_for_its_other_bytes(tmp_path):
    path = tmp_path / "umlauts.txt"
    path.write_text("äöü\n" * 100)
    folder = train(tmp_path / "run", f"data={path}", "units=byte", "steps=1")
    pieces = list(TextGenerator(open_run(folder, device="cpu"), Sampling(temperature=1.0), tokens=40).stream("ä"))
    assert len("".join(pieces).encode()) >= 40


def test_learned_positions_bound_the_text(text, tmp_path):
    folder = train(tmp_path, f"data={text}", "units=character", "positions=learned", "steps=1")
    written = attnlab.generate(folder, "the cat", device="cpu", temperature=1.0)
    assert len(written) == 32 + 1 - 8  # positions, and </s> before the prompt
    for prompt, tokens, word in (("the cat", 26, "25"), ("the cat " * 5, None, "shorten")):
        with pytest.raises(ValueError, match=word):
            attnlab.generate(folder, prompt, tokens=tokens, device="cpu")


def test_runs_of_other_tasks_name_their_command(tmp_path):
    for data, command in (("lexicon", "attnlab translate"), ("keyword", "attnlab predict")):
        folder = train(
            tmp_path / data, f"data={data}", "length=5", "steps=1", "examples=50", "held_out=9", task="synthetic"
        )
        done = run("generate", str(folder), "--prompt", "a")
        assert done.returncode == 2
        assert command in done.stderr


def test_sequences_that_are_no_text_are_refused(tmp_path):
    folder = train(tmp_path / "mqar", "data=mqar", "steps=1", "examples=50", task="synthetic")
    for words in (["generate", folder, "--prompt", "1 2"], ["translate", folder]):
        done = run(*words)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "attnlab evaluate" in done.stderr


def test_a_task_that_cannot_read_text_is_refused(characters):
    opened = open_run(characters, device="cpu")
    own = SimpleNamespace(architecture="language", has_text=True, encode=opened.task.encode)
    with pytest.raises(ValueError, match="decode"):
        TextGenerator(replace(opened, task=own), Sampling())
