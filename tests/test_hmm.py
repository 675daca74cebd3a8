"""Hidden Markov models and fertilities of word alignment, against every alignment enumerated one by one."""

import itertools
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest

from attnlab.counting.cooccurrence import WordPairs
from attnlab.counting.fertility import MOST, add_fertility, estimate_fertility, tabulate_weights, weigh_links
from attnlab.counting.hmm import WIDEST, build_moves, make_first_jumps, run_chain, run_ibm1
from attnlab.counting.hmm_fit import HmmOptions, fit_hmm
from attnlab.counting.hmm_model import HmmModel
from attnlab.counting.padded_blocks import SLACK, SMALL, BlockFile, cut_blocks
from attnlab.counting.type_pairs import PROBED, SMALLEST, TypePairs

NULL = 0.1


def draw_corpus(seed, number=11, longest=4, types=5):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, (2, number))
    return [tuple(generator.integers(0, types, n).tolist() for n in pair) for pair in lengths.T]


def slow_posterior(theta, null, jumps, words, p0=NULL):
    """Links (T,L), log p(y|x) and jumps of one pair; theta (T,L), null (T,). None in a row of links is NULL."""
    steps, length = theta.shape
    links, total, moves = np.zeros((steps, length)), 0.0, defaultdict(float)
    for chosen in itertools.product([None, *range(1, length + 1)], repeat=steps):
        weight, at, path = 1.0, 0, []
        for t, position in enumerate(chosen):
            if position is None:
                weight *= p0 * null[t]
                continue
            weight *= (1 - p0) * theta[t, position - 1] * jumps[position - at + WIDEST]
            path.append((at, position))
            at = position
        weight *= words(chosen) if words else 1.0
        total += weight
        for t, position in enumerate(chosen):
            if position is not None:
                links[t, position - 1] += weight
        for move in path:
            moves[move] += weight
    return links / total, np.log(total), {move: value / total for move, value in moves.items()}


def draw_padded(seed, lengths):
    """Random emissions of pairs of these lengths side by side, padded; and each alone."""
    generator = np.random.default_rng(seed)
    longest, steps = max(x for x, _ in lengths), max(y for _, y in lengths)
    emission = np.zeros((steps, len(lengths), longest + 1), dtype=np.float32)
    null = np.ones((steps, len(lengths)), dtype=np.float32)
    alone = []
    for k, (length, words) in enumerate(lengths):
        theta, own = generator.random((words, length)), generator.random(words)
        emission[:words, k, 1 : length + 1], null[:words, k] = theta, NULL * own
        alone.append((theta, own))
    return emission, null, alone


def test_the_chain_equals_every_alignment_enumerated():
    lengths = [(3, 4), (2, 5), (4, 2), (1, 1)]
    emission, null, alone = draw_padded(0, lengths)
    jumps = np.random.default_rng(1).dirichlet(np.ones(2 * WIDEST + 1)).astype(np.float32)
    found = run_chain(emission, null, build_moves(jumps, 5, NULL))
    likelihood, moves = 0.0, np.zeros((5, 5))
    for k, (theta, own) in enumerate(alone):
        links, log_p, path = slow_posterior(theta, own, jumps, None)
        steps, length = theta.shape
        assert found.links[:steps, k, 1 : length + 1] == pytest.approx(links, rel=1e-4, abs=1e-7)
        assert found.compute_null()[:steps, k] == pytest.approx(1 - links.sum(1), abs=1e-5)
        assert (found.links[steps:, k] == 0).all()
        likelihood += log_p
        for move, value in path.items():
            moves[move] += value
    assert found.log_likelihood == pytest.approx(likelihood, rel=1e-5)
    assert found.moves == pytest.approx(moves, rel=1e-4, abs=1e-7)


def test_ibm1_is_the_chain_without_jumps():
    lengths = [(3, 4), (2, 5)]
    emission, null, alone = draw_padded(2, lengths)
    found = run_ibm1(emission, null, np.array([3, 2]), NULL)
    for k, (theta, own) in enumerate(alone):
        joint = (1 - NULL) / theta.shape[1] * theta
        wanted = joint / (joint.sum(1, keepdims=True) + NULL * own[:, None])
        assert found.links[: len(own), k, 1 : theta.shape[1] + 1] == pytest.approx(wanted, rel=1e-5)


def fit(pairs, *stages, **options):
    times = {stage: stages.count(stage) for stage in dict.fromkeys(stages)}
    kind = "fertility" if "fertility" in stages else "hmm"
    return fit_hmm(WordPairs.gather(pairs), kind, schedule=times, options=HmmOptions(null=NULL, **options))


