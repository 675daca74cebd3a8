"""Scores against sacrebleu itself, against numbers by hand, and against sums over full passes."""

import math

import pytest
import torch
from torch.nn import functional as F

from attnlab.decoding.scores import compute_bleu, compute_chrf, compute_split_bleu, split_compounds
from attnlab.mechanisms import MECHANISMS
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.transformer import TransformerConfig, build
from attnlab.training import scoring as score
from attnlab.training.scoring import Scored, bits_per_character, perplexity, score_batches

SMALL = {"vocabulary": 23, "layers": 2, "width": 16, "heads": 2, "feed_forward": 13}
STOCHASTIC = [name for name, kind in MECHANISMS.items() if kind.stochastic]
OURS = ["the cat sat on the mat .", "a well-known dog-like fox jumps over it"]
THEIRS = ["the cat sat on a mat .", "a well-known dog-like fox leaps over it"]


def made(kind="translator", attention="softmax", **changes):
    model = build(TransformerConfig(model=kind, attention=attention, **SMALL | changes)).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def score_batch(model, inputs, targets, **options):
    return score_batches(model, [(inputs, targets)], **options)


def pairs():
    source, target = torch.randint(1, 23, (3, 5)), torch.randint(1, 23, (3, 7))
    source[1, 3:], target[1, 5:], target[2, 2:] = 0, 0, 0
    return (source, target[:, :-1]), target[:, 1:]


def test_bleu_and_chrf_are_sacrebleus():
    import sacrebleu

    assert compute_bleu(OURS, THEIRS).value == sacrebleu.corpus_bleu(OURS, [THEIRS]).score
    assert compute_chrf(OURS, THEIRS).value == sacrebleu.corpus_chrf(OURS, [THEIRS]).score
    assert compute_bleu(OURS, [THEIRS, OURS]).value == pytest.approx(100.0)
    upper = [line.upper() for line in OURS]
    assert (
        compute_bleu(upper, THEIRS).value
        < compute_bleu(upper, THEIRS, lowercase=True).value
        == compute_bleu(OURS, THEIRS).value
    )
    assert "tok:13a" in compute_bleu(OURS, THEIRS).signature
    assert sacrebleu.__version__ in compute_bleu(OURS, THEIRS).signature
    assert compute_chrf(OURS, THEIRS, word_order=2).name == "chrF2++"


