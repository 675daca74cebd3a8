"""Synthetic tasks: the distributions of Snell et al. and the lexicon's grammar, checked against their definitions."""

import numpy as np
import pytest
import torch
from in_process import run_attnlab as run

from attnlab.tasks import TASKS, find_task
from attnlab.tasks.lexicon import Lexicon
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.tasks.task import BOS, EOS
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_folder import RunFolder

COPYING = ("permutation", "subset", "mixture", "permutation-function")
ALL = ("lexicon", *COPYING, "keyword", "mqar")


def task(data, **changes):
    return Synthetic.prepare(SyntheticConfig(data=data, **changes), None)


def drawn(data, number=600, **changes):
    made = task(data, examples=number, **changes)
    return made, made.make_batch("train", list(range(number)))


@pytest.mark.parametrize("data", ALL)
def test_examples_are_a_function_of_seed_part_and_index(data):
    one, other = task(data, examples=50), task(data, examples=50, data_seed=1)
    batch, again = one.make_batch("train", [3, 41, 7]), task(data, examples=50).make_batch("train", [3, 41, 7])
    assert torch.equal(batch.targets, again.targets)
    assert torch.equal(batch.inputs[0], again.inputs[0])
    alone = one.make_batch("train", [41])
    width = alone.inputs[0].shape[1]
    assert torch.equal(batch.inputs[0][1, :width], alone.inputs[0][0])
    assert not torch.equal(one.make_batch("valid", [0, 1]).inputs[0], one.make_batch("test", [0, 1]).inputs[0])
    assert (
        one.make_batch("train", list(range(50))).inputs[0].tolist()
        != other.make_batch("train", list(range(50))).inputs[0].tolist()
    )


@pytest.mark.parametrize("data", ALL)
def test_batches_fit_the_sizes_and_count_what_is_scored(data):
    made = task(data, examples=211, held_out=31)
    sizes = made.get_sizes()
    for part, number in (("train", 211), ("valid", 31), ("test", 31)):
        batches = [made.make_batch(part, indices) for indices in made.plan_batches(part, tokens=600, seed=5, epoch=0)]
        assert sum(len(batch.indices) for batch in batches) == number == made.count_examples(part)
        for batch in batches:
            assert all(
                tensor.max() < sizes.get("source_vocabulary", sizes["vocabulary"]) for tensor in batch.inputs[:1]
            )
            if made.architecture == "translation":
                assert batch.count == int((batch.targets != 0).sum())
                assert batch.targets.max() < sizes["vocabulary"]
                assert torch.equal(batch.inputs[1][:, 1:], batch.targets[:, :-1].where(batch.inputs[1][:, 1:] != 0, 0))
                assert (batch.inputs[1][:, 0] == BOS).all()
                assert max(batch.targets.numel(), batch.inputs[0].numel()) <= 600
            elif made.architecture == "language":
                assert batch.count == int((batch.targets != 0).sum())
                assert batch.targets.max() < sizes["vocabulary"]
            else:
                assert batch.count == len(batch.targets)
                assert set(batch.targets.tolist()) <= set(range(sizes["classes"]))


def test_each_task_names_its_main_score():
    stated = {"lexicon": "perplexity", "mixture": "perplexity", "keyword": "accuracy", "mqar": "accuracy"}
    assert {data: TASKS["synthetic"].name_main_score({"data": data}) for data in stated} == stated
    assert TASKS["classification"].name_main_score({}) == "accuracy"
    assert TASKS["language"].name_main_score({}) == "perplexity"