@pytest.mark.parametrize("agree", [True, False])
def test_expected_links_are_those_of_a_slow_transcription(agree):
    pairs = draw_corpus(3)
    model = fit(pairs, "hmm", agree=agree).ahead
    jumps, types = make_first_jumps(), [1 + max(max(pair[side]) for pair in pairs) for side in (0, 1)]
    counts, null, path = defaultdict(float), np.full(types[1], 1e-3), 50.0 * jumps
    for x, y in pairs:
        ahead, _, moves = slow_posterior(*even(len(y), len(x), types[1]), jumps, None)
        np.add.at(null, y, 1 - ahead.sum(1))
        for (start, end), value in moves.items():
            path[end - start + WIDEST] += value
        back, _, _ = slow_posterior(*even(len(x), len(y), types[0]), jumps, None)
        for (t, o), (position, i) in itertools.product(enumerate(y), enumerate(x)):
            counts[i, o] += ahead[t, position] * (back[position, t] if agree else 1.0)
    found = {(int(k) // types[1], int(k) % types[1]): n for k, n in zip(model.keys, model.counts, strict=True)}
    assert found == pytest.approx({cell: n for cell, n in counts.items() if n >= 1e-3}, rel=1e-4)
    assert model.null_words == pytest.approx(null / null.sum(), rel=1e-4)
    assert model.jumps == pytest.approx(path / path.sum(), rel=1e-4)
    for i in range(types[0]):
        together = {o for x, y in pairs if i in x for o in y}
        wanted = sum(counts[i, o] for o in together) + 1e-4 * len(together)
        assert model.totals[i] == pytest.approx(wanted, rel=1e-4)


def even(steps, length, types):
    return np.full((steps, length), 1.0 / types), np.full(steps, 1.0 / types)


@pytest.mark.parametrize("stage", ["ibm1", "hmm"])
def test_without_agreement_no_iteration_lowers_the_likelihood(stage):
    tiny = dict.fromkeys(("prior", "null_prior", "jump_prior"), 1e-9)
    made = fit(draw_corpus(4, number=60, longest=7, types=9), *[stage] * 12, agree=False, **tiny)
    gains = np.diff(made.log_likelihood, axis=0)
    assert (gains > -1e-5).all()
    assert (gains[0] > 0.01).all()


def test_fertility_weighs_a_link_by_the_number_of_the_others():
    fertility = np.random.default_rng(5).dirichlet(np.ones(MOST + 1), size=3).astype(np.float32)
    links = np.zeros((5, 1, 3), dtype=np.float32)
    links[:, 0, 1] = [1.0, 1.0, 0.5, 0.0, 0.0]
    found = weigh_links(tabulate_weights(fertility), links, np.array([[2, 0]]))
    row = fertility[2]
    assert found[0, 0, 1] == pytest.approx((row[2] + row[3]) / (row[1] + row[2]))  # μ = 1.5
    assert found[2, 0, 1] == pytest.approx(row[3] / row[2])  # μ = 2
    assert found[3, 0, 1] == pytest.approx((row[3] + row[4]) / (row[2] + row[3]))  # μ = 2.5
    assert found[:, 0, 2] == pytest.approx(fertility[0, 1] / fertility[0, 0])  # μ = 0


def test_fertilities_are_counted_in_proportion_and_drawn_to_the_mean():
    counts = np.zeros((2, MOST + 1))
    links = np.zeros((20, 2, 3), dtype=np.float32)
    links[0, 0, 1], links[1, 0, 1], links[:, 1, 1] = 1.0, 0.25, 1.0
    add_fertility(counts, links, np.array([[1, 0], [1, -1]]))
    assert counts[0].tolist() == [1.0] + [0.0] * MOST
    assert counts[1, [1, 2, MOST]] == pytest.approx([0.75, 0.25, 1.0])
    mean = counts.sum(0) / 3
    assert estimate_fertility(counts, 5.0)[0] == pytest.approx((counts[0] + 5 * mean) / 6, abs=1e-5)


def test_fertilities_are_learnt():
    """0 translates as 0, and 1 as 1 1."""
    table = fit([([0], [0]), ([1], [1, 1])] * 30, "ibm1", "hmm", "hmm", "fertility").ahead.fertility
    assert table.sum(1) == pytest.approx(1, abs=1e-5)
    assert table[0, 1] > 0.9
    assert table[1, 2] > 0.2 > 0.05 > table[0, 2]


def test_numbers_of_pairs_of_types_are_those_of_a_dictionary():
    index, known, generator = TypePairs(1000), {}, np.random.default_rng(6)
    pool = generator.integers(0, 2**40, 20_000)  # the last 5,000 are never added
    for size in (10, 3000, 9000, 1, 20_000):  # grows beyond SMALLEST
        keys = pool[generator.integers(0, 15_000, size)]
        numbers = index.add(keys)
        for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
            assert known.setdefault(key, number) == number
    assert len(index) == len(known) + 1 > SMALLEST
    assert sorted(known.values()) == [*range(1, len(index))]
    assert {int(key): k for k, key in enumerate(index.keys) if k} == known
    assert index.find(pool).tolist() == [known.get(key, 0) for key in pool.tolist()]


def test_the_index_of_pairs_of_types_takes_little_memory():
    number = 600_000
    tracemalloc.start()
    try:
        index = TypePairs(1000)
        for start in range(0, number, 50_000):
            index.add(np.arange(start, start + 50_000))
        most = tracemalloc.get_traced_memory()[1]
        index.drop_slots()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == number + 1
    assert most < 40 * number + 50 * PROBED  # counts room for keys that no memory backs yet
    assert kept < 9 * number


def test_every_pair_with_words_is_in_one_block():
    generator = np.random.default_rng(7)
    lengths = generator.integers(0, 60, (2, 400))
    lengths[:, 0] = 1001  # more cells than one pair may have
    corpus = WordPairs(*(generator.integers(0, 50, n.sum()) for n in lengths), *lengths)
    index = TypePairs(50)
    blocks = BlockFile(corpus, index.add, 50)
    seen = []
    for block in blocks:
        for k, pair in enumerate(block.pairs):
            x, y = (side[k][side[k] >= 0] for side in (block.source, block.target))
            alone = corpus.select(np.arange(400) == pair)
            assert (x.tolist(), y.tolist()) == (alone.source.tolist(), alone.target.tolist())
            keys = index.keys[block.cells[: len(y), k, 1 : len(x) + 1]]
            assert (keys == x[None] * 50 + y[:, None]).all()
            assert block.cells[:, k].astype(bool).sum() == len(x) * len(y)
        seen += block.pairs.tolist()
    assert blocks.too_long.tolist() == [0]
    assert sorted(seen) == np.flatnonzero((lengths[0] > 0) & (lengths[1] > 0))[1:].tolist()
    for pairs in cut_blocks(blocks.used, *lengths):
        x, y = lengths[:, pairs]
        assert len(pairs) * x.max() * y.max() <= max(SMALL, SLACK * (x * y).sum())


@pytest.mark.parametrize("stages", [("ibm1", "hmm"), ("ibm1", "hmm", "fertility")])
def test_a_saved_model_aligns_as_the_one_that_was_fitted(tmp_path, stages):
    pairs = draw_corpus(8, number=40, types=9)
    model = fit(pairs, *stages).back
    model.save(tmp_path / "model")
    again = HmmModel.load(tmp_path / "model")
    assert (again.kind, again.prior, again.null) == (model.kind, model.prior, NULL)
    corpus = WordPairs.gather([(y, x) for x, y in pairs])
    both = [list(m.iterate_posteriors(corpus)) for m in (model, again)]
    for (_, one), (_, other) in zip(*both, strict=True):
        assert np.array_equal(one.links, other.links)
    assert sum(posterior.links.sum() for _, posterior in both[0]) > 10


def test_a_pair_is_aligned_beside_others_as_alone():
    pairs = draw_corpus(9, number=30, longest=9)
    model = fit(pairs, "ibm1", "hmm", "fertility").ahead
    corpus = WordPairs.gather(pairs)
    for block, posterior in model.iterate_posteriors(corpus):
        assert len(block.pairs) > 5
        for k, pair in enumerate(block.pairs):
            ((_, alone),) = model.iterate_posteriors(corpus.select(np.arange(30) == pair))
            steps, _, positions = alone.links.shape
            assert posterior.links[:steps, k, :positions] == pytest.approx(alone.links[:, 0], abs=1e-5)
            assert posterior.links[:, k].sum() == pytest.approx(alone.links.sum(), abs=1e-4)


def test_a_file_that_is_no_aligner_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        HmmModel.load(tmp_path / "none")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ValueError, match="not a safetensors file or is damaged"):
        HmmModel.load(tmp_path / "text")


@pytest.mark.parametrize(("options", "message"), [({"null": 0.0}, "null"), ({"prior": 0.0}, "prior must be greater")])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HmmOptions(**options)


def test_a_corpus_without_words_is_refused():
    with pytest.raises(ValueError, match="1 or more pairs must have words on both sides, got 0 of 2 pairs"):
        fit([([], [1]), ([2], [])], "ibm1")