def test_bleu_by_hand():
    """Of 5 words 4 are right, of 4 pairs 3, of 3 triples 2, of 2 fours 1; one word too short."""
    expected = 100 * math.exp(1 - 6 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    got = compute_split_bleu(["a b c d e"], ["a b c d f g"])
    assert got.value == pytest.approx(expected, abs=1e-10)
    assert compute_split_bleu(["a b c d e"], ["a b c x e"]).value == 0.0  # no four is right, and none is smoothed in


def test_hyphens_are_split():
    assert split_compounds("a well-known fact - or x-y-z , - a- b") == (
        "a well ##AT##-##AT## known fact - or x ##AT##-##AT## y-z , - a- b"
    )
    assert split_compounds("été-là\u00a0-x") == "été ##AT##-##AT## là\u00a0 ##AT##-##AT## x"  # as bytes, no space there
    split = [[line.replace("-", " ##AT##-##AT## ") for line in lines] for lines in (OURS, THEIRS)]
    assert compute_split_bleu(OURS, THEIRS).value == compute_bleu(*split, tokenize="none", smooth_method="none").value
    assert compute_split_bleu(OURS, THEIRS).value > compute_bleu(OURS, THEIRS, tokenize="none").value


def test_intervals_are_the_bootstraps():
    right = ["this line is quite the same"]
    ours, theirs = OURS * 7 + right, THEIRS * 7 + right
    got, again = (compute_bleu(ours, theirs, bootstrap=37) for _ in range(2))
    assert got == again
    assert "bs:37|seed:12345" in got.signature
    assert 0 < got.margin < got.mean
    assert got.value == compute_bleu(ours, theirs).value
    assert f"± {got.margin:.2f}" in str(got)
    assert compute_bleu(OURS, THEIRS).margin is None


def test_what_is_refused_of_texts():
    with pytest.raises(ValueError, match="2 hypotheses but 1 references"):
        compute_bleu(OURS, THEIRS[:1])
    with pytest.raises(ValueError, match="2 hypotheses but 3 references"):
        compute_chrf(OURS, [THEIRS, [*THEIRS, "x"]])
    for nothing in ([], "text"):
        with pytest.raises(ValueError, match="hypotheses must be a list"):
            compute_bleu(nothing, nothing)
    with pytest.raises(ValueError, match="bootstrap must be 0"):
        compute_bleu(OURS, THEIRS, bootstrap=1)


def test_perplexity_and_bits():
    assert perplexity(7 * math.log(13), 7) == pytest.approx(13)
    assert perplexity(1e9, 7) == math.inf
    assert bits_per_character(math.log(8), 3) == pytest.approx(1.0)
    assert Scored(nll_sum=math.log(9), bound_sum=math.log(25), count=2, correct=1).perplexity == pytest.approx(3)
    assert Scored(nll_sum=math.log(9), bound_sum=math.log(25), count=2, correct=1).bound_perplexity == pytest.approx(5)
    for nothing in (lambda: perplexity(1.0, 0), lambda: Scored().accuracy):
        with pytest.raises(ValueError, match="number of targets"):
            nothing()


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_targets_of_a_translator(rows, monkeypatch):
    monkeypatch.setattr(score, "ROWS", rows)
    model, (inputs, targets) = made(), pairs()
    logits = model(*inputs)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    got = score_batch(model, inputs, targets)
    assert got.nll_sum == pytest.approx(float(nll.detach()), abs=1e-10)
    assert got.nll_sum == got.bound_sum
    assert got.count == 6 + 4 + 1
    assert got.correct == sum(
        int(logits[b, t].argmax() == targets[b, t]) for b in range(3) for t in range(6) if targets[b, t] != 0
    )


def test_other_models_and_targets():
    model, tokens = made("classifier", classes=3), torch.randint(1, 23, (5, 7))
    classes = torch.tensor([0, 1, 2, 0, 0])
    got = score_batch(model, tokens, classes, padding=None)
    assert got.nll_sum == pytest.approx(float(F.cross_entropy(model(tokens).detach(), classes, reduction="sum")))
    assert got.count == 5
    adaptive = made("language-model", width=48, adaptive_cutoffs=(5, 11))
    nll = adaptive.readout.nll(adaptive.hidden(tokens[:, :-1]), tokens[:, 1:]).sum()
    assert score_batch(adaptive, tokens[:, :-1], tokens[:, 1:]).nll_sum == pytest.approx(float(nll.detach()))
    table = torch.nn.Embedding(23, 23).eval()  # any module that gives logits
    nll = F.cross_entropy(table(tokens[:, :-1]).flatten(0, 1).detach(), tokens[:, 1:].flatten(), reduction="sum")
    assert score_batch(table, tokens[:, :-1], tokens[:, 1:]).nll_sum == pytest.approx(float(nll), rel=1e-6)


def test_batches_add_up():
    model, (inputs, targets) = made(), pairs()
    parts = [((inputs[0][n : n + 1], inputs[1][n : n + 1]), targets[n : n + 1]) for n in range(3)]
    whole, streamed = score_batch(model, inputs, targets), score_batches(model, iter(parts))
    summed = sum((score_batch(model, *part) for part in parts), Scored())
    for got in (streamed, summed):
        assert (got.count, got.correct) == (whole.count, whole.correct)
        assert got.nll_sum == pytest.approx(whole.nll_sum, abs=1e-10)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_expectation_of_noise(name):
    model, (inputs, targets) = made(attention=name), pairs()
    seen, passes = targets != 0, []
    for seed in (5, 6, 7):
        with seed_noise(model, seed), torch.no_grad():
            passes.append(model(*inputs).softmax(-1)[seen])  # (m,v)
    of_targets = torch.stack(passes)[:, range(len(targets[seen])), targets[seen]]  # (3,m)
    got = score_batch(model, inputs, targets, samples=3, seed=5)
    assert got.nll_sum == pytest.approx(-float(of_targets.mean(0).log().sum()), abs=1e-9)
    assert got.bound_sum == pytest.approx(-float(of_targets.log().mean(0).sum()), abs=1e-9)
    assert got.correct == int((torch.stack(passes).mean(0).argmax(1) == targets[seen]).sum())
    assert got.nll_sum < got.bound_sum  # Jensen
    assert got.perplexity < got.bound_perplexity


@pytest.mark.parametrize("name", STOCHASTIC)
def test_one_sample_is_its_own_bound_and_none_is_the_mean(name):
    model, (inputs, targets) = made(attention=name), pairs()
    one = score_batch(model, inputs, targets, samples=1, seed=3)
    assert one.nll_sum == one.bound_sum
    assert one != score_batch(model, inputs, targets, samples=1, seed=4)
    assert one != score_batch(model, inputs, targets)
    two = score_batches(model, [(inputs, targets), (inputs, targets)], samples=2, seed=3)
    alone = score_batch(model, inputs, targets, samples=2, seed=3)
    other = score_batch(model, inputs, targets, samples=2, seed=5)
    assert two.nll_sum == pytest.approx((alone + other).nll_sum, abs=1e-10)
    assert all(m.sample_seed is None for m in model.modules() if hasattr(m, "sample_seed"))


def test_what_is_refused_of_models():
    model, (inputs, targets) = made(), pairs()
    with pytest.raises(ValueError, match=r"noise.*4 samples"):
        score_batch(model, inputs, targets, samples=4)
    with pytest.raises(ValueError, match=r"samples .*-1"):
        score_batch(model, inputs, targets, samples=-1)
    with pytest.raises(ValueError, match=r"targets \(3, 5\) do not fit .*\(3, 6\)"):
        score_batch(model, inputs, targets[:, 1:])
    with pytest.raises(ValueError, match="no batches"):
        score_batches(model, [])
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        score_batch(model.train(), inputs, targets)


def test_too_little_text_for_an_interval_is_scored_without_one():
    """Some bootstrap samples of two sentences score exactly 0, which sacrebleu cannot average with the others."""
    score = compute_chrf(["jipy", "zzz"], ["jipy", "vyje"], bootstrap=30)
    assert (score.mean, score.margin) == (None, None)
    assert score.value > 0