@pytest.mark.parametrize("settings", [{"pairs": 4}, {"queries": 2}, {"power": 1.0}])
def test_settings_of_recall_are_refused_elsewhere(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        task("permutation", **settings)


@pytest.mark.parametrize("data", [*COPYING, "keyword", "mqar"])
def test_training_never_repeats_over_epochs_and_seeds(data):
    made = task(data, examples=97, length=11, types=13, **{"pairs": 2} if data == "mqar" else {})
    rows = [
        tuple(row)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
        for indices in made.plan_batches("train", examples=16, seed=seed, epoch=epoch)
        for row in made.make_batch("train", indices).inputs[0].tolist()
    ]
    assert len(rows) == 6 * 97
    assert len(set(rows)) > 0.99 * len(rows)
    assert made.plan_batches("valid", examples=16, epoch=0, shuffle=False) == made.plan_batches(
        "valid", examples=16, epoch=4, shuffle=False
    )


def test_a_lexicon_is_seen_again_every_epoch():
    made = task("lexicon", examples=50)
    plans = [made.plan_batches("train", examples=16, seed=2, epoch=epoch) for epoch in (0, 1)]
    assert plans[0] != plans[1]
    for plan in plans:
        assert sorted(index for batch in plan for index in batch) == list(range(50))


@pytest.mark.parametrize(
    ("data", "vocabulary", "supports"),
    [
        ("permutation", 44, [range(4, 44)]),
        ("subset", 64, [range(4, 64)]),
        ("mixture", 84, [range(4, 44), range(44, 84)]),
        ("permutation-function", 64, [range(4, 64)]),
    ],
)
def test_copying_has_the_papers_distribution(data, vocabulary, supports):
    made, batch = drawn(data)
    assert made.get_sizes() == {"source_vocabulary": vocabulary, "vocabulary": vocabulary}
    x, y = batch.inputs[0], batch.targets
    assert x.shape == y.shape == (600, 41)
    assert (x[:, -1] == EOS).all()
    assert (y[:, -1] == EOS).all()
    seen = np.zeros(len(supports), dtype=int)
    for row in x[:, :-1].tolist():
        assert len(set(row)) == 40
        (which,) = [k for k, support in enumerate(supports) if set(row) <= set(support)]
        seen[which] += 1
    assert (np.abs(seen / 600 - 1 / len(supports)) < 0.1).all()
    places = np.array([row.index(4) for row in x.tolist() if 4 in row])
    assert abs(places.mean() - 19.5) < 5 * 11.55 / len(places) ** 0.5


def test_copies_are_in_order_but_for_the_permutation_function():
    for data in COPYING:
        made, batch = drawn(data)
        x, y = batch.inputs[0][:, :-1], batch.targets[:, :-1]
        links = made.read_alignments("train")[0]
        assert all(torch.equal(x[:, source], y[:, target]) for source, target in links)
        assert len(links) == 40
        assert (links == frozenset((k, k) for k in range(40))) == (data != "permutation-function")
        assert made.read_alignments("train")[1] == links


def test_the_keyword_is_there_once_or_never():
    made, batch = drawn("keyword", number=1024)
    x, y = batch.inputs[0], batch.targets
    assert x.shape == (1024, 40)
    assert torch.equal((x == 4).sum(1), y)
    assert y.sum() == 512
    counts = np.bincount(x[x != 4].numpy(), minlength=44)[5:]
    expected = counts.sum() / 39
    assert ((counts - expected) ** 2 / expected).sum() < 39 + 5 * (2 * 39) ** 0.5
    with pytest.raises(ValueError, match="no alignments"):
        made.read_alignments("train")


@pytest.mark.parametrize("power", [1.0, 0.01])
def test_a_recalled_value_is_the_one_beside_its_key(power):
    _, batch = drawn("mqar", number=1024, length=50, types=61, pairs=7, queries=5, power=power)
    x, y = batch.inputs[0] - 4, batch.targets - 4
    keys, values = x[:, 0:14:2], x[:, 1:14:2]
    assert keys.max() < 30 <= values.min()
    assert all(len(set(row)) == 7 for row in (*keys.tolist(), *values.tolist()))
    rows, places = torch.nonzero(y >= 0, as_tuple=True)
    assert batch.count == len(rows) == 5 * 1024
    assert (places >= 14).all()
    assert (places % 2 == 0).all()
    at = (keys[rows] == x[rows, places].unsqueeze(1)).int().argmax(1)
    assert torch.equal(values[rows, at], y[rows, places])
    assert len({(row, int(key)) for row, key in zip(rows.tolist(), x[rows, places], strict=True)}) == len(rows)
    counts = np.bincount((places.numpy() - 14) // 2, minlength=18)
    assert counts.min() > 0
    assert (counts[0] > 5 * counts[-1]) == (power < 1)
    if power == 1:
        expected = counts.sum() / 18
        assert ((counts - expected) ** 2 / expected).sum() < 18 + 5 * (2 * 18) ** 0.5


@pytest.mark.parametrize(
    ("changes", "word"), [({"queries": 9}, "pairs"), ({"length": 31}, "32"), ({"types": 15}, "16")]
)
def test_a_recall_that_does_not_fit_is_refused(changes, word):
    with pytest.raises(ValueError, match=word):
        SyntheticConfig(data="mqar", **changes)


def test_the_lexicon_links_words_with_their_translations_and_nothing_else():
    lexicon = Lexicon(7)
    markers = crossings = doubled = 0
    for sentence in lexicon.draw_sentences(0, 400):
        linked = {place for place, _ in sentence.links}
        assert {sentence.source[i] for i in range(len(sentence.source)) if i not in linked} <= set(
            lexicon.classes["determiner"]
        )
        free = [word for j, word in enumerate(sentence.target) if j not in {j for _, j in sentence.links}]
        assert free == [lexicon.marker]
        for place in linked:
            words = [sentence.target[j] for i, j in sorted(sentence.links) if i == place]
            assert words == lexicon.translations[sentence.source[place]]
            doubled += len(words) == 2
        markers += sentence.target.count(lexicon.marker)
        crossings += any(i < k and j > m for i, j in sentence.links for k, m in sentence.links)
    assert markers == 400
    assert crossings == 400  # the verb always moves
    assert doubled > 40


def test_the_lexicon_differs_between_parts_and_seeds_and_stays_small():
    lexicon = Lexicon(0)
    parts = [{" ".join(s.source) for s in lexicon.draw_sentences(part, 200)} for part in (0, 1)]
    assert parts[0] != parts[1]
    assert lexicon.source_words != Lexicon(1).source_words
    assert not set(lexicon.source_words) & set(lexicon.target_words)
    assert len(lexicon.source_words) == len(set(lexicon.source_words)) == 52
    assert len(lexicon.target_words) == len(set(lexicon.target_words)) == 57


def test_text_goes_in_and_comes_out():
    made = task("lexicon", held_out=20)
    source, reference = made.read_sources("test")[3], made.read_references("test")[3]
    batch = made.make_batch("test", [3])
    assert made.encode([source]).pad([0]).tolist() == batch.inputs[0].tolist()
    assert made.decode(batch.targets[0].tolist()) == reference
    links = made.read_alignments("test")[3]
    assert all(i < len(source.split()) and j < len(reference.split()) for i, j in links)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"must be one of lexicon, .*'copy'"):
        SyntheticConfig(data="copy")
    with pytest.raises(ValueError, match="types=39 must be at least length=40"):
        SyntheticConfig(data="subset", types=39)
    with pytest.raises(ValueError, match="examples must be at least 1"):
        SyntheticConfig(examples=0)
    with pytest.raises(ValueError, match="did you mean 'valid'"):
        task("lexicon").make_batch("valdi", [0])


def test_the_registry_names_tasks_and_their_configurations():
    assert "synthetic" in TASKS
    for name, kind in TASKS.items():
        assert find_task(name) is kind
        kind.config_type()  # every default is allowed


@pytest.mark.parametrize("data", ALL)
def test_the_text_of_an_example_is_read_as_the_example_itself(data):
    made = task(data, examples=7, held_out=5)
    batch, indices = made.make_batch("valid", list(range(5))), list(range(5))
    assert torch.equal(made.encode(made.read_sources("valid")).pad(indices), batch.inputs[0])
    if made.architecture == "translation":
        assert torch.equal(made.encode_target(made.read_references("valid")).pad(indices), batch.inputs[1])


@pytest.mark.slow
def test_softmax_learns_to_recall(tmp_path):
    sizes = ["width=64", "layers=2", "heads=2", "feed_forward=128", "dropout=0", "lr=2e-3", "batch_examples=64"]
    done = run("train", "synthetic", "data=mqar", *sizes, "steps=500", "device=cpu", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path).metrics()[-1]["valid_accuracy"] >= 0.95


def test_a_problem_that_translates_may_have_other_numbers_of_decoder_layers(tmp_path):
    """The recipe does not know yet what kind of model the problem needs."""
    recipe = resolve_recipe("synthetic", {"data": "lexicon", "layers": "1", "decoder_layers": "2"})
    config = recipe.resolve_model(find_task("synthetic").prepare(recipe.data, tmp_path))
    assert (config.model, config.layers, config.decoder_layers) == ("translator", 1, 2)
    wrong = resolve_recipe("synthetic", {"data": "mqar", "decoder_layers": "2"})
    with pytest.raises(ValueError, match="decoder_layers is for translators only"):
        wrong.resolve_model(find_task("synthetic").prepare(wrong.data, tmp_path))
