"""Sequences and plans: every example once, within the budget, as a pure function of (seed, epoch)."""

import numpy as np
import pytest
import torch
from properties import given, st

from attnlab.tasks.batching import Sequences, plan_batches

LINES = [[7, 8, 9], [], [5], [6, 6, 6, 6, 6]]


def plan(lengths, **changes):
    settings = {"tokens": 40, "examples": None, "seed": 0, "epoch": 0, "shuffle": True} | changes
    return plan_batches(tuple(np.asarray(length) for length in lengths), **settings)


def test_sequences_keep_what_they_are_given_and_add_ends():
    plain, ended = Sequences.from_ids(LINES), Sequences.from_ids(iter(LINES), begin=1, end=2)
    assert [row.tolist() for row in plain] == LINES
    assert [row.tolist() for row in ended] == [[1, *line, 2] for line in LINES]
    assert plain.lengths.tolist() == [3, 0, 1, 5]
    assert len(Sequences.from_ids([])) == 0


def test_padding_is_on_the_right_and_shifting_drops_ends():
    rows = Sequences.from_ids(LINES, begin=1, end=2)
    assert rows.pad([0, 2]).tolist() == [[1, 7, 8, 9, 2], [1, 5, 2, 0, 0]]
    assert rows.pad([0, 2], drop=1).tolist() == [[1, 7, 8, 9], [1, 5, 0, 0]]
    assert rows.pad([0, 2], skip=1).tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]]
    assert rows.pad([1]).dtype == torch.int64


def test_choosing_and_cutting_agree_with_lists():
    rows = Sequences.from_ids(LINES, end=2)
    kept = np.array([True, False, False, True])
    assert [row.tolist() for row in rows.select(kept)] == [[7, 8, 9, 2], [6, 6, 6, 6, 6, 2]]
    assert [row.tolist() for row in rows.truncate(3)] == [[7, 8, 2], [2], [5, 2], [6, 6, 2]]


@given(
    st.lists(st.tuples(st.integers(1, 23), st.integers(1, 23)), max_size=60),
    st.integers(23, 101),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_plan_holds_every_example_once_within_the_budget(pairs, tokens, epoch, shuffle):
    lengths = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    batches = plan(lengths, tokens=tokens, epoch=epoch, shuffle=shuffle)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    for batch in batches:
        assert batch
        assert max(max(pairs[index]) for index in batch) * len(batch) <= tokens


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_a_plan_is_a_function_of_seed_and_epoch(seed, epoch):
    lengths = [np.arange(200) % 7 + 1]
    assert plan(lengths, seed=seed, epoch=epoch) == plan(lengths, seed=seed, epoch=epoch)
    assert plan(lengths, seed=seed, epoch=epoch) != plan(lengths, seed=seed, epoch=epoch + 1)
    assert plan(lengths, seed=seed, epoch=epoch) != plan(lengths, seed=seed + 1, epoch=epoch)


def test_similar_lengths_are_together():
    lengths = np.random.default_rng(0).integers(1, 50, size=997)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in plan([lengths], tokens=211))
    assert padded < 1.05 * lengths.sum()


def test_unshuffled_plans_begin_with_the_longest_and_do_not_depend_on_the_seed():
    lengths = [np.array([3, 11, 5, 2])]
    batches = plan(lengths, tokens=11, shuffle=False)
    assert batches == [[1], [2], [3, 0]]
    assert batches == plan(lengths, tokens=11, shuffle=False, seed=5, epoch=7)


def test_a_number_of_examples_instead_of_tokens():
    batches = plan([np.arange(1, 12)], tokens=None, examples=4)
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert sorted(index for batch in batches for index in batch) == list(range(11))
    assert plan([np.arange(1, 4)], tokens=None, examples=2, shuffle=False) == [[0, 1], [2]]


def test_an_example_beyond_the_budget_is_named():
    with pytest.raises(ValueError, match=r"example 1 has 41 tokens.*at most 40"):
        plan([np.array([3, 41, 5])])
    with pytest.raises(ValueError, match="either tokens="):
        plan([np.array([3])], examples=4)
